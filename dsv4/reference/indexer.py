"""The lightning indexer: scores compressed entries for each query and selects the best ones."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """I[t, n] = sum over heads of w[t, h] * relu(q[t, h] . k[n]).

    Args:
        q: [..., T, H, D]; k: [..., N, D]; weights: [..., T, H], with its factor (D * H)^-0.5
            included.

    Returns:
        [..., T, N] FP32.
    """
    dots = torch.einsum("...thd,...nd->...thn", q.float(), k.float())
    return (weights.float()[..., None] * dots.relu()).sum(-2)


def select_top_k(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Indices of the `k` best visible entries: the higher score first, then the lower index.

    Args:
        scores: [..., N]; -0.0 equals 0.0.
        visible: bool [..., N].
        k: number of columns of the result.

    Returns:
        int64 [..., k]; -1 where fewer than `k` entries are visible.
    """
    entries = scores.shape[-1]
    masked = torch.where(visible, scores.detach().float() + 0.0, -torch.inf)
    # A visible score of -inf must still come before an invisible entry: order by visibility last,
    # stably.
    order = masked.argsort(dim=-1, descending=True, stable=True)
    seen = visible.gather(-1, order)
    order = order.gather(-1, (~seen).to(torch.int8).argsort(dim=-1, stable=True))[..., :k]
    count = visible.sum(-1, keepdim=True).clamp(max=k)
    chosen = torch.arange(min(k, entries), device=scores.device) < count
    picked = torch.where(chosen, order, -1)
    return torch.nn.functional.pad(picked, (0, max(0, k - entries)), value=-1)


def selection_mask(indices: Tensor, entries: int) -> Tensor:
    """bool [..., entries]: which entries `indices` [..., k] name; -1 names none."""
    mask = torch.zeros(*indices.shape[:-1], entries + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, torch.where(indices < 0, entries, indices), True)[..., :entries]
