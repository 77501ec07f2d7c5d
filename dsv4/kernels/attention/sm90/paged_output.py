"""Inverse rotation of the output of the paged kernels: the last 64 columns, by the token's
position (`inverse_rope`).
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.inverse_rope import rope_row, rotate_back, rotation
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_output import OutputFragments, OutputWarpgroups
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.wgmma import by_row


class PagedOutputWarpgroups(OutputWarpgroups):
    """Output warpgroups that rotate the accumulators of every work tile, if there is a table."""

    is_paged = True

    @cute.jit
    def _load_turns(self, ctx: HeadsMContext, f: OutputFragments, coord):
        """Cosine and sine of the pair of columns that has a lane's number, if there is a table: two
        latencies, one behind the other, that nothing waits for before the keys are there."""
        rope, turns = ctx.operands.rope, cute.make_rmem_tensor(2, cutlass.Float32)
        turns.fill(0.0)
        if rope.shape[0] > 0:
            row = rope_row(rope, ctx.operands.keys.positions, coord.token)
            turns[0], turns[1] = rotation(rope, row, f.lane)
        return turns

    @cute.jit
    def _rotate(
        self, ctx: HeadsMContext, f: OutputFragments, turns: cute.Tensor, half, first_subtile,
        is_sliced,
    ):  # fmt: skip
        if ctx.operands.rope.shape[0] > 0:
            if is_sliced:
                self._rotate_subtile(turns, f.subtiles[0], first_subtile, f.lane)
            else:
                last = half * self.plan.subtiles + (self.plan.subtiles - 1)
                self._rotate_subtile(turns, f.subtiles[-1], last, f.lane)

    @cute.jit
    def _rotate_subtile(self, turns: cute.Tensor, acc: cute.Tensor, subtile, lane):
        """Rotate the last columns of an accumulator sub-tile, if they are among those."""
        pv_dim = self.plan.pv_dim
        columns = min(pv_dim, ROPE_DIM)
        # Of the first column in the rotated ones; negative outside.
        first = (subtile + 1) * pv_dim - columns - (self.plan.head_dim - ROPE_DIM)
        if first >= 0:
            values = by_row(acc)
            for j in cutlass.range_constexpr(columns // 8):
                pair = first // 2 + j * 4 + lane % 4
                angle = tuple(cute.arch.shuffle_sync(turns[i], pair) for i in range(2))
                group = (pv_dim - columns) // 8 + j
                for r in cutlass.range_constexpr(2):
                    values[r, 0, group], values[r, 1, group] = rotate_back(
                        values[r, 0, group], values[r, 1, group], angle
                    )
