"""Score warpgroup of the heads-in-M kernel: S = Q K^T, softmax, P to shared memory."""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.key_span import BOTH_BRANCHES, MISS
from dsv4.kernels.attention.mask import mask_tail
from dsv4.kernels.attention.sm90.gather_role import load_span, told_index
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import DTYPE, HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_epilogue import RowStatistics, load_sinks
from dsv4.kernels.attention.sm90.heads_m_load import WINDOW_FLAG
from dsv4.kernels.attention.sm90.heads_m_softmax import Rows, set_bias, softmax
from dsv4.kernels.attention.sm90.plan import HALVES, HEADS, KEYS, HeadsMPlan
from dsv4.kernels.attention.softmax import LOG2_E
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.reduce import quad_sum
from dsv4.kernels.kit.swizzle import clear_rows
from dsv4.kernels.kit.wgmma import a_steps, by_row, gemm, make_mma

# K steps of QK that are left when the previous tile's PV gets its turn.
EARLY_STEPS = 8
# K step of QK at which the previous tile's P is stored.
STORE_STEP = 3
# K steps between testing an mbarrier and needing the answer.
TEST_STEPS = 2


class ScoreFragments(NamedTuple):
    """Operands and state of a thread of the score warpgroup."""

    thread: cutlass.Int32
    lane: cutlass.Int32
    row: cutlass.Int32  # first of the thread's two, 8 apart
    q: cute.Tensor
    q_registers: cute.Tensor
    k: cute.Tensor
    s: cute.Tensor
    p: cute.Tensor
    rows: Rows


class ScoreWarpgroup:
    """Producer of P of every key tile, one ahead of the output warpgroups, and of row statistics
    of every work tile."""

    statistics_type = RowStatistics
    is_paged = False  # no first tile is speculative where it is

    def __init__(self, config: FmhaConfig, plan: HeadsMPlan, combine: HeadsMCombine):
        self.num_query_heads = config.num_query_heads
        self.is_gate = config.sink_mode == "swa_gate"
        self.scale_log2 = config.scale * LOG2_E
        self.plan = plan
        self.combine = combine
        self.statistics = self.statistics_type(config, combine)

    def _qk_mma(self):
        return make_mma(DTYPE, (HEADS, KEYS), OperandMajorMode.K)

    def _qk_register_mma(self):
        return make_mma(DTYPE, (HEADS, KEYS), OperandMajorMode.K, True)

    def _fragments(self, ctx: HeadsMContext) -> ScoreFragments:
        thread = cute.arch.thread_idx()[0] % 128
        lane = cute.arch.lane_idx()
        mma, register_mma = self._qk_mma(), self._qk_register_mma()
        mma_slice = mma.get_slice(0)
        q_shape = register_mma.partition_shape_A((HEADS, max(self.plan.q_register_dim, 16)))
        s = mma.make_fragment_C(mma.partition_shape_C((HEADS, KEYS)))
        return ScoreFragments(
            thread=thread,
            lane=lane,
            row=thread // 32 * 16 + lane // 4,
            q=mma_slice.make_fragment_A(mma_slice.partition_A(ctx.smem.q)),
            q_registers=register_mma.make_fragment_A(q_shape),
            k=mma_slice.make_fragment_B(mma_slice.partition_B(ctx.smem.k)),
            s=s,
            p=cute.make_rmem_tensor_like(s, DTYPE),
            rows=self._make_rows(),
        )

    def _make_rows(self) -> Rows:
        return Rows.make()

    def _load_scales(self, ctx: HeadsMContext, f: ScoreFragments, coord) -> None:
        """Load what else the scores of a work tile's rows are multiplied by: nothing."""

    def _await_scales(self, ctx: HeadsMContext, f: ScoreFragments) -> None:
        """Wait for what `_load_scales` has asked for: nothing."""

    def _ask_for_sinks(self, ctx: HeadsMContext, f: ScoreFragments, head):
        """Load the sinks of the thread's rows. At the end of a work tile, loads would delay the
        output, and the next work tile with it."""
        return load_sinks(ctx.operands.sink_logits, head, self.num_query_heads)

    def _sinks(self, ctx: HeadsMContext, f: ScoreFragments, sinks):
        """What has been asked for."""
        return sinks

    @cute.jit
    def _reduce(self, ctx: HeadsMContext, rows: Rows):
        """Reduce what the quad of a row has of it."""
        for r in cutlass.range_constexpr(2):
            rows.row_sum[r] = quad_sum(rows.row_sum[r])

    @cute.jit
    def score(self, ctx: HeadsMContext):
        """S = Q K^T and the softmax of every key tile; the row statistics of every work tile."""
        f = self._fragments(ctx)
        lane, rows = f.lane, f.rows
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        phase, rows_phase = cutlass.Int32(0), cutlass.Int32(1)
        kv, tiles = ctx.pipes.kv.consumer(), cutlass.Int32(0)
        index = told_index(ctx, phase, index)
        while index < stop:
            coord = self.combine.coord(ctx.tiling, index)
            head = coord.head + f.row

            # ---- prologue ----
            span = load_span(ctx, phase, lane)
            own_ctx = ctx.of_token(span)
            count, is_miss = span.count, span.has(MISS)
            has_both = span.has(BOTH_BRANCHES)
            gate_offset = set_bias(
                f.rows, self.is_gate, has_both, ctx.operands.sink_logits, head,
                self.num_query_heads,
            )  # fmt: skip
            f.rows.reset()
            self._load_scales(ctx, f, coord)
            sinks = self._ask_for_sinks(ctx, f, head)
            kv = self._load_q_registers(ctx, f, kv)
            ctx.pipes.q.wait(phase)
            phase ^= 1
            self._await_scales(ctx, f)
            if cutlass.const_expr(not self.is_paged):  # noqa: SIM102 static, then dynamic
                if is_miss:
                    for half in cutlass.range_constexpr(HALVES):
                        ctx.pipes.kv.wait(kv, half)
                        ctx.pipes.kv.release(kv, lane, half, ctx.tiling.column_slices)
                    kv = ctx.pipes.kv.next(kv)

            # ---- key tiles ----
            # P waits in registers until the next tile's QK is under way, and PV until it is over:
            # so PV fills the tensor cores during the softmax, and storing P delays nothing. Unless
            # that tile is not there yet.
            is_held, is_here = cutlass.Boolean(False), cutlass.Boolean(False)
            for n in cutlass.range(count, unroll=1):
                tile_info, is_here = self._multiply_keys(ctx, f, tiles, kv, is_held, is_here)
                if n == count - 1:
                    ctx.pipes.q.release(lane)
                self._softmax(ctx, f, kv, tile_info)
                is_held = cutlass.Boolean(True)
                tiles += 1
                kv = ctx.pipes.kv.next(kv)
            if is_held:
                ctx.pipes.p.acquire(tiles % 2)
                self._store_p(ctx, f)
                ctx.pipes.pv_turn.at(1 - tiles % 2).arrive(lane)
            if count == 0:
                ctx.pipes.q.release(lane)

            # ---- epilogue ----
            self._reduce(ctx, rows)
            ctx.pipes.rows.acquire(rows_phase)
            rows_phase ^= 1
            if lane % 4 == 0:
                own_sinks = self._sinks(ctx, f, sinks)
                self.statistics.finish(own_ctx, coord, f.row, rows, gate_offset, own_sinks)
            ctx.pipes.rows.commit(lane)
            index = told_index(ctx, phase, index + step)

    @cute.jit
    def _multiply_keys(
        self, ctx: HeadsMContext, f: ScoreFragments, tiles, kv: Cursor, is_held, is_here
    ):
        """S of a key tile; returns what `smem.tile_info` says of it, and whether the next tile is
        there.

        P of the previous tile is stored meanwhile, and its PV gets its turn, if it is held back.
        """
        turn = ctx.pipes.pv_turn.at(1 - tiles % 2)
        if not is_here:
            if is_held and not self._has_landed(ctx, kv):
                ctx.pipes.p.acquire(tiles % 2)
                self._store_p(ctx, f)
                turn.arrive(f.lane)
                is_held = cutlass.Boolean(False)
            ctx.pipes.kv.wait(kv, 1)
        is_held = self._issue_scores(ctx, f, tiles, kv, is_held)

        # Beside PV, loads from shared memory take long: this one is under way before the softmax
        # needs it.
        tile_info = self._tile_info(ctx, f, kv)
        is_next_here = self._has_landed(ctx, ctx.pipes.kv.next(kv))
        warpgroup.wait_group(1)
        if is_held:
            turn.arrive(f.lane)
        warpgroup.wait_group(0)
        return tile_info, is_next_here

    @cute.jit
    def _softmax(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor, tile_info):
        """P of a key tile, and what the older accumulators are to be scaled by, in registers."""
        is_window = self._mask(ctx, f, kv, tile_info)
        softmax(f.s, f.rows, is_window, self.scale_log2, self.is_gate)
        f.p.store(f.s.load().to(DTYPE))

    def _tile_info(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor):
        """What the load warp says of the key tile in a stage."""
        return ctx.smem.tile_info[kv.stage]

    @cute.jit
    def _mask(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor, tile_info):
        """Mask the scores of rows that are no keys, and clear these; returns whether the tile is
        one of the window."""
        valid = tile_info % WINDOW_FLAG
        if valid < KEYS:
            mask_tail(cute.group_modes(by_row(f.s), 1, 3), valid, f.lane)
            start = ctx.smem.kv_start + kv.stage * KEYS * self.plan.head_dim
            clear_rows(start, KEYS, self.plan.head_dim, valid, self.plan.chunk, f.thread, DTYPE)
        return tile_info >= WINDOW_FLAG

    @cute.jit
    def _store_p(self, ctx: HeadsMContext, f: ScoreFragments):
        """Store P, and its factors, for PV to read.

        A thread of an output warpgroup reads what the thread of the same number stores here: P is
        not rearranged (`kit.wgmma.a_steps`).
        """
        p = a_steps(f.p)
        for i in cutlass.range_constexpr(KEYS // 16):
            cute.autovec_copy(p[None, i], ctx.smem.p[None, f.thread, i])
        cute.autovec_copy(f.rows.rescale, ctx.smem.rescale[None, f.thread])
        ctx.pipes.p.commit(f.lane)

    @cute.jit
    def _load_q_registers(self, ctx: HeadsMContext, f: ScoreFragments, kv: Cursor):
        """Read the register columns of Q from the ring stage that brought them, and free it."""
        if cutlass.const_expr(self.plan.q_register_dim > 0):
            mma = self._qk_register_mma()
            load = cute.make_tiled_copy_A(
                cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), DTYPE), mma
            )
            load_slice = load.get_slice(f.thread)
            source = load_slice.partition_S(ctx.smem.k)
            target = load_slice.retile(f.q_registers)
            first = self.plan.q_smem_dim // 16
            for half in cutlass.range_constexpr(HALVES):
                ctx.pipes.kv.wait(kv, half)
            for i in cutlass.range_constexpr(self.plan.q_register_dim // 16):
                cute.copy(load, source[None, None, first + i, kv.stage], target[None, None, i])
            # An arrival overtakes loads on their way: the next TMA would then be what they read.
            cute.arch.fence_view_async_shared()
            for half in cutlass.range_constexpr(HALVES):
                ctx.pipes.kv.release(kv, f.lane, half, ctx.tiling.column_slices)
            kv = ctx.pipes.kv.next(kv)
        return kv

    @cute.jit
    def _has_landed(self, ctx: HeadsMContext, kv: Cursor):
        """Whether the half of a key tile is there that QK reads first."""
        return cute.arch.vote_all_sync(ctx.pipes.kv.is_full(kv, 1))

    @cute.jit
    def _issue_scores(
        self, ctx: HeadsMContext, f: ScoreFragments, tiles, kv: Cursor, is_held: cutlass.Boolean
    ):
        """S = Q K^T in two groups; returns whether PV of the previous tile still waits.

        When the first group is over, PV of the previous tile may start: the output warpgroups take
        about as long to do so as the second group takes to end. The second half of the columns
        comes first: it is loaded first, and the other may still be on its way.
        """
        steps, smem_steps = self.plan.head_dim // 16, self.plan.q_smem_dim // 16
        middle, early = steps // 2, steps - min(EARLY_STEPS, steps // 2)
        store = min(STORE_STEP, early - 1)
        # Products with Q in registers first: those with Q in shared memory queue up without a warp.
        order = [*range(middle, steps), *range(smem_steps, middle), *range(min(smem_steps, middle))]
        rest = ctx.pipes.kv.at(ctx.pipes.kv.slot(kv, 0))
        k = f.k[None, None, None, kv.stage]
        is_fenced = ctx.pipes.kv.is_fenced
        if cutlass.const_expr(is_fenced):
            # One fence for all that is there; behind the stores of P it would wait for them.
            is_rest_here = rest.is_full(kv.phase)
            cute.arch.fence_view_async_shared()
        warpgroup.fence()
        for i in cutlass.range_constexpr(steps):
            if cutlass.const_expr(i == early):
                warpgroup.commit_group()
            if cutlass.const_expr(i == max(store - TEST_STEPS, 0)):
                is_free = ctx.pipes.p.is_empty(tiles % 2)
            if cutlass.const_expr(i == store):  # noqa: SIM102 static, then dynamic
                if is_held:
                    if not cute.arch.vote_all_sync(is_free):
                        ctx.pipes.p.acquire(tiles % 2)
                    self._store_p(ctx, f)
            if cutlass.const_expr(i == max(middle - TEST_STEPS, 0) and not is_fenced):
                is_rest_here = rest.is_full(kv.phase)
            if cutlass.const_expr(i == middle):  # noqa: SIM102 static, then dynamic
                if not cute.arch.vote_all_sync(is_rest_here):
                    must_wait = is_held
                    if cutlass.const_expr(is_fenced):
                        # The first test was before the stores of P.
                        is_rest_here = rest.is_full(kv.phase)
                        must_wait = is_held and not cute.arch.vote_all_sync(is_rest_here)
                    if must_wait:
                        ctx.pipes.pv_turn.at(1 - tiles % 2).arrive(f.lane)
                        is_held = cutlass.Boolean(False)
                    rest.wait(kv.phase)
            step = order[i]
            if cutlass.const_expr(step < smem_steps):
                gemm(self._qk_mma, f.s, f.q, k, [step], 0, i > 0)
            else:
                gemm(self._qk_register_mma, f.s, f.q_registers, k, [step], smem_steps, i > 0)
        warpgroup.commit_group()
        return is_held
