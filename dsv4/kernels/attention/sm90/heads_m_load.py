"""Load and prefetch warps of the heads-in-M kernel: Q and key tiles by TMA."""

import cutlass
from cutlass import cute
from cutlass.experimental.primitives import mbarrier_try_wait_parity

from dsv4.kernels.attention.key_span import HIT, KeySpan, SeqlenInfo
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.kv_source import (
    DenseKv,
    KeyTile,
    Slot,
    SpeculativeTile,
    speculate_first_tile,
)
from dsv4.kernels.attention.sm90.plan import ELEMENT_BYTES, HALVES, HEADS, KEYS, HeadsMPlan
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.scheduler import Throttle, lockstep
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load, tma_prefetch

WINDOW_FLAG = 128
# Pause between two prefetches of a CTA that waits for the launch before, in nanoseconds.
PREFETCH_PAUSE = 100


class LoadWarp:
    """Producer of Q and of the KV ring.

    Args:
        has_even_tiles: whether head tiles divide the heads evenly.
    """

    def __init__(self, plan: HeadsMPlan, has_even_tiles: bool):
        self.plan = plan
        self.has_even_tiles = has_even_tiles

    @cute.jit
    def load(self, ctx: HeadsMContext, q_map, source: DenseKv, seqlens: SeqlenInfo):
        """Load what every work tile needs."""
        lane = cute.arch.lane_idx()
        tiling, pipes = ctx.tiling, ctx.pipes
        prefetch_descriptors((q_map, source.compressed, source.window))
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        head_tile, split, token = tiling.coordinates(index)
        speculative = speculate_first_tile(seqlens, token, split, tiling.by_splits, KEYS)
        # A CTA that starts when the launch before it is over would only load everything twice.
        if tiling.leaves_room and lane == 0:
            self._prefetch(q_map, source, head_tile, token, speculative)
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        # The warps that compute touch memory only after data that this one and the scheduler warp
        # fetch.
        pdl.wait_for_previous_launch()
        if cutlass.const_expr(ctx.throttle is Throttle.TWO_HALF_TILES):  # noqa: SIM102 static, dynamic
            if lane == 0:
                cute.arch.mbarrier_arrive(pipes.inputs_ready.full)
        q_phase, span_phase = cutlass.Int32(1), cutlass.Int32(0)
        kv = ctx.pipes.kv.producer()
        while index < stop:
            # ---- Q: one part passes through the ring, the other needs the last QK to be over ----
            kv = self._send_q_registers(ctx, q_map, head_tile, token, lane, kv)
            ctx.pipes.q.acquire(q_phase)
            q_phase ^= 1
            if lane == 0:
                self._load_q_smem(ctx, q_map, head_tile, token)
            if speculative.exists():
                # This stage is empty: it has not been used before. The half that QK reads first
                # comes first, and behind Q: QK starts before the other one is there.
                if cutlass.const_expr(ctx.throttle is Throttle.CLUSTER_LOCKSTEP):
                    lockstep(ctx.pipes.lockstep.full, kv, lane)
                if lane == 0:
                    for half in cutlass.range_constexpr(1, -1, -1):
                        self._load_half(ctx, source, speculative.tile, token, kv, half)
                kv = ctx.pipes.kv.next(kv)

            if cutlass.const_expr(self.plan.q_register_dim > 0):
                # All CTAs start at once. Where neighbours fetch the same keys, Q is much of what
                # they fetch first, and key tiles beside it would make it late.
                has_neighbours = tiling.head_tiles * tiling.column_slices > 1
                is_first = index == cute.arch.block_idx()[0]
                if is_first and has_neighbours and not tiling.leaves_room:
                    start = ctx.pipes.kv.consumer()
                    cute.arch.mbarrier_wait(ctx.pipes.kv.full + 1, start.phase)
                    ctx.pipes.q.wait(start.phase)

            # ---- key tiles ----
            ctx.pipes.span.wait(span_phase)
            span_phase ^= 1
            span = KeySpan.load(ctx.smem.span)
            ctx.pipes.span.release(lane)
            speculative = speculative.none()
            done = cutlass.select_(span.has(HIT), cutlass.Int32(1), cutlass.Int32(0))
            for n in cutlass.range(done, span.count, unroll=1):
                self._load_tile(ctx, source, span, span.first + n, token, lane, kv)
                kv = ctx.pipes.kv.next(kv)
            index += step
            head_tile, split, token = ctx.tiling.coordinates(index)

    @cute.jit
    def _send_q_registers(self, ctx: HeadsMContext, q_map, head_tile, token, lane, kv: Cursor):
        """Send the register columns of Q through a stage of the KV ring, in the place of K's."""
        plan = self.plan
        if cutlass.const_expr(plan.q_register_dim > 0):
            chunks = plan.head_dim // plan.chunk
            first = plan.q_smem_dim // plan.chunk
            for half in cutlass.range_constexpr(HALVES):
                begin, end = max(first, half * chunks // 2), (half + 1) * chunks // 2
                slot = ctx.pipes.kv.slot(kv, half)
                full = ctx.pipes.kv.full + slot
                chunk_elements = HEADS * plan.chunk
                ctx.pipes.kv.acquire(kv, half)
                if cutlass.const_expr(ctx.throttle is Throttle.CLUSTER_LOCKSTEP and half == 0):
                    lockstep(ctx.pipes.lockstep.full, kv, lane)
                if lane == 0:
                    ctx.pipes.kv.expect(slot, (end - begin) * chunk_elements * ELEMENT_BYTES)
                    for chunk in cutlass.range_constexpr(begin, end):
                        start = (kv.stage * chunks + chunk) * chunk_elements
                        target = ctx.smem.kv_start + start
                        place = self._q_coordinates(head_tile, chunk, token)
                        tma_load(q_map, target, place, full)
            kv = ctx.pipes.kv.next(kv)
        return kv

    def _load_q_smem(self, ctx: HeadsMContext, q_map, head_tile, token):
        """Fetch the columns of Q that stay in shared memory; one thread calls this."""
        ctx.pipes.q.expect(self.plan.q_bytes)
        for chunk in range(self.plan.q_smem_dim // self.plan.chunk):
            target = ctx.smem.q_start + chunk * HEADS * self.plan.chunk
            tma_load(q_map, target, self._q_coordinates(head_tile, chunk, token), ctx.pipes.q.full)

    @cute.jit
    def _load_tile(
        self, ctx: HeadsMContext, source: DenseKv, span: KeySpan, i, token, lane, kv: Cursor
    ):
        """Fetch a key tile of a token into a stage, each half when it is free; the one that QK
        reads first comes first."""
        pipe = ctx.pipes.kv
        tile = KeyTile.of_span(span, i, KEYS)
        before = pipe.previous(Cursor(kv.stage, kv.phase ^ 1))
        for half in cutlass.range_constexpr(1, -1, -1):
            pipe.acquire(kv, half)
            if cutlass.const_expr(ctx.throttle is Throttle.CLUSTER_LOCKSTEP and half == 1):
                lockstep(ctx.pipes.lockstep.full, kv, lane)
            if cutlass.const_expr(ctx.throttle is Throttle.TWO_HALF_TILES):
                pipe.wait(before, half)
            if lane == 0:
                if cutlass.const_expr(half == 1):
                    self.describe_tile(ctx, span, i, kv.stage)
                self._load_half(ctx, source, tile, token, kv, half)

    @cute.jit
    def _load_half(
        self, ctx: HeadsMContext, source: DenseKv, tile, token, kv, half: cutlass.Constexpr
    ):
        """Fetch half of the columns of a key tile; one thread calls this."""
        index = ctx.pipes.kv.slot(kv, half)
        slot = Slot(
            full=ctx.pipes.kv.full + index,
            target=ctx.smem.kv_start + index * KEYS * self.plan.half_dim,
            chunk=half * (self.plan.half_dim // self.plan.chunk),
        )
        ctx.pipes.kv.expect(index, self.plan.half_bytes)
        source.load(tile, token, slot)

    @cute.jit
    def describe_tile(self, ctx: HeadsMContext, span: KeySpan, i, stage):
        """Store how many keys of the key tile in a stage are valid, and of which branch they
        are."""
        is_window, _, valid = span.tile(i, KEYS)
        tile_info = ctx.smem.tile_info
        tile_info[stage] = valid + cutlass.select_(
            is_window, cutlass.Int32(WINDOW_FLAG), cutlass.Int32(0)
        )

    @cute.jit
    def _prefetch(self, q_map, source: DenseKv, head_tile, token, speculative: SpeculativeTile):
        """Bring Q and the speculative first tile into L2; one thread calls this.

        This may overlap the launch before, which may write them: see `kit.pdl`.
        """
        for chunk in cutlass.range_constexpr(self.plan.head_dim // self.plan.chunk):
            tma_prefetch(q_map, self._q_coordinates(head_tile, chunk, token))
        if speculative.exists():
            for half in cutlass.range_constexpr(1, -1, -1):
                chunk = half * (self.plan.half_dim // self.plan.chunk)
                source.prefetch(speculative.tile, token, chunk)

    @cute.jit
    def prefetch_until_ready(self, ctx: HeadsMContext, q_map, source: DenseKv):
        """Prefetch warp: bring what comes first into L2, box by box, until the launch before is
        over.

        A CTA that starts early finds DRAM idle; one that starts late soon stops: all that it asks
        for twice is in the way of its loads.
        """
        lane = cute.arch.lane_idx()
        index, _, _ = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        head_tile, _, token = ctx.tiling.coordinates(index)
        chunks = self.plan.head_dim // self.plan.chunk
        half_chunks = self.plan.half_dim // self.plan.chunk
        first_tile = KeyTile(False, 0, 0)
        is_over = cutlass.Boolean(ctx.tiling.leaves_room)
        box = cutlass.Int32(0)
        while box < 2 + chunks and not is_over:
            if lane == 0:
                if box < 2:
                    source.prefetch(first_tile, token, box * half_chunks)
                else:
                    tma_prefetch(q_map, self._q_coordinates(head_tile, box - 2, token))
            box += 1
            is_over = cute.arch.vote_any_sync(
                mbarrier_try_wait_parity(ctx.pipes.inputs_ready.full, 0, time_limit=PREFETCH_PAUSE)
            )

    def _q_coordinates(self, head_tile, chunk, token):
        row, tile = (0, head_tile) if self.has_even_tiles else (head_tile * HEADS, 0)
        return [0, row, chunk, tile, token]
