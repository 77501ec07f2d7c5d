"""Compression of every `ratio` tokens into one cache entry, token by token or in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.entries import EntryPool
from dsv4.cache.index_keys import IndexKeyPool
from dsv4.cache.rings import Ring
from dsv4.layers.linear import Linear
from dsv4.layers.module import Module, empty_parameter
from dsv4.layers.norm import RMSNorm
from dsv4.ops import Compression


class Compressor(Module):
    """Softmax-weighted mean of the projections of a block of tokens, per channel.

    Entry n covers tokens n * ratio .. (n + 1) * ratio - 1. With `overlap` the projections are two
    series wide: the block's own tokens contribute the last `dim` columns, those of the block before
    it the first `dim` columns, all in one softmax; the first block has no block before it. Every
    projection is kept in a ring addressed by position until no future block can need it, so that
    chunks may end anywhere and rejected drafts are overwritten. fp32 up to the mean, which is
    normalised, rotated and rounded as it is written to the cache.

    Args:
        hidden_size, dim: width of the input, of an entry.
        ratio: tokens per entry.
        overlap: whether blocks overlap: a property of the layer's kind, not of the rate.
        dtype: of the weights and of the entries.
    """

    def __init__(
        self,
        hidden_size: int,
        dim: int,
        ratio: int,
        overlap: bool,
        norm_eps: float,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.ratio = ratio
        self.overlap = overlap
        width = 2 * dim if overlap else dim
        self.ape = empty_parameter((ratio, width), torch.float32, device)
        self.wkv = Linear(hidden_size, width, dtype=dtype, is_wide=True, device=device)
        self.wgate = Linear(hidden_size, width, dtype=dtype, is_wide=True, device=device)
        self.norm = RMSNorm(dim, norm_eps, device)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """Projections of the input: value, score."""
        return self.wkv, self.wgate

    def step(
        self, values: Tensor, scores: Tensor, ring: Ring, pool: EntryPool | IndexKeyPool
    ) -> Compression:
        """What takes in a step's tokens, and writes the entries of the blocks that end with them.

        Args:
            values, scores: [B, C, width] fp32, the projections of the tokens.
            ring: [.., 2, width] fp32: projection and score of past tokens.
            pool: of the entries.
        """
        return Compression(values, scores, self.ape, ring.data, self.norm.weight, pool.data)
