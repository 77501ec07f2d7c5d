"""Output warpgroups of the heads-in-M kernel: O += P V, then the epilogue or the combine."""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.kernels.attention.key_span import MISS
from dsv4.kernels.attention.sm90.gather_role import load_span, told_index
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine, OutputWarp
from dsv4.kernels.attention.sm90.heads_m_context import DTYPE, HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import Epilogue, Staging
from dsv4.kernels.attention.sm90.plan import HALVES, HEADS, KEYS, HeadsMPlan
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.tma import prefetch_descriptors
from dsv4.kernels.kit.wgmma import a_steps, gemm, make_mma, scale_rows

# K steps of P that fit the registers of a thread: the last one takes the first one's place.
P_STEPS = 3


class OutputFragments(NamedTuple):
    """Operands of a thread of an output warpgroup."""

    thread: cutlass.Int32
    lane: cutlass.Int32
    p: cute.Tensor
    v: cute.Tensor
    acc: cute.Tensor  # all sub-tiles
    subtiles: tuple


class Columns(NamedTuple):
    """The columns of an output warpgroup: all sub-tiles of half of the columns, or one of them
    where two CTAs slice the columns."""

    half: cutlass.Int32
    first_subtile: cutlass.Int32  # of the key tile's


class OutputWarpgroups:
    """Two warpgroups, each with half of the output's columns."""

    is_paged = False  # no first tile is speculative where it is

    def __init__(self, plan: HeadsMPlan, combine: HeadsMCombine, epilogue: Epilogue):
        self.plan = plan
        self.combine = combine
        self.epilogue = epilogue

    def _pv_mma(self):
        return make_mma(DTYPE, (HEADS, self.plan.pv_dim), OperandMajorMode.MN, True)

    def _fragments(self, ctx: HeadsMContext, thread, lane) -> OutputFragments:
        plan = self.plan
        mma = self._pv_mma()
        mma_slice = mma.get_slice(0)
        p = mma.make_fragment_A(mma.partition_shape_A((HEADS, 16 * P_STEPS)))
        v = mma_slice.make_fragment_B(mma_slice.partition_B(ctx.smem.v))
        subtile = mma.make_fragment_C(mma.partition_shape_C((HEADS, plan.pv_dim)))
        acc = cute.make_rmem_tensor(plan.subtiles * cute.size(subtile), cutlass.Float32)
        subtiles = tuple(
            cute.make_tensor(acc.iterator + i * cute.size(subtile), subtile.layout)
            for i in range(plan.subtiles)
        )
        return OutputFragments(thread, lane, p, v, acc, subtiles)

    @cute.jit
    def output(self, ctx: HeadsMContext, half: cutlass.Int32, o_maps):
        """O += P V over half of the columns, and the output rows, of every work tile."""
        thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        row = thread // 32 * 16 + lane // 4
        prefetch_descriptors(o_maps)
        f = self._fragments(ctx, thread, lane)

        # Half of the columns for each, or a sub-tile each of the CTA's half.
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        is_sliced = cutlass.Boolean(False)
        if cutlass.const_expr(self.plan.subtiles == 2):
            is_sliced = ctx.tiling.column_slices > 1
        column_half = cutlass.select_(is_sliced, ctx.tiling.column_slice(index), half)
        # `make_warp_uniform` pins this outside of the loops.
        column_half = cute.arch.make_warp_uniform(column_half)
        first_subtile = column_half * self.plan.subtiles + cutlass.select_(
            is_sliced, half, cutlass.Int32(0)
        )
        phase, tiles = cutlass.Int32(0), cutlass.Int32(0)
        kv = ctx.pipes.kv.consumer()
        index = told_index(ctx, phase, index)
        while index < stop:
            # ---- prologue ----
            coord = self.combine.coord(ctx.tiling, index)
            span = load_span(ctx, phase, lane)
            count, is_miss = span.count, span.has(MISS)
            own_ctx = ctx.of_token(span)
            offset = cutlass.Int32(0)
            if own_ctx.tiling.num_splits > 1:
                offset = self.combine.warp_offset(own_ctx.tiling, coord, half, f.thread // 32)
            f.acc.fill(0.0)
            turns = self._load_turns(ctx, f, coord)
            # Stages with Q, or with an unused tile, belong to the score warpgroup.
            if cutlass.const_expr(self.plan.q_register_dim > 0):
                kv = ctx.pipes.kv.next(kv)
            if cutlass.const_expr(not self.is_paged):  # noqa: SIM102 static, then dynamic
                if is_miss:
                    kv = ctx.pipes.kv.next(kv)

            # ---- key tiles ----
            # Two loops: column offsets that are selected at run time would delay the products.
            if is_sliced:
                columns = Columns(column_half, first_subtile)
                tiles, kv = self._multiply_tiles(ctx, f, f.subtiles[:1], columns, count, tiles, kv)
            else:
                columns = Columns(half, half * self.plan.subtiles)
                tiles, kv = self._multiply_tiles(ctx, f, f.subtiles, columns, count, tiles, kv)

            # ---- epilogue ----
            self._rotate(ctx, f, turns, half, first_subtile, is_sliced)
            if own_ctx.tiling.num_splits > 1:
                # What is never run takes most of the compilation, too.
                if cutlass.const_expr(not ctx.tiling.is_plain):
                    self._combine_splits(own_ctx, f, coord, offset, half, phase)
                ctx.pipes.rows.release(lane)
            else:
                ctx.pipes.rows.wait(phase)
                scales = [ctx.smem.row_scale[row], ctx.smem.row_scale[row + 8]]
                ctx.pipes.rows.release(lane)
                # The stage after the last key tile's: free when nothing is loaded any more.
                target = ctx.smem.kv_start + ctx.pipes.kv.slot(kv, half) * KEYS * self.plan.half_dim
                staging = Staging(o_maps, target, index + step >= stop)
                column = first_subtile * self.plan.pv_dim
                self.epilogue.store(
                    ctx, coord, f.subtiles[0], f.acc, scales, column, is_sliced, staging
                )
            phase ^= 1
            index = told_index(ctx, phase, index + step)

    def _load_turns(self, ctx: HeadsMContext, f: OutputFragments, coord) -> cute.Tensor | None:
        """Load what a work tile's output is rotated by: nothing."""

    def _rotate(
        self, ctx: HeadsMContext, f: OutputFragments, turns: cute.Tensor | None, half,
        first_subtile, is_sliced,
    ):  # fmt: skip
        """Rotate what is accumulated: not here."""

    @cute.jit
    def _combine_splits(self, ctx: HeadsMContext, f: OutputFragments, coord, offset, half, phase):
        """Store the partial rows of a split, and combine a slice of those of all splits."""
        w = OutputWarp(half, f.thread // 32, f.lane)
        semaphore = self.combine.semaphore(ctx, coord, half, f.thread)
        epoch = semaphore.epoch()
        self.combine.store_accumulators(ctx, coord, offset, f.subtiles, w)
        ctx.pipes.rows.wait(phase)
        semaphore.arrive()
        # Computed meanwhile: a warp that knows what to load may load it at once.
        subtile = self.combine.first_subtile(ctx.tiling, half, coord.split, w.warp)
        # With work tiles left to start, some may be what this CTA would wait for.
        is_one_wave = ctx.tiling.work_tiles <= cute.arch.grid_dim()[0]
        result = cute.make_tensor(ctx.smem.slices.iterator + half, cute.make_layout(1))
        slices = semaphore.wait(epoch, is_one_wave, result)
        self.combine.combine(ctx, coord, slices, subtile, w)

    @cute.jit
    def _multiply_tiles(
        self,
        ctx: HeadsMContext,
        f: OutputFragments,
        subtiles,
        columns: Columns,
        count,
        tiles: cutlass.Int32,
        kv: Cursor,
    ):
        """O += P V of all key tiles, over some accumulator sub-tiles of half of the columns."""
        has_all = len(subtiles) == self.plan.subtiles
        factors = cute.make_rmem_tensor(2, cutlass.Float32)
        for _ in cutlass.range(count, unroll=1):
            slot = ctx.pipes.kv.slot(kv, columns.half)
            if cutlass.const_expr(ctx.pipes.kv.is_fenced):
                # P is later still. Behind the loads of P, the fence would wait for them.
                ctx.pipes.kv.at(slot).wait(kv.phase)
            ctx.pipes.p.wait(tiles % 2)
            for step in cutlass.range_constexpr(P_STEPS):
                self._load_p(ctx, f, step, step)
            cute.autovec_copy(ctx.smem.rescale[None, f.thread], factors)
            if cutlass.const_expr(not has_all):
                # Columns that only QK reads, which is over.
                ctx.pipes.kv.release(kv, f.lane, 1 - columns.half)
            if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
                for subtile in subtiles:
                    scale_rows(subtile, factors)
            if cutlass.const_expr(not ctx.pipes.kv.is_fenced):
                ctx.pipes.kv.at(slot).wait(kv.phase)
            first = kv.stage * (HALVES * self.plan.subtiles) + columns.first_subtile
            # The half of the columns that QK reads first goes first: its stage is free, and filled
            # again, that much sooner.
            is_first = cutlass.Boolean(False)
            if cutlass.const_expr(has_all):
                is_first = columns.half == 1
                if is_first:
                    ctx.pipes.pv_turn.at(tiles % 2).wait(tiles // 2 % 2)
                else:
                    ctx.pipes.pv_next.wait(tiles % 2)
            else:
                ctx.pipes.pv_turn.at(tiles % 2).wait(tiles // 2 % 2)
            self._multiply_values(ctx, f, subtiles, first, is_first)
            ctx.pipes.kv.at(slot).release(f.lane)
            tiles += 1
            kv = ctx.pipes.kv.next(kv)
        return tiles, kv

    @cute.jit
    def _multiply_values(self, ctx: HeadsMContext, f: OutputFragments, subtiles, first, is_first):
        """O += P V of a key tile's sub-tiles from `first` on; frees P.

        Three quarters of P wait in registers. When the products with the first quarter are over,
        the last one takes its place. The warpgroup that goes first lets the other one follow when
        the products with the last quarter are all that is left.
        """
        warpgroup.fence()
        for step in cutlass.range_constexpr(KEYS // 16):
            place = step % P_STEPS
            if cutlass.const_expr(step == P_STEPS):
                warpgroup.wait_group(P_STEPS - 1)
                self._load_p(ctx, f, step, place)
                ctx.pipes.p.release(f.lane)
                warpgroup.fence()
            for i in cutlass.range_constexpr(len(subtiles)):
                v = f.v[None, None, None, first + i]
                gemm(self._pv_mma, subtiles[i], f.p, v, [step], step - place, True)
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        if is_first:
            ctx.pipes.pv_next.arrive(f.lane)
        warpgroup.wait_group(0)

    def _load_p(self, ctx: HeadsMContext, f: OutputFragments, step: int, place: int):
        """Read a K step of P into a place of the registers."""
        cute.autovec_copy(ctx.smem.p[None, f.thread, step], a_steps(f.p)[None, place])
