"""Experts with a clamped SwiGLU. Every routed expert is evaluated and weighted: no indexing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _identity(x: Tensor) -> Tensor:
    return x


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the gate has an upper bound only."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def dense_weights(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[..., E]: the weight of every expert, 0 for those not chosen; a repeated id adds up."""
    return torch.zeros(*ids.shape[:-1], experts, device=ids.device).scatter_add(-1, ids, weights)


def routed_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    weights: Tensor,
    limit: float,
    quantize: Callable[[Tensor], Tensor] = _identity,
    quantize_hidden: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Weighted sum of expert outputs.

    The weight multiplies before w2, as in the official `Expert.forward`.

    Args:
        x: [..., D]; w1 (gate), w3 (up): [E, I, D]; w2 (down): [E, D, I].
        weights: [..., E], 0 for experts not chosen.
        limit: clamp of gate (above) and up (both sides).
        quantize: applied to the inputs of every product.
        quantize_hidden: instead, to those of w2, [..., E, I].
    """
    x = quantize(x.float())
    quantize_hidden = quantize_hidden or quantize
    gate = torch.einsum("...d,eid->...ei", x, w1.float())
    up = torch.einsum("...d,eid->...ei", x, w3.float())
    hidden = quantize_hidden(clamped_swiglu(gate, up, limit) * weights[..., None])
    return torch.einsum("...ei,edi->...d", hidden, w2.float())


def shared_expert(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    limit: float,
    quantize: Callable[[Tensor], Tensor] = _identity,
) -> Tensor:
    """The expert every token passes, [..., D]; same clamp, no weight."""
    x = quantize(x.float())
    hidden = clamped_swiglu(x @ w1.float().T, x @ w3.float().T, limit)
    return quantize(hidden) @ w2.float().T


def group_pairs(ids: Tensor, experts: int, group_tokens: int) -> tuple[Tensor, Tensor]:
    """(token, slot) pairs sorted by expert, and the groups of equal experts they fall into.

    Args:
        ids: [T, k]; -1 = no expert.
        experts: their number.
        group_tokens: rows of a group at most.

    Returns:
        pairs [n] int64, token * k + slot, by expert, then in order; groups [.., 4] int64: expert,
        first place in `pairs`, number of rows, 0.
    """
    flat = ids.flatten().tolist()
    pairs: list[int] = []
    groups: list[list[int]] = []
    for expert in range(experts):
        own = [place for place, found in enumerate(flat) if found == expert]
        for start in range(0, len(own), group_tokens):
            rows = min(group_tokens, len(own) - start)
            groups.append([expert, len(pairs) + start, rows, 0])
        pairs += own
    shape = (len(groups), 4)
    return torch.tensor(pairs, dtype=torch.int64), torch.tensor(groups).long().reshape(shape)
