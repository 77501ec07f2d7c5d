"""Words about a gathered key tile, from the warps that gather it to the softmax: which of its rows
are keys, and whether they are of the window.
"""

import cutlass
from cutlass import cute


@cute.jit
def store_tile_info(
    tile_info: cute.Tensor, first, is_key, is_window, warp, lane, warp_keys: cutlass.Constexpr
):
    """Store what a warp knows of a tile: the bits of its rows; warp 0 also the third and the fourth
    of the `TILE_INFO_WORDS`.

    Args:
        first: word of the tile's.
        is_key: ballot over the warp's rows.
        warp_keys: rows of a tile that each warp gathers, 8, 16 or 32.
    """
    if lane == 0:
        bits = cutlass.Int32((tile_info.iterator + first).toint()) + warp * (warp_keys // 8)
        cute.arch.inline_ptx(
            f"st.shared.b{warp_keys} [{{$r0}}], {{$r1}};", read_only_args=[bits, is_key]
        )
        if warp == 0:
            tile_info[first + 2] = cutlass.Int32(is_window)
            tile_info[first + 3] = cutlass.Int32(0)
