"""Load warp of the swap-AB kernel: Q and key tiles by TMA."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.key_span import HIT, KeySpan, SeqlenInfo
from dsv4.kernels.attention.sm90.kv_source import DenseKv, KeyTile, Slot, speculate_first_tile
from dsv4.kernels.attention.sm90.plan import KEYS, SwapAbPlan
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import prefetch_descriptors, tma_load, tma_prefetch


class LoadWarp:
    """Producer of Q and of the KV ring."""

    def __init__(self, plan: SwapAbPlan):
        self.plan = plan

    @cute.jit
    def load(self, ctx: SwapAbContext, q_map, source: DenseKv, seqlens: SeqlenInfo):
        """Load Q and the key tiles of every work tile."""
        lane = cute.arch.lane_idx()
        pipe, tiling, per_tile = ctx.pipes.kv, ctx.tiling, self.plan.slots_per_tile
        prefetch_descriptors((q_map, source.compressed, source.window))
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        head, split, token = tiling.coordinates(index)
        speculative = speculate_first_tile(seqlens, token, split, tiling.by_splits, KEYS)
        # This may overlap the launch before: see `kit.pdl`.
        if lane == 0:
            tma_prefetch(q_map, [0, head, 0, token])
            if speculative.exists():
                for part in cutlass.range_constexpr(per_tile):
                    source.prefetch(speculative.tile, token, part * self.plan.slot_chunks)
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        pdl.wait_for_previous_launch()
        kv, phase = pipe.producer(), cutlass.Int32(1)
        while index < stop:
            ctx.pipes.q.acquire(phase)
            if lane == 0:
                ctx.pipes.q.expect(self.plan.q_bytes)
                tma_load(q_map, ctx.smem.q_start, [0, head, 0, token], ctx.pipes.q.full)
                if speculative.exists():
                    # These slots are empty: they have not been used before.
                    for part in cutlass.range_constexpr(per_tile):
                        self._load_slot(ctx, source, speculative.tile, token, part, part)
            if speculative.exists():
                kv = ctx.pipes.kv.skip(kv, per_tile)
            speculative = speculative.none()
            phase ^= 1
            ctx.pipes.span.wait(phase)
            span = KeySpan.load(ctx.smem.span)
            ctx.pipes.span.release(lane)
            done = cutlass.select_(span.has(HIT), cutlass.Int32(1), cutlass.Int32(0))
            for n in cutlass.range(done, span.count, unroll=1):
                tile = KeyTile.of_span(span, span.first + n, KEYS)
                for part in cutlass.range_constexpr(per_tile):
                    ctx.pipes.kv.acquire(kv)
                    if lane == 0:
                        self._load_slot(ctx, source, tile, token, part, kv.stage)
                    kv = ctx.pipes.kv.skip(kv, 1)
            index += step
            head, _, token = ctx.tiling.coordinates(index)
        # Not earlier: the next launch's prefetches would delay these loads.
        pdl.launch_dependents()

    @cute.jit
    def _load_slot(
        self, ctx: SwapAbContext, source: DenseKv, tile, token, part: cutlass.Constexpr, stage
    ):
        """Fetch some columns of a key tile; one thread calls this."""
        slot = Slot(
            full=ctx.pipes.kv.full + stage,
            target=ctx.smem.kv_start + stage * KEYS * self.plan.slot_dim,
            chunk=part * self.plan.slot_chunks,
        )
        ctx.pipes.kv.expect(stage, self.plan.slot_bytes)
        source.load(tile, token, slot)
