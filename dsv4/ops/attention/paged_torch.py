"""`sparse_fmha_paged` in plain torch: the CPU backend, GPUs without a kernel, the readable path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dsv4.kernels.attention.paged_args import PagedFmhaTensors
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops.attention.torch_path import attend, merge, tokens_at_once
from dsv4.ops.code_terms import to_terms
from dsv4.ops.head_rotation import norm_factor
from dsv4.ops.pools import Pool


class Slots(Protocol):
    """Slots of the keys of c tokens.

    Attributes:
        count: [c], keys of each token, invalid ones among them.
    """

    count: Tensor

    def at(self, start: int, stop: int) -> Tensor: ...

    def of(self, part: slice) -> Slots: ...


@dataclass(frozen=True)
class ListedSlots:
    """Slots from index lists [c, k]."""

    indices: Tensor
    count: Tensor

    def at(self, start: int, stop: int) -> Tensor:
        """Slots of keys start..stop of every token [c, n] int64; outside the pool: no key."""
        return self.indices[:, start:stop].long()

    def of(self, part: slice) -> ListedSlots:
        return ListedSlots(self.indices[part], self.count[part])


@dataclass(frozen=True)
class TabledSlots:
    """Slots of entries first..first + count of each token, by the table of its request.

    Attributes:
        table: [B, columns], pages.
        rows: [c] int64, within the table.
        first, count: [c] int64.
        page_size, pages: of the pool.
    """

    table: Tensor
    rows: Tensor
    first: Tensor
    count: Tensor
    page_size: int
    pages: int

    def at(self, start: int, stop: int) -> Tensor:
        """Slots of keys start..stop of every token [c, n] int64; -1 without a page."""
        number = torch.arange(start, stop, device=self.first.device) + self.first[:, None]
        # Entries past the last column are in the first again: a ring is a table of one column.
        column = number // self.page_size % self.table.shape[1]
        page = self.table[self.rows[:, None], column].long()
        has_page = (page >= 0) & (page < self.pages)
        return torch.where(has_page, page * self.page_size + number % self.page_size, -1)

    def of(self, part: slice) -> TabledSlots:
        tensors = (self.rows[part], self.first[part], self.count[part])
        return TabledSlots(self.table, *tensors, self.page_size, self.pages)


@dataclass(frozen=True)
class Branch:
    """Keys of one branch for all tokens.

    Attributes:
        width: keys of a token at most.
    """

    pool: Pool
    slots: Slots
    width: int

    def of(self, part: slice) -> PagedKeys:
        """Those of a chunk of tokens."""
        return PagedKeys(self.pool, self.slots.of(part), self.width)


class PagedKeys:
    """Keys of one branch for a chunk of tokens, for `attend`."""

    def __init__(self, pool: Pool, slots: Slots, width: int) -> None:
        self.pool = pool
        self.slots = slots
        self.hi = width if pool.slots else 0
        if self.hi and slots.count.device.type == "cpu":
            self.hi = int(slots.count.amax())

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys start..stop of every token in float32 [c, n, d], and their mask [c, 1, n].

        What is masked reads as zeros: no slot that is not named is looked at, whatever it holds.
        """
        slots = self.slots.at(start, stop)
        place = torch.arange(start, stop, device=slots.device)
        valid = (slots >= 0) & (slots < self.pool.slots) & (place < self.slots.count[:, None])
        keys = self.pool.read(torch.where(valid, slots, 0)).float()
        return keys.masked_fill_(~valid.unsqueeze(-1), 0.0), valid.unsqueeze(1)


def sparse_fmha_paged(config: PagedFmhaConfig, given: PagedFmhaTensors) -> None:
    """Write `o` and, when given, `lse` and `max_logits`; or codes of `o`. Arguments are checked
    ones.

    Products and sums in float32; with bfloat16 queries probabilities are rounded to bfloat16 before
    the second product, the normaliser is the sum of unrounded ones.
    """
    q = given.q
    tokens = q.shape[0]
    if tokens == 0:
        return
    if config.rounds_output:
        rows = torch.empty_like(q)
        exact = given._replace(o=rows, codes=None, code_scales=None)
        sparse_fmha_paged(replace(config, rounds_output=False), exact)
        codes, scales = to_terms(rows.flatten(1))
        given.codes.copy_(codes)
        given.code_scales.copy_(scales)
        return
    window, compressed = _branches(config, given)
    chunk = tokens_at_once(q)
    for begin in range(0, tokens, chunk):
        part = slice(begin, begin + chunk)
        scaled_q = q[part].float() * config.scale
        if given.q_factor is not None:
            scaled_q *= given.q_factor[part].unsqueeze(-1)
        if given.q_squares is not None:
            factor = norm_factor(given.q_squares[part], config.head_dim, config.q_eps)
            scaled_q *= factor.unsqueeze(-1)
        round_p = q.dtype == torch.bfloat16
        o_c, lse_c, max_c = attend(scaled_q, compressed.of(part), round_p)
        o_w, lse_w, max_w = attend(scaled_q, window.of(part), round_p)
        o, lse = merge(config.sink_mode, o_c, lse_c, o_w, lse_w, given.sink_logits)
        if given.rope is not None:
            _rotate_back_(o, given.rope[given.positions[part].clamp(0, given.rope.shape[0] - 1)])
        given.o[part] = o
        if given.lse is not None:
            given.lse[part] = lse
        if given.max_logits is not None:
            given.max_logits[part] = torch.maximum(max_c, max_w)


def _branches(config: PagedFmhaConfig, given: PagedFmhaTensors) -> tuple[Branch, Branch]:
    """Window and compressed keys of all tokens; pools decoded where it is less work."""
    q, request_ids, positions = given.q, given.request_ids, given.positions
    tokens = q.shape[0]
    entry = Fp8Entry(config.head_dim, config.rope_dim) if config.kv_format == "fp8" else None
    sees = torch.ones(tokens, dtype=torch.bool, device=q.device)
    if request_ids is not None:
        sees = request_ids >= 0
    window = Pool(given.window_pool, entry)
    compressed = window
    if given.compressed_pool is not None:
        compressed = Pool(given.compressed_pool, entry)
    if given.window_table is not None:
        slots_w = _window_of(config, window, given.window_table, request_ids, positions)
        width_w = config.sliding_window
    else:
        slots_w = _listed(given.window_indices, given.window_lens, sees)
        width_w = given.window_indices.shape[1]
    if given.block_table is not None:
        slots_c = _entries_of(config, compressed, given.block_table, request_ids, positions)
        width_c = given.block_table.shape[1] * compressed.size
    elif given.compressed_indices is not None:
        slots_c = _listed(given.compressed_indices, given.compressed_lens, sees)
        width_c = given.compressed_indices.shape[1]
    else:
        slots_c, width_c = ListedSlots(q.new_empty(tokens, 0), torch.zeros_like(sees).long()), 0
    window, compressed = _decode_once(window, width_w, compressed, width_c, tokens)
    return Branch(window, slots_w, width_w), Branch(compressed, slots_c, width_c)


def _listed(indices: Tensor, lens: Tensor | None, sees: Tensor) -> ListedSlots:
    width = indices.shape[1]
    count = sees * width if lens is None else lens.clamp(0, width) * sees
    return ListedSlots(indices, count)


def _window_of(
    config: PagedFmhaConfig, pool: Pool, table: Tensor, request_ids: Tensor, positions: Tensor
) -> TabledSlots:
    """The last `sliding_window` positions of every token, its own included."""
    rows, sees = _rows_of(table, request_ids, positions)
    end = (positions.long() + 1) * sees
    first = (end - config.sliding_window).clamp_(min=0)
    return TabledSlots(table, rows, first, end - first, pool.size, pool.pages)


def _entries_of(
    config: PagedFmhaConfig, pool: Pool, table: Tensor, request_ids: Tensor, positions: Tensor
) -> TabledSlots:
    """The compressed entries that are complete at every token."""
    rows, sees = _rows_of(table, request_ids, positions)
    count = torch.zeros_like(rows)
    if config.ratio:
        capacity = table.shape[1] * pool.size
        count = ((positions.long() + 1) // config.ratio).clamp_(max=capacity) * sees
    return TabledSlots(table, rows, torch.zeros_like(rows), count, pool.size, pool.pages)


def _rows_of(table: Tensor, request_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Row [T] int64 of each token, and whether it has one."""
    batch = table.shape[0] if table.shape[1] else 0
    sees = (request_ids >= 0) & (request_ids < batch) & (positions >= 0)
    return torch.where(sees, request_ids, 0).long(), sees


def _decode_once(
    window: Pool, width_w: int, compressed: Pool, width_c: int, tokens: int
) -> tuple[Pool, Pool]:
    """The pools, decoded where tokens read every entry more than once."""
    is_shared = window is compressed
    if tokens * width_w > window.slots:
        window = window.decoded()
    if is_shared:
        return window, window
    if tokens * width_c > compressed.slots:
        compressed = compressed.decoded()
    return window, compressed


def _rotate_back_(o: Tensor, rotation: Tensor) -> None:
    """Turn the last channels of o [c, n_h, d] back by [c, cosines then sines]."""
    cos, sin = rotation.float().unsqueeze(1).chunk(2, -1)
    tail = o[..., o.shape[-1] - rotation.shape[-1] :]
    even, odd = tail[..., 0::2].clone(), tail[..., 1::2].clone()
    tail[..., 0::2] = even * cos + odd * sin
    tail[..., 1::2] = odd * cos - even * sin
