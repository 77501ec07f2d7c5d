"""Stage E: the whole kernel against the oracle, and the way to it: constructor, cache, op."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fmha
from dsv4.kernels.attention.sm100.fmha import FmhaKernel
from dsv4.ops import sparse_fmha_with_swa
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import registry
from dsv4.ops.runtime.cache import CompileCache
from dsv4.ops.runtime.precompile import precompile
from dsv4.ops.runtime.toolchain import CuteToolchain
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from tests.attention_cases import DECODE, GRID, PREFILL

pytestmark = pytest.mark.stage("E")


def parity_inputs(tokens: int, seed: int) -> Inputs:
    """Pro's shapes: 128 heads, 1024 compressed keys, windows of 4 requests, head_dim 512."""
    case = Case(
        heads=128,
        head_dim=512,
        top_k=1024,
        window_rows=128,
        sink_mode="swa_gate",
        requests=tuple((token % 4, 1) for token in range(tokens)),
        ragged=False,
    )
    inputs = make_inputs(case, seed)
    windows = torch.randn(4, 128, 512).bfloat16()
    lens = torch.tensor([128, 50, 128, 75], dtype=torch.int32)
    return inputs.replaced(swa_kv=windows, swa_lens=lens)


PARITY = FmhaConfig(512, 128, 128, 1024)
# What users compile ahead of time, and the grid. Each compiles a kernel, with `--full`.
CONFIGURATIONS = {
    "parity": PARITY,
    **SPARSE_FMHA.aot(),
    **{str(case): config_of(case) for case in GRID},
}


@pytest.mark.parametrize("tokens", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_sparse_fmha_matches_spec(backend: AttentionKernels, tokens: int, seed: int) -> None:
    inputs = parity_inputs(tokens, seed)
    kernel = backend.compile(PARITY)
    # Schedules are compared on a token; at full size one of them is enough.
    run = backend.run_all if tokens == 1 else backend.run
    result = run(kernel, inputs, seed=seed)
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])


def test_one_token_split_over_many_ctas(backend: AttentionKernels, seed: int) -> None:
    """Decode of one token: 9 splits of 2 tiles for each half of the heads."""
    inputs = parity_inputs(1, seed)
    result = backend.run(backend.compile(PARITY), inputs, splits=9, seed=seed, races=False)
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(backend: AttentionKernels, case: Case, splits: int, seed: int) -> None:
    backend.check(replace(case, requests=((0, 2), (1, 1), (-1, 1), (2, 1))), seed, splits)


@pytest.mark.slow  # the contract has such ids among its edges
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_request_ids_past_the_batch_are_padding(
    backend: AttentionKernels, head_dim: int, is_causal: bool, seed: int
) -> None:
    """A request id that names no request is that of a padding token: no length is read for it."""
    requests = ((0, 1), (-1, 3), (1, 1))
    case = Case(72, head_dim, top_k=150, requests=requests, batch=2, is_causal=is_causal)
    inputs = make_inputs(case, seed)
    ids = inputs.request_ids.clone()
    ids[1], ids[2] = 2, torch.iinfo(torch.int32).max
    kernel = backend.compile(config_of(case))
    result = backend.run_all(kernel, inputs.replaced(request_ids=ids), seed=seed)
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_many_tokens(backend: AttentionKernels, case: Case, seed: int) -> None:
    backend.check(case, seed)


@pytest.mark.parametrize("sink_mode", ["swa_gate", pytest.param("softmax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_every_instruction_runs(
    backend: AttentionKernels, head_dim: int, sink_mode: str, seed: int
) -> None:
    """Two launches reach every basic block and every synchronisation: of single CTAs, of pairs and
    of the combine.
    """
    if backend.device != "cpu":
        pytest.skip("only the simulator knows what ran")
    case = Case(
        heads=72,
        head_dim=head_dim,
        requests=((0, 2), (1, 1), (-1, 1), (2, 1)),
        top_k=600,
        growing=True,
        sink_mode=sink_mode,
        is_causal=True,
    )
    inputs = make_inputs(case, seed)
    # A compilation of its own: coverage adds up over all launches of a compiled function.
    kernel = backend.compile(config_of(case), lambda config, options: fmha.build(config, options))
    for splits in (1, 9):
        result = backend.run(kernel, inputs, splits, ctas=4)
        expected = inputs.expected()
        assert_attention_close(result.o, expected[0], result.lse, expected[1])
    for coverage in result.report.coverage:
        assert not coverage.missed, f"{coverage}: " + "\n".join(coverage.missed)


def test_constructor_refuses_what_it_cannot_compute() -> None:
    sizes = {"head_dim": 512, "num_query_heads": 64, "sliding_window": 128, "top_k": 512}
    with pytest.raises(ValueError, match=r"head_dim must be one of .*, got 96"):
        FmhaKernel(**{**sizes, "head_dim": 96})
    with pytest.raises(ValueError, match="softmax_scale must be positive, got -1"):
        FmhaKernel(**sizes, softmax_scale=-1.0)
    with pytest.raises(ValueError, match="q, KV and o must be BFloat16"):
        FmhaKernel(**sizes, o_dtype=float)
    with pytest.raises(ValueError, match="accumulators must be Float32"):
        FmhaKernel(**sizes, pv_acc_dtype=float)
    with pytest.raises(
        ValueError, match=r"cluster_shape_mn must be None or \(1, 1\) .*got \(2, 1\)"
    ):
        FmhaKernel(**sizes, cluster_shape_mn=(2, 1))
    with pytest.raises(ValueError, match="TWO needs head_dim 512 and more than 64 query heads"):
        FmhaKernel(**sizes, cta_group=CtaGroup.TWO)
    with pytest.raises(ValueError, match="cta_group must be None, ONE or TWO, got 2"):
        FmhaKernel(**sizes, cta_group=2)
    with pytest.raises(ValueError, match="dtype must be bfloat16 on sm_100a, got float32"):
        fmha.build(FmhaConfig(512, 64, 128, 512, dtype="float32"))


def test_runner_is_compiled_once(backend: AttentionKernels, tmp_path: Path, seed: int) -> None:
    """A second process of the same cache loads what the first one stored, for any top_k."""
    arch = CuteToolchain().arch
    if not arch.startswith("sm_10"):
        pytest.skip(f"this process compiles for {arch}")
    case = Case(heads=16, requests=((0, 1),), sink_mode="softmax")
    builds = []

    def build(key: registry.CompileKey):
        builds.append(key)
        return registry.build(key)

    for top_k in (200, 4096):
        key = SPARSE_FMHA.compile_key(replace(config_of(case), top_k=top_k), arch)
        assert CompileCache(tmp_path).get(key, build) is not None
    assert len(builds) == 1
    # What the cache compiles is the kernel of the tests: the blanked sizes are runtime sizes.
    inputs = make_inputs(case, seed)
    result = backend.run(backend.compile(builds[0].config), inputs)
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("label", CONFIGURATIONS)
def test_compiler_report(label: str, monkeypatch, tmp_path) -> None:
    """No spill, no local memory, shared memory as planned: for the models and the test grid."""
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    config = CONFIGURATIONS[label]
    key = SPARSE_FMHA.compile_key(config, "sm_100a")
    (outcome,) = precompile([(label, key)], jobs=1, report=True)
    assert not outcome.error, outcome.error
    kernels = {kernel.name: kernel for kernel in outcome.kernels}
    variant = FmhaKernel.from_config(config).variant
    plan = variant.plan
    for kernel in kernels.values():
        assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0), kernel
    main = kernels[type(variant).__name__]
    assert main.registers <= plan.registers.at_launch
    assert main.shared_memory == plan.smem.total_bytes <= 227 * 1024
    assert plan.tmem.allocated_columns <= 512


@pytest.mark.sm100
@pytest.mark.parametrize("num_splits", [None, 1, 9])
def test_op(num_splits: int | None, seed: int) -> None:
    """`torch.ops.dsv4.sparse_fmha_with_swa` on CUDA tensors, as the model calls it."""
    inputs = parity_inputs(4, seed)
    there = inputs.to("cuda")
    o, lse = sparse_fmha_with_swa(
        *there.tensors, **there.options, num_splits=num_splits, return_lse=True
    )
    expected = inputs.expected()
    assert_attention_close(o, expected[0], lse, expected[1])
