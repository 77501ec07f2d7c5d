"""Epilogues that weights have of their own, each applied by the warp that has the complete sums of
16 rows and some groups of 8 tokens."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from dsv4.kernels.gemm.epilogues import HeadRotation
from dsv4.kernels.gemm.operands import OutputTile, chosen_matrix
from dsv4.kernels.gemm.plan import CONSUMER_WARPS, LANE_VALUES, M_TILE, UNIT_ROWS, LinearPlan
from dsv4.kernels.gemm.sm90.context import LinearContext
from dsv4.kernels.gemm.sm90.head_rotation import (
    TURNS,
    VECTOR,
    WARP,
    Block,
    RotateHeads,
    StagedShare,
)

WARPGROUP = 128

# Groups of tokens whose cosines and sines wait in registers while a tile is multiplied.
MOST_GROUPS_AHEAD = 2


class LoadedAhead(NamedTuple):
    """Values that an epilogue has before the products of a tile."""

    # Of token 32 i + lane of the token tile; staged: of the thread's token.
    positions: cute.Tensor | None = None
    # Cosines and sines of the warp's block, where they are loaded ahead.
    turns: cute.Tensor | None = None
    # Position, and cosines and sines, as `index_heads` has them.
    head: tuple[cute.Tensor, cute.Tensor] | None = None


class WeightEpilogues:
    """Device functions of the weights of a kind, and what they load ahead."""

    def __init__(self, plan: LinearPlan):
        self.plan = plan
        # Others are not applied to outputs by themselves: see `rounded_tile`, `index_tile` and
        # `best_rows`.
        self.own = [
            RotateHeads(config) if isinstance(config, HeadRotation) else None
            for config in plan.epilogues
        ]
        # A warp of a tile that is not summed in parts has one unit of rows and all tokens, or where
        # tokens are M all units and some tokens; else some units' groups of tokens, one after the
        # other.
        self.groups = plan.warp_groups if plan.parts == 1 else 1
        has_one_block = plan.parts == 1 or plan.own_units * plan.column_groups <= CONSUMER_WARPS
        self.loads_ahead = (
            has_one_block and self.groups <= MOST_GROUPS_AHEAD and not plan.has_tokens_in_m
        )
        self.staged_tokens = plan.tokens // 2 if plan.has_tokens_in_m else plan.tokens

    def make_loaded(self, is_staged: bool) -> LoadedAhead | None:
        """Registers of `load_positions` and `load_turns`, where a weight has an epilogue.

        Args:
            is_staged: whether it is applied in shared memory, where a thread has one token.
        """
        if not any(self.own):
            return None
        words = 1 if is_staged else -(-self.plan.tokens // WARP)
        positions = cute.make_rmem_tensor(words, Int32)
        turns = None
        if self.loads_ahead:
            turns = cute.make_rmem_tensor(TURNS * self.groups, Float32)
        return LoadedAhead(positions, turns)

    def load_positions(
        self, ctx: LinearContext, tile: OutputTile, loaded: LoadedAhead, is_staged: bool
    ) -> None:
        """Ask for the positions of a token tile."""
        positions = ctx.operands.heads[0].positions
        first = tile.token_tile * self.plan.tokens + cute.arch.lane_idx()
        if is_staged:
            share = self.staged_shares(tile, cute.arch.thread_idx()[0] // WARPGROUP)[0]
            first = share.first_token + share.token
        for i in range(cute.size(loaded.positions)):
            token = cutlass.min(first + i * WARP, Int32(positions.shape[0]) - 1)
            loaded.positions[i] = positions[token]

    def _make_turns(self, count: int) -> cute.Tensor:
        """Registers that are loaded where a tile is rotated. Not written elsewhere, they would keep
        what they had for the tile before while this one is multiplied."""
        turns = cute.make_rmem_tensor(count, Float32)
        turns.fill(0.0)
        return turns

    @cute.jit
    def load_turns(self, ctx: LinearContext, tile: OutputTile, unit, loaded: LoadedAhead):
        """Ask for what a warp's block of a tile is rotated by: otherwise the end of the tile waits
        for it."""
        if cutlass.const_expr(self.loads_ahead):
            plan, group = self.plan, 0
            if cutlass.const_expr(plan.parts > 1):
                warp = cute.arch.thread_idx()[0] // WARP
                unit, group = warp // plan.column_groups, warp % plan.column_groups
                unit = ctx.rank * plan.own_units + unit
            block = self.block(tile, unit, group)
            for i in cutlass.range_constexpr(len(self.own)):
                if cutlass.const_expr(self.own[i] is not None):  # noqa: SIM102 static, then dynamic
                    if tile.weight == i:
                        self.own[i].load_turns(
                            ctx.operands.heads[0], loaded.positions, block, loaded.turns
                        )

    def block(self, tile: OutputTile, unit, group) -> Block:
        """A block of a tile, from a unit of rows and a group of tokens on."""
        row = tile.row_tile * self.plan.rows + unit * UNIT_ROWS
        return Block(row, tile.token_tile * self.plan.tokens, group, cute.arch.lane_idx())

    @cute.jit
    def apply(
        self, ctx: LinearContext, weight, values: cute.Tensor, block: Block, loaded: LoadedAhead
    ):
        """Apply the epilogue of a weight, if it has one, to the sums of a block, in place."""
        ys, heads = ctx.operands.ys, ctx.operands.heads[0]
        for i in cutlass.range_constexpr(len(self.own)):
            if cutlass.const_expr(self.own[i] is not None):  # noqa: SIM102 static, then dynamic
                if weight == i:
                    turns = loaded.turns
                    if cutlass.const_expr(not self.loads_ahead):
                        turns = self._make_turns(TURNS * self.groups)
                        self.own[i].load_turns(heads, loaded.positions, block, turns)
                    values.store(values.load().to(ys[i].element_type).to(Float32))
                    self.own[i].apply(heads.squares[i], values, turns, block, ys[i].shape[1])

    def staged_shares(self, tile: OutputTile, group) -> list[StagedShare]:
        """What this thread takes of each span of 64 rows that a warpgroup has in shared memory."""
        plan, count = self.plan, self.staged_tokens
        row, token = tile.row_tile * plan.rows, tile.token_tile * plan.tokens
        thread, threads = cute.arch.thread_idx()[0] % WARPGROUP, WARPGROUP // count
        if not plan.has_tokens_in_m:
            return [StagedShare(row + group * M_TILE, token, thread, threads)]
        token += group * count
        return [
            StagedShare(row + first, token, thread, threads)
            for first in range(0, plan.rows, M_TILE)
        ]

    @cute.jit
    def load_staged_turns(
        self, ctx: LinearContext, tile: OutputTile, share: StagedShare, loaded: LoadedAhead
    ):
        """What a thread's share is rotated by, in registers: on its way while sums are staged."""
        turns = self._make_turns(2 * share.vectors * 4)
        position = loaded.positions[0]
        for i in cutlass.range_constexpr(len(self.own)):
            if cutlass.const_expr(self.own[i] is not None):  # noqa: SIM102 static, then dynamic
                if tile.weight == i:
                    self.own[i].load_staged_turns(ctx.operands.heads[0], share, position, turns)
        return turns

    @cute.jit
    def apply_staged(
        self, ctx: LinearContext, tile: OutputTile, share: StagedShare, span: cute.Pointer,
        turns: cute.Tensor,
    ):  # fmt: skip
        """Apply the epilogue of a weight, if it has one, to rows in shared memory, [token, row] as
        TMA stores them; a thread takes a token, or a part of one."""
        ys, squares = ctx.operands.ys, ctx.operands.heads[0].squares
        for i in cutlass.range_constexpr(len(self.own)):
            if cutlass.const_expr(self.own[i] is not None):  # noqa: SIM102 static, then dynamic
                if tile.weight == i:
                    self.own[i].apply_staged(squares[i], span, share, turns, ys[i])

    @cute.jit
    def copy_staged(self, ctx: LinearContext, tile: OutputTile, share: StagedShare, span):
        """Write a thread's share to an output that TMA cannot write, each element by itself."""
        y = chosen_matrix(ctx.operands.ys, tile.weight, BFloat16)
        token = share.first_token + share.token
        if token < y.shape[0]:
            for v in cutlass.range_constexpr(share.vectors):
                vector = cute.recast_tensor(share.vector(span, v), BFloat16)
                for i in cutlass.range_constexpr(VECTOR):
                    row = share.row + (share.first_vector + v) * VECTOR + i
                    if row < y.shape[1]:
                        y[token, row] = vector[i]

    def applied(
        self, ctx: LinearContext, weight, values: list, block: Block, loaded: LoadedAhead | None
    ) -> list:
        """Four sums of a lane after the epilogue of their weight."""
        if not any(self.own):
            return values
        found = cute.make_rmem_tensor(LANE_VALUES, Float32)
        for i, value in enumerate(values):
            found[i] = value
        self.apply(ctx, weight, found, block, loaded)
        return [found[i] for i in range(LANE_VALUES)]
