"""Roundings against torch's own dtypes, scales against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from dsv4.reference import quantize as qz

pytestmark = pytest.mark.stage("reference")


def test_e4m3_rounding_equals_torch_dtype(seed: int) -> None:
    x = torch.cat((torch.randn(20000) * 100, torch.randn(20000) * 2.0**-8, torch.randn(999)))
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    middle = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    x = torch.cat((x, every, middle)).clamp(-448, 448)
    assert torch.equal(qz.round_e4m3(x), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(qz.round_e4m3(torch.tensor([1e9, -1e9])), torch.tensor([448.0, -448.0]))


def test_e2m1_rounds_to_nearest_and_ties_to_even(seed: int) -> None:
    table = torch.tensor(qz.E2M1_VALUES)
    x = torch.rand(5000) * 8
    x = x[(x[:, None] - (table[1:] + table[:-1]) / 2).abs().amin(1) > 1e-6]
    nearest = table[(x[:, None] - table).abs().argmin(1)]
    assert torch.equal(qz.round_e2m1(x), nearest)
    assert torch.equal(qz.round_e2m1(-x), -nearest)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert qz.round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_ceil_log2_at_and_beside_powers_of_two() -> None:
    for exponent in range(-100, 100):
        power = torch.tensor(2.0**exponent)
        above = torch.nextafter(power, torch.tensor(math.inf))
        below = torch.nextafter(power, torch.tensor(0.0))
        got = qz.ceil_log2(torch.stack((below, power, above))).tolist()
        assert got == [exponent, exponent, exponent + 1]
        assert qz.exp2_int(torch.tensor(exponent, dtype=torch.int32)) == power


@pytest.mark.parametrize("largest, floor, function, block", [
    (448, 1e-4, qz.quantize_e4m3, 64),
    (448, 1e-4, qz.quantize_e4m3, 128),
    (6, 6 * 2.0**-126, qz.quantize_e2m1, 32),
])  # fmt: skip
def test_scale_is_the_least_power_of_two_that_fits(largest, floor, function, block, seed) -> None:
    x = torch.randn(50, 2 * block) * torch.exp2(torch.randint(-20, 8, (50, 1)).float())
    x[0] = 0
    x[1] = 0
    x[1, 3] = largest * 0.25
    values, scale = function(x, block)
    assert values.abs().max() <= largest
    for row in range(x.shape[0]):
        for group in range(2):
            amax = Fraction(x[row, group * block : (group + 1) * block].abs().max().item())
            got = Fraction(scale[row, group].item())
            assert got * largest >= max(amax, Fraction(floor)) * (1 - Fraction(1, 2**22))
            assert got / 2 * largest < max(amax, Fraction(floor))
    assert scale[1, 0] == 0.25, "an exact power of two must not be doubled"
    assert torch.equal(values[0], torch.zeros(2 * block))


def test_fake_quantisers_are_idempotent_exact_in_bf16_and_straight_through(seed: int) -> None:
    for function, block in ((qz.fake_quantize_e4m3, 128), (qz.fake_quantize_e2m1, 32)):
        x = torch.randn(7, 256, requires_grad=True)
        y = function(x, block)
        assert torch.equal(function(y, block), y)
        assert torch.equal(y.bfloat16().float(), y)
        assert not torch.equal(x, y)
        weight = torch.randn_like(y)
        (y * weight).sum().backward()
        assert torch.equal(x.grad, weight)


def test_a_ragged_last_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128, got 100"):
        qz.fake_quantize_e4m3(torch.zeros(2, 100))
