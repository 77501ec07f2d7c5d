"""Gather of FP8 entries as they lie: codes into spans of 64 bytes, rotated values into spans of
128, by cp.async; scales of keys beside them."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.entry_codes import load_scales, scale_byte, scale_of
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.codes_plan import CodesPlan
from dsv4.kernels.attention.sm90.gather_role import GatherRole
from dsv4.kernels.attention.sm90.gather_rows import WARP_KEYS
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HEADS, KEYS
from dsv4.kernels.attention.tile_info import store_tile_info
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.gather import copy_vector, vector_offset, vectors_per_span
from dsv4.kernels.kit.kv_entry import GROUP, Fp8Entry
from dsv4.kernels.kit.mbarrier import Cursor, arrive_warp
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES
from dsv4.kernels.kit.vectors import LINE_BYTES, prefetch_l2


class RawEntries:
    """Copies of a warp's rows of every key tile.

    Args:
        plan: of the kernel.
    """

    warp_keys = WARP_KEYS

    def __init__(self, plan: CodesPlan):
        self.plan = plan
        self.entry = Fp8Entry(plan.head_dim)

    @cute.jit
    def gather_tiles(
        self, ctx: HeadsMContext, keys: PagedKeys, span: KeySpan, token, word, warp, lane,
        kv: Cursor,
    ):  # fmt: skip
        """Copy a warp's rows of all key tiles of a work tile.

        Args:
            word: of row `lane % 16` of the warp's in the first tile.
        """
        row = warp * WARP_KEYS + lane % WARP_KEYS
        last, tile_scales = span.last, ctx.smem.scales
        address, scale_address = cutlass.Int64(0), cutlass.Int64(0)
        if span.count > 0:
            address, scale_address = keys.addresses(span, span.first, row, word, KEYS, self.entry)
        scales = load_scales(scale_address)
        word = keys.fetch(span, token, span.first + 1, row, KEYS)
        for i in cutlass.range(span.first, last, unroll=1):
            # Scales of the next tile, and words of the one after it, are under way beside the rows
            # of this one.
            following, scale_address = cutlass.Int64(0), cutlass.Int64(0)
            if i + 1 < last:
                following, scale_address = keys.addresses(span, i + 1, row, word, KEYS, self.entry)
            if i + 2 < last:
                word = keys.fetch(span, token, i + 2, row, KEYS)
            ctx.pipes.kv.acquire(kv)
            self._copy_codes(ctx, address, kv.stage, warp, lane)
            self._copy_rope(ctx, address, kv.stage, warp, lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(ctx.pipes.kv.full + kv.stage)
            if lane < WARP_KEYS:
                tile_scales[row, kv.stage] = scale_of(scale_byte(scales))
            scales = load_scales(scale_address)
            is_key = cute.arch.vote_ballot_sync(address != 0)
            first, is_window = kv.stage * TILE_INFO_WORDS, i >= span.compressed_tiles
            words = ctx.smem.tile_info
            store_tile_info(words, first, is_key, is_window, warp, lane, WARP_KEYS)
            arrive_warp(ctx.pipes.kv.full + kv.stage, lane, ctx.pipes.kv.lanes_per_warp)
            address = following
            kv = ctx.pipes.kv.next(kv)
        return kv

    def _copy_codes(self, ctx: HeadsMContext, address, stage, warp, lane) -> None:
        """Ask for the codes of the warp's rows: a span of eight rows at a time.

        Args:
            address: of row `lane % 16` of the warp's, or 0.
        """
        vectors = vectors_per_span(GROUP)
        rows = 32 // vectors
        row, vector = lane // vectors, lane % vectors
        target = cutlass.Int32(ctx.smem.codes_start.toint()) + stage * self.plan.code_bytes
        target += vector_offset(warp * WARP_KEYS + row, vector, GROUP)
        for step in range(WARP_KEYS // rows):
            source, size = _row(address, step * rows + row)
            source += vector * VECTOR_BYTES
            for chunk in range(self.entry.groups):
                offset = (chunk * KEYS + step * rows) * GROUP
                copy_vector(target, source, size, offset, chunk * GROUP)

    def _copy_rope(self, ctx: HeadsMContext, address, stage, warp, lane) -> None:
        """Ask for the rotated values of the warp's rows: four rows at a time."""
        vectors = vectors_per_span(SPAN_BYTES)
        rows = 32 // vectors
        row, vector = lane // vectors, lane % vectors
        target = cutlass.Int32(ctx.smem.rope_start.toint()) + stage * self.plan.rope_bytes
        target += vector_offset(warp * WARP_KEYS + row, vector, SPAN_BYTES)
        for step in range(WARP_KEYS // rows):
            source, size = _row(address, step * rows + row)
            source += vector * VECTOR_BYTES
            # Rows 4 apart differ in the last bit but two of the swizzle.
            place = target ^ (step % 2 * 64) if step % 2 else target
            copy_vector(place, source, size, step * rows * SPAN_BYTES, self.entry.codes)


def _row(address, row):
    """Address of one of the warp's rows, and the bytes of a copy of it: 0 where there is none."""
    source = cute.arch.shuffle_sync(address, row)
    return source, cutlass.select_(source != 0, cutlass.Int32(VECTOR_BYTES), cutlass.Int32(0))


class CodesGather(GatherRole):
    """Gather warpgroup: key spans, rows of pages, what comes next into L2."""

    def __init__(self, plan: CodesPlan, is_gate: bool):
        self.plan = plan
        self.is_gate = is_gate
        self.rows = RawEntries(plan)

    @cute.jit
    def gather(self, ctx: HeadsMContext):
        """Load the keys that every work tile needs."""
        lane = cute.arch.lane_idx()
        first_warp = self.plan.warps["gather"].first
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx() - first_warp)
        keys = ctx.operands.keys
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        pdl.wait_for_previous_launch()
        phase, kv = cutlass.Int32(1), ctx.pipes.kv.producer()
        while index < stop:
            _, _, token = ctx.tiling.coordinates(index)
            span, word = self._find_keys(ctx, keys, index, phase, warp, lane)
            if index + step < stop:
                self._prefetch(ctx, keys, index + step, warp, lane)
            kv = self.rows.gather_tiles(ctx, keys, span, token, word, warp, lane, kv)
            phase ^= 1
            index += step

    @cute.jit
    def _prefetch(self, ctx: HeadsMContext, keys: PagedKeys, index, warp, lane):
        """Bring what a work tile starts with into L2: its lists of keys, its Q."""
        head_tile, _, token = ctx.tiling.coordinates(index)
        if warp == 0:
            keys.prefetch(token, lane)
        q = ctx.operands.q
        lines = self.plan.head_dim * 2 // LINE_BYTES
        for i in cutlass.range_constexpr(HEADS * lines // 128):
            line = i * 128 + warp * 32 + lane
            head = head_tile * ctx.tiling.tile_heads + line // lines
            if head < q.shape[1]:
                row = q[token, head, None].iterator.toint()
                prefetch_l2(row + line % lines * LINE_BYTES)
