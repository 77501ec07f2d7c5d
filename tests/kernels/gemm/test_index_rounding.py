"""Linears whose weights have the epilogue `index_rounding`: in the simulator of both architectures,
with races and schedules, and on a Hopper GPU.

Every tiling gives what the torch implementation makes of the same kernel's plain output, bit for
bit: so codes and scales depend on neither the tile nor the batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.ops.merged_linear import MERGED_LINEAR, PLANS
from dsv4.testing.fp8_linear import Case
from dsv4.testing.harness import (
    Device,
    Simulator,
    assert_clean,
    missed_synchronisation,
    simulator,
)
from dsv4.testing.index_rounding import Inputs, MergedInputs, assert_same_heads
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.merged_linear import Case as MergedCase
from tests.kernels.gemm.fp8_kernels import FEW_SMS, choose, run, tilings

pytestmark = pytest.mark.stage("projections")

ANY_ROWS = 32768  # a configuration of many rows: every tile has one CTA
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "rows", "schedules"),
    [
        # Every fifth token NaN; CTAs that share a tile, which have tokens of their own to round.
        slow(Case(67, 512, 384, has_special_rows=True), None, 1),
        slow(Case(21, 1024, 256), None, None),
        slow(Case(150, 1536, 384, has_special_rows=True), ANY_ROWS, 1),
        slow(Case(67, 512, 128, is_strided=True), ANY_ROWS, None),
        slow(Case(70, 2048, 256, scale_dtype="float32"), None, 1),
        slow(Case(18, 512, 256, has_special_rows=True), ANY_ROWS, None),
    ],
    ids=str,
)
def test_every_tiling_has_the_bits_of_two_steps(kernels, case, rows, schedules, seed) -> None:
    inputs = replace(Inputs.make_heads(case, seed), rows=rows)
    plain = run(kernels, inputs.plain, 0, seed)["out"]
    expected = inputs.applied(plain)
    for i, tiling in enumerate(tilings(kernels, inputs.config)):
        found = run(kernels, inputs, i, seed, schedules)
        pair = found["out"], found["head_scales"]
        assert_same_heads(pair, expected, plain, str(tiling))


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    inputs = Inputs.make_heads(Case(200, 512, 256), seed)
    together = run(kernels, inputs, choose(kernels, inputs.config, 200), seed)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 65):
        part = inputs.first(tokens)
        found = run(kernels, part, choose(kernels, inputs.config, tokens), seed)
        for name in ("out", "head_scales"):
            wanted = together[name][:tokens].view(torch.uint8)
            assert torch.equal(found[name].view(torch.uint8), wanted), f"{name}, T = {tokens}"


@pytest.mark.slow
def test_a_frame_around_the_outputs_is_not_written(kernels, seed) -> None:
    inputs = Inputs.make_heads(Case(67, 512, 256, is_strided=True), seed)
    compiled = kernels.compile(inputs.config)
    for tiling in range(len(tilings(kernels, inputs.config))):
        call = kernels.call(inputs, tiling=tiling, num_sms=FEW_SMS)
        y = call.outputs["out"].view(torch.uint8)
        frame = y.as_strided((y.shape[0] - 1, y.stride(0)), y.stride())[:, y.shape[1] :]
        frame.fill_(7)
        kernels.target.run(compiled, call)
        assert (frame == 7).all()


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a", pytest.param("cuda", marks=HOPPER)])
def target(request: pytest.FixtureRequest) -> Simulator | Device:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else simulator(request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "width", "plain", "schedules"),
    [
        (21, 1024, "", None),
        (150, 1024, "", 1),
        # Sums of wide tiles wait where outputs do.
        (150, 2048, "", 1),
        (67, 1024, ", 72 bfloat16 float32", 1),
    ],
)
def test_beside_rotated_heads_in_a_merged_linear(
    target, tokens, width, plain, schedules, seed
) -> None:
    """A layer's queries: what attention takes, and what the indexer takes."""
    weights = "256 float8_e8m0fnu bfloat16, 128 float8_e8m0fnu bfloat16" + plain
    case = MergedCase(tokens, width, weights, has_codes=True)
    inputs, merged = MergedInputs.make_heads(case, 128, seed), OpKernels(MERGED_LINEAR, target)
    linears = OpKernels(FP8_LINEAR, target)
    queries = run(linears, inputs.heads, 0, seed)
    alone = run(linears, inputs.index.plain, 0, seed)["out"]
    expected = inputs.index.applied(alone)
    for tiling in range(len(PLANS[target.arch].tilings(inputs.config))):
        found = merged.run(inputs, seed, schedules, tiling=tiling, num_sms=4)
        assert torch.equal(found["out_0"], queries["out"]), f"tiling {tiling}"
        assert torch.equal(found["squares_0"], queries["squares"]), f"tiling {tiling}"
        pair = found["out_1"], found["head_scales_1"]
        assert_same_heads(pair, expected, alone, f"tiling {tiling}")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config_rows", [256, ANY_ROWS])
def test_every_barrier_and_fence_is_reached(arch, config_rows, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels = OpKernels(FP8_LINEAR, Simulator(arch))
    # The first tile of 128 tokens lacks some, or the second one.
    outcomes = []
    for tokens in (65, 150):
        inputs = replace(Inputs.make_heads(Case(tokens, 1024, 256), seed), rows=config_rows)
        every = range(len(tilings(kernels, inputs.config)))
        outcomes += [run(kernels, inputs, tiling, seed) for tiling in every]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
