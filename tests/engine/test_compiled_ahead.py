"""Kernels that steps of the released models launch are those that `dsv4 compile` makes: without
memory, and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.bench.random_model import MODELS, truncated
from dsv4.cache.step import Step
from dsv4.engine.forward import prefill, verify
from dsv4.engine.inputs import ForwardInputs
from dsv4.engine.sampler import GREEDY
from dsv4.layers import rope
from dsv4.layers.moe import MoE
from dsv4.model.model import DeepseekV4
from dsv4.ops.runtime import backend
from dsv4.ops.runtime.registry import OPS, CompileKey, ahead_of_time, compile_key
from dsv4.ops.runtime.runner import config_of

pytestmark = [pytest.mark.stage("model"), pytest.mark.slow]

ARCH, LAYERS, CONTEXT, BLOCK = "sm_90a", 6, 32_768, 128
# Requests, tokens of each, drafts: steps of decode, and chunks of a prompt.
DECODE = ((1, 1, 0), (1, 2, 1), (16, 1, 0), (64, 2, 1), (256, 1, 0))
PREFILL = ((1, 512, 0), (1, 4096, 1))


class Launches(TorchDispatchMode):
    """Kernels of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[CompileKey] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = str(func).partition(".")
        if space == "dsv4":
            op = OPS[name.split(".")[0]]
            config = config_of(op, args[op.num_required])
            if op.has_kernel(config):
                self.keys.add(compile_key(op, config, ARCH))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors that layers take for an H200's."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)
    monkeypatch.setattr(FakeTensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(MoE, "prepare", lambda layer: setattr(layer, "form", "packed"))

    def table(turned: rope.Rope, length: int, device: torch.device) -> torch.Tensor:
        return torch.empty(length, turned.dim, device=device)

    monkeypatch.setattr(rope, "_table", table)  # the true one is kept, and would be fake
    backend.device_of.cache_clear()
    yield
    backend.device_of.cache_clear()


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_step_is_compiled_ahead(name: str, hopper: None) -> None:
    pytest.importorskip("cutlass", reason="kernels are found where they can be compiled")
    launches = Launches()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        config = truncated(MODELS[name](), LAYERS, has_drafts=True)
        model = DeepseekV4(config, kv_format="fp8")
        for rows, tokens, drafts in DECODE:
            cache, inputs = given(model, rows, tokens, drafts)
            with launches:
                verify(model, cache, inputs, drafts)
        for rows, tokens, drafts in PREFILL:
            cache, inputs = given(model, rows, tokens, drafts)
            with launches:
                prefill(model, cache, inputs, drafts, last=True)
    assert len(launches.keys) > 20
    missing = launches.keys - {key for _, key in ahead_of_time(ARCH)}
    assert not missing, "\n".join(map(str, missing))


def given(model: DeepseekV4, rows: int, tokens: int, drafts: int) -> tuple:
    """A cache, and inputs of a step."""
    blocks = CONTEXT // BLOCK
    cache = model.new_cache(rows, rows * blocks, blocks, drafts, rows * tokens)
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    step = Step(
        slots=torch.arange(rows),
        starts=torch.zeros(rows, dtype=torch.int64),
        lens=torch.full((rows,), tokens),
        block_table=torch.zeros(rows, blocks, dtype=torch.int64),
        chunk=tokens,
        capacity=CONTEXT,
    )
    return cache, ForwardInputs(step, ids, ids, GREEDY)
