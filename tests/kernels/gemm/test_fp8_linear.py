"""The kernels of `fp8_linear`: in the simulator, of both architectures, with races and schedules,
and on a Hopper GPU.

Every tiling gives the same bits, close to the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops.fp8_linear import FP8_LINEAR
from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close
from dsv4.testing.harness import (
    Outcome,
    Simulator,
    assert_clean,
    missed_synchronisation,
    simulator,
)
from dsv4.testing.kernel_call import OpKernels
from tests.kernels.gemm.fp8_kernels import FEW_SMS, choose, run, some_tilings, tilings

pytestmark = pytest.mark.stage("projections")

ANY_ROWS = 32768  # a configuration of many rows: every tile has one CTA
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


def check_every_tiling(
    kernels: OpKernels, inputs: Inputs, seed: int, schedules: int | None = 1
) -> Outcome:
    """Compare one tiling with the reference, and all others with it bit for bit."""
    every = tilings(kernels, inputs.config)
    outcomes = [run(kernels, inputs, tiling, seed, schedules) for tiling in range(len(every))]
    assert_linear_close(outcomes[0]["out"], inputs)
    for tiling, outcome in zip(every, outcomes):
        outcomes[0].assert_same_bits(outcome, str(tiling))
    return outcomes[0]


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        # Ragged tiles of tokens and rows; of more k blocks than any ring has stages, too.
        (Case(21, 512, 200), 1),
        # Three short copies of a tile of 128 tokens, by two CTAs.
        (Case(70, 512, 136), 1),
        pytest.param(Case(21, 1024, 200), 1, marks=pytest.mark.slow),
        pytest.param(Case(21, 1024, 200), None, marks=pytest.mark.slow),
        pytest.param(Case(67, 512, 136, is_strided=True), None, marks=pytest.mark.slow),
        pytest.param(Case(20, 2048, 136), None, marks=pytest.mark.slow),
        pytest.param(Case(70, 4096, 328), None, marks=pytest.mark.slow),
        # Two tiles of the most tokens, an odd number of row tiles, a y that TMA cannot write.
        pytest.param(Case(150, 1024, 324), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_tiling_gives_the_same_bits(kernels, case, schedules, seed) -> None:
    check_every_tiling(kernels, Inputs.make(case, seed), seed, schedules)


BLACKWELL = Case(21, 512, 264, x_dtype="float8_e4m3fn")


@pytest.mark.slow
def test_every_tiling_of_blackwell_gives_the_same_bits(seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    kernels = OpKernels(FP8_LINEAR, simulator("sm_100a"))
    check_every_tiling(kernels, Inputs.make(BLACKWELL, seed), seed)


def test_two_tilings_of_blackwell_give_the_same_bits(seed) -> None:
    """The cheapest to compile; the others of this module are slow."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(BLACKWELL, seed)
    with some_tilings(FP8_LINEAR, slice(2)) as kernels:
        one, other = (run(kernels, inputs, tiling, seed) for tiling in range(2))
    assert_linear_close(one["out"], inputs)
    other.assert_same_bits(one, "one tiling against the other")


def test_every_schedule_gives_the_same_bits(kernels, seed) -> None:
    """Of a tiling with resident activations, and of one with streamed ones in clusters."""
    inputs = Inputs.make(Case(21, 512, 136), seed)
    for tiling in (0, choose(kernels, inputs.config, 64)):
        run(kernels, inputs, tiling, seed, schedules=None)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(9, 512, 136, scale_dtype="float32", out_dtype="float32"), marks=pytest.mark.slow
        ),
        pytest.param(Case(18, 512, 136, x_dtype="float8_e4m3fn"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dtypes(kernels, case, seed) -> None:
    """Of the tiling of fewest tokens, and of one with streamed activations in clusters."""
    inputs = Inputs.make(case, seed)
    found = run(kernels, inputs, 0, seed)
    assert_linear_close(found["out"], inputs)
    streamed = run(kernels, inputs, choose(kernels, inputs.config, 64), seed)
    streamed.assert_same_bits(found, "many tokens against few")
    if case.x_dtype == "float8_e4m3fn":
        wide = Inputs.make(replace(case, x_dtype="bfloat16"), seed)
        run(kernels, wide, 0, seed).assert_same_bits(found, "codes against bf16")


def test_codes_give_the_bits_of_what_they_were_rounded_from(kernels, seed) -> None:
    """Of the two tilings of fewest tokens; of others in the test above, which is slow."""
    if kernels.target.arch != "sm_90a" or kernels.target.device != "cpu":
        pytest.skip("compiles for the simulator of Hopper")
    inputs = Inputs.make(Case(18, 512, 136, x_dtype="float8_e4m3fn"), seed)
    wide = run(kernels, Inputs.make(replace(inputs.case, x_dtype="bfloat16"), seed), 0, seed)
    with some_tilings(FP8_LINEAR, slice(2), arch="sm_90a") as few:
        for tiling in range(2):
            run(few, inputs, tiling, seed).assert_same_bits(wide, f"codes, tiling {tiling}")


@pytest.mark.slow
def test_one_cta_for_all_slices(kernels, seed) -> None:
    """Layers with many rows: sums of all slices on one stack."""
    if kernels.target.arch != "sm_90a":
        pytest.skip("the number of rows decides how many slices there are")
    inputs = Inputs.make(Case(19, 2048, 72), seed)
    alone = check_every_tiling(kernels, replace(inputs, rows=ANY_ROWS), seed)
    run(kernels, inputs, 1, seed).assert_same_bits(alone, "clusters against one CTA a tile")


@pytest.mark.slow
def test_two_ctas_of_many_tokens_on_an_sm(kernels, seed) -> None:
    """Of layers whose tiles are as many as clusters of four find places for in pairs alone."""
    if kernels.target.arch != "sm_90a":
        pytest.skip("the number of rows decides which tilings there are")
    inputs = replace(Inputs.make(Case(70, 2048, 136), seed), rows=4096)
    assert [t.cluster for t in tilings(kernels, inputs.config) if t.is_light] == [4]
    check_every_tiling(kernels, inputs, seed, schedules=None)


@pytest.mark.slow  # that of merged linears, whose kernel is the same, is not
def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    inputs = Inputs.make(Case(200, 512, 136), seed)
    config = inputs.case.config
    all_tokens = run(kernels, inputs, choose(kernels, config, 200), seed)["out"]
    assert_linear_close(all_tokens, inputs)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 65):
        found = run(kernels, inputs.first(tokens), choose(kernels, config, tokens), seed)["out"]
        assert torch.equal(found, all_tokens[:tokens]), f"T = {tokens}"


def test_rows_that_are_not_finite_touch_no_other(kernels, seed) -> None:
    case = Case(15, 512, 136, has_special_rows=True)
    inputs = Inputs.make(case, seed)
    found = run(kernels, inputs, 0, seed)["out"]
    assert found[0::5].isnan().all()
    assert (found[2::5] == 0).all()
    part = inputs.x[4::5].clone()
    alone = Inputs(
        replace(case, tokens=len(part)), part, inputs.weight, inputs.scale, inputs.x_scale, part
    )
    assert torch.equal(run(kernels, alone, 0, seed)["out"], found[4::5])


def test_without_scratch_many_tokens_follow_each_other(kernels, seed) -> None:
    inputs = Inputs.make(Case(21, 512, 136), seed)
    right = run(kernels, inputs, 0, seed)
    for tiling in range(1, len(tilings(kernels, inputs.case.config))):
        found = run(kernels, replace(inputs, has_scratch=False), tiling, seed)
        found.assert_same_bits(right, "no scratch")


def test_nothing_is_written_beside_the_output(kernels, seed) -> None:
    inputs = Inputs.make(Case(9, 512, 136, is_strided=True), seed)
    compiled = kernels.compile(inputs.config)
    for tiling in range(len(tilings(kernels, inputs.config))):
        call = kernels.call(inputs, tiling=tiling, num_sms=FEW_SMS)
        y = call.outputs["out"]
        frame = y.as_strided((y.shape[0] - 1, y.stride(0)), y.stride())[:, y.shape[1] :]
        frame.fill_(7)
        kernels.target.run(compiled, call, races=False)
        assert (frame == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config_rows", [136, ANY_ROWS])
def test_every_barrier_and_fence_is_reached(arch, config_rows, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels = OpKernels(FP8_LINEAR, Simulator(arch))
    # The first tile of 128 tokens lacks some, or the second one.
    outcomes = []
    for tokens in (65, 150):
        inputs = replace(Inputs.make(Case(tokens, 1024, 136), seed), rows=config_rows)
        every = range(len(tilings(kernels, inputs.config)))
        outcomes += [run(kernels, inputs, tiling) for tiling in every]
    for outcome in outcomes:
        assert_clean(outcome.report)
    assert not missed_synchronisation(outcome.report for outcome in outcomes)
