"""A decode step reads nothing back to the host, and no shape depends on what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from tests.model.tiny import Session, quantized_config, random_model, tiny_config, with_mtp

# What synchronises with a device, or gives an output whose shape depends on values.
FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}


class _Recorder(TorchDispatchMode):
    """Refuses forbidden operators; records every operator with the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        overload = f"{name}.{func._schema.overload_name}"
        assert name not in FORBIDDEN and overload not in FORBIDDEN, f"{overload} in a decode step"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            kinds = [i.dtype for i in args[1] if i is not None]
            assert torch.bool not in kinds, f"{name} with a boolean mask in a decode step"
        result = func(*args, **(kwargs or {}))
        flat = result if isinstance(result, (tuple, list)) else [result]
        shapes = tuple(tuple(r.shape) for r in flat if isinstance(r, torch.Tensor))
        self.trace.append((overload, shapes))
        return result


CONFIGS = {
    "plain": lambda: with_mtp(tiny_config("SCHC", index_topk=3)),
    "everything selected": lambda: with_mtp(tiny_config("SCH", index_topk=64)),
    "quantised": lambda: with_mtp(quantized_config("SCH", index_topk=3)),
}


@pytest.mark.stage("cache")
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_decode_is_static(config: Callable[[], ModelConfig], drafts: int, seed: int) -> None:
    model = random_model(config())
    vocab = model.config.vocab_size
    session = Session(model, 3, 128, max_draft=drafts)
    session.feed({0: [1] * 30, 1: [2] * 3})
    traces = []
    # Positions inside and at the end of blocks, padding rows, rows without tokens.
    for lengths in ((30, 3), (31, 15), (14, 0)):
        session.lengths[:2] = lengths
        tokens = {s: torch.randint(0, vocab, (1 + drafts,)).tolist() for s in (0, 1)}
        ids, step = session.prepare(tokens, rows=3, capacity=128)
        with _Recorder() as recorder:
            streams = model.streams(ids, session.cache, step)
            model.logits(streams)
            model.mtp[0].logits(model.mtp[0](streams, ids, session.cache, step))
        traces.append(recorder.trace)
    assert any(name.startswith("dsv4::sparse_fmha_paged") for name, _ in traces[0])
    # The first step also fills the table of rotation frequencies.
    assert traces[1] == traces[2], "two steps of one shape ran different operators or shapes"


def test_every_layers_attention_is_the_operator(seed: int) -> None:
    model = random_model(tiny_config("SCH"))
    session = Session(model, 1, 128)
    for tokens in ([1] * 10, [1]):
        ids, step = session.prepare({0: tokens})
        with _Recorder() as recorder:
            model.streams(ids, session.cache, step)
        names = [name.split(".")[0] for name, _ in recorder.trace]
        assert names.count("dsv4::sparse_fmha_paged") == 3


def test_step_checks_its_arguments() -> None:
    good = dict(
        slots=torch.zeros(2, dtype=torch.int64),
        starts=torch.zeros(2, dtype=torch.int64),
        lens=torch.ones(2, dtype=torch.int64),
        block_table=torch.zeros(2, 3, dtype=torch.int64),
        chunk=1,
        capacity=128,
    )
    Step(**good)
    for name, value in {
        "slots": torch.zeros(2, 1, dtype=torch.int64),
        "starts": torch.zeros(3, dtype=torch.int64),
        "lens": torch.ones(2, dtype=torch.int32),
        "block_table": torch.zeros(3, 3, dtype=torch.int64),
        "chunk": 0,
        "capacity": 0,
    }.items():
        with pytest.raises(ValueError, match=name):
            Step(**{**good, name: value})
