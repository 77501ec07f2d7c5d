"""Gather warpgroup of the paged heads-in-M kernel: key spans, Q by TMA, rows of pages."""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.paged_keys import PagedKeys
from dsv4.kernels.attention.sm90.gather_role import GatherRole
from dsv4.kernels.attention.sm90.gather_rows import Bf16Rows
from dsv4.kernels.attention.sm90.gather_slots import HeadsMSlots
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_load import LoadWarp
from dsv4.kernels.attention.sm90.plan import (
    ELEMENT_BYTES,
    HALVES,
    HEADS,
    PagedHeadsMPlan,
)
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.mbarrier import Cursor, arrive_warp
from dsv4.kernels.kit.tma import tma_load, tma_prefetch


@dataclass(frozen=True)
class QLoad:
    """Rest of a work tile's Q, to be loaded when the QK before it are over."""

    loader: LoadWarp
    ctx: HeadsMContext
    q_map: object
    head_tile: cutlass.Int32
    token: cutlass.Int32
    phase: cutlass.Int32

    @cute.jit
    def send(self, warp, lane):
        """Ask for it; warp 0 does."""
        if warp == 0:
            self.ctx.pipes.q.acquire(self.phase)
            if lane == 0:
                self.loader._load_q_smem(self.ctx, self.q_map, self.head_tile, self.token)


class GatherWarpgroup(GatherRole, LoadWarp):
    """Producer of Q and of the KV ring. Each warp gathers some rows of every key tile."""

    def __init__(self, plan: PagedHeadsMPlan, has_even_tiles: bool, is_gate: bool):
        super().__init__(plan, has_even_tiles)
        self.is_gate = is_gate
        if plan.is_fp8:
            warps = plan.warps["gather"].count
            self.rows = Fp8Rows(plan.head_dim, plan.half_dim, plan.staged_pieces, 1, warps)
        else:
            self.rows = Bf16Rows(plan.half_dim, plan.chunk)

    @cute.jit
    def gather(self, ctx: HeadsMContext, q_map, keys: PagedKeys):
        """Load what every work tile needs."""
        warp, lane = self._begin(q_map)
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        pdl.wait_for_previous_launch()
        phase = cutlass.Int32(1)
        kv, slots = ctx.pipes.kv.producer(), HeadsMSlots(ctx)
        pieces = cutlass.Int32(0)
        if cutlass.const_expr(ctx.tiling.has_pieces):
            index, pieces = self._take_piece(ctx, self._find_pieces(ctx, keys, lane))
        while index < stop:
            head_tile, _, token = ctx.tiling.coordinates(index)
            span, word = self._find_keys(ctx, keys, index, phase, warp, lane)
            # ---- Q: one part passes through the ring, the other needs the last QK to be over ----
            kv = self._send_q(ctx, q_map, head_tile, token, warp, lane, kv)
            q = QLoad(self, ctx, q_map, head_tile, token, phase)
            if cutlass.const_expr(not self.plan.is_fp8):
                q.send(warp, lane)
            # Where one CTA has all of a token's heads, DRAM bounds it: this would be in the way.
            if index + step < stop and ctx.tiling.head_tiles > 1:
                self._prefetch(ctx, q_map, keys, index + step, warp, lane)

            # ---- key tiles ----
            if cutlass.const_expr(self.plan.is_fp8):
                # The first one is asked for before Q, whose place is free when the last QK is over.
                kv = self.rows.gather_tiles(slots, keys, span, token, word, warp, lane, kv, q)
            else:
                kv = self.rows.gather_tiles(slots, keys, span, token, word, warp, lane, kv)
            phase ^= 1
            if cutlass.const_expr(ctx.tiling.has_pieces):
                index, pieces = self._take_piece(ctx, pieces)
            else:
                index += step
        self._end(ctx, phase, stop, warp, lane)

    @cute.jit
    def _prefetch(self, ctx: HeadsMContext, q_map, keys: PagedKeys, index, warp, lane):
        """Bring what a work tile starts with into L2: its lists of keys, its Q."""
        head_tile, _, token = ctx.tiling.coordinates(index)
        if warp == 0:
            keys.prefetch(token, lane)
            if lane == 0:
                for chunk in cutlass.range_constexpr(self.plan.head_dim // self.plan.chunk):
                    tma_prefetch(q_map, self._q_coordinates(head_tile, chunk, token))

    @cute.jit
    def _send_q(self, ctx: HeadsMContext, q_map, head_tile, token, warp, lane, kv: Cursor):
        """Send the register columns of Q through a stage of the KV ring, in the place of K's."""
        plan = self.plan
        if cutlass.const_expr(plan.q_register_dim > 0):
            chunks = plan.head_dim // plan.chunk
            first = plan.q_smem_dim // plan.chunk
            for half in cutlass.range_constexpr(HALVES):
                begin, end = max(first, half * chunks // 2), (half + 1) * chunks // 2
                full = ctx.pipes.kv.full + ctx.pipes.kv.slot(kv, half)
                chunk_elements = HEADS * plan.chunk
                ctx.pipes.kv.acquire(kv, half)
                if warp == 0 and lane == 0:
                    tx_bytes = (end - begin) * chunk_elements * ELEMENT_BYTES
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes)
                    for chunk in cutlass.range_constexpr(begin, end):
                        start = (kv.stage * chunks + chunk) * chunk_elements
                        target = ctx.smem.kv_start + start
                        place = self._q_coordinates(head_tile, chunk, token)
                        tma_load(q_map, target, place, full)
                else:
                    cute.arch.mbarrier_arrive(full)
                arrive_warp(full, lane, plan.lanes_per_warp)
            kv = ctx.pipes.kv.next(kv)
        return kv
