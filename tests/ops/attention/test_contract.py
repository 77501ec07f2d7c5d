"""The clauses of the attention contract on the torch implementation, in the kernels' harness."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4.testing.attention_kernel import AttentionKernels
from dsv4.testing.harness import TorchCode
from tests.kernels.attention import test_contract as contract

pytestmark = pytest.mark.stage("op")

# Not those of schedules and splits, of which torch has none.
CLAUSES: dict[str, tuple[dict[str, Any], ...]] = {
    "edges": tuple(
        {"sink_mode": mode, "splits": 1, "is_causal": is_causal}
        for mode in ("swa_gate", "softmax")
        for is_causal in (True, False)
    ),
    "tensors_without_rows": tuple(
        {"top_k": top_k, "rows": rows, "splits": 1} for top_k, rows in ((0, 100), (200, 0), (0, 0))
    ),
    "no_requests": ({"splits": 1},),
    "strides": ({},),
    "nan_in_a_key_shows": ({"splits": 1},),
    "scores_of_thousands_under_huge_sinks": tuple({"sign": sign, "splits": 1} for sign in (1, -1)),
}


@pytest.mark.parametrize(
    ("clause", "options"),
    [(clause, options) for clause, every in CLAUSES.items() for options in every],
    ids=str,
)
@pytest.mark.parametrize("heads", [16, 40])
def test_clause(clause: str, options: dict[str, Any], heads: int, seed: int) -> None:
    subject = contract.Subject(AttentionKernels(TorchCode()), heads, 64)
    getattr(contract, f"test_{clause}")(subject, **options, seed=seed)
