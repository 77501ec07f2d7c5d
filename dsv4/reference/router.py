"""Expert routing: sqrt(softplus) scores, chosen by score and bias, or by token id (hash layers)."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert ids and weights of each token.

    Args:
        x: [..., D]; weight: [E, D].
        top_k: experts of a token.
        scaling: routed scaling factor; weights of a token sum to it.
        bias: [E], added for the choice only (score-routed layers). Ties: the lower id.
        table: [vocab, top_k] expert ids by token id (hash-routed layers), with `input_ids` [...].

    Returns:
        ids [..., top_k] int64, weights [..., top_k] FP32.
    """
    scores = torch.nn.functional.softplus(x.float() @ weight.float().T).sqrt()
    if table is not None:
        if input_ids is None:
            raise ValueError("input_ids: hash-routed layers need the token ids, got None")
        ids = table[input_ids].long()
    else:
        choice = scores if bias is None else scores + bias.float()
        ids = choice.detach().argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    chosen = scores.gather(-1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * scaling
