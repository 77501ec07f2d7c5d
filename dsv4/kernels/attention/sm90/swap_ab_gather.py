"""Gather warps of the paged swap-AB kernel: key spans, Q by TMA, rows of pages."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.gather_role import GatherRole
from dsv4.kernels.attention.sm90.gather_rows import Bf16Rows
from dsv4.kernels.attention.sm90.gather_slots import SwapAbSlots
from dsv4.kernels.attention.sm90.plan import CHUNK, PagedSwapAbPlan
from dsv4.kernels.attention.sm90.swap_ab_context import SwapAbContext
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tma import tma_load


class GatherWarps(GatherRole):
    """Producer of Q and of the KV ring. Each warp gathers some rows of every key tile."""

    def __init__(self, plan: PagedSwapAbPlan, is_gate: bool):
        self.plan = plan
        self.is_gate = is_gate
        if plan.is_fp8:
            staged, warps = range(plan.pieces), plan.warps["gather"].count
            self.rows = Fp8Rows(plan.head_dim, plan.slot_dim, staged, plan.ahead, warps)
        else:
            self.rows = Bf16Rows(plan.slot_dim, CHUNK)

    @cute.jit
    def gather(self, ctx: SwapAbContext, q_map, keys: PagedKeys):
        """Load what every work tile needs."""
        warp, lane = self._begin(q_map)
        index, stop, step = ctx.scheduler.range_of(ctx.tiling.first(cute.arch.block_idx()[0]))
        pieces, known = cutlass.Int32(0), index
        if cutlass.const_expr(ctx.tiling.has_pieces):
            index, pieces = self._take_piece(ctx, self._find_pieces(ctx, keys, lane))
            # It may have none.
            known = cutlass.min(index, stop - 1)
        _, split, token = ctx.tiling.coordinates(known)
        early = self._find_early(ctx, keys, token, split, warp, lane)
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        pdl.wait_for_previous_launch()
        phase = cutlass.Int32(1)
        kv = ctx.pipes.kv.producer()
        slots = SwapAbSlots(ctx, tuple(range(self.plan.slots_per_tile)))
        while index < stop:
            head, _, token = ctx.tiling.coordinates(index)
            if warp == 0:
                ctx.pipes.q.acquire(phase)
                if lane == 0:
                    ctx.pipes.q.expect(self.plan.q_bytes)
                    tma_load(q_map, ctx.smem.q_start, [0, head, 0, token], ctx.pipes.q.full)
            span, word = self._find_keys(ctx, keys, index, phase, warp, lane, early)
            early = early.none()
            phase ^= 1
            kv = self.rows.gather_tiles(slots, keys, span, token, word, warp, lane, kv)
            if cutlass.const_expr(ctx.tiling.has_pieces):
                index, pieces = self._take_piece(ctx, pieces)
            else:
                index += step
        self._end(ctx, phase, stop, warp, lane)
        # Not earlier: the next launch would delay these loads.
        pdl.launch_dependents()
