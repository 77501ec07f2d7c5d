"""Stage D2: tokens times query heads; fewer or more heads than the 64 rows of a CTA."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.attention import Case, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D2")

REQUESTS = ((0, 2), (-1, 1), (2, 1))


@pytest.mark.parametrize(
    "heads", [8, 64, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 80))]
)
def test_heads(backend: AttentionKernels, heads: int, seed: int) -> None:
    backend.check(Case(heads=heads, requests=REQUESTS), seed)


def test_padded_rows_change_nothing(backend: AttentionKernels, seed: int) -> None:
    """The first 8 heads of 64 come out bit for bit as 8 heads alone."""
    case = Case(heads=64, requests=REQUESTS)
    inputs = make_inputs(case, seed)
    few = inputs.replaced(
        q=inputs.q[:, :8].contiguous(), sink_logits=inputs.sink_logits[:8].clone()
    )
    all_heads = backend.run(backend.compile(config_of(case)), inputs)
    alone = backend.run(backend.compile(config_of(Case(heads=8, requests=REQUESTS))), few)
    assert torch.equal(all_heads.o[:, :8], alone.o)
    assert torch.equal(all_heads.lse[:, :8], alone.lse)
