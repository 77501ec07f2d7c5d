"""MMA warp of attention in FP4: copies of scales to Tensor Memory, products, warpgroup by
warpgroup.

Copies and products of one thread are in order: a copy waits for the products before it, which still
read what it writes. The scores of both warpgroups have one place, by turns: a product with scores
waits until the other warpgroup, too, has those before in registers. It then has the time in which
the other one computes its weights.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit.swizzle import SPAN_BYTES
from dsv4.kernels.kit.tcgen05 import (
    commit,
    copy_scales,
    fence_after_thread_sync,
    multiply,
    multiply_scaled,
    operand_descriptor,
    packed_product,
)
from dsv4.kernels.lowp.plan import TILE_KEYS
from dsv4.kernels.lowp.sm100.context import AttentionContext, columns_of
from dsv4.kernels.lowp.sm100.fp4_plan import (
    ATOM_BYTES,
    DEPTH,
    MEAN_ROWS,
    WEIGHT_BYTES,
    WEIGHT_SCALE_BYTES,
    WORD_ROWS,
    Fp4Plan,
)
from dsv4.kernels.lowp.sm100.mma_warp import Issued, MmaWarp
from dsv4.kernels.lowp.sm100.plan import GROUP_QUERIES, GROUPS

ATOM_COLUMNS = ATOM_BYTES // 128
STEP_BYTES = DEPTH // 2
SMOOTH_STEP = 32  # bytes of K of a product of smoothed keys


class Fp4MmaWarp(MmaWarp):
    """Consumer of codes and weights and of their scales, producer of scores and sums."""

    weighs_first = True

    def __init__(self, plan: Fp4Plan):
        super().__init__(plan)

    @cute.jit
    def _score(
        self, ctx: AttentionContext, group: cutlass.Constexpr, stage, tile, counts, issued: Issued
    ):
        """S = Q K^T of a tile that a warpgroup sees, in the one place of scores."""
        plan, smem, scores = self.plan, ctx.smem, ctx.pipes.scores
        if tile < counts[group]:
            for g in cutlass.range_constexpr(GROUPS):
                count = issued.scores(g)
                if cutlass.const_expr(g < group):
                    # Its scores of this tile have been issued just before.
                    count += Int32(tile < counts[g])
                scores.at(g).acquire(count % 2 ^ 1)
            fence_after_thread_sync()
            queries = smem.queries_start.toint() + group * plan.group_bytes
            query_scales = smem.query_scales.toint() + group * plan.query_scale_bytes
            keys = smem.keys_start.toint() + stage * plan.tile_bytes
            key_scales = smem.key_scales.iterator.toint() + stage * plan.key_scale_bytes
            target = columns_of(ctx, plan, "scores", group)
            with cute.arch.elect_one():
                of_queries = self._copy(ctx, "query_scales", query_scales, plan.query_scale_bytes)
                of_keys = self._copy(ctx, "key_scales", key_scales, plan.key_scale_bytes)
                if cutlass.const_expr(plan.smooth != ""):
                    self._score_means(ctx, group, stage, target)
                for step in cutlass.range_constexpr(plan.dim // DEPTH):
                    a = operand_descriptor(queries + step * STEP_BYTES, plan.row_bytes)
                    b = operand_descriptor(keys + step * STEP_BYTES, plan.row_bytes)
                    adds = step > 0 or plan.smooth != ""
                    self._multiply(target, a, b, TILE_KEYS, step, (of_queries, of_keys), adds)
                commit(scores.at(group).full)

    @cute.jit
    def _weigh(
        self, ctx: AttentionContext, group: cutlass.Constexpr, stage, tile, count, issued: Issued
    ):
        """O += P V of a tile that a warpgroup sees; of the first one O = P V."""
        plan, smem, pipes = self.plan, ctx.smem, ctx.pipes
        if tile < count:
            pipes.weights.at(group).wait(issued.sums(group) % 2)
            fence_after_thread_sync()
            weights = smem.weights_start.toint() + group * (GROUP_QUERIES * WEIGHT_BYTES)
            weight_scales = smem.weight_scales.toint() + group * WEIGHT_SCALE_BYTES
            values = smem.values_start.toint() + stage * plan.value_bytes
            value_scales = smem.value_block_scales.iterator.toint() + stage * plan.value_scale_bytes
            target = columns_of(ctx, plan, "sums", group)
            with cute.arch.elect_one():
                of_weights = self._copy(ctx, "weight_scales", weight_scales, WEIGHT_SCALE_BYTES)
                of_values = self._copy(ctx, "value_scales", value_scales, plan.value_scale_bytes)
                for step in cutlass.range_constexpr(TILE_KEYS // DEPTH):
                    a = operand_descriptor(weights + step * STEP_BYTES, WEIGHT_BYTES)
                    b = operand_descriptor(values + step * STEP_BYTES, WEIGHT_BYTES)
                    adds = tile > 0 if step == 0 else True
                    self._multiply(target, a, b, plan.dim, step, (of_weights, of_values), adds)
                commit(pipes.sums.at(group).full)

    def _score_means(self, ctx: AttentionContext, group: int, stage, target: cute.Pointer) -> None:
        """Scores of the mean of a warpgroup's queries, the same in all rows: eight rows of it are
        those of every group of eight."""
        plan = self.plan
        means = ctx.smem.means.toint() + group * plan.mean_bytes
        keys = ctx.smem.smooth_keys.toint() + stage * plan.smooth_bytes
        for step in range(2 * plan.dim // SMOOTH_STEP):
            span, place = step * SMOOTH_STEP // SPAN_BYTES, step * SMOOTH_STEP % SPAN_BYTES
            mean = means + span * (MEAN_ROWS * SPAN_BYTES) + place
            key = keys + span * (TILE_KEYS * SPAN_BYTES) + place
            a = operand_descriptor(mean, SPAN_BYTES, group_step=0)
            b = operand_descriptor(key, SPAN_BYTES)
            multiply(target, a, b, (GROUP_QUERIES, TILE_KEYS), step > 0, plan.smooth)

    def _copy(self, ctx: AttentionContext, name: str, source, size: int) -> cute.Pointer:
        """Copy atoms of scales to their columns; the first of them."""
        target = ctx.tmem + self.plan.tmem.column(name)
        for atom in range(size // ATOM_BYTES):
            descriptor = operand_descriptor(source + atom * ATOM_BYTES)
            copy_scales(target + atom * ATOM_COLUMNS, descriptor)
        return target

    def _multiply(self, target: cute.Pointer, a, b, columns: int, step: int, scales, adds) -> None:
        """The product of a step of K; its scales are a word of each row."""
        places = (
            scales[0] + step * (GROUP_QUERIES // WORD_ROWS),
            scales[1] + step * (columns // WORD_ROWS),
        )
        descriptor = packed_product(GROUP_QUERIES, columns)
        multiply_scaled(target, a, b, descriptor, *places, adds, "mxf4nvf4")
