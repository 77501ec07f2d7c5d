"""Every backend against the FP32 oracle over shapes, head counts, sink modes and window rules."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from tests.attention_cases import FULL_GRID, GRID, SHAPES
from tests.ops.conftest import Backend

pytestmark = pytest.mark.stage("op")


def check(backend: Backend, case: Case, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    inputs = make_inputs(case, seed, dtype)
    o, lse = backend.run(inputs)
    expected_o, expected_lse = inputs.expected()
    assert_attention_close(o, expected_o, lse, expected_lse)


@pytest.mark.parametrize("case", [*GRID, *SHAPES], ids=str)
def test_equals_oracle(backend: Backend, case: Case, seed: int) -> None:
    check(backend, case, seed)


@pytest.mark.parametrize("case", [*GRID[::3], *SHAPES], ids=str)
def test_float32_is_not_rounded(case: Case, seed: int) -> None:
    check(Backend("cpu"), case, seed, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("case", FULL_GRID, ids=str)
def test_full_grid(backend: Backend, case: Case, seed: int) -> None:
    check(backend, case, seed)


def test_bounds_can_fail(seed: int) -> None:
    """A cosine of 0.99 and an lse off by a thousandth do not pass: the grid is not vacuous."""
    inputs = make_inputs(GRID[0], seed)
    expected_o, expected_lse = inputs.expected()
    wrong = (expected_o * (1 + 0.02 * torch.randn_like(expected_o))).bfloat16()
    with pytest.raises(AssertionError, match="Frobenius"):
        assert_attention_close(wrong, expected_o, expected_lse, expected_lse)
    with pytest.raises(AssertionError, match="lse"):
        assert_attention_close(expected_o.bfloat16(), expected_o, expected_lse + 1e-3, expected_lse)
