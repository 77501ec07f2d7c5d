"""Stage D3: window lengths, and everything else that makes a tile partial or a branch empty."""

from __future__ import annotations

import pytest

from dsv4.testing.attention import Case
from dsv4.testing.attention_kernel import AttentionKernels

pytestmark = pytest.mark.stage("D3")


@pytest.mark.parametrize("rows", [1, 150, pytest.param(300, marks=pytest.mark.slow)])
def test_window_lengths(backend: AttentionKernels, rows: int, seed: int) -> None:
    """Requests at every fill level; the rows past it hold NaN and infinities."""
    requests = ((0, 1), (1, 1), (2, 2), (3, 1))
    backend.check(Case(heads=16, top_k=70, window_rows=rows, requests=requests), seed)
