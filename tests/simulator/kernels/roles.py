"""A warp that fills a tile for another one, and nothing between them."""

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator


class Unordered:
    """One CTA: warp 0 produces, warp 1 consumes."""

    @cute.jit
    def __call__(self, values: cute.Tensor, sums: cute.Tensor, stream):
        self.kernel(values, sums).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, values: cute.Tensor, sums: cute.Tensor):
        @cute.struct
        class Storage:
            header: cute.struct.MemRange[cutlass.Int32, 8]
            tile: cute.struct.MemRange[cutlass.Int32, 32]

        storage = SmemAllocator().allocate(Storage)
        tile = storage.tile.get_tensor(cute.make_layout(32))
        lane = cute.arch.lane_idx()
        if cute.arch.warp_idx() == 0:
            self.produce(values, tile, lane)
        else:
            sums[lane] = tile[lane] + values[lane]

    @cute.jit
    def produce(self, values: cute.Tensor, tile: cute.Tensor, lane: cutlass.Int32):
        """Fill the tile, and the values, which the other warp reads."""
        tile[lane] = lane
        values[lane] = lane
