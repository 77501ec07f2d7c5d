"""Work tiles of attention: which queries of which head, and which keys they see."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.groups import first_block
from dsv4.kernels.lowp.plan import MAXIMA_ROWS
from dsv4.kernels.lowp.sequences import Rows, rows_of, sequence_of


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptors."""

    q: cute.Tensor
    k_codes: cute.Tensor
    k_scale: cute.Tensor
    out: cute.Tensor
    v_scale: cute.Tensor  # of channels; of FP4 those of 16 keys of a channel
    km: cute.Tensor
    vm: cute.Tensor
    cu_seqlens_q: cute.Tensor
    cu_seqlens_k: cute.Tensor
    lse: cute.Tensor
    factor: Int32  # bits of the factor on scores
    section: Int32  # heads that pass a tile of queries together
    attn_mask: cute.Tensor
    # Maxima of blocks of queries, where a head's share one scale; then the lists of tiles that a
    # mask lets queries see.
    maxima: cute.Tensor


class Work(NamedTuple):
    """Queries of a work tile, and their keys.

    Attributes:
        batch, head, key_head: indices.
        sequence: row of statistics.
        first_row, rows: first query in the tensor, queries that there are, at most a tile's.
        first_key, first_tile: first row of the keys in the tensor, first of their tiles.
        keys: keys that the sequence has.
        seen: keys that the first query sees; where attention is causal each one after it sees one
            more.
        count: tiles of keys that some query sees, of a list where a mask has made one.
    """

    batch: Int32
    head: Int32
    key_head: Int32
    sequence: Int32
    first_row: Int32
    rows: Int32
    first_key: Int32
    first_tile: Int32
    keys: Int32
    seen: Int32
    count: Int32

    def store(self, words: cute.Tensor) -> None:
        """Hand it over through shared memory, in whole vectors."""
        for i in range(cute.size(words)):
            words[i] = self[i] if i < len(self) else Int32(0)

    @staticmethod
    def load(words: cute.Tensor) -> Work:
        """What `store` has handed over."""
        return Work(*(words[i] for i in range(len(Work._fields))))


class Share(NamedTuple):
    """Part of a work tile that a warpgroup has.

    Attributes:
        seen: keys that its first query sees.
        count: tiles of keys that some query sees.
        full: tiles that all queries see whole.
    """

    seen: Int32
    count: Int32
    full: Int32


class WorkTiles:
    """Order of the work tiles of a configuration.

    Args:
        groups, group_queries: warpgroups that share a work tile, and queries of each.
    """

    def __init__(self, config: QuantizedAttentionConfig, groups: int, group_queries: int):
        self.group_queries = group_queries
        self.queries = groups * group_queries
        self.keys = config.tiles.block_k  # of a tile
        self.is_causal = config.causal != "none"
        self.is_bottom_right = config.causal == "bottom_right"
        self.is_varlen = config.is_varlen
        self.has_mask = config.mask != "none"
        self.has_query_maxima = config.has_query_maxima

    @cute.jit
    def blocks(self, operands: Operands) -> Int32:
        """Tiles of the queries of a head."""
        rows = Int32(operands.q.shape[2])
        if cutlass.const_expr(self.is_varlen):
            # One sequence more: the rows behind the last.
            return rows // self.queries + Int32(operands.cu_seqlens_q.shape[0])
        return (rows + self.queries - 1) // self.queries

    @cute.jit
    def count(self, operands: Operands) -> Int32:
        """Work tiles of the launch."""
        heads = Int32(operands.q.shape[0]) * Int32(operands.q.shape[1])
        return heads * self.blocks(operands)

    @cute.jit
    def find(self, operands: Operands, index) -> Work:
        """A work tile, with as many tiles of keys as its list has."""
        work = self.find_any(operands, index)
        if cutlass.const_expr(self.has_mask):
            count = Int32(0)
            if work.count > 0:
                count = word_at(self.list_of(operands, work), 0).load()
            work = work._replace(count=count)
        return work

    @cute.jit
    def list_of(self, operands: Operands, work: Work) -> Int64:
        """Address of a work tile's list: how many tiles, and which."""
        mask, keys = operands.attn_mask, Int32(operands.k_codes.shape[2])
        batch = Int32(0) if mask.stride[0] == 0 else work.batch
        head = Int32(0) if mask.stride[1] == 0 else work.head
        number = Int64(batch) * mask.shape[1] + head
        number = number * self.blocks(operands) + work.first_row // self.queries
        number = number * ((keys + self.keys - 1) // self.keys + 1)
        if cutlass.const_expr(self.has_query_maxima):
            blocks = (Int32(operands.q.shape[2]) + MAXIMA_ROWS - 1) // MAXIMA_ROWS
            number = number + Int64(operands.q.shape[0]) * operands.q.shape[1] * blocks
        return address_of(operands.maxima, number)

    @cute.jit
    def number(self, operands: Operands, work: Work, tile) -> Int32:
        """Number among a sequence's tiles of keys of one of those that a work tile passes."""
        found = Int32(tile)
        if cutlass.const_expr(self.has_mask):
            found = listed(self.list_of(operands, work), tile)
        return found

    @cute.jit
    def find_any(self, operands: Operands, index) -> Work:
        """A work tile without its mask. Of a section the last queries come first: they see the most
        keys."""
        heads, key_heads = Int32(operands.q.shape[1]), Int32(operands.k_codes.shape[1])
        all_heads = Int32(operands.q.shape[0]) * heads
        blocks = self.blocks(operands)
        first_head = index // (operands.section * blocks) * operands.section
        width = cutlass.min(operands.section, all_heads - first_head)
        place = index - first_head * blocks
        block = blocks - 1 - place // width
        any_head = first_head + place % width
        batch, head = any_head // heads, any_head % heads
        queries = Rows(batch, Int32(0), Int32(operands.q.shape[2]))
        keys = Rows(batch, Int32(0), Int32(operands.k_codes.shape[2]))
        first_tile = Int32(0)
        if cutlass.const_expr(self.is_varlen):
            ends = operands.cu_seqlens_q
            sequence = sequence_of(ends, block, self.queries)
            queries = rows_of(ends, sequence, operands.q.shape[2])
            block = cutlass.max(block - first_block(queries.first, sequence, self.queries), 0)
            # Rows behind the last sequence are nobody's, and have no keys.
            keys = Rows(sequence, Int32(0), Int32(0))
            if sequence < ends.shape[0] - 1:
                keys = rows_of(operands.cu_seqlens_k, sequence, operands.k_codes.shape[2])
            first_tile = first_block(keys.first, sequence, self.keys)
        first = block * self.queries
        rows = cutlass.max(cutlass.min(queries.count - first, self.queries), 0)
        seen, last = keys.count, keys.count
        if cutlass.const_expr(self.is_causal):
            offset = Int32(1)
            if cutlass.const_expr(self.is_bottom_right):
                offset += keys.count - queries.count
            seen = first + offset
            last = cutlass.max(cutlass.min(seen + rows - 1, keys.count), 0)
        if rows == 0:
            last = Int32(0)
        return Work(
            batch=batch,
            head=head,
            key_head=head // (heads // key_heads),
            sequence=queries.sequence,
            first_row=queries.first + first,
            rows=rows,
            first_key=keys.first,
            first_tile=first_tile,
            keys=keys.count,
            seen=seen,
            count=(last + self.keys - 1) // self.keys,
        )

    @cute.jit
    def share(self, work: Work, group) -> Share:
        """Keys that a warpgroup's queries see."""
        first = group * self.group_queries
        rows = cutlass.max(cutlass.min(work.rows - first, self.group_queries), 0)
        seen, last = work.keys, work.keys
        if cutlass.const_expr(self.is_causal):
            seen = work.seen + first
            last = cutlass.max(cutlass.min(seen + rows - 1, work.keys), 0)
        if rows == 0:
            last = Int32(0)
        full = cutlass.max(cutlass.min(seen, work.keys), 0) // self.keys
        count = (last + self.keys - 1) // self.keys
        if cutlass.const_expr(self.has_mask):
            # Those of the list, whichever of the warpgroups' queries see them.
            count = Int32(0)
            if rows > 0:
                count = work.count
        return Share(seen, count, full)


def word_at(words: Int64, place) -> cute.Pointer:
    """A word of a list."""
    return pointer_to(words + Int64(place) * 4, Int32, 4)


def listed(words: Int64, tile) -> Int32:
    """A tile's number of a list."""
    return word_at(words, tile + 1).load()


def row_of(tensor: cute.Tensor, batch, head, row) -> Int64:
    """Offset of a row of a tensor [b, H, rows, d]."""
    strides = tensor.stride
    return Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(row) * strides[2]
