"""Compression of every `ratio` tokens into one cache entry, token by token or in chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.rings import Ring
from dsv4.cache.step import Step
from dsv4.layers.linear import Linear
from dsv4.layers.module import Module, empty_parameter
from dsv4.layers.norm import RMSNorm


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

    def forward(self, values: Tensor, scores: Tensor, ring: Ring, step: Step) -> Tensor:
        """Take in the step's tokens and pool the blocks that may end with them.

        Args:
            values, scores: [B, C, width] fp32, the projections of the tokens.
            ring: [.., 2, width] fp32: projection and score of past tokens.

        Returns:
            [B, K, dim] in the dtype of the weights, K = ceil(C / ratio), from block starts // ratio
            on, before their norm; undefined for blocks that do not end.
        """
        scores = scores + self.ape[step.positions % self.ratio]
        tokens = torch.stack((values, scores), dim=-2)
        past = ring.history(step, (2 if self.overlap else 1) * self.ratio - 1)
        ring.append(step, tokens)

        blocks = step.derive(_blocks, self.ratio, self.overlap)
        return self._mean(torch.cat((past, tokens), dim=1), blocks).to(self.wkv.weight.dtype)

    def _mean(self, tokens: Tensor, blocks: _Blocks) -> Tensor:
        """[B, history + C, 2, width] -> [B, K, dim]."""
        batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        values, scores = tokens[..., -self.dim :][batch, blocks.rows].unbind(-2)
        if self.overlap:
            before = tokens[..., : self.dim][batch, blocks.rows - self.ratio]
            old_values, old_scores = before.unbind(-2)
            # The ring is undefined before position 0: a NaN there would survive a zero weight.
            old_values = old_values.where(blocks.has_previous, 0.0)
            old_scores = old_scores.where(blocks.has_previous, -torch.inf)
            values = torch.cat((old_values, values), dim=2)
            scores = torch.cat((old_scores, scores), dim=2)
        return (scores.softmax(dim=2) * values).sum(dim=2)


class _Blocks(NamedTuple):
    """The K blocks per request that may end within a step.

    Attributes:
        rows: [B, K, ratio], the tokens of each among history and chunk.
        has_previous: [B, K, 1, 1] bool.
    """

    rows: Tensor
    has_previous: Tensor


def _blocks(step: Step, ratio: int, overlap: bool) -> _Blocks:
    """Find the blocks that the step's tokens may complete."""
    count = -(-step.chunk // ratio)
    first = step.starts // ratio
    numbers = first[:, None] + torch.arange(count, device=first.device)
    begins = numbers * ratio
    history = (2 if overlap else 1) * ratio - 1
    within = torch.arange(ratio, device=first.device)
    rows = (begins - step.starts[:, None] + history)[..., None] + within
    return _Blocks(
        # Rows past the chunk belong to blocks that are not complete: any row will do.
        rows=rows.clamp(max=history + step.chunk - 1),
        has_previous=(numbers > 0)[..., None, None],
    )
