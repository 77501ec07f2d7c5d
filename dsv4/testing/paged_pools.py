"""Pools of keys for inputs of `sparse_fmha_paged`, NaN wherever no token looks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.reference.cache_entry import pack_pages

if TYPE_CHECKING:
    from dsv4.testing.paged_attention import Case

# What index lists hold beside slots: none of these is a key, and no memory lies there.
WILD = (-1, -(2**31), -123456, 2**31 - 1)


class Pool:
    """A pool under construction: `slots` entries in pages, which requests own in random order.

    Attributes:
        rows: [pages, P, head_dim] fp32.
        table: [requests, columns] int32.
        width: keys of a token at most.
    """

    def __init__(self, rows: Tensor, table: Tensor, width: int) -> None:
        self.rows, self.table, self.width = rows, table, width

    @classmethod
    def make(
        cls,
        case: Case,
        width: int,
        page: int,
        direction: Tensor,
        generator: torch.Generator,
    ) -> Pool:
        # A few more positions than are seen: a window of several queries is longer.
        columns = -(-(width + case.queries) // page)
        pages = case.requests * columns
        order = torch.randperm(pages + 1, generator=generator)[:pages]
        rows = torch.randn(pages + 1, page, case.head_dim, generator=generator)
        table = order.view(case.requests, columns).to(torch.int32)
        if case.growing:
            rise = torch.linspace(-1, 1, columns * page).view(columns, page, 1)
            for request in table:
                rows[request] += rise * math.sqrt(case.head_dim) * direction
            rows.clamp_(-1.25, 1.25)
        rows *= case.deviation
        return cls(rows, table, width)

    def lose_pages(self, generator: torch.Generator) -> None:
        """Put what is no page of the pool in some columns of the table."""
        wild = torch.tensor((*WILD, len(self.rows)), dtype=torch.int32)
        which = torch.rand(self.table.shape, generator=generator) < 0.25
        chosen = torch.randint(len(wild), self.table.shape, generator=generator)
        self.table[which] = wild[chosen][which]

    @property
    def page(self) -> int:
        return self.rows.shape[1]

    def slots_of(self, request: int) -> Tensor:
        """Slots of a request's entries, in order."""
        pages = self.table[request].long()[:, None] * self.page
        return (pages + torch.arange(self.page)).flatten()

    def lists(self, case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Index lists [T, width] and lengths, as a case wants them; keeps what they name."""
        tokens, width = case.tokens, self.width
        indices = torch.empty(tokens, width, dtype=torch.int32)
        for t in range(tokens):
            own = self.slots_of(t // case.queries)
            order = torch.randperm(len(own), generator=generator)[:width]
            if case.growing:
                order = order.sort().values
            indices[t] = own[order]
        if case.wild and width:
            wild = torch.tensor((*WILD, self.rows.shape[0] * self.page), dtype=torch.int32)
            which = torch.rand(tokens, width, generator=generator) < 0.3
            count = int(which.sum())
            indices[which] = wild[torch.randint(len(wild), (count,), generator=generator)]
            indices[:: max(2, tokens // 2)] = -1
        lens = None
        if case.ragged:
            lens = torch.randint(-1, width + 2, (tokens,), generator=generator).to(torch.int32)
            lens[: min(2, tokens)] = torch.tensor([0, width], dtype=torch.int32)[:tokens]
        used = torch.ones(tokens, width, dtype=torch.bool)
        if lens is not None:
            used = torch.arange(width) < lens[:, None]
        self.keep(indices[used].tolist())
        if case.padded:
            wide = torch.full((tokens, width + 24), WILD[-1], dtype=torch.int32)
            wide[:, :width] = indices
            indices = wide[:, :width]
        return indices, lens

    def positions_seen(self, case: Case, positions: Tensor) -> list[int]:
        """Slots of the window's positions that tokens see by the table."""
        found = []
        for t, position in enumerate(positions.tolist()):
            own = self.slots_of(t // case.queries)
            first = max(0, position - case.window + 1)
            found += [int(own[n % len(own)]) for n in range(first, position + 1)]
        return found

    def entries_seen(self, case: Case, positions: Tensor) -> list[int]:
        """The same of complete compressed entries."""
        found = []
        for t, position in enumerate(positions.tolist()):
            own = self.slots_of(t // case.queries)
            found += own[: (position + 1) // case.ratio].tolist()
        return found

    def keep(self, slots: list[int]) -> None:
        """Leave NaN wherever no token looks."""
        total = self.rows.shape[0] * self.page
        kept = torch.zeros(total, dtype=torch.bool)
        kept[[slot for slot in slots if 0 <= slot < total]] = True
        self.rows[~kept.view(self.rows.shape[:2])] = torch.nan

    def packed(self, case: Case) -> Tensor:
        """The pool in its format, NaN in what lies between pages."""
        if case.kv_format == "fp8":
            return _packed_fp8(self.rows, case)
        rows = self.rows.bfloat16()
        if not case.padded:
            return rows
        wide = rows.new_full((rows.shape[0], rows.shape[1] + 3, rows.shape[2] + 64), torch.nan)
        view = wide[:, 1:-2, : rows.shape[2]]
        return view.copy_(rows)


def _packed_fp8(rows: Tensor, case: Case) -> Tensor:
    """Entries [pages, P, bytes]; those whose values are NaN have bytes of NaN alone."""
    pages, size, dim = rows.shape
    entry = Fp8Entry(dim, case.rope_dim)
    unnamed = rows.isnan().any(-1)
    data = pack_pages(rows.nan_to_num(0.0), case.rope_dim, uniform_scale=case.uniform)
    records = data[:, : size * entry.record_bytes].unflatten(1, (size, -1))
    records[unnamed] = 0xFF
    if entry.groups:
        scales = data[:, size * entry.record_bytes : size * entry.bytes].unflatten(1, (size, -1))
        scales[unnamed] = 0xFF
    data[:, size * entry.bytes :] = 0xFF
    stride = data.shape[1] + (1008 if case.padded else 0)
    frame = torch.full((pages * stride,), 0xFF, dtype=torch.uint8)
    frame.view(pages, stride)[:, : data.shape[1]] = data
    return frame.as_strided((pages, size, entry.bytes), (stride, entry.bytes, 1))
