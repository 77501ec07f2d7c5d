"""Rows [b, h, s, d] of elements that lie channels first [d, s, h, b], for sm_90a and sm_100a.

As a matrix of channels by (s, h, b) it is a transposition: a CTA has 32 channels of 64 columns,
reads them along the columns, which are neighbours in memory, and writes them along the channels,
which are neighbours in the result. Shared memory stands between both.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.relayout_config import ARGS, RelayoutConfig, values

WARP, WARPS = 32, 8
CHANNELS, COLUMNS = 32, 64  # of a CTA


class Relayout:
    """Kernel of one dtype."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [d, s, h, b]
        y: cute.Tensor,  # [b, h, s, d], written
        stream,
    ):
        """Launch it."""
        dim, rows, heads, batch = x.shape
        columns = (Int32(rows) * Int32(heads) * Int32(batch) + COLUMNS - 1) // COLUMNS
        channels = (Int32(dim) + CHANNELS - 1) // CHANNELS
        self.kernel(x, y).launch(
            grid=[cutlass.max(columns, 1), cutlass.max(channels, 1), 1],
            block=[WARP * WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        """Turn the tile of a CTA."""
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        first_column, first_channel, _ = cute.arch.block_idx()
        first_column, first_channel = first_column * COLUMNS, first_channel * CHANNELS
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        dim, rows, heads, batch = (Int32(size) for size in x.shape)
        count = rows * heads * batch
        # An element more, or the columns that lanes write would share a bank.
        layout = cute.make_layout((CHANNELS, COLUMNS), stride=(COLUMNS + 1, 1))
        tile = SmemAllocator().allocate_tensor(x.element_type, layout, 16)
        dtype, size = x.element_type, x.element_type.width // 8
        for half in cutlass.range_constexpr(COLUMNS // WARP):
            column = first_column + half * WARP + lane
            place = self.place_of(x, column)
            for i in cutlass.range_constexpr(CHANNELS // WARPS):
                channel = warp + i * WARPS
                if column < count and first_channel + channel < dim:
                    offset = Int64(first_channel + channel) * x.stride[0] + place
                    element = pointer_to(address_of(x, offset), dtype, size).load()
                    tile[channel, half * WARP + lane] = element
        cute.arch.sync_threads()
        channel = first_channel + lane
        for i in cutlass.range_constexpr(COLUMNS // WARPS):
            column = warp + i * WARPS
            if first_column + column < count and channel < dim:
                b = (first_column + column) % batch
                h = (first_column + column) // batch % heads
                s = (first_column + column) // batch // heads
                offset = Int64(b) * y.stride[0] + Int64(h) * y.stride[1] + Int64(s) * y.stride[2]
                target = address_of(y, offset + channel)
                pointer_to(target, dtype, size).store(tile[lane, column])

    @cute.jit
    def place_of(self, x: cute.Tensor, column) -> Int64:
        """Offset of a column (s, h, b) in a channel of x."""
        _, _, heads, batch = x.shape
        b, rest = column % batch, column // batch
        return Int64(rest // heads) * x.stride[1] + Int64(rest % heads) * x.stride[2] + b


def build(config: RelayoutConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(Relayout(), ARGS, values(config), options)
