"""What becomes of a work item's rows when its last block is over, in the Hopper kernel."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.fmha_combine import output_scale, row_lse


@cute.jit
def load_sinks(sink_logits, head, heads: cutlass.Constexpr):
    """Sinks of a thread's two rows, from `head` on; 0 for padding."""
    sinks = cute.make_rmem_tensor(2, cutlass.Float32)
    sinks.fill(0.0)
    for r in cutlass.range_constexpr(2):
        if head + 8 * r < heads:
            sinks[r] = sink_logits[head + 8 * r]
    return sinks


class FinishedRows:
    """The part of `FmhaManyHeads` that finishes rows."""

    @cute.jit
    def finish_rows(self, smem, tile, member, tiling, gate_offset, sinks, lse, workspace):
        """What a work item's rows need: output scale and lse, or a partial row's statistics."""
        for r in cutlass.range_constexpr(2):
            row = tile.row + 8 * r
            head = member.head + row
            ref, total = tile.rows.ref[r], tile.rows.sum[r]
            if tiling.num_splits > 1:
                smem.row_scale[row] = gate_offset[r]
                if row < tiling.tile_heads:
                    self.join.store_statistics(workspace, tiling, member, row, ref, total)
            else:
                scale = cutlass.Float32(0.0)
                if head < self.num_query_heads:
                    scale = output_scale(ref, total, sinks[r], not self.is_gate)
                    is_first = tiling.column_share(cute.arch.block_idx()[0]) == 0
                    if member.token < lse.shape[0] and is_first:
                        lse[member.token, head] = row_lse(ref, total, gate_offset[r])
                smem.row_scale[row] = scale
