"""Activations as sums of two e4m3 codes: every bf16 value, the order of rows."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops.code_terms import decode_codes, num_term_rows, own_rows, to_terms
from dsv4.ops.quantize import quantize_e4m3

pytestmark = pytest.mark.stage("op")


def test_every_value_is_the_sum_of_its_terms() -> None:
    """Of groups with every value of bf16 from 2^-90 on that their largest one leaves exact; below
    that, values are as close as the second term's steps are."""
    bits = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16)
    finite = bits[(bits >= 2.0**-90) & bits.isfinite()]
    for octaves in (0, 7, 13):
        x = finite[finite <= finite[-1].float() * 2.0**-15].unsqueeze(1).expand(-1, 128).clone()
        x[:, 1:] *= 2.0**octaves
        x[:, 5] *= -1
        assert torch.equal(decode_codes(*to_terms(x)), x), octaves
    x[:, 0] *= 2.0**-4
    left = (decode_codes(*to_terms(x)).float() - x.float()).abs()
    assert (left <= x[:, 1:2].float() * 2.0**-21).all()


def test_rows_of_eight_tokens_lie_together(seed) -> None:
    x = torch.randn(11, 256).bfloat16()
    codes, scales = to_terms(x)
    assert codes.shape == (num_term_rows(11), 256) == (32, 256)
    first, one_term = codes.float(), quantize_e4m3(x, 128)
    assert torch.equal(scales.view(torch.uint8), one_term[1].view(torch.uint8))
    for token in range(11):
        row = token // 8 * 16 + token % 8
        assert torch.equal(first[row], one_term[0][token].float())
    own = own_rows(11)
    assert own.tolist() == [*[True] * 16, *([*[True] * 3, *[False] * 5] * 2)]
    assert (first[~own] == 0).all()


def test_groups_that_are_not_finite_have_the_scale_of_nan() -> None:
    x = torch.ones(2, 256).bfloat16()
    x[0, 3], x[1, 130] = torch.nan, -torch.inf
    codes, scales = to_terms(x)
    assert (scales.view(torch.uint8) == 255).tolist() == [[True, False], [False, True]]
    values = codes.float()
    assert values[0, 3].isnan() and values[8, 3].isnan() and values[1, 130].isnan()
    assert (values[0, :128].nan_to_num(0) == 0).all()


def test_no_tokens() -> None:
    codes, scales = to_terms(torch.empty(0, 256).bfloat16())
    assert codes.shape == (0, 256) and scales.shape == (0, 2)
    assert decode_codes(codes, scales).shape == (0, 256)
