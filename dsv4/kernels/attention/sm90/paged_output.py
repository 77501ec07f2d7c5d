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
    def _rotate(
        self, ctx: HeadsMContext, f: OutputFragments, coord, half, first_subtile, is_sliced
    ):
        rope = ctx.operands.rope
        if rope.shape[0] > 0:
            row = rope_row(rope, ctx.operands.keys.positions, coord.token)
            if is_sliced:
                self._rotate_subtile(rope, row, f.subtiles[0], first_subtile, f.lane)
            else:
                last = half * self.plan.subtiles + (self.plan.subtiles - 1)
                self._rotate_subtile(rope, row, f.subtiles[-1], last, f.lane)

    @cute.jit
    def _rotate_subtile(self, rope: cute.Tensor, row, acc: cute.Tensor, subtile, lane):
        """Rotate the last columns of an accumulator sub-tile, if they are among those."""
        pv_dim = self.plan.pv_dim
        columns = min(pv_dim, ROPE_DIM)
        # Of the first column in the rotated ones; negative outside.
        first = (subtile + 1) * pv_dim - columns - (self.plan.head_dim - ROPE_DIM)
        if first >= 0:
            values = by_row(acc)
            for j in cutlass.range_constexpr(columns // 8):
                pair = first // 2 + j * 4 + lane % 4
                angle = rotation(rope, row, pair)
                group = (pv_dim - columns) // 8 + j
                for r in cutlass.range_constexpr(2):
                    values[r, 0, group], values[r, 1, group] = rotate_back(
                        values[r, 0, group], values[r, 1, group], angle
                    )
