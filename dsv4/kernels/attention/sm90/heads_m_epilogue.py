"""What becomes of a work item's rows when its last block is over, in the Hopper kernel."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.sm90.device import by_row, store_rows, tma_store
from dsv4.kernels.attention.sm100.combine import output_scale, row_lse

WARP_ROWS = 16  # of an accumulator fragment
SPAN = 128  # bytes of a row in a tensor map's box, swizzled by 16 bytes


@cute.jit
def load_sinks(sink_logits, head, heads: cutlass.Constexpr):
    """Sinks of a thread's two rows, from `head` on; 0 for padding."""
    sinks = cute.make_rmem_tensor(2, cutlass.Float32)
    sinks.fill(0.0)
    for r in cutlass.range_constexpr(2):
        if head + 8 * r < heads:
            sinks[r] = sink_logits[head + 8 * r]
    return sinks


@cute.jit
def stage_rows(acc: cute.Tensor, scales, target: cute.Pointer, lane, dtype: cutlass.Constexpr):
    """Scale, round and write a span of a warp's rows where a tensor map expects them."""
    rows = by_row(acc)
    row = lane % WARP_ROWS
    address = target.toint() + row * SPAN
    # Four 8 x 8 matrices at a time; a lane says where a row of one of them goes.
    for pair in cutlass.range_constexpr(cute.size(rows, mode=[2]) // 2):
        values = cute.make_rmem_tensor(8, dtype)
        for i in cutlass.range_constexpr(4):
            for c in cutlass.range_constexpr(2):
                value = rows[i % 2, c, 2 * pair + i // 2] * scales[i % 2]
                values[2 * i + c] = value.to(dtype)
        words = cute.recast_tensor(values, cutlass.Int32)
        unit = (2 * pair + lane // WARP_ROWS) ^ (row % 8)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[address + unit * 16, *(words[i] for i in range(4))],
        )


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

    @cute.jit
    def store_output(
        self, piece, acc, scales, o, o_maps, target, member, column, is_shared, is_last
    ):
        """Write a warp's rows from `column` on: a piece of them where two CTAs share the columns,
        else all that are accumulated. With a tensor map the last ones of a CTA are staged.

        Args:
            o_maps: the tensor map of o, or nothing.
            target: of staged rows, free after the CTA's last block.
            is_last: whether this is the CTA's last work item.
        """
        lane = cute.arch.lane_idx()
        row = cute.arch.thread_idx()[0] % 128 // 32 * WARP_ROWS + lane // 4
        place = (o, scales, member.token, member.head + row, column, lane, self.num_query_heads)
        is_staged = cutlass.Boolean(False)
        if cutlass.const_expr(len(o_maps) > 0):
            is_staged = is_last
        if is_shared:
            store_rows(piece, *place)
        elif not is_staged:
            store_rows(acc, *place)
        if cutlass.const_expr(len(o_maps) > 0):  # noqa: SIM102 static, then dynamic
            if is_staged:
                self.store_staged(
                    *(acc, scales, o_maps[0], target, member.head, column, member.token, lane)
                )

    @cute.jit
    def store_staged(self, acc, scales, o_map, target: cute.Pointer, head, column, token, lane):
        """Write a warp's rows from `head` on through shared memory: with less to do for the warps
        than `store_rows`, they are on their way sooner. Rows of no head are out of bounds.

        Args:
            target: where nobody reads or writes any more; half of a block is enough for all warps.
        """
        warp = cute.arch.thread_idx()[0] % 128 // 32
        size = cute.size(acc) * self.chunk // self.half_dim
        for i in cutlass.range_constexpr(self.half_dim // self.chunk):
            part = cute.make_tensor(acc.iterator + i * size, cute.make_layout(size))
            spans = self.half_dim // self.chunk * warp + i
            span = target + spans * WARP_ROWS * self.chunk
            stage_rows(part, scales, span, lane, self.dtype)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                place = [0, head + warp * WARP_ROWS, column // self.chunk + i, token]
                tma_store(o_map, span, place)
                cute.arch.cp_async_bulk_commit_group()
        if lane == 0:
            # Shared memory must outlive the reads of the stores.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
