"""Inverse rotation of the output of the paged kernels: the last 64 columns, by the token's
position.

Neighbouring columns (x, y) become (x cos + y sin, y cos - x sin). It is linear, and the same for
all keys of a token: accumulators are rotated before they are scaled, or stored as a split's part.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.heads_m_output import OutputFragments, OutputWarpgroups
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.kernels.kit.wgmma import by_row

PAIRS = ROPE_DIM // 2


@cute.jit
def rope_row(rope: cute.Tensor, positions: cute.Tensor, token):
    """Row of the table of a token, clamped."""
    position = cutlass.Int32(0)
    if token < positions.shape[0]:
        position = positions[token]
    return cutlass.max(cutlass.min(position, cutlass.Int32(rope.shape[0]) - 1), 0)


class PagedOutputWarpgroups(OutputWarpgroups):
    """Rotates the accumulators of every work tile, if there is a table."""

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
                cosine, sine = rope[row, pair], rope[row, pair + PAIRS]
                group = (pv_dim - columns) // 8 + j
                for r in cutlass.range_constexpr(2):
                    x, y = values[r, 0, group], values[r, 1, group]
                    values[r, 0, group] = x * cosine + y * sine
                    values[r, 1, group] = y * cosine - x * sine
