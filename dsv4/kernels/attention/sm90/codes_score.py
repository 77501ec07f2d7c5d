"""Score warpgroup of the kernel of FP8 codes: S = Q K^T, softmax, P to shared memory."""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.attention.entry_codes import OFFSET
from dsv4.kernels.attention.key_span import BOTH_BRANCHES, KeySpan
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.sm90.codes_context import (
    CODE_STEP,
    ROPE_STEP,
    rope_scores_mma,
    scores_mma,
)
from dsv4.kernels.attention.sm90.codes_plan import PLACES, QUERY_SCALES, CodesPlan
from dsv4.kernels.attention.sm90.codes_queries import CodeQueries
from dsv4.kernels.attention.sm90.codes_softmax import (
    follow_maxima,
    key_scales,
    scale_scores,
    store_weights,
    weight_places,
)
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows, set_bias
from dsv4.kernels.attention.sm90.paged_score import PagedScoreWarpgroup
from dsv4.kernels.attention.sm90.plan import HEADS, KEYS
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.wgmma import gemm

# Products over codes that are left when the previous tile's PV gets its turn.
EARLY_STEPS = 6


class ScoreFragments(NamedTuple):
    """Operands and state of a thread of the score warpgroup."""

    thread: cutlass.Int32
    lane: cutlass.Int32
    row: cutlass.Int32  # first of the thread's two, 8 apart
    q: cute.Tensor
    k: cute.Tensor
    q_rope: cute.Tensor
    k_rope: cute.Tensor
    s: cute.Tensor
    rows: Rows


class CodesScoreWarpgroup(PagedScoreWarpgroup):
    """Producer of P of every key tile, and of row statistics of every work tile."""

    def __init__(self, config: PagedFmhaConfig, plan: CodesPlan, combine: HeadsMCombine):
        super().__init__(config, plan, combine)
        self.queries = CodeQueries(plan, config.num_query_heads)

    def _fragments(self, ctx: HeadsMContext) -> ScoreFragments:
        thread, lane, smem = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx(), ctx.smem
        codes, rope = scores_mma(), rope_scores_mma()
        of_codes, of_rope = codes.get_slice(0), rope.get_slice(0)
        return ScoreFragments(
            thread=thread,
            lane=lane,
            row=thread // 32 * 16 + lane // 4,
            q=of_codes.make_fragment_A(of_codes.partition_A(smem.q_codes)),
            k=of_codes.make_fragment_B(of_codes.partition_B(smem.k_codes)),
            q_rope=of_rope.make_fragment_A(of_rope.partition_A(smem.q_rope)),
            k_rope=of_rope.make_fragment_B(of_rope.partition_B(smem.k_rope)),
            s=codes.make_fragment_C(codes.partition_shape_C((HEADS, KEYS))),
            rows=self._make_rows(),
        )

    @cute.jit
    def score(self, ctx: HeadsMContext):
        """S = Q K^T and the softmax of every key tile; the row statistics of every work tile."""
        f = self._fragments(ctx)
        lane, rows = f.lane, f.rows
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        phase, rows_phase = cutlass.Int32(0), cutlass.Int32(1)
        kv, tiles = ctx.pipes.kv.consumer(), cutlass.Int32(0)
        while index < stop:
            coord = self.combine.coord(ctx.tiling, index)
            head = coord.head + f.row

            # ---- prologue ----
            ctx.pipes.span.wait(phase)
            span = KeySpan.load(ctx.smem.span)
            ctx.pipes.span.release(lane)
            phase ^= 1
            count, has_both = span.count, span.has(BOTH_BRANCHES)
            gate_offset = set_bias(
                rows, self.is_gate, has_both, ctx.operands.sink_logits, head, self.num_query_heads
            )
            rows.reset()
            self._load_scales(ctx, f, coord)
            self.queries.load(ctx, coord, f.thread, lane)
            self._await_scales(ctx, f)

            # ---- key tiles ----
            # PV of a tile gets its turn when the next tile's QK is all but over: so it fills the
            # tensor cores during the softmax. Unless that tile is not there yet.
            is_held = cutlass.Boolean(False)
            for _ in cutlass.range(count, unroll=1):
                tile_info = self._multiply_keys(ctx, f, tiles, kv, is_held)
                self._softmax(ctx, f, tiles, kv, tile_info)
                is_held = cutlass.Boolean(True)
                tiles += 1
                kv = ctx.pipes.kv.next(kv)
            if is_held:
                self._commit_p(ctx, tiles - 1, lane)

            # ---- epilogue ----
            self._reduce(ctx, rows)
            ctx.pipes.rows.acquire(rows_phase)
            rows_phase ^= 1
            if lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    rows.row_max[r] = rows.row_max[r] - OFFSET
                sinks = self._sinks(ctx, f, None)
                self.statistics.finish(ctx, coord, f.row, rows, gate_offset, sinks)
            ctx.pipes.rows.commit(lane)
            index += step

    def _commit_p(self, ctx: HeadsMContext, tile, lane) -> None:
        """Give a tile's P, which has been stored, to the output warpgroups."""
        ctx.pipes.p.at(tile % PLACES).commit(lane)

    @cute.jit
    def _multiply_keys(self, ctx: HeadsMContext, f: ScoreFragments, tiles, kv: Cursor, is_held):
        """S of a key tile, times no scale of rows; returns what is said of it.

        The second terms come first: the tensor core keeps 14 bits of a sum, and theirs is small.
        """
        if is_held:  # noqa: SIM102 dynamic, both
            if not cute.arch.vote_all_sync(ctx.pipes.kv.is_full(kv)):
                self._commit_p(ctx, tiles - 1, f.lane)
                is_held = cutlass.Boolean(False)
        ctx.pipes.kv.wait(kv)
        steps = self.plan.codes // CODE_STEP
        order = [(term, i) for term in reversed(range(self.plan.terms)) for i in range(steps)]
        k = f.k[None, None, None, kv.stage]
        warpgroup.fence()
        for n in cutlass.range_constexpr(len(order)):
            if cutlass.const_expr(n == len(order) - EARLY_STEPS):
                warpgroup.commit_group()
            term, i = order[n]
            gemm(scores_mma, f.s, f.q[None, None, None, term], k, [i], 0, n > 0)
        warpgroup.commit_group()
        # Beside products, loads from shared memory take long.
        tile_info = self._tile_info(ctx, f, kv)
        scales = key_scales(ctx.smem, kv.stage, f.lane)
        warpgroup.wait_group(1)
        if is_held:
            self._commit_p(ctx, tiles - 1, f.lane)
        warpgroup.wait_group(0)
        scale_scores(f.s, scales)
        warpgroup.fence()
        k = f.k_rope[None, None, None, kv.stage]
        gemm(rope_scores_mma, f.s, f.q_rope, k, range(ROPE_DIM // ROPE_STEP), 0, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        return tile_info

    def _tile_info(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor):
        words = super()._tile_info(ctx, f, kv)
        for r in range(2):
            f.rows.scale[r] = f.rows.scale[r] * ctx.smem.row_inputs[QUERY_SCALES, f.row + 8 * r]
        return words

    @cute.jit
    def _softmax(self, ctx: HeadsMContext, f: ScoreFragments, tiles, kv: Cursor, tile_info):
        """P of a key tile, and what the older accumulators are to be scaled by, to shared
        memory."""
        is_window = self._mask(ctx, f, kv, tile_info)
        rows, place = f.rows, tiles % PLACES
        scales = key_scales(ctx.smem, kv.stage, f.lane)
        bias = [cutlass.select_(is_window, rows.bias[r, 1], rows.bias[r, 0]) for r in range(2)]
        shifts = follow_maxima(f.s, scales, rows, bias, self.is_gate)
        ctx.pipes.p.at(place).acquire(tiles // PLACES % 2 ^ 1)
        targets = weight_places(ctx.smem, place, f.row, f.lane, self.plan.terms)
        store_weights(f.s, scales, rows, shifts, targets, self.plan.terms)
        rescale, changes = ctx.smem.rescale, ctx.smem.changes
        changed = cute.arch.fmin(rows.rescale[0], rows.rescale[1]) < 1.0
        changed = cute.arch.vote_any_sync(changed)
        if changed and f.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                rescale[f.row + 8 * r, place] = rows.rescale[r]
        if f.lane == 0:
            changes[f.thread // 32, place] = cutlass.Int32(changed)
        # Products read P through the async proxy.
        cute.arch.fence_view_async_shared()
