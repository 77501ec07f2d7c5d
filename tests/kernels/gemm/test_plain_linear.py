"""The kernels of `plain_linear`: in the simulator, of both architectures, with races and schedules,
and on a Hopper GPU.

Every tiling gives the same bits, close to the reference.
"""

from __future__ import annotations

import pytest
import torch

from dsv4.ops.plain_linear import PLAIN_LINEAR, PLANS
from dsv4.testing.fp8_linear import Case
from dsv4.testing.harness import Device, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.plain_linear import Inputs, assert_plain_close

pytestmark = pytest.mark.stage("projections")

FEW_SMS = 2  # clusters have several tiles: rings wrap
HOPPER = [pytest.mark.gpu, pytest.mark.sm90]


@pytest.fixture(
    scope="module",
    params=[
        "sm_90a",
        pytest.param("sm_100a", marks=pytest.mark.slow),
        pytest.param("cuda", marks=HOPPER),
    ],
)
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    is_device = request.param == "cuda"
    return OpKernels(PLAIN_LINEAR, Device() if is_device else simulator(request.param))


@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        # `linear_argmax` is tested with the same outputs.
        pytest.param(Case(11, 512, 328, out_dtype="float32"), 1, marks=pytest.mark.slow),
        pytest.param(
            Case(67, 1024, 392, out_dtype="float32", is_strided=True), None, marks=pytest.mark.slow
        ),
        pytest.param(Case(150, 2048, 200), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_tiling_gives_the_same_bits(kernels, case, schedules, seed) -> None:
    inputs, tilings = Inputs.make(case, seed), PLANS[kernels.target.arch].TILINGS
    outcomes = [
        kernels.run(inputs, seed, schedules, tiling=i, num_sms=FEW_SMS) for i in range(len(tilings))
    ]
    assert_plain_close(outcomes[0]["out"], inputs)
    for tiling, outcome in zip(tilings, outcomes):
        outcomes[0].assert_same_bits(outcome, str(tiling))


@pytest.mark.slow
def test_rows_that_are_not_finite_touch_no_other(kernels, seed) -> None:
    case = Case(15, 512, 136, out_dtype="float32", has_special_rows=True)
    inputs, choose = Inputs.make(case, seed), PLANS[kernels.target.arch].choose
    together = kernels.run(inputs, seed, tiling=choose(15), num_sms=FEW_SMS)["out"]
    assert together[0::5].isnan().all()
    alone = Inputs(inputs.x[4::5].clone(), inputs.weight)
    found = kernels.run(alone, seed, tiling=choose(3), num_sms=FEW_SMS)["out"]
    assert torch.equal(found, together[4::5])


@pytest.mark.slow
def test_a_token_has_the_same_bits_among_any_number(kernels, seed) -> None:
    inputs = Inputs.make(Case(260, 512, 136, out_dtype="float32"), seed)
    choose = PLANS[kernels.target.arch].choose
    together = kernels.run(inputs, seed, tiling=choose(260), num_sms=FEW_SMS)["out"]
    assert_plain_close(together, inputs)
    for tokens in (1, 7, 9, 17, 65, 129):
        part, scalars = inputs.first(tokens), {"tiling": choose(tokens), "num_sms": FEW_SMS}
        found = kernels.run(part, seed, **scalars)["out"]
        assert torch.equal(found, together[:tokens]), f"T = {tokens}"
