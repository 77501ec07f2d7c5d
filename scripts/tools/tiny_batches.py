"""Training batches of the tiny checkpoint: crops of the text, and recall rows made when drawn.

Drawn on the device from a generator of their own: a piece of training that starts at step n sees
the rows that an uncut training sees there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecallKind:
    """A kind of recall row: `pairs` statements, then `rounds` lists of all of them, reordered.

    Attributes:
        share: part of the batch.
        gap: least and largest number of text tokens before each list.
    """

    share: float
    pairs: int
    rounds: int
    gap: tuple[int, int]


class Batches:
    """Random batches on the device, written in place: a captured graph reads them there.

    Args:
        lead: a recall row begins with up to so many tokens of text: the phase of its statements
            against the blocks of the compressors varies then.
        bare: share of recall rows with text in place of their opening.

    Attributes:
        ids: [B, length + 1] int64 tokens.
        weights: [B, length + 1] FP32: how much the prediction of each token counts. Text weighs 1 a
            token; the answers of all recall rows together weigh as much as the text.
        is_text: [B] bool.
        asks: [B, length] bool: rows of logits whose next token is an answer.
    """

    def __init__(
        self,
        data: Mapping[str, Tensor],
        kinds: tuple[RecallKind, ...],
        *,
        batch: int,
        length: int,
        form_weight: float,
        device: torch.device,
        lead: int = 0,
        bare: float = 0.0,
    ) -> None:
        self.stream = data["train"].to(device, torch.int64)
        self.names, self.goods = data["names"].to(device), data["goods"].to(device)
        self.opening, self.recall = data["opening"].to(device), data["recall"].to(device)
        self.unto, self.end, self.newline = (
            data[mark].item() for mark in ("unto", "end", "newline")
        )
        self.kinds, self.form_weight = kinds, form_weight
        self.lead, self.bare = lead, bare
        self.rows = [round(batch * kind.share) for kind in kinds]
        self.crops = batch - sum(self.rows)
        answers = sum(n * k.pairs * k.rounds for n, k in zip(self.rows, kinds))
        self.answer_weight = self.crops * length / max(1, answers)
        self.ids = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.weights = torch.ones(batch, length + 1, device=device)
        self.asks = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.is_text = torch.arange(batch, device=device) < self.crops
        self.generator = torch.Generator(device)

    def draw(self, seed: int) -> None:
        """Fill the batch anew; the same seed gives the same batch."""
        self.generator.manual_seed(seed)
        batch, row = self.ids.shape
        at = self._integers(0, self.stream.numel() - row, (batch, 1))
        self.ids.copy_(self.stream[at + torch.arange(row, device=at.device)])
        first = self.crops
        for count, kind in zip(self.rows, self.kinds):
            self._write(slice(first, first + count), kind)
            first += count
        self.asks.copy_((self.weights == self.answer_weight)[:, 1:])

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, device=self.ids.device, generator=self.generator)

    def _orders(self, rows: int, size: int) -> Tensor:
        """[rows, size] random permutations."""
        keys = torch.rand(rows, size, device=self.ids.device, generator=self.generator)
        return keys.argsort(dim=1)

    def _write(self, where: slice, kind: RecallKind) -> None:
        ids, weights = self.ids[where], self.weights[where]
        rows, row = ids.shape
        weights.zero_()
        names = self.names[self._orders(rows, len(self.names))[:, : kind.pairs]]
        goods = self.goods[self._orders(rows, len(self.goods))[:, : kind.pairs]]
        at = self._open(ids)
        statements = self._statements(names, goods)
        span = torch.arange(4 * kind.pairs, device=ids.device)
        ids.scatter_(1, at + span, statements)
        at = at + 4 * kind.pairs
        ids.scatter_(1, at, self.newline)
        head, block = len(self.recall), len(self.recall) + 4 * kind.pairs
        # What the gaps may take together, shared out at random among the rounds.
        gaps = self._integers(kind.gap[0], kind.gap[1] + 1, (rows, kind.rounds))
        room = row - at - 1 - block * kind.rounds
        gaps = (gaps * (room / gaps.sum(1, keepdim=True)).clamp(max=1.0)).long()
        start = at + 1
        form = weights.new_full((rows, 4), self.form_weight)
        form[:, 2] = self.answer_weight
        form = form.repeat(1, kind.pairs)
        for gap in gaps.unbind(1):
            start = start + gap[:, None]
            order = self._orders(rows, kind.pairs)
            listed = self._statements(names.gather(1, order), goods.gather(1, order))
            ids.scatter_(
                1, start + torch.arange(head, device=ids.device), self.recall.expand(rows, -1)
            )
            places = start + head + span
            ids.scatter_(1, places, listed)
            weights.scatter_(1, places, form)
            start = start + block

    def _open(self, ids: Tensor) -> Tensor:
        """Write the openings of recall rows; where the statements begin, [rows, 1]."""
        rows = ids.shape[0]
        places = torch.arange(len(self.opening), device=ids.device).expand(rows, -1)
        opening = self.opening.expand(rows, -1)
        if self.lead:
            places = places + self._integers(0, self.lead + 1, (rows, 1))
        if self.bare:
            chance = torch.rand(rows, 1, device=ids.device, generator=self.generator)
            opening = torch.where(chance < self.bare, ids.gather(1, places), opening)
        ids.scatter_(1, places, opening)
        return places[:, -1:] + 1

    def _statements(self, names: Tensor, goods: Tensor) -> Tensor:
        """[rows, 4 * pairs] tokens of `unto name good;` for [rows, pairs] names and goods."""
        unto, end = torch.full_like(names, self.unto), torch.full_like(names, self.end)
        return torch.stack((unto, names, goods, end), -1).flatten(1)
