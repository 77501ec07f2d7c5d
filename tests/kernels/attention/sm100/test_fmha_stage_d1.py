"""Stage D1: every head_dim, with more tiles than the KV ring holds."""

from __future__ import annotations

import pytest

from dsv4.testing.attention import Case
from dsv4.testing.attention_kernel import AttentionKernels

pytestmark = pytest.mark.stage("D1")


@pytest.mark.parametrize(
    ("head_dim", "growing"),
    [
        (64, True),
        (128, False),
        (256, False),
        (512, True),
        pytest.param(64, False, marks=pytest.mark.slow),
        pytest.param(128, True, marks=pytest.mark.slow),
        pytest.param(256, True, marks=pytest.mark.slow),
        pytest.param(512, False, marks=pytest.mark.slow),
    ],
)
def test_head_dim(backend: AttentionKernels, head_dim: int, growing: bool, seed: int) -> None:
    case = Case(
        heads=64,
        head_dim=head_dim,
        top_k=600,
        window_rows=128,
        requests=((0, 1),),
        ragged=False,
        growing=growing,
    )
    backend.check(case, seed)
