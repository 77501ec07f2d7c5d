"""Forwards of the shipped checkpoint whose attention is the sm_90a kernel, simulated.

The kernel gets the tensors that the model makes, as it makes them: rings as the window, pages of
entries by table or by list or none at all, padding rows, chunks behind the rings.
"""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.cache.manager import CacheManager
from dsv4.engine.forward import prefill, verify
from dsv4.engine.inputs import known_inputs
from dsv4.engine.sampler import GREEDY
from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_args import ARGS, values
from dsv4.kernels.attention.sm90.paged import build
from dsv4.loader.tokenizer import load_tokenizer
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED, SparseFmhaPaged
from dsv4.ops.runtime.runner import runner_config
from dsv4.reference.paged_attention import sparse_fmha_paged as oracle
from dsv4.testing.attention import assert_attention_close
from dsv4.testing.harness import simulator
from dsv4.testing.kernel_call import make_call
from tests.gpu.test_model_cuda import NOISE

paged = import_module(SparseFmhaPaged.__module__)

pytestmark = pytest.mark.stage("H")

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"
LENGTHS = (135, 30)  # past the window, and within it
TARGET = simulator("sm_90a")
STEPS = 24


class Call(NamedTuple):
    """What a call of the operator looked like."""

    tokens: int
    lists_window: bool  # by indices, not by the table of rings
    entries: str  # how they are named: "none", "table" or "list"


class SimulatedOperator:
    """Computes calls of the operator in the simulator and checks them against the oracle."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, *arguments: Tensor | int | None) -> None:
        names = [arg.name for arg in SPARSE_FMHA_PAGED.tensors]
        names.insert(names.index("o") + 1, "runner_id")
        given = dict(zip(names, arguments))
        config = runner_config(given.pop("runner_id"))
        o, _, _ = (given.pop(name) for name in ("o", "lse", "max_logits"))
        q, pool = given["q"], given["compressed_pool"]
        entries = 0 if pool is None else pool.shape[0] * pool.shape[1]
        sizes = {"T": len(q), "k_w": config.sliding_window, "k_c": entries}
        scalars = paged_plan.scalars(config, sizes, TARGET.multiprocessors, TARGET.arch)
        call = make_call(
            ARGS,
            values(config),
            given,
            dict(zip(("num_splits", "num_ctas", "sliding_window", "ratio"), scalars)),
            wanted=("lse",),
            workspace=paged_plan.workspace_size(config, sizes, scalars),
        )
        compiled = TARGET.compile(build, SPARSE_FMHA_PAGED.compiled_config(config, TARGET.arch))
        found = TARGET.run(compiled, call, TARGET.schedules[0], 0)
        o.copy_(found["o"])
        expected, lse, _ = oracle(
            **given,
            q_eps=config.q_eps,
            sink_mode=config.sink_mode,
            softmax_scale=config.softmax_scale,
            sliding_window=config.sliding_window,
            ratio=config.ratio,
            rope_dim=config.rope_dim,
        )
        # The bounds are for unit-scale inputs, values below about 5. A power of two is exact.
        largest = max(
            x.nan_to_num().abs().max().item() for x in (given["window_pool"], pool) if x is not None
        )
        scale = 2.0 ** max(0, math.ceil(math.log2(largest / 5)))
        assert_attention_close(o / scale, expected / scale, found["lse"], lse)
        named = "none" if given["block_table"] is None else "table"
        named = named if given["compressed_indices"] is None else "list"
        self.calls.append(Call(len(q), given["window_indices"] is not None, named))


class Decoder:
    """Requests of the held-out text, prefilled, and decode forwards over them."""

    def __init__(self, drafts: int = 0) -> None:
        self.model = dsv4.load(FOLDER, device="cpu", dtype=torch.bfloat16)
        path = FOLDER / "held_out.txt"
        self.text = load_tokenizer(FOLDER).encode(path.read_text(encoding="utf-8"))
        self.drafts = drafts
        self.model.kv_format = "bf16"  # which kernels read of 128 channels
        self.cache = self.model.new_cache(4, 8, 2, max_draft=drafts, max_tokens=max(LENGTHS))
        self.manager = CacheManager(self.cache)
        for length in LENGTHS:
            self.prefill(self.manager.admit(length + STEPS + drafts), length)

    def prefill(self, slot: int, count: int) -> None:
        """A chunk of the text's next tokens."""
        tokens = self.text[self.manager.length(slot) :][:count]
        step = self.manager.step([slot], [count], count)
        inputs = known_inputs(step, GREEDY, [tokens])
        with torch.inference_mode():
            prefill(self.model, self.cache, inputs, 0, last=True)

    def step(self, slots: tuple[int, ...], rows: int) -> Tensor:
        """`verify` of the text's next tokens: drafts that are right, whatever is sampled."""
        chunk = 1 + self.drafts
        tokens = [self.text[self.manager.length(slot) :][:chunk] for slot in slots]
        step = self.manager.step(slots, [chunk] * len(slots), chunk, rows)
        inputs = known_inputs(step, GREEDY, tokens)
        with torch.inference_mode():
            return verify(self.model, self.cache, inputs, self.drafts)


@pytest.mark.parametrize(
    ("slots", "rows", "drafts"), [((1, 0), 4, 0), ((0,), 1, 2), ((0, 1), 2, 1)]
)
def test_decode_calls(slots: tuple[int, ...], rows: int, drafts: int, monkeypatch) -> None:
    decoder = Decoder(drafts)
    operator = SimulatedOperator()
    monkeypatch.setattr(paged, "_op", operator)
    result = decoder.step(slots, rows)
    assert ((result >= 0) & (result < decoder.model.config.vocab_size)).all()
    main = operator.calls[: len(decoder.model.layers)]
    assert {call.tokens for call in main} == {rows * (1 + drafts)}
    # A window alone, the indexer's choice, and one entry per 128 tokens.
    assert [call.entries for call in main] == ["none", "list", "table", "list"]
    assert not any(call.lists_window for call in main)
    # Drafts come from the MTP layer, the first from the whole chunk.
    assert len(operator.calls) - len(main) == drafts


def test_a_chunk_of_a_prompt(monkeypatch) -> None:
    """Its keys lie behind the rings, which index lists name beside it."""
    decoder = Decoder()
    operator = SimulatedOperator()
    monkeypatch.setattr(paged, "_op", operator)
    decoder.prefill(0, 5)
    assert [call.tokens for call in operator.calls] == [5] * len(decoder.model.layers)
    assert all(call.lists_window for call in operator.calls)
    tokens = decoder.step((0,), 1)
    assert ((tokens >= 0) & (tokens < decoder.model.config.vocab_size)).all()


@pytest.mark.slow
def test_greedy_tokens_are_the_cpus(monkeypatch) -> None:
    """Wherever the CPU's two best logits differ by more than noise; the text is fed."""
    decoder = Decoder()
    longest = max(LENGTHS) + STEPS
    with torch.inference_mode():
        logits = decoder.model(torch.tensor([decoder.text[:longest]]))[0]
    best = logits.topk(2, dim=-1)
    operator = SimulatedOperator()
    monkeypatch.setattr(paged, "_op", operator)
    positions = torch.tensor(LENGTHS)
    differing = []
    for _ in range(STEPS):
        tokens = decoder.step((0, 1), 2)[:, 0]
        lead = best.values[positions, 0] - best.values[positions, 1]
        differing += lead[tokens != best.indices[positions, 0]].tolist()
        positions += 1
    print(f"{len(differing)} of {2 * STEPS} tokens differ, at leads of {sorted(differing)}")
    assert len(operator.calls) == STEPS * len(decoder.model.layers)
    assert max(differing, default=0.0) <= NOISE
    assert len(differing) <= STEPS // 4
