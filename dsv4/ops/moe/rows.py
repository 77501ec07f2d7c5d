"""Rows of a token's experts that are still to be added: what `moe` hands on, and their sum."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.kernels.moe.routing import gate_tiling
from dsv4.kernels.moe.scratch import WORD, sections


class ExpertRows(NamedTuple):
    """Results of T tokens' experts, of which the reader adds those that there are.

    Attributes:
        rows: [T, k + 1, D] bfloat16: the routed experts' in ascending order, then the shared one's;
            rows without an expert, and those of padding, hold anything.
        ids: [T, k] int32, the experts; -1: none.
        counts: [2] int32, the second of them how many tokens are not padding.
    """

    rows: Tensor
    ids: Tensor
    counts: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the sum, [T, D]."""
        return self.rows.shape[::2]

    def sum(self) -> Tensor:
        """[T, D] bfloat16: added in fp32 in their order, 0 for padding; the bits of the kernels."""
        tokens, places, hidden = self.rows.shape
        is_live = torch.arange(tokens, device=self.rows.device) < self.counts[1]
        is_used = (self.ids >= 0) & is_live[:, None]
        is_used = torch.cat([is_used, is_live[:, None]], 1)
        total = self.rows.new_zeros((tokens, hidden), dtype=torch.float32)
        for place in range(places):
            added = total + self.rows[:, place].float()
            total = torch.where(is_used[:, place, None], added, total)
        return total.to(self.rows.dtype)


def rows_in(scratch: Tensor, config: MoeConfig, tokens: int) -> ExpertRows:
    """What a launch of so many tokens leaves in its scratch [bytes] uint8."""
    k, hidden = config.top_k, config.hidden
    rows, ids, counts = _places(config, tokens)
    words, halves = scratch.view(torch.int32), scratch.view(torch.bfloat16)
    row = (k + 1) * hidden
    return ExpertRows(
        halves.as_strided((tokens, k + 1, hidden), (row, hidden, 1), rows // 2),
        words.as_strided((tokens, k), (k, 1), ids // WORD),
        words.as_strided((2,), (1,), counts // WORD),
    )


@lru_cache(maxsize=4096)
def _places(config: MoeConfig, tokens: int) -> tuple[int, int, int]:
    """Bytes from the start of the scratch to rows, ids and counts."""
    at = sections(config, tokens, gate_tiling(config.routing, tokens)[0])
    return at["rows"], at["ids"], at["counts"]
