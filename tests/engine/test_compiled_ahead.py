"""Kernels that steps of the released models launch are those that `dsv4 compile` makes: without
memory, and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.bench.random_model import MODELS, truncated
from dsv4.cache.step import Step
from dsv4.engine.forward import prefill, verify
from dsv4.engine.inputs import ForwardInputs
from dsv4.engine.sampler import GREEDY, SamplingBatch
from dsv4.layers import rope
from dsv4.layers.moe import MoE
from dsv4.model.model import DeepseekV4
from dsv4.ops.runtime import backend
from dsv4.ops.runtime.registry import OPS, CompileKey, ahead_of_time, compile_key
from dsv4.ops.runtime.runner import config_of

pytestmark = pytest.mark.stage("model")

LAYERS, BLOCK = 6, 128
CONTEXTS = (32_768, 1024)  # of the latter a token sees all entries, and nothing is scored
# Requests, tokens of each, drafts: steps of decode, and chunks of a prompt.
DECODE = ((1, 1, 0), (1, 2, 1), (2, 4, 3), (16, 1, 0), (64, 2, 1), (256, 1, 0))
PREFILL = ((1, 1, 0), (1, 512, 0), (1, 1024, 1))
SAMPLED = ({}, {"nucleus": True}, {"top_k": True, "min_p": True})


class Gpu(NamedTuple):
    """A GPU as layers see it, and the form of its experts' weights."""

    arch: str
    capability: tuple[int, int]
    sms: int
    form: str


GPUS = (
    Gpu("sm_90a", (9, 0), 132, "packed"),
    pytest.param(Gpu("sm_90a", (9, 0), 132, "row_packed"), marks=pytest.mark.slow),
    pytest.param(Gpu("sm_100a", (10, 0), 148, "tiled"), marks=pytest.mark.slow),
)


class Launches(TorchDispatchMode):
    """Kernels of the operators that are called, of an architecture."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self.arch = arch
        self.keys: set[CompileKey] = set()
        self.configs: list[tuple[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = str(func).partition(".")
        if space == "dsv4":
            op = OPS[name.split(".")[0]]
            config = config_of(op, args[op.num_required])
            self.configs.append((op.name, config))
            if op.has_kernel(config):
                self.keys.add(compile_key(op, config, self.arch))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=GPUS, ids=["sm_90a", "sm_90a, a scale a row", "sm_100a"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Fake tensors that layers take for a GPU's."""
    found: Gpu = request.param
    properties = SimpleNamespace(multi_processor_count=found.sms)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: properties)
    monkeypatch.setattr(FakeTensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(MoE, "prepare", lambda layer: setattr(layer, "form", found.form))

    def table(turned: rope.Rope, length: int, device: torch.device) -> torch.Tensor:
        return torch.empty(length, turned.dim, device=device)

    monkeypatch.setattr(rope, "_table", table)  # the true one is kept, and would be fake
    backend.device_of.cache_clear()
    yield found
    backend.device_of.cache_clear()


@pytest.mark.parametrize("is_invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_format", ["fp8", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["flash", pytest.param("pro", marks=pytest.mark.slow)])
def test_every_kernel_of_a_step_is_compiled_ahead(
    name: str, kv_format: str, is_invariant: bool, gpu: Gpu
) -> None:
    pytest.importorskip("cutlass", reason="kernels are found where they can be compiled")
    launches = Launches(gpu.arch)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        config = truncated(MODELS[name](), LAYERS, has_drafts=True)
        keys = "fp4" if kv_format == "bf16" else "fp8"
        model = DeepseekV4(config, kv_format=kv_format, index_format=keys)
        for context, (rows, tokens, drafts) in product(CONTEXTS, DECODE):
            cache, inputs = given(model, rows, tokens, drafts, context, is_invariant)
            with launches:
                verify(model, cache, inputs, drafts)
        for context, (rows, tokens, drafts) in product(CONTEXTS, PREFILL):
            cache, inputs = given(model, rows, tokens, drafts, context, is_invariant)
            with launches:
                prefill(model, cache, inputs, drafts, last=True)
        for options in SAMPLED:
            cache, inputs = given(model, 2, 1, 0, CONTEXTS[0], is_invariant)
            with launches:
                verify(model, cache, replace(inputs, sampling=sampled(2, **options)), 0)
    assert len(launches.keys) > 20
    missing = launches.keys - {key for _, key in ahead_of_time(gpu.arch)}
    assert not missing, "\n".join(map(str, missing))


@pytest.mark.parametrize(("rows", "gives_codes"), [(8, False), (9, True)])
def test_attention_of_many_tokens_gives_codes(rows: int, gives_codes: bool, gpu: Gpu) -> None:
    """And the output projection takes them."""
    launches = Launches(gpu.arch)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = DeepseekV4(truncated(MODELS["flash"](), LAYERS, has_drafts=True), kv_format="fp8")
        cache, inputs = given(model, rows, 1, 0, CONTEXTS[0], False)
        with launches:
            verify(model, cache, inputs, 0)
    found = dict(launches.configs)  # the last of each operator
    assert found["sparse_fmha_paged"].rounds_output == gives_codes
    assert found["grouped_linear"].quantizes != gives_codes
    assert found["grouped_linear"].rounds_output == gives_codes
    layers = [config for name, config in launches.configs if name == "sparse_fmha_paged"]
    assert {config.rounds_output for config in layers} == {gives_codes}


def sampled(rows: int, nucleus: bool = False, **options: bool) -> SamplingBatch:
    """Requests that draw their tokens."""
    numbers, reals = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    given = {"top_k": numbers, "min_p": reals}
    chosen = {name: given[name] for name, is_wanted in options.items() if is_wanted}
    return SamplingBatch(reals, reals, numbers, greedy=False, nucleus=nucleus, **chosen)


def given(
    model: DeepseekV4, rows: int, tokens: int, drafts: int, context: int, is_invariant: bool
) -> tuple:
    """A cache, and inputs of a step."""
    blocks = context // BLOCK
    cache = model.new_cache(rows, rows * blocks, blocks, drafts, rows * tokens, is_invariant)
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    step = Step(
        slots=torch.arange(rows),
        starts=torch.zeros(rows, dtype=torch.int64),
        lens=torch.full((rows,), tokens),
        block_table=torch.zeros(rows, blocks, dtype=torch.int64),
        chunk=tokens,
        capacity=context,
    )
    return cache, ForwardInputs(step, ids, ids, GREEDY)
