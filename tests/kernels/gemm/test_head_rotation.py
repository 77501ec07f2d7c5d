"""Linears whose weights have the epilogue `head_rotation`: in the simulator of both architectures,
with races and schedules, and on a Hopper GPU.

Every tiling gives what the torch implementation makes of the same kernel's plain output, bit for
bit: so the rotated channels and the sums of squares depend on neither the tile nor the batch.
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
from dsv4.testing.head_rotation import Inputs, MergedInputs
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.merged_linear import Case as MergedCase
from tests.kernels.gemm.fp8_kernels import FEW_SMS, choose, run, tilings

pytestmark = pytest.mark.stage("projections")

ANY_ROWS = 32768  # a configuration of many rows: every tile has one CTA
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a", pytest.param("cuda", marks=HOPPER)])
def target(request: pytest.FixtureRequest) -> Simulator | Device:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return Device() if request.param == "cuda" else simulator(request.param)


def check(kernels: OpKernels, inputs: Inputs, seed: int, schedules: int | None = 1) -> None:
    """Compare every tiling with the plain output after the torch implementation."""
    plain = run(kernels, inputs.plain, 0, seed)["out"].cpu()
    y, squares = inputs.applied(plain)
    if inputs.case.out_dtype == "float32":
        # Kernels fuse a square of fp32 with a sum: theirs are equal, and close to torch's.
        found = run(kernels, inputs, 0, seed)["squares"].cpu()
        torch.testing.assert_close(found, squares, rtol=1e-6, atol=0)
        squares = found
    for i, tiling in enumerate(tilings(kernels, inputs.config)):
        outcome = run(kernels, inputs, i, seed, schedules)
        for name, expected in (("out", y), ("squares", squares)):
            found = outcome[name].cpu()
            same = (found == expected) | (found.isnan() & expected.isnan())
            assert same.all(), f"{name}, {tiling}: {int((~same).sum())} differ"


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "head_dim", "rows", "schedules"),
    [
        # Heads of one row tile, of which the last tile of 128 rows has half; every fifth token NaN.
        slow(Case(67, 512, 192, has_special_rows=True), 64, ANY_ROWS, 1),
        slow(Case(21, 512, 256), 128, None, None),
        slow(Case(67, 512, 128), 64, ANY_ROWS, None),
        slow(Case(70, 2048, 256, is_strided=True), 128, None, 1),
        slow(Case(150, 1536, 512), 512, ANY_ROWS, 1),
        slow(Case(9, 512, 256, scale_dtype="float32", out_dtype="float32"), 128, None, 1),
        slow(Case(66, 512, 256, out_dtype="float32"), 128, ANY_ROWS, 1),
        # The cheapest to compile.
        (Case(18, 512, 192, x_dtype="float8_e4m3fn"), 64, ANY_ROWS, 1),
    ],
    ids=str,
)
def test_every_tiling_has_the_bits_of_the_torch_implementation(
    kernels, case, head_dim, rows, schedules, seed
) -> None:
    inputs = replace(Inputs.make_heads(case, head_dim, seed), rows=rows)
    check(kernels, inputs, seed, schedules)


@pytest.mark.slow
def test_outputs_that_tma_cannot_write(kernels, seed) -> None:
    inputs = Inputs.make_heads(Case(67, 512, 256), 128, seed)
    check(kernels, replace(inputs, rows=ANY_ROWS, gap=4), seed)


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    inputs = Inputs.make_heads(Case(200, 512, 256), 128, seed)
    together = run(kernels, inputs, choose(kernels, inputs.config, 200), seed)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 65):
        part = inputs.first(tokens)
        found = run(kernels, part, choose(kernels, inputs.config, tokens), seed)
        for name in ("out", "squares"):
            assert torch.equal(found[name], together[name][:tokens]), f"{name}, T = {tokens}"


@pytest.mark.slow
def test_what_is_not_asked_for_is_not_written(kernels, seed) -> None:
    """Squares; and a frame around the outputs."""
    inputs = Inputs.make_heads(Case(67, 512, 256, is_strided=True), 128, seed)
    compiled = kernels.compile(inputs.config)
    for tiling in range(len(tilings(kernels, inputs.config))):
        call = kernels.call(inputs, tiling=tiling, num_sms=FEW_SMS)
        wanted = run(kernels, inputs, tiling, seed)
        y, squares = call.outputs["out"], call.outputs["squares"]
        frame = y.as_strided((y.shape[0] - 1, y.stride(0)), y.stride())[:, y.shape[1] :]
        frame.fill_(7)
        options = {**call.options, "squares": squares[:0]}
        call = replace(call, options=options, outputs={"out": y})
        squares.fill_(7)
        kernels.target.run(compiled, call)
        assert (frame == 7).all() and (squares == 7).all()
        assert torch.equal(y.cpu(), wanted["out"].cpu())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        (MergedCase(21, 512, "256 float8_e8m0fnu bfloat16, 72 float8_e8m0fnu bfloat16"), None),
        (MergedCase(150, 512, "256 float8_e8m0fnu bfloat16, 72 float8_e8m0fnu bfloat16"), 1),
        # Outputs of two dtypes, of which none is staged, and a weight of another kind.
        (
            MergedCase(
                67,
                1024,
                "256 float8_e8m0fnu bfloat16, 8 float8_e8m0fnu float32, 72 bfloat16 float32",
            ),
            1,
        ),
    ],
    ids=str,
)
def test_the_first_weight_of_a_merged_linear(target, case, schedules, seed) -> None:
    """On Blackwell, too: slices are as many as those of the weight alone."""
    inputs, merged = MergedInputs.make_heads(case, 128, seed), OpKernels(MERGED_LINEAR, target)
    linears = OpKernels(FP8_LINEAR, target)
    alone = run(linears, inputs.heads, 0, seed)
    others = [run(linears, part, 0, seed)["out"] for part in inputs.linears[1:]]
    for tiling in range(len(PLANS[target.arch].tilings(inputs.config))):
        found = merged.run(inputs, seed, schedules, tiling=tiling, num_sms=4)
        assert torch.equal(found["out_0"], alone["out"]), f"tiling {tiling}"
        assert torch.equal(found["squares_0"], alone["squares"]), f"tiling {tiling}"
        for i, y in enumerate(others, 1):
            assert torch.equal(found[f"out_{i}"], y), f"tiling {tiling}"


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
        inputs = replace(Inputs.make_heads(Case(tokens, 1024, 256), 128, seed), rows=config_rows)
        every = range(len(tilings(kernels, inputs.config)))
        outcomes += [run(kernels, inputs, tiling, seed) for tiling in every]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
