"""Consumer warpgroups of attention: 64 queries each.

While the products of one warpgroup run, the others compute weights. A warpgroup's step:

    products   T = P(j - 1) V(j - 1), then S(j) = Q K(j)^T
    T          O = O * decay(j - 1) + T
    S(j)       maxima, weights, in its registers; codes P(j)

`plan.Order` says whether S(j) is issued before T is there, or takes its registers, and at what
warpgroups take turns: the tensor cores, or the special function unit. T is a fresh accumulator for
each tile ("fp32+fp32"): an FP8 tensor core keeps 14 bits of its sums. With "fp32" the products of
all tiles stay in O, which is scaled between them. With "fp32+fp16" T is two accumulators of fp16,
one for each half of a tile's keys: more of them would overflow.

With 256 channels T is made and added in two parts: all of it beside O would be more registers than
a thread has.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.kit.wgmma import by_row, gemm
from dsv4.kernels.lowp.config import FP16_FLUSH_KEYS, P_OFFSET, QuantizedAttentionConfig
from dsv4.kernels.lowp.plan import GROUP_QUERIES, AttentionPlan
from dsv4.kernels.lowp.sm90.context import AttentionContext, scores_mma, values_mma
from dsv4.kernels.lowp.sm90.epilogue import Epilogue
from dsv4.kernels.lowp.sm90.mask import MaskRows, apply_mask
from dsv4.kernels.lowp.sm90.queries import Queries
from dsv4.kernels.lowp.sm90.softmax import (
    RowState,
    Weights,
    encode,
    hide_unseen,
    raise_maxima,
    weigh,
)
from dsv4.kernels.lowp.sm90.sums import Sums
from dsv4.kernels.lowp.turns import Turns
from dsv4.kernels.lowp.work import Operands, Share, Work, listed

# Of a product, by format.
K_STEPS = {"int8": 32, "fp8": 32, "fp16": 16}
# Part of a tile's weights that a warpgroup computes before it passes a turn at them.
PASSED = 10 / 16
TURNS = 1  # named barrier of the first warpgroup's turns; those of the others follow
PART = 128  # channels of a part of T


class Fragments(NamedTuple):
    """Operands and sums of a thread."""

    q: cute.Tensor  # of all warpgroups and stages, or of one
    k: cute.Tensor
    v: tuple[cute.Tensor, ...]  # of each part of the channels
    scores: cute.Tensor
    codes: cute.Tensor  # of weights
    sums: cute.Tensor  # O
    # T, of all of a tile's keys or of the halves of them; of a part of the channels at a time.
    tile_sums: tuple[cute.Tensor, ...]
    state: RowState


class Seen(NamedTuple):
    """Part of a tile that a thread's two rows see.

    Attributes:
        limits: keys, by row.
        mask, rows, tile: the call's mask, places of the rows in it, and the tile's number.
    """

    limits: tuple[Int32, Int32]
    mask: cute.Tensor | None = None
    rows: MaskRows | None = None
    tile: Int32 | None = None


class Consumers:
    """All warpgroups."""

    def __init__(self, config: QuantizedAttentionConfig, plan: AttentionPlan):
        self.config = config
        self.plan = plan
        self.has_two_levels = config.pv_accum_dtype in ("fp32+fp32", "fp32+fp16", "fp16+fp32")
        is_flushed = config.pv_accum_dtype == "fp32+fp16"
        self.halves = plan.tile_keys // FP16_FLUSH_KEYS if is_flushed else 1  # of a tile's sums
        # Channels of a product of values, and such products.
        self.channels = PART if plan.dim > 128 and self.has_two_levels else plan.dim
        self.parts = plan.dim // self.channels
        self.turns = Turns(TURNS, plan.groups)
        has_half = is_flushed or config.pv_accum_dtype.startswith("fp16")
        self.mma_sums = Float16 if has_half else Float32
        self.is_fp16 = config.pv == "fp16"
        self.offset = P_OFFSET[config.pv]
        self.has_mask = config.mask != "none"
        self.column_groups = plan.tile_keys // 8
        self.passed = int(self.column_groups * PASSED)
        self.turn, self.block = plan.order.turn, plan.order.block
        self.is_serial = plan.order.is_serial and (self.has_two_levels or self.is_fp16)
        self.epilogue = Epilogue(config, plan)
        self.queries = Queries(config, plan)
        scales = {"per_row": 0, "per_64": plan.tile_keys // 64}
        self.key_scales = scales.get(config.qk_quant_gran, 1)

    @cute.jit
    def compute(self, ctx: AttentionContext, warp):
        """Outputs of every work tile of the CTA."""
        lane, group = cute.arch.lane_idx(), warp // 4
        f = self._fragments(ctx)
        keys = ctx.pipes.keys.consumer()
        # The last one passes the first turn, and the first one takes the last that is passed.
        if group == self.plan.groups - 1:
            self.turns.give(group)
        parity, index = Int32(0), Int32(cute.arch.block_idx()[0])
        stop = ctx.tiles.count(ctx.operands)
        while index < stop:
            ctx.pipes.queries.wait(parity)
            work = Work.load(ctx.smem.works[None, parity])
            factor = self.queries.take(ctx, work, warp, lane)
            its = f._replace(q=f.q[None, None, None, group])
            keys = self._pass_keys(ctx, its, work, factor, warp, lane, keys)
            self.epilogue.store(ctx, Sums(f.sums).wide(), f.state, warp, lane, parity)
            parity ^= 1
            index += cute.arch.grid_dim()[0]
        if group == 0:
            self.turns.take(group)

    def _fragments(self, ctx: AttentionContext) -> Fragments:
        scores, values = scores_mma(self.plan), self._values_mma()
        own, of_values = scores.get_slice(0), values.get_slice(0)
        shape = values.partition_shape_C((GROUP_QUERIES, self.channels))
        weights = GROUP_QUERIES, self.plan.tile_keys
        o = values.make_fragment_C(values.partition_shape_C((GROUP_QUERIES, self.plan.dim)))
        s = scores.make_fragment_C(scores.partition_shape_C(weights))
        t = (o,)
        if self.has_two_levels:
            layout = o.layout
            t = tuple(values.make_fragment_C(shape) for _ in range(self.halves))
            if self.is_serial and not self.is_fp16:
                s, t = shared(s, t)
            o = cute.make_rmem_tensor(layout, Float32)
        return Fragments(
            q=own.make_fragment_A(own.partition_A(ctx.smem.queries)),
            k=own.make_fragment_B(own.partition_B(ctx.smem.keys)),
            v=tuple(
                of_values.make_fragment_B(of_values.partition_B(self._channels_of(ctx, part)))
                for part in range(self.parts)
            ),
            scores=s,
            codes=values.make_fragment_A(values.partition_shape_A(weights)),
            sums=o,
            tile_sums=t,
            state=RowState.make(),
        )

    def _channels_of(self, ctx: AttentionContext, part: int) -> cute.Tensor:
        """A part of the channels of all stages' values."""
        if self.parts == 1:
            return ctx.smem.values
        return cute.local_tile(
            ctx.smem.values, (self.channels, self.plan.tile_keys), (part, 0, None)
        )

    @cute.jit
    def _pass_keys(
        self, ctx: AttentionContext, f: Fragments, work: Work, factor, warp, lane, keys: Cursor
    ) -> Cursor:
        """Sums over all keys of a work tile; the next place in both rings."""
        share = ctx.tiles.share(work, warp // 4)
        # Opaque, or they would be computed again for every tile.
        count = cute.arch.make_warp_uniform(share.count)
        all_tiles = cute.arch.make_warp_uniform(work.count)
        scale = KeyScale.of(ctx.operands, work, lane)
        f.state.reset()
        f.sums.fill(0.0)
        if count > 0:
            keys = self._pass_seen(ctx, f, work, share, count, scale, factor, warp, lane, keys)
        # ---- tiles that other warpgroups' queries see ----
        for tile in cutlass.range(count, all_tiles, unroll=1):
            ctx.pipes.keys.wait(keys)
            ctx.pipes.keys.release(keys, lane)
            ctx.pipes.values.wait(keys)
            ctx.pipes.values.release(keys, lane)
            if tile > 0:
                self.turns.take(warp // 4)
                self.turns.give(warp // 4)
            keys = ctx.pipes.keys.next(keys)
        return keys

    @cute.jit
    def _pass_seen(
        self, ctx: AttentionContext, f: Fragments, work: Work, share: Share, count,
        scale: KeyScale, factor, warp, lane, keys: Cursor,
    ) -> Cursor:  # fmt: skip
        """Sums over the keys that a warpgroup's queries see, of which there are some. The place in
        the ring of values is a tile behind."""
        first = share.seen + (warp % 4 * 16 + lane // 4 if ctx.tiles.is_causal else 0)
        middle = cutlass.max(cutlass.min(share.full, share.count), 1)
        if cutlass.const_expr(self.has_mask):
            middle = Int32(1)
        middle = cute.arch.make_warp_uniform(middle)
        # ---- first tile ----
        start, number = scale, Int32(0)
        if cutlass.const_expr(self.has_mask):
            words = ctx.tiles.list_of(ctx.operands, work)
            number = listed(words, Int32(0))
            scale = start.at(number)
        of_tile = times(factor, scale.load(self.key_scales))
        ctx.pipes.keys.wait(keys)
        warpgroup.fence()
        self._issue_scores(f, keys.stage)
        following = Int32(0)
        if cutlass.const_expr(self.has_mask):
            following = listed(words, cutlass.min(Int32(1), count - 1))
            scale = start.at(following)
        else:
            scale = scale.next(count > 1)
        ahead = scale.load(self.key_scales)
        warpgroup.wait_group(0)
        self._take_scores(ctx, f, keys, lane)
        seen = self._seen(ctx, work, first, number, warp, lane)
        if cutlass.const_expr(self.has_mask):
            self._start(f, of_tile, seen, lane, True)
        else:
            if share.full > 0:
                self._start(f, of_tile, seen, lane, False)
            else:
                self._start(f, of_tile, seen, lane, True)
        self._encode(f)
        if cutlass.const_expr(self.block > 0):
            ctx.pipes.values.wait(keys)
        values, keys = keys, ctx.pipes.keys.next(keys)
        # ---- tiles that all queries see whole, then the others ----
        if cutlass.const_expr(not self.has_mask):
            for tile in cutlass.range(1, middle, unroll=1):
                of_tile, scale = times(factor, ahead), scale.next(tile + 1 < count)
                ahead = scale.load(self.key_scales)
                seen = Seen((Int32(0), Int32(0)))
                self._step(ctx, f, of_tile, seen, lane, keys, values, False)
                values, keys = keys, ctx.pipes.keys.next(keys)
        for tile in cutlass.range(middle, count, unroll=1):
            of_tile = times(factor, ahead)
            if cutlass.const_expr(self.has_mask):
                number = following
                following = listed(words, cutlass.min(tile + 1, count - 1))
                scale = start.at(following)
            else:
                number, scale = tile, scale.next(tile + 1 < count)
            ahead = scale.load(self.key_scales)
            seen = self._seen(ctx, work, first, number, warp, lane)
            self._step(ctx, f, of_tile, seen, lane, keys, values, True)
            values, keys = keys, ctx.pipes.keys.next(keys)
        # ---- values of the last tile ----
        ctx.pipes.values.wait(values)
        self._add_values(ctx, f, values, lane)
        return keys

    @cute.jit
    def _step(
        self, ctx: AttentionContext, f: Fragments, factor, seen: Seen, lane, keys: Cursor,
        values: Cursor, is_masked: cutlass.Constexpr,
    ):  # fmt: skip
        """The weighted values of the tile before, then the weights of a tile."""
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        ctx.pipes.keys.wait(keys)
        if cutlass.const_expr(self.block == 0):
            ctx.pipes.values.wait(values)
        if cutlass.const_expr(self.turn == "products"):
            self.turns.take(group)
        if cutlass.const_expr(self.is_serial):
            self._add_values(ctx, f, values, lane)
            warpgroup.fence()
            self._issue_scores(f, keys.stage)
            if cutlass.const_expr(self.turn == "products"):
                self.turns.give(group)
        else:
            warpgroup.fence()
            self._issue_values(f, values.stage)
            self._issue_scores(f, keys.stage)
            if cutlass.const_expr(self.turn == "products"):
                self.turns.give(group)
            warpgroup.wait_group(1)
            ctx.pipes.values.release(values, lane)
            self._add_tile(f)
        warpgroup.wait_group(0)
        self._take_scores(ctx, f, keys, lane)
        self._raise_maxima(f, factor, seen, lane, is_masked)
        if cutlass.const_expr(self.block > 0):
            self._weigh_in_blocks(ctx, f, factor, group, keys, is_masked)
            return
        if cutlass.const_expr(self.turn == "weights"):
            self.turns.take(group, [f.state.decay[r] for r in range(2)])
            # The next step's wait, here a branch: the assembler would move weights before the turn,
            # and the end of the turn behind the weights that follow it.
            ctx.pipes.values.wait(keys)
            self._weigh(f, factor, range(self.passed), is_masked)
            weights = by_row(cute.recast_tensor(f.scores, Float32))
            self.turns.give(group, [weights[r, 1, self.passed - 1] for r in range(2)])
            ctx.pipes.values.wait(keys)
            self._weigh(f, factor, range(self.passed, self.column_groups), is_masked)
        else:
            self._weigh(f, factor, range(self.column_groups), is_masked)
        self._encode(f)

    @cute.jit
    def _weigh_in_blocks(
        self, ctx: AttentionContext, f: Fragments, factor, group, keys: Cursor,
        is_masked: cutlass.Constexpr,
    ):  # fmt: skip
        """Weights of a tile, their codes with them; its values are waited for."""
        weights = Weights(*self._scores(f, factor), f.codes, f.state, is_masked, self.block)
        self.turns.take(group, weights.ends(0))
        # A branch, as above.
        ctx.pipes.values.wait(keys)
        for block in cutlass.range_constexpr(len(weights.blocks)):
            weights.compute(block)
            if cutlass.const_expr((block + 1) * self.block == self.passed):
                self.turns.give(group, weights.ends(block))
                ctx.pipes.values.wait(keys)
        weights.finish()

    @cute.jit
    def _encode(self, f: Fragments):
        """Codes of a tile's weights."""
        encode(f.scores, f.codes)
        if cutlass.const_expr(self.is_fp16):
            # They take half of the weights' registers, which the next product would keep.
            f.scores.fill(0)

    @cute.jit
    def _take_scores(self, ctx: AttentionContext, f: Fragments, keys: Cursor, lane):
        """Release a tile of keys whose scores are there, which get the scales of keys that have one
        each."""
        if cutlass.const_expr(self.plan.key_scales > 0):
            rows = by_row(f.scores)
            pairs = cute.make_tensor(
                ctx.smem.key_scales[None, keys.stage].iterator + lane % 4 * 2,
                cute.make_layout((2, self.column_groups), stride=(1, 8)),
            )
            for j in cutlass.range_constexpr(self.column_groups):
                for c in cutlass.range_constexpr(2):
                    scale = pairs[c, j]
                    for r in cutlass.range_constexpr(2):
                        rows[r, c, j] = rows[r, c, j] * scale
        ctx.pipes.keys.release(keys, lane)

    @cute.jit
    def _start(self, f: Fragments, factor, seen: Seen, lane, is_masked: cutlass.Constexpr):
        """Weights of the first tile."""
        self._raise_maxima(f, factor, seen, lane, is_masked)
        self._weigh(f, factor, range(self.column_groups), is_masked)

    def _scores(self, f: Fragments, factor):
        """Scores, and the factors on them; a mask was added to scores that are scaled."""
        if not self.has_mask:
            return f.scores, factor
        return cute.recast_tensor(f.scores, Float32), ((Float32(1.0),),) * 2

    def _weigh(self, f: Fragments, factor, columns: range, is_masked: bool) -> None:
        """Weights of some groups of columns."""
        scores, factor = self._scores(f, factor)
        weigh(scores, f.state, factor, columns, is_masked)

    @cute.jit
    def _raise_maxima(self, f: Fragments, factor, seen: Seen, lane, is_masked: cutlass.Constexpr):
        """Maxima with a tile's scores; sums that no later product is added to follow them."""
        if cutlass.const_expr(self.has_mask):
            apply_mask(f.scores, seen.mask, seen.rows, factor, seen.limits, seen.tile, lane)
        elif cutlass.const_expr(is_masked):
            hide_unseen(f.scores, seen.limits, lane)
        scores, factor = self._scores(f, factor)
        raise_maxima(scores, f.state, factor, self.offset, is_masked)
        if cutlass.const_expr(not self.has_two_levels):
            self._scale(f)

    def _seen(self, ctx: AttentionContext, work: Work, first, tile, warp, lane) -> Seen:
        """Keys of a tile that each of this thread's two rows sees."""
        step = 8 if ctx.tiles.is_causal else 0
        before = tile * self.plan.tile_keys
        limits = tuple(cutlass.min(first + step * r, work.keys) - before for r in range(2))
        if not self.has_mask:
            return Seen(limits)
        mask = ctx.operands.attn_mask
        rows = MaskRows.of(ctx.operands, work, warp * 16 + lane // 4)
        return Seen(limits, mask, rows, tile)

    def _issue_scores(self, f: Fragments, stage) -> None:
        """S = Q K^T of a stage's keys."""
        steps = range(self.plan.dim // K_STEPS[self.plan.qk])
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

    def _issue_values(self, f: Fragments, stage, part: int = 0) -> None:
        """T = P V of a stage's values, or of a part of their channels."""
        v = f.v[part][None, None, None, stage]
        count = self.plan.tile_keys // K_STEPS[self.plan.pv] // self.halves
        for i, target in enumerate(f.tile_sums):
            steps = range(i * count, (i + 1) * count)
            gemm(self._values_mma, target, f.codes, v, steps, 0, not self.has_two_levels)
        warpgroup.commit_group()

    def _values_mma(self):
        return values_mma(self.plan, self.mma_sums, self.channels)

    @cute.jit
    def _add_values(self, ctx: AttentionContext, f: Fragments, values: Cursor, lane):
        """O with a stage's weighted values, part by part of their channels; the stage is
        released."""
        for part in cutlass.range_constexpr(self.parts):
            warpgroup.fence()
            self._issue_values(f, values.stage, part)
            warpgroup.wait_group(0)
            if cutlass.const_expr(part + 1 == self.parts):
                ctx.pipes.values.release(values, lane)
            self._add_tile(f, part)

    @cute.jit
    def _add_tile(self, f: Fragments, part: cutlass.Constexpr = 0):
        """O, or a part of its channels, with the last tile whose values were weighted."""
        if cutlass.const_expr(self.has_two_levels):
            sums, decay = by_row(f.sums), f.state.decay
            first, *others = [Sums(half) for half in f.tile_sums]
            for group in cutlass.range_constexpr(self.channels // 8):
                j = part * (self.channels // 8) + group
                for r in cutlass.range_constexpr(2):
                    added = first.pair(r, group)
                    for c in cutlass.range_constexpr(2):
                        sums[r, c, j] = cute.math.fma(sums[r, c, j], decay[r], added[c])
                    for half in others:
                        added = half.pair(r, group)
                        for c in cutlass.range_constexpr(2):
                            sums[r, c, j] = sums[r, c, j] + added[c]

    @cute.jit
    def _scale(self, f: Fragments):
        """O relative to the maxima of the last tile."""
        sums = Sums(f.sums)
        for j in cutlass.range_constexpr(sums.groups):
            for r in cutlass.range_constexpr(2):
                sums.set_pair(r, j, [x * f.state.decay[r] for x in sums.pair(r, j)])


def shared(
    scores: cute.Tensor, sums: tuple[cute.Tensor, ...]
) -> tuple[cute.Tensor, tuple[cute.Tensor, ...]]:
    """Scores and a tile's sums in the same registers: those of the larger one."""
    first = sums[0]
    words = cute.size(first) * first.element_type.width // 32 * len(sums)
    if words > cute.size(scores):
        start = cute.recast_ptr(first.iterator, dtype=scores.element_type)
        return cute.make_tensor(start, scores.layout), sums
    start, size = cute.recast_ptr(scores.iterator, dtype=first.element_type), cute.cosize(first)
    return scores, tuple(cute.make_tensor(start + i * size, first.layout) for i in range(len(sums)))


class KeyScale(NamedTuple):
    """Scales of the keys of a work tile: a thread's columns of a tile share one, or each half of
    them."""

    address: Int64
    stride: Int64

    @staticmethod
    def of(operands: Operands, work: Work, lane) -> KeyScale:
        """Those of a thread, from the first tile on."""
        scale = operands.k_scale
        offset = Int64(work.batch) * scale.stride[0] + Int64(work.key_head) * scale.stride[1]
        offset += Int64(work.first_tile) * scale.stride[2]
        if scale.shape[3] == 4:
            offset += lane % 4
        return KeyScale(address_of(scale, offset), Int64(scale.stride[2]) * 4)

    def next(self, exists) -> KeyScale:
        """Those from the next tile on, where it exists."""
        step = cutlass.select_(exists, self.stride, Int64(0))
        return KeyScale(self.address + step, self.stride)

    def at(self, tile) -> KeyScale:
        """Those of a tile further on."""
        return KeyScale(self.address + Int64(tile) * self.stride, self.stride)

    def load(self, count: int) -> tuple[Float32, ...]:
        """So many scales of a tile; 1 of keys that have one each."""
        if count == 0:
            return (Float32(1.0),)
        return tuple(pointer_to(self.address + 4 * i, Float32, 4).load() for i in range(count))


def times(of_rows, of_keys):
    """Factors on scores: by row, then by the part of a tile's keys."""
    return tuple(tuple(x * y for y in of_keys) for x in of_rows)
