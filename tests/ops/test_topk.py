"""Top-k against sorting in Python, ties above all."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.ops.topk import topk_stable

pytestmark = pytest.mark.stage("indexer")


def brute_force(scores: list[float], k: int, valid: list[bool]) -> list[int]:
    """Valid indices by falling score, then rising index."""
    return sorted((i for i, ok in enumerate(valid) if ok), key=lambda i: (-scores[i], i))[:k]


@pytest.mark.parametrize("size", [1, 2, 31, 400])
@pytest.mark.parametrize("k", [1, 16, 500])
def test_equals_sorting(size: int, k: int, seed: int) -> None:
    """Few distinct scores, so that ties cross every rank; a third of the entries invalid."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (3, 5, size), generator=generator).float()
    scores[..., ::7] *= 1e-40  # subnormal numbers, and -0.0
    valid = torch.rand(scores.shape, generator=generator) > 0.3
    indices, count = topk_stable(scores, k, valid)
    assert (indices.dtype, indices.shape) == (torch.int64, (3, 5, k))
    assert ((indices >= 0) & (indices < size)).all()
    for place in range(15):
        expected = brute_force(
            scores.view(15, size)[place].tolist(), k, valid.view(15, size)[place].tolist()
        )
        assert count.flatten()[place] == len(expected)
        assert indices.view(15, k)[place, : len(expected)].tolist() == expected


def test_negative_zero_is_zero() -> None:
    scores = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    indices, _ = topk_stable(scores, 4, torch.ones(4, dtype=torch.bool))
    assert indices.tolist() == [0, 1, 2, 3]


def test_infinities_are_scores() -> None:
    """A valid -inf comes before an invalid +inf."""
    scores = torch.tensor([math.inf, -math.inf, -3.4e38, math.inf, 0.0])
    valid = torch.tensor([False, True, True, True, True])
    indices, count = topk_stable(scores, 5, valid)
    assert indices.tolist() == [3, 4, 2, 1, 0]
    assert count == 4


def test_nothing_valid() -> None:
    indices, count = topk_stable(torch.ones(2, 3), 2, torch.zeros(2, 3, dtype=torch.bool))
    assert count.tolist() == [0, 0]
    assert ((indices >= 0) & (indices < 3)).all()


def test_no_entries() -> None:
    empty = torch.ones(2, 0)
    indices, count = topk_stable(empty, 3, empty.bool())
    assert indices.shape == (2, 3)
    assert count.tolist() == [0, 0]


def test_large_k_of_many(seed: int) -> None:
    """Beyond 2^16 entries, equal scores still come in index order."""
    indices, _ = topk_stable(torch.zeros(100_000), 4096, torch.ones(100_000, dtype=torch.bool))
    assert torch.equal(indices, torch.arange(4096))


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match=r"scores: needs torch\.float32, got torch\.bfloat16"):
        topk_stable(torch.zeros(3).bfloat16(), 1, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"valid: needs torch\.bool of shape \(3,\)"):
        topk_stable(torch.zeros(3), 1, torch.ones(2, dtype=torch.bool))
