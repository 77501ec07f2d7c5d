"""MMA warp of attention: scores of codes, sums of weighted values, warpgroup by warpgroup.

Scores of a tile are issued when those of the tile before have been read, long before its weights
are there. The second warpgroup's weights come half a step after the first one's, and so do its
products: S0(j + 1), O1(j - 1), S1(j + 1), O0(j).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import (
    commit,
    fence_after_thread_sync,
    multiply,
    operand_descriptor,
)
from dsv4.kernels.lowp.sm100.context import AttentionContext, columns_of
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES, GROUPS, AttentionPlanSm100

DEPTH = 32  # bytes of K of a product


class Issued(NamedTuple):
    """Counts of what has been issued so far, by warpgroup: work tiles, scores and sums of tiles."""

    works_0: Int32
    works_1: Int32
    scores_0: Int32
    scores_1: Int32
    sums_0: Int32
    sums_1: Int32

    def works(self, group: int) -> Int32:
        """Work tiles of which a warpgroup saw keys."""
        return self[group]

    def scores(self, group: int) -> Int32:
        """Tiles whose scores have been issued."""
        return self[GROUPS + group]

    def sums(self, group: int) -> Int32:
        """Tiles whose weighted values have been issued."""
        return self[2 * GROUPS + group]

    def start(self, counts) -> Issued:
        """After the first scores of a work tile."""
        works = (self.works(g) + Int32(counts[g] > 0) for g in range(GROUPS))
        scores = (self.scores(g) + Int32(counts[g] > 0) for g in range(GROUPS))
        return Issued(*works, *scores, *self[2 * GROUPS :])

    def next(self, tile, counts) -> Issued:
        """After a tile, of which the second warpgroup's values are still to be weighted."""
        scores = (self.scores(g) + Int32(tile + 1 < counts[g]) for g in range(GROUPS))
        sums = (self.sums(g) + Int32(tile - g < counts[g]) for g in range(GROUPS))
        first, second = sums
        # Of the first tile there was none before.
        second = cutlass.select_(tile > 0, second, self.sums_1)
        return Issued(self.works_0, self.works_1, *scores, first, second)

    def end(self, tiles, counts) -> Issued:
        """After the last values of a work tile."""
        return self._replace(sums_1=self.sums_1 + Int32(tiles <= counts[1]))


class MmaWarp:
    """Consumer of codes and weights, producer of scores and sums; one elected lane issues."""

    # Whether values come before the scores of the tile after, as these wait for a place.
    weighs_first = False

    def __init__(self, plan: AttentionPlanSm100):
        self.plan = plan

    @cute.jit
    def multiply(self, ctx: AttentionContext):
        """The products of every work tile."""
        pipes = ctx.pipes
        keys, values = pipes.keys.consumer(), pipes.values.consumer()
        behind = values
        issued = Issued(*(Int32(0) for _ in Issued._fields))
        index = Int32(cute.arch.block_idx()[0])
        stop = ctx.tiles.count(ctx.operands)
        while index < stop:
            work = ctx.tiles.find(ctx.operands, index)
            counts = tuple(ctx.tiles.share(work, g).count for g in range(GROUPS))
            if work.count > 0:
                # ---- scores of the first tile ----
                pipes.keys.wait(keys)
                for g in cutlass.range_constexpr(GROUPS):
                    if counts[g] > 0:
                        pipes.coded.at(g).wait(issued.works(g) % 2)
                    self._score(ctx, g, keys.stage, Int32(0), counts, issued)
                self._release(pipes.keys, keys)
                keys = pipes.keys.next(keys)
                issued = issued.start(counts)
            for tile in cutlass.range(work.count, unroll=1):
                has_next = tile + 1 < work.count
                if has_next:
                    pipes.keys.wait(keys)
                pipes.values.wait(values)
                if cutlass.const_expr(not self.weighs_first):
                    self._score(ctx, 0, keys.stage, tile + 1, counts, issued)
                if tile > 0:
                    self._weigh(ctx, 1, behind.stage, tile - 1, counts[1], issued)
                    self._release(pipes.values, behind)
                if cutlass.const_expr(self.weighs_first):
                    self._score(ctx, 0, keys.stage, tile + 1, counts, issued)
                    self._weigh(ctx, 0, values.stage, tile, counts[0], issued)
                self._score(ctx, 1, keys.stage, tile + 1, counts, issued)
                if has_next:
                    self._release(pipes.keys, keys)
                    keys = pipes.keys.next(keys)
                if cutlass.const_expr(not self.weighs_first):
                    self._weigh(ctx, 0, values.stage, tile, counts[0], issued)
                issued = issued.next(tile, counts)
                behind, values = values, pipes.values.next(values)
            if work.count > 0:
                # ---- weighted values of the last tile ----
                self._weigh(ctx, 1, behind.stage, work.count - 1, counts[1], issued)
                self._release(pipes.values, behind)
                issued = issued.end(work.count, counts)
            index += cute.arch.grid_dim()[0]
        # No CTA ends before its commits have arrived.
        if issued.works_0 + issued.works_1 > 0:
            pipes.values.acquire(behind)

    @cute.jit
    def _score(
        self, ctx: AttentionContext, group: cutlass.Constexpr, stage, tile, counts, issued: Issued
    ):
        """S = Q K^T of a tile that a warpgroup sees, into its columns."""
        plan, scores = self.plan, ctx.pipes.scores.at(group)
        if tile < counts[group]:
            scores.acquire(issued.scores(group) % 2 ^ 1)
            fence_after_thread_sync()
            queries = ctx.smem.queries_start.toint() + group * plan.group_bytes
            keys = ctx.smem.keys_start.toint() + stage * plan.tile_bytes
            target = columns_of(ctx, plan, "scores", group)
            with cute.arch.elect_one():
                for step in cutlass.range_constexpr(plan.dim // DEPTH):
                    a = operand_descriptor(queries + step * DEPTH, plan.row_bytes)
                    b = operand_descriptor(keys + step * DEPTH, plan.row_bytes)
                    multiply(target, a, b, (GROUP_QUERIES, plan.tile_keys), step > 0, plan.qk)
                commit(scores.full)

    @cute.jit
    def _weigh(
        self, ctx: AttentionContext, group: cutlass.Constexpr, stage, tile, count, issued: Issued
    ):
        """O += P V of a tile that a warpgroup sees; of the first one O = P V."""
        plan, pipes = self.plan, ctx.pipes
        if tile < count:
            pipes.weights.at(group).wait(issued.sums(group) % 2)
            fence_after_thread_sync()
            span_bytes = plan.weight_span
            weights = ctx.smem.weights_start.toint() + group * (GROUP_QUERIES * span_bytes)
            values = ctx.smem.values_start.toint() + stage * plan.value_bytes
            target = columns_of(ctx, plan, "sums", group)
            with cute.arch.elect_one():
                for step in cutlass.range_constexpr(plan.tile_keys * plan.weight_bytes // DEPTH):
                    span, place = step * DEPTH // span_bytes, step * DEPTH % span_bytes
                    start = weights + span * plan.weight_span_bytes + place
                    a = operand_descriptor(start, span_bytes)
                    b = self._value_operand(values, step)
                    adds = tile > 0 if step == 0 else True
                    kind = "fp8" if plan.pv == "fp8" else "fp16 values"
                    multiply(target, a, b, (GROUP_QUERIES, plan.dim), adds, kind)
                commit(pipes.sums.at(group).full)

    def _value_operand(self, values, step: int):
        """Descriptor of a step's values: of fp16 rows of channels, else columns of keys."""
        if self.plan.pv == "fp8":
            return operand_descriptor(values + step * DEPTH, self.plan.tile_keys)
        start, step_bytes = (
            values + step * (DEPTH // 2) * SPAN_BYTES,
            self.plan.tile_keys * SPAN_BYTES,
        )
        return operand_descriptor(start, SPAN_BYTES, step_bytes=step_bytes)

    @cute.jit
    def _release(self, ring, cursor: Cursor):
        """A stage is free once the products so far are over."""
        with cute.arch.elect_one():
            commit(ring.empty + cursor.stage)
