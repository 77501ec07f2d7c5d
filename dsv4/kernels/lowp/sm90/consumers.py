"""Consumer warpgroups of attention: 64 queries each.

While the products of one warpgroup run, the others compute weights. A warpgroup's step:

    products   T = P(j - 1) V(j - 1), then S(j) = Q K(j)^T
    T          O = O * decay(j - 1) + T
    S(j)       maxima, weights, in its registers; codes P(j)

`plan.Order` says whether S(j) is issued before T is there, or takes its registers, and at what
warpgroups take turns: the tensor cores, or the special function unit. T is a fresh accumulator for
each tile ("fp32+fp32"): an FP8 tensor core keeps 14 bits of its sums. With "fp32" the products of
all tiles stay in O, which is scaled between them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.kit.wgmma import by_row, gemm
from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import GROUP_QUERIES, GROUPS, TILE_KEYS, AttentionPlan
from dsv4.kernels.lowp.sm90.context import AttentionContext, scores_mma, values_mma
from dsv4.kernels.lowp.sm90.epilogue import Epilogue
from dsv4.kernels.lowp.sm90.queries import Queries
from dsv4.kernels.lowp.sm90.softmax import RowState, encode, hide_unseen, raise_maxima, weigh
from dsv4.kernels.lowp.sm90.work import Operands, Share, Work

K_STEP = 32  # of a product of bytes
COLUMN_GROUPS = TILE_KEYS // 8
PASSED = 12  # column groups whose weights a warpgroup computes before it passes a turn at them
TURNS = 1  # named barrier of the first warpgroup's turns; those of the others follow


class Fragments(NamedTuple):
    """Operands and sums of a thread."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    scores: cute.Tensor
    codes: cute.Tensor  # of weights
    sums: cute.Tensor  # O
    tile_sums: cute.Tensor  # T
    state: RowState


class Consumers:
    """All warpgroups."""

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlan):
        self.config = config
        self.plan = plan
        self.has_two_levels = config.pv_accum_dtype == "fp32+fp32"
        self.turn = plan.order.turn
        self.shares_registers = plan.order.shares_registers and self.has_two_levels
        self.queries = Queries(config, plan)
        self.epilogue = Epilogue(config, plan)

    @cute.jit
    def compute(self, ctx: AttentionContext, warp):
        """Outputs of every work tile of the CTA."""
        lane, group = cute.arch.lane_idx(), warp // 4
        f = self._fragments(ctx, group)
        keys = ctx.pipes.keys.consumer()
        # The last one passes the first turn, and the first one takes the last that is passed.
        if group == GROUPS - 1:
            pass_turn(group)
        parity, index = Int32(0), Int32(cute.arch.block_idx()[0])
        stop = ctx.tiles.count(ctx.operands)
        while index < stop:
            ctx.pipes.queries.wait(parity)
            work = Work.load(ctx.smem.works[None, parity])
            keys = self._pass_keys(ctx, f, work, warp, lane, keys)
            self.epilogue.store(ctx, f.sums, f.state, warp, lane, parity)
            parity ^= 1
            index += cute.arch.grid_dim()[0]
        if group == 0:
            await_turn(group)

    def _fragments(self, ctx: AttentionContext, group) -> Fragments:
        scores, values = scores_mma(self.plan), values_mma(self.plan)
        own, of_values = scores.get_slice(0), values.get_slice(0)
        sums = values.partition_shape_C((GROUP_QUERIES, self.plan.dim))
        o = values.make_fragment_C(sums)
        s = scores.make_fragment_C(scores.partition_shape_C((GROUP_QUERIES, TILE_KEYS)))
        t = values.make_fragment_C(sums) if self.has_two_levels else o
        if self.shares_registers:
            t = cute.make_tensor(cute.recast_ptr(s.iterator, dtype=Float32), o.layout)
        return Fragments(
            q=own.make_fragment_A(own.partition_A(ctx.smem.queries))[None, None, None, group],
            k=own.make_fragment_B(own.partition_B(ctx.smem.keys)),
            v=of_values.make_fragment_B(of_values.partition_B(ctx.smem.values)),
            scores=s,
            codes=values.make_fragment_A(values.partition_shape_A((GROUP_QUERIES, TILE_KEYS))),
            sums=o,
            tile_sums=t,
            state=RowState.make(),
        )

    @cute.jit
    def _pass_keys(
        self, ctx: AttentionContext, f: Fragments, work: Work, warp, lane, keys: Cursor
    ) -> Cursor:
        """Sums over all keys of a work tile; the next place in both rings."""
        share = ctx.tiles.share(work, warp // 4)
        # Opaque, or they would be computed again for every tile.
        count = cute.arch.make_warp_uniform(share.count)
        all_tiles = cute.arch.make_warp_uniform(work.count)
        scale, first_scale = KeyScale.of(ctx.operands, work, lane), Float32(0.0)
        if count > 0:
            first_scale = scale.load()
        factor = self.queries.take(ctx, work, warp, lane)
        f.state.reset()
        f.sums.fill(0.0)
        if count > 0:
            keys = self._pass_seen(
                ctx, f, work, share, count, scale, factor * first_scale, factor, warp, lane, keys
            )
        # ---- tiles that other warpgroups' queries see ----
        for tile in cutlass.range(count, all_tiles, unroll=1):
            ctx.pipes.keys.wait(keys)
            ctx.pipes.keys.release(keys, lane)
            ctx.pipes.values.wait(keys)
            ctx.pipes.values.release(keys, lane)
            if tile > 0:
                await_turn(warp // 4)
                pass_turn(warp // 4)
            keys = ctx.pipes.keys.next(keys)
        return keys

    @cute.jit
    def _pass_seen(
        self, ctx: AttentionContext, f: Fragments, work: Work, share: Share, count,
        scale: KeyScale, of_tile, factor, warp, lane, keys: Cursor,
    ) -> Cursor:  # fmt: skip
        """Sums over the keys that a warpgroup's queries see, of which there are some. The place in
        the ring of values is a tile behind."""
        first = share.seen + (warp % 4 * 16 + lane // 4 if ctx.tiles.is_causal else 0)
        middle = cutlass.max(cutlass.min(share.full, share.count), 1)
        middle = cute.arch.make_warp_uniform(middle)
        # ---- first tile ----
        ctx.pipes.keys.wait(keys)
        warpgroup.fence()
        self._issue_scores(f, keys.stage)
        scale = scale.next(count > 1)
        ahead = scale.load()
        warpgroup.wait_group(0)
        ctx.pipes.keys.release(keys, lane)
        limits = self._limits(ctx, work, first, Int32(0))
        if share.full > 0:
            self._raise_maxima(f, of_tile, limits, lane, False)
            weigh(f.scores, f.state, of_tile, range(COLUMN_GROUPS), False)
        else:
            self._raise_maxima(f, of_tile, limits, lane, True)
            weigh(f.scores, f.state, of_tile, range(COLUMN_GROUPS), True)
        encode(f.scores, f.codes)
        values, keys = keys, ctx.pipes.keys.next(keys)
        # ---- tiles that all queries see whole, then the others ----
        for tile in cutlass.range(1, middle, unroll=1):
            of_tile, scale = factor * ahead, scale.next(tile + 1 < count)
            ahead = scale.load()
            self._step(ctx, f, of_tile, (Int32(0), Int32(0)), lane, keys, values, False)
            values, keys = keys, ctx.pipes.keys.next(keys)
        for tile in cutlass.range(middle, count, unroll=1):
            of_tile, scale = factor * ahead, scale.next(tile + 1 < count)
            ahead = scale.load()
            limits = self._limits(ctx, work, first, tile)
            self._step(ctx, f, of_tile, limits, lane, keys, values, True)
            values, keys = keys, ctx.pipes.keys.next(keys)
        # ---- values of the last tile ----
        ctx.pipes.values.wait(values)
        warpgroup.fence()
        self._issue_values(f, values.stage)
        warpgroup.wait_group(0)
        ctx.pipes.values.release(values, lane)
        self._add_tile(f)
        return keys

    @cute.jit
    def _step(
        self, ctx: AttentionContext, f: Fragments, factor, limits, lane, keys: Cursor,
        values: Cursor, is_masked: cutlass.Constexpr,
    ):  # fmt: skip
        """The weighted values of the tile before, then the weights of a tile."""
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        ctx.pipes.keys.wait(keys)
        ctx.pipes.values.wait(values)
        if cutlass.const_expr(self.turn == "products"):
            await_turn(group)
        warpgroup.fence()
        self._issue_values(f, values.stage)
        if cutlass.const_expr(not self.shares_registers):
            self._issue_scores(f, keys.stage)
            if cutlass.const_expr(self.turn == "products"):
                pass_turn(group)
        warpgroup.wait_group(0 if self.shares_registers else 1)
        ctx.pipes.values.release(values, lane)
        self._add_tile(f)
        if cutlass.const_expr(self.shares_registers):
            warpgroup.fence()
            self._issue_scores(f, keys.stage)
            if cutlass.const_expr(self.turn == "products"):
                pass_turn(group)
        warpgroup.wait_group(0)
        ctx.pipes.keys.release(keys, lane)
        self._raise_maxima(f, factor, limits, lane, is_masked)
        if cutlass.const_expr(self.turn == "weights"):
            await_turn(group)
            # The next step's wait, here a branch: the assembler would move weights before the turn.
            ctx.pipes.values.wait(keys)
            weigh(f.scores, f.state, factor, range(PASSED), is_masked)
            weights = by_row(cute.recast_tensor(f.scores, Float32))
            pass_turn(group, [weights[r, 1, PASSED - 1] for r in range(2)])
            weigh(f.scores, f.state, factor, range(PASSED, COLUMN_GROUPS), is_masked)
        else:
            weigh(f.scores, f.state, factor, range(COLUMN_GROUPS), is_masked)
        encode(f.scores, f.codes)

    @cute.jit
    def _raise_maxima(self, f: Fragments, factor, limits, lane, is_masked: cutlass.Constexpr):
        """Maxima with a tile's scores; sums that no later product is added to follow them."""
        if cutlass.const_expr(is_masked):
            hide_unseen(f.scores, limits, lane)
        raise_maxima(f.scores, f.state, factor, is_masked)
        if cutlass.const_expr(not self.has_two_levels):
            self._scale(f)

    def _limits(self, ctx: AttentionContext, work: Work, first, tile):
        """Keys of a tile that each of this thread's two rows sees."""
        step = 8 if ctx.tiles.is_causal else 0
        before = tile * TILE_KEYS
        return tuple(cutlass.min(first + step * r, work.keys) - before for r in range(2))

    def _issue_scores(self, f: Fragments, stage) -> None:
        """S = Q K^T of a stage's keys."""
        steps = range(self.plan.dim // K_STEP)
        gemm(
            lambda: scores_mma(self.plan),
            f.scores,
            f.q,
            f.k[None, None, None, stage],
            steps,
            0,
            False,
        )
        warpgroup.commit_group()

    def _issue_values(self, f: Fragments, stage) -> None:
        """T = P V of a stage's values."""
        steps = range(TILE_KEYS // K_STEP)
        target, v = f.tile_sums, f.v[None, None, None, stage]
        gemm(lambda: values_mma(self.plan), target, f.codes, v, steps, 0, not self.has_two_levels)
        warpgroup.commit_group()

    @cute.jit
    def _add_tile(self, f: Fragments):
        """O with the last tile whose values were weighted."""
        if cutlass.const_expr(self.has_two_levels):
            sums, tile_sums, decay = by_row(f.sums), by_row(f.tile_sums), f.state.decay
            for j in cutlass.range_constexpr(cute.size(sums, mode=[2])):
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        sums[r, c, j] = cute.math.fma(sums[r, c, j], decay[r], tile_sums[r, c, j])

    @cute.jit
    def _scale(self, f: Fragments):
        """O relative to the maxima of the last tile."""
        sums = by_row(f.sums)
        for j in cutlass.range_constexpr(cute.size(sums, mode=[2])):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    sums[r, c, j] = sums[r, c, j] * f.state.decay[r]


class KeyScale(NamedTuple):
    """Scales of the keys of a work tile: a thread's columns of a tile share one."""

    address: Int64
    stride: Int64

    @staticmethod
    def of(operands: Operands, work: Work, lane) -> KeyScale:
        """Those of a thread, from the first tile on."""
        scale = operands.k_scale
        offset = Int64(work.batch) * scale.stride[0] + Int64(work.key_head) * scale.stride[1]
        offset += Int64(work.first_tile) * scale.stride[2]
        if scale.shape[3] > 1:
            offset += lane % 4
        return KeyScale(address_of(scale, offset), Int64(scale.stride[2]) * 4)

    def next(self, exists) -> KeyScale:
        """Those from the next tile on, where it exists."""
        step = cutlass.select_(exists, self.stride, Int64(0))
        return KeyScale(self.address + step, self.stride)

    def load(self) -> Float32:
        """Scale of the tile."""
        return pointer_to(self.address, Float32, 4).load()


def await_turn(group) -> None:
    """Wait for the warpgroup before."""
    cute.arch.barrier(barrier_id=TURNS + group, number_of_threads=256)


def pass_turn(group, weights=()) -> None:
    """Let the next warpgroup have its turn, when some weights are there."""
    after = cutlass.select_(group == GROUPS - 1, Int32(0), group + 1)
    for weight in weights:
        # None is negative, which the assembler does not know: it would pass the turn before them.
        after = cutlass.select_(weight < 0.0, after + Int32(8), after)
    cute.arch.barrier_arrive(barrier_id=TURNS + after, number_of_threads=256)
