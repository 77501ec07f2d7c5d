"""Stage D4: the causal window."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D4")


@pytest.mark.parametrize(
    "sliding_window", [100, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 128))]
)
def test_causal_window(backend: AttentionKernels, sliding_window: int, seed: int) -> None:
    case = Case(
        heads=8,
        top_k=70,
        window_rows=150,
        sliding_window=sliding_window,
        requests=((0, 4), (2, 1), (-1, 1), (3, 2)),
        is_causal=True,
    )
    backend.check(case, seed)


def test_many_tokens_of_one_request(backend: AttentionKernels, seed: int) -> None:
    """More tokens than one step of the search for a request's last token covers."""
    case = Case(
        heads=8,
        top_k=0,
        window_rows=90,
        sliding_window=100,
        requests=((0, 35), (1, 2)),
        batch=2,
        is_causal=True,
        ragged=False,
    )
    backend.check(case, seed)


def test_tokens_before_the_window(backend: AttentionKernels, seed: int) -> None:
    """More tokens than rows: the first ones sit at negative positions and see nothing."""
    case = Case(
        heads=8, top_k=0, requests=((0, 5),), is_causal=True, ragged=False, sliding_window=100
    )
    inputs = make_inputs(case, seed)
    inputs = inputs.replaced(swa_lens=torch.tensor([3, 0, 0, 0], dtype=torch.int32))
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed)
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])
    assert torch.isneginf(result.lse[:2]).all()
