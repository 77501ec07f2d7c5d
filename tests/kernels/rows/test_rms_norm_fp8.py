"""The kernel against the torch implementation, bit for bit: in the simulator for both
architectures, with races and schedules, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.rows.config import RmsNormFp8Config, RowTiling, choose_tiling
from dsv4.ops.rms_norm_fp8 import RMS_NORM_FP8
from dsv4.testing.harness import Outcome, Simulator, Target
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.rms_norm_fp8 import EPS, Case, Inputs, assert_same_codes

pytestmark = pytest.mark.stage("rows")

FEW_CTAS = 2  # each takes several blocks of rows


@pytest.fixture(scope="module")
def kernels(target: Target) -> OpKernels:
    return OpKernels(RMS_NORM_FP8, target)


def run(
    kernels: OpKernels,
    inputs: Inputs,
    seed: int,
    num_ctas: int = FEW_CTAS,
    tiling: RowTiling | None = None,
    schedules: int | None = None,
) -> Outcome:
    """Run in every schedule, or the first few, and compare with the torch implementation."""
    compiled = kernels.compile((inputs.config, tiling), build_tiled)
    outcome = kernels.run(inputs, seed, schedules, compiled, num_ctas=num_ctas)
    for name, tensor in inputs.expected().items():
        assert_same_codes(name, outcome[name], tensor)
    return outcome


def build_tiled(key: tuple[RmsNormFp8Config, RowTiling | None], options: str):
    """Compile a configuration with a tiling, None for its own."""
    from dsv4.kernels.rows.rms_norm_fp8 import build

    return build(key[0], options, key[1])


@pytest.mark.parametrize(
    "case",
    [
        Case(9, 128),
        Case(13, 512, None),
        Case(9, 1024, "bfloat16", wants_norm=False),
        Case(5, 1536, is_strided=True),
        Case(7, 4096, kind="growing"),
        Case(3, 7168, wants_norm=False),
        pytest.param(Case(3, 16384, "bfloat16", "growing", True, True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bits_of_the_torch_implementation(kernels, case, seed) -> None:
    run(kernels, Inputs.make(case, seed), seed)


def test_rows_that_are_not_finite_touch_no_other(kernels, seed) -> None:
    """And what a NaN gives: the scale 255 and codes of NaN where the NaN is, else 0."""
    case = Case(14, 512, kind="special")
    inputs = Inputs.make(case, seed)
    outcome = run(kernels, inputs, seed)
    codes, scales = (outcome[name].view(torch.uint8) for name in ("out", "scale_out"))
    assert (codes[0] == 0x7F).all()
    assert (scales[0] == 255).all()
    assert (codes[3] & 0x7F == 0).all()
    ordinary = inputs.x[6::7].clone()
    alone = Inputs(replace(case, tokens=len(ordinary)), ordinary, inputs.weight)
    for name, tensor in run(kernels, alone, seed).outputs.items():
        assert_same_codes(name, tensor, outcome[name][6::7])


def test_sums_that_are_exact_give_the_bits_of_the_reference(kernels, seed) -> None:
    from dsv4.reference.norm import rms_norm_fp8

    inputs = Inputs.make(Case(4, 7168, kind="integers"), seed)
    outcome = run(kernels, inputs, seed)
    values, scales, norm = rms_norm_fp8(inputs.x, inputs.weight, EPS)
    assert torch.equal(outcome["out"].float(), values)
    assert torch.equal(outcome["scale_out"].float(), scales)
    assert torch.equal(outcome["norm_out"], norm)


@pytest.mark.parametrize(
    "tiling",
    [
        RowTiling(groups=12, row_warps=1, rows=1, team=4, stages=2),
        RowTiling(groups=12, row_warps=1, rows=3, team=8, stages=3, holds_weight=False),
        RowTiling(groups=12, row_warps=2, rows=2, team=8, stages=1),
        RowTiling(groups=12, row_warps=5, rows=1, team=16, stages=4),
    ],
    ids=str,
)
def test_no_bit_depends_on_the_tiling(kernels, tiling, seed) -> None:
    """Nor on how many rows there are, and CTAs to share them."""
    inputs = Inputs.make(Case(7, 1536, kind="growing"), seed)
    first = run(kernels, inputs, seed, 1, tiling)
    run(kernels, inputs, seed, 100, tiling, schedules=1)
    last = Inputs(replace(inputs.case, tokens=1), inputs.x[6:], inputs.weight)
    for name, tensor in run(kernels, last, seed, 1, tiling, schedules=1).outputs.items():
        assert_same_codes(name, tensor, first[name][6:])


def test_nothing_is_written_beside_the_outputs(kernels, seed) -> None:
    inputs = Inputs.make(Case(5, 1536, is_strided=True), seed)
    call = kernels.call(inputs, num_ctas=FEW_CTAS)
    frames = {}
    for name, tensor in call.outputs.items():
        tokens, width = tensor.shape
        step = tensor.stride(0)
        frames[name] = tensor.as_strided((tokens - 1, step), tensor.stride())[:, width:]
        frames[name].view(torch.uint8).fill_(0x5A)
    kernels.target.run(kernels.compile(inputs.config), call)
    for name, frame in frames.items():
        assert (frame.view(torch.uint8) == 0x5A).all(), f"{name}: wrote past the end of a row"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_kernel_runs(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels = OpKernels(RMS_NORM_FP8, Simulator(arch))
    inputs = Inputs.make(Case(11, 640, wants_norm=True), seed)
    kernels.run(inputs, num_ctas=1)
    without = replace(inputs, case=replace(inputs.case, wants_norm=False))
    outcome = kernels.run(without, num_ctas=1)
    (coverage,) = outcome.report.coverage
    assert coverage.complete, coverage.missed


def test_chosen_tilings_cover_rows_and_fit() -> None:
    for dim in range(128, 16385, 128):
        tiling = choose_tiling(dim)
        assert tiling.teams * tiling.rounds >= tiling.groups
        assert tiling.teams * (tiling.rounds - 1) < tiling.groups, f"{dim}: a round without groups"
        assert tiling.smem_bytes * tiling.ctas_per_sm <= 227 * 1024, dim
        assert tiling.threads * tiling.ctas_per_sm <= 2048, dim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 100}, "dim must be a multiple of 128 up to 16384, got 100"),
        ({"dim": 16512}, "dim must be a multiple of 128 up to 16384, got 16512"),
        ({"eps": 0.0}, "eps must be at least 1e-18, got 0.0"),
        ({"weight_dtype": "float16"}, "weight_dtype must be one of .* got 'float16'"),
    ],
)
def test_configurations_that_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        RmsNormFp8Config(**{"dim": 512, "eps": EPS, **options})
