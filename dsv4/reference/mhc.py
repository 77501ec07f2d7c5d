"""Manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix.

Technical report section 2.2; where it differs from the official `hc_split_sinkhorn` the code is
followed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mixing(NamedTuple):
    """One sublayer: pre [..., n], post [..., n], comb [..., n, n] (source stream first)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def _projected(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.float().flatten(-2)
    return (flat @ fn.float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def sinkhorn(scores: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic [..., n, n] of scores: rows and columns in turn, columns last.

    The first row pass is a softmax; `iterations` passes each; `eps` is added to the softmax and to
    every sum.
    """
    a = torch.softmax(scores, -1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    return iterated(a, iterations - 1, eps)


def iterated(a: Tensor, passes: int, eps: float) -> Tensor:
    """More passes of Sinkhorn's iteration."""
    for _ in range(passes):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def mixing(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Mixing:
    """Coefficients of a sublayer from its residual streams.

    Args:
        streams: [..., n, D]; fn: [2n + n^2, n * D]; base: [2n + n^2]; scale: [3].
        iterations: Sinkhorn passes; eps: floor of `pre` and of Sinkhorn's sums; norm_eps: floor of
            the RMS.
    """
    n = streams.shape[-2]
    m, base, scale = _projected(streams, fn, norm_eps), base.float(), scale.float()
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    scores = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return Mixing(pre, post, sinkhorn(scores, iterations, eps))


def contract(streams: Tensor, pre: Tensor) -> Tensor:
    """Sublayer input [..., D]: sum over streams of pre_j X_j."""
    return (pre[..., None] * streams.float()).sum(-2)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sublayer with output y [..., D]: X'_k = post_k y + sum_j comb[j, k] X_j."""
    return post[..., None] * y[..., None, :].float() + comb.transpose(-1, -2) @ streams.float()


def head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """One vector [..., D] of the final streams; fn [n, n * D], base [n], scale [1]."""
    pre = torch.sigmoid(_projected(streams, fn, norm_eps) * scale.float() + base.float()) + eps
    return contract(streams, pre)
