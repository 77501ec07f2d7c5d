"""Math warpgroup of the swap-AB kernel: S^T = K Q^T, softmax, O^T += V^T P^T, output."""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.key_span import BOTH_BRANCHES, MISS
from dsv4.kernels.attention.sink_merge import output_scale, row_lse
from dsv4.kernels.attention.sm90.gather_role import load_span, told_index
from dsv4.kernels.attention.sm90.plan import CHUNK, KEYS, SwapAbPlan
from dsv4.kernels.attention.sm90.sink_gate import gate_offset
from dsv4.kernels.attention.sm90.swap_ab_cluster import SwapAbCluster
from dsv4.kernels.attention.sm90.swap_ab_combine import MathWarp, SwapAbCombine, store_fragments
from dsv4.kernels.attention.sm90.swap_ab_context import DTYPE, PAIR, SwapAbContext
from dsv4.kernels.attention.sm90.swap_ab_softmax import (
    Heads,
    ReductionScratch,
    add_to_row_sums,
    exponentiate,
    gate_biases,
    mask_keys,
    reduce_row_sums,
    scale_heads,
    store_p,
    update_row_max,
)
from dsv4.kernels.attention.softmax import LOG2_E
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import clear_rows
from dsv4.kernels.kit.wgmma import gemm, make_mma


@dataclass(frozen=True)
class MathFragments:
    """Operands and state of a thread of the math warpgroup."""

    thread: cutlass.Int32
    warp: cutlass.Int32
    lane: cutlass.Int32
    scratch: ReductionScratch
    k: cute.Tensor
    q: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    s: cute.Tensor
    p_registers: cute.Tensor  # of S's shape
    acc: cute.Tensor  # [4, 8 heads, chunk]
    chunks: tuple  # of the accumulators
    heads: Heads


@dataclass(frozen=True)
class TileMask:
    """Valid keys of a tile, for the softmax."""

    n: cutlass.Int32  # of the work tile's key tiles
    is_window: cutlass.Boolean
    valid: cutlass.Int32  # keys
    has_both: cutlass.Boolean  # branches


class MathWarpgroup:
    """Math warpgroup: scores, P, accumulators and output of every work tile."""

    # Heads have scales, their largest scores may be asked for, and no first tile is speculative.
    is_paged = False

    def __init__(
        self,
        config: FmhaConfig,
        plan: SwapAbPlan,
        combine: SwapAbCombine,
        cluster: SwapAbCluster | None,
    ):
        self.is_gate = config.sink_mode == "swa_gate"
        self.scale_log2 = config.scale * LOG2_E
        self.plan = plan
        self.combine = combine
        self.cluster = cluster
        # The row sums of a split are reduced while its accumulators are on their way to the
        # workspace. With 24 heads the compiler would then serialise the products.
        self.sums_last = plan.tile_heads <= 16

    def _qk_mma(self):
        return make_mma(DTYPE, (KEYS, self.plan.tile_heads), OperandMajorMode.K)

    def _pv_mma(self):
        tile, major = (CHUNK, self.plan.tile_heads), OperandMajorMode
        return make_mma(DTYPE, tile, major.K, a_major=major.MN)

    def _fragments(self, ctx: SwapAbContext) -> MathFragments:
        heads, chunks = self.plan.tile_heads, self.plan.chunks
        thread = cute.arch.thread_idx()[0]
        qk, pv = self._qk_mma(), self._pv_mma()
        qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
        s = qk.make_fragment_C(qk.partition_shape_C((KEYS, heads)))
        chunk = pv.make_fragment_C(pv.partition_shape_C((CHUNK, heads)))
        size = cute.size(chunk)
        acc = cute.make_rmem_tensor((4, heads // 8, chunks), cutlass.Float32)
        return MathFragments(
            thread=thread,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            lane=cute.arch.lane_idx(),
            scratch=ReductionScratch.of(ctx.smem, thread),
            k=qk_slice.make_fragment_A(qk_slice.partition_A(ctx.smem.k)),
            q=qk_slice.make_fragment_B(qk_slice.partition_B(ctx.smem.q)),
            v=pv_slice.make_fragment_A(pv_slice.partition_A(ctx.smem.v)),
            p=pv_slice.make_fragment_B(pv_slice.partition_B(ctx.smem.p)),
            s=s,
            p_registers=cute.make_rmem_tensor_like(s),
            acc=acc,
            chunks=tuple(
                cute.make_tensor(acc.iterator + i * size, chunk.layout) for i in range(chunks)
            ),
            heads=Heads.make(heads, self.is_paged),
        )

    @cute.jit
    def compute(self, ctx: SwapAbContext):
        """Scores, P, accumulators and output of every work tile."""
        f = self._fragments(ctx)
        lane, per_tile = f.lane, self.plan.slots_per_tile
        index = ctx.tiling.first(cute.arch.block_idx()[0])
        turns = cute.make_rmem_tensor((2, 2), cutlass.Float32)
        turns.fill(0.0)
        # Not what the launch before writes: see `SparseFmhaPaged.early`.
        if cutlass.const_expr(self.is_paged):
            self._load_sinks(ctx, f)
        if cutlass.const_expr(not ctx.tiling.has_pieces):
            self._load_turns(ctx, f, index, turns)
        # What the scheduler warp publishes first comes after the launch before.
        ctx.pipes.span.wait(cutlass.Int32(0))
        if cutlass.const_expr(not self.is_paged):
            self._load_sinks(ctx, f)
        f.scratch.sync()
        kv, phase = ctx.pipes.kv.consumer(), cutlass.Int32(0)
        index = told_index(ctx, phase, index)
        if cutlass.const_expr(ctx.tiling.has_pieces):
            self._load_turns(ctx, f, index, turns)
        while index < ctx.tiling.work_tiles:
            # ---- prologue ----
            scratch = f.scratch.of_heads(ctx.tiling.coordinates(index)[0])
            span = load_span(ctx, phase, lane)
            own_ctx = ctx.of_token(span)
            has_both = span.has(BOTH_BRANCHES)
            f.heads.reset()
            f.acc.fill(0.0)
            self._load_scales(ctx, f, index)
            ctx.pipes.q.wait(phase)
            if cutlass.const_expr(not self.is_paged):  # noqa: SIM102 static, then dynamic
                if span.has(MISS):
                    for part in cutlass.range_constexpr(per_tile):
                        unused = Cursor(cutlass.Int32(part), kv.phase)
                        ctx.pipes.kv.wait(unused)
                        ctx.pipes.kv.release(unused, lane)
                    kv = ctx.pipes.kv.skip(kv, per_tile)

            # ---- key tiles ----
            for n in cutlass.range(span.count, unroll=1):
                is_window, _, valid = span.tile(span.first + n, KEYS)
                self._multiply_keys(ctx, f, kv)
                if n == span.count - 1:
                    ctx.pipes.q.release(lane)
                mask = TileMask(n, is_window, valid, has_both)
                self._softmax(ctx, f, scratch, mask, kv)
                self._multiply_values(ctx, f, n, kv)
                kv = ctx.pipes.kv.skip(kv, per_tile)
            if span.count == 0:
                ctx.pipes.q.release(lane)

            # ---- epilogue ----
            if cutlass.const_expr(not self.sums_last):
                reduce_row_sums(f.heads, f.scratch)
            coord = self.combine.coord(ctx.operands.workspace, ctx.tiling, index)
            self._rotate(ctx, f, turns)
            if own_ctx.tiling.num_splits > 1:
                self._meet(own_ctx, f, coord, has_both)
            else:
                if cutlass.const_expr(self.sums_last):
                    reduce_row_sums(f.heads, f.scratch)
                self._store_heads(ctx, f, scratch, coord, has_both)
                self._store_largest(own_ctx, f, coord)
            phase ^= 1
            index = told_index(ctx, phase, ctx.scheduler.next(index))
            if index < ctx.tiling.work_tiles:
                self._load_turns(ctx, f, index, turns)

    @cute.jit
    def _load_sinks(self, ctx: SwapAbContext, f: MathFragments):
        """Copy the sinks of all heads to shared memory."""
        if f.thread < self.plan.tile_heads * self.plan.head_tiles:
            ctx.smem.sinks[f.thread] = ctx.operands.sink_logits[f.thread]

    def _load_scales(self, ctx: SwapAbContext, f: MathFragments, index) -> None:
        """Load what else the scores of a work tile's heads are multiplied by: nothing."""

    def _load_turns(self, ctx: SwapAbContext, f: MathFragments, index, turns: cute.Tensor) -> None:
        """Load what a work tile's output is rotated by: nothing."""

    def _rotate(self, ctx: SwapAbContext, f: MathFragments, turns: cute.Tensor) -> None:
        """Rotate what is accumulated: not here."""

    def _store_largest(self, ctx: SwapAbContext, f: MathFragments, coord) -> None:
        """Store the largest scores of a work tile's heads: not here."""

    @cute.jit
    def _multiply_keys(self, ctx: SwapAbContext, f: MathFragments, kv: Cursor):
        """S^T = K Q^T of a key tile, as its columns land."""
        steps = self.plan.slot_dim // 16
        warpgroup.fence()
        for part in cutlass.range_constexpr(self.plan.slots_per_tile):
            ctx.pipes.kv.wait(kv)
            k, q = f.k[None, None, None, kv.stage], f.q[None, None, None, part]
            gemm(self._qk_mma, f.s, k, q, range(steps), 0, part > 0)
            kv = ctx.pipes.kv.skip(kv, 1)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _softmax(
        self,
        ctx: SwapAbContext,
        f: MathFragments,
        scratch: ReductionScratch,
        mask: TileMask,
        kv: Cursor,
    ):
        """P^T of a key tile into shared memory; accumulators and V become the operands of PV.

        P is stored before it is known whether the row maxima may stay: they nearly always may, and
        then this takes one barrier. Shared memory is slow beside products, so that the chain has as
        few accesses and barriers as it can.
        """
        heads, place = f.heads, (f.warp, f.lane, DTYPE)
        self._mask(ctx, f, scratch, mask, kv)
        # Slower warps may still multiply by P of the key tile before: it is elsewhere.
        p = ctx.smem.p_start + mask.n % 2 * self.plan.tile_heads * KEYS
        heads.rescale.fill(1.0)
        biases = gate_biases(heads, scratch, mask.is_window, mask.has_both, self.is_gate)
        are_stale = cutlass.Boolean(True)
        if mask.n > 0:
            may_stay = exponentiate(f.s, f.p_registers, heads, biases, self.scale_log2)
            store_p(f.p_registers, p, *place)
            cute.arch.fence_view_async_shared()
            are_stale = scratch.any(not may_stay)
        if are_stale:
            update_row_max(f.s, f.p_registers, heads, scratch, biases, self.scale_log2)
            store_p(f.p_registers, p, *place)
            cute.arch.fence_view_async_shared()
            scratch.sync()
        add_to_row_sums(f.p_registers, heads)
        if heads.are_updated():
            for chunk in f.chunks:
                scale_heads(chunk, heads)

    @cute.jit
    def _mask(
        self,
        ctx: SwapAbContext,
        f: MathFragments,
        scratch: ReductionScratch,
        mask: TileMask,
        kv: Cursor,
    ):
        """Mask the scores of rows that are no keys, and clear these."""
        if mask.valid < KEYS:
            mask_keys(f.s, mask.valid, f.thread)
            # All warps have multiplied this tile's keys.
            scratch.sync()
            for _ in cutlass.range_constexpr(self.plan.slots_per_tile):
                start = ctx.smem.kv_start + kv.stage * KEYS * self.plan.slot_dim
                clear_rows(start, KEYS, self.plan.slot_dim, mask.valid, CHUNK, f.thread, DTYPE)
                kv = ctx.pipes.kv.skip(kv, 1)

    @cute.jit
    def _multiply_values(self, ctx: SwapAbContext, f: MathFragments, n, kv: Cursor):
        """O^T += V^T P^T of a key tile; frees its slots one by one."""
        slot_chunks, per_tile = self.plan.slot_chunks, self.plan.slots_per_tile
        steps = range(KEYS // 16)
        first, p = kv, f.p[None, None, None, n % 2]
        warpgroup.fence()
        for part in cutlass.range_constexpr(per_tile):
            for i in cutlass.range_constexpr(slot_chunks):
                v = f.v[None, None, None, kv.stage * slot_chunks + i]
                acc = f.chunks[part * slot_chunks + i]
                gemm(self._pv_mma, acc, v, p, steps, 0, True)
            warpgroup.commit_group()
            kv = ctx.pipes.kv.skip(kv, 1)
        kv = first
        for part in cutlass.range_constexpr(per_tile):
            warpgroup.wait_group(per_tile - 1 - part)
            ctx.pipes.kv.release(kv, f.lane)
            kv = ctx.pipes.kv.skip(kv, 1)

    @cute.jit
    def _meet(self, ctx: SwapAbContext, f: MathFragments, coord, has_both):
        """Combine the splits of a head tile, in a cluster or through the workspace."""
        if cutlass.const_expr(self.cluster is None):
            self._combine_splits(ctx, f, coord, has_both)
        elif ctx.tiling.is_clustered:
            if cutlass.const_expr(self.sums_last):
                reduce_row_sums(f.heads, f.scratch)
            self.cluster.meet(ctx, coord, f.acc, f.heads, MathWarp(f.warp, f.lane), has_both)
        else:
            self._combine_splits(ctx, f, coord, has_both)

    @cute.jit
    def _combine_splits(self, ctx: SwapAbContext, f: MathFragments, coord, has_both):
        """Store the partial rows of a split, and combine a slice of those of all splits."""
        w = MathWarp(f.warp, f.lane)
        semaphore = self.combine.semaphore(ctx, coord, f.thread)
        epoch = semaphore.epoch()
        self.combine.store_accumulators(ctx, coord, f.acc, w)
        if cutlass.const_expr(self.sums_last):
            reduce_row_sums(f.heads, f.scratch)
        self.combine.store_statistics(ctx, coord, f.heads, w)
        if cutlass.const_expr(ctx.tiling.has_pieces):
            self._store_largest(ctx, f, coord)
        semaphore.arrive()
        # With work tiles left to start, some may be what this CTA would wait for.
        is_one_wave = ctx.tiling.work_tiles <= cute.arch.grid_dim()[0]
        slices = semaphore.wait(epoch, is_one_wave, ctx.smem.slices)
        self.combine.combine(ctx, coord, slices, w, has_both)

    @cute.jit
    def _store_heads(
        self, ctx: SwapAbContext, f: MathFragments, scratch: ReductionScratch, coord, has_both
    ):
        """Output and lse of a work tile that has all of a token's keys."""
        heads, o, lse = f.heads, ctx.operands.o, ctx.operands.lse
        for j in cutlass.range_constexpr(self.plan.tile_heads // 8):
            sinks = [scratch.sink(c, j) for c in range(PAIR)]
            scales = [
                output_scale(heads.row_max[c, j], heads.row_sum[c, j], sinks[c], not self.is_gate)
                for c in range(PAIR)
            ]
            head = coord.head + 8 * j
            place = (coord.token, head, f.warp * 16, CHUNK, f.lane)
            store_fragments(f.acc[None, j, None], scales, o, *place)
            if coord.token < lse.shape[0] and f.warp == 0 and f.lane < 4:
                for c in cutlass.range_constexpr(PAIR):
                    offset = gate_offset(sinks[c], has_both, self.is_gate)
                    value = row_lse(heads.row_max[c, j], heads.row_sum[c, j], offset)
                    lse[coord.token, head + 2 * f.lane + c] = value
