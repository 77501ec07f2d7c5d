"""Stage D3: window lengths, and everything else that makes a tile partial or a branch empty."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D3")


@pytest.mark.parametrize("rows", [1, 150, pytest.param(300, marks=pytest.mark.slow)])
def test_window_lengths(backend: AttentionKernels, rows: int, seed: int) -> None:
    """Requests at every fill level; the rows past it hold NaN and infinities."""
    requests = ((0, 1), (1, 1), (2, 2), (3, 1))
    backend.check(Case(heads=16, top_k=70, window_rows=rows, requests=requests), seed)


def test_lengths_are_clamped(backend: AttentionKernels, seed: int) -> None:
    """Lengths below 0 count as 0, beyond the rows as all rows."""
    case = Case(heads=16, top_k=100, window_rows=70, requests=((0, 1), (1, 1), (2, 1)), batch=3)
    inputs = make_inputs(case, seed)
    finite = {
        name: torch.randn_like(tensor)
        for name, tensor in zip(("compressed_kv", "swa_kv"), inputs.tensors[1:3])
    }
    wild = torch.tensor([10**9, -5, 71], dtype=torch.int32)
    tame = torch.tensor([70, 0, 70], dtype=torch.int32)
    lens = {10**9: 100, -5: 0, 71: 71}
    inputs = inputs.replaced(
        **finite, swa_lens=wild, compressed_lens=torch.tensor(list(lens)[::-1], dtype=torch.int32)
    )
    expected = inputs.replaced(
        swa_lens=tame, compressed_lens=torch.tensor(list(lens.values())[::-1], dtype=torch.int32)
    ).expected()
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed)
    assert_attention_close(result.o, expected[0], result.lse, expected[1])


@pytest.mark.parametrize("splits", [1, 3])
def test_no_compressed_rows(backend: AttentionKernels, splits: int, seed: int) -> None:
    """top_k = 0: the compressed tensor is empty and has no address."""
    case = Case(heads=16, top_k=0, ragged=False)
    result = backend.check(case, seed, splits)
    assert torch.isneginf(result.lse[4]).all(), "token 4 is padding"


def test_no_keys_at_all(backend: AttentionKernels, seed: int) -> None:
    case = Case(heads=16, top_k=0, ragged=False, requests=((0, 2),))
    inputs = make_inputs(case, seed).replaced(swa_lens=torch.zeros(4, dtype=torch.int32))
    result = backend.run_all(backend.compile(config_of(case)), inputs, seed=seed)
    assert (result.o == 0).all()
    assert torch.isneginf(result.lse).all()
