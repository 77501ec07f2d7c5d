"""The two kernels of Hopper's attention, and which of them a launch takes."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.sm90.heads_m import FmhaHeadsM
from dsv4.kernels.attention.sm90.swap_ab import FmhaSwapAB
from dsv4.kernels.attention.split_kv import MOST_SWAP_AB_HEADS, SWAP_AB_TILE_HEADS, TILED_HEADS


class Variants:
    """Swap-AB for up to 24 heads, heads-in-M for more; of 32, 64 and 128 both, by a launch's size.

    Args:
        config: of the attention, over keys in rows or in pages.
        is_one_kernel: whether a token's bits must not depend on the batch: it has one kernel then.
        swap_ab, heads_m: the kernels' classes.
    """

    def __init__(
        self,
        config: FmhaConfig,
        is_one_kernel: bool,
        swap_ab: type[FmhaSwapAB] = FmhaSwapAB,
        heads_m: type[FmhaHeadsM] = FmhaHeadsM,
    ):
        heads = config.num_query_heads
        self.swap_ab = self.heads_m = None
        if heads <= MOST_SWAP_AB_HEADS:
            self.swap_ab = swap_ab(config, heads)
        else:
            self.heads_m = heads_m(config)
            if heads in TILED_HEADS and not is_one_kernel:
                self.swap_ab = swap_ab(config, SWAP_AB_TILE_HEADS)

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Launch one of them."""
        if cutlass.const_expr(self.heads_m is None):
            self.swap_ab.launch(arguments, stream)
        elif cutlass.const_expr(self.swap_ab is None):
            self.heads_m.launch(arguments, stream)
        elif self._is_few(arguments):
            self.swap_ab.launch(arguments, stream)
        else:
            self.heads_m.launch(arguments, stream)

    def _is_few(self, arguments: FmhaArguments) -> cutlass.Boolean:
        """Whether there is an SM for each head tile of swap-AB."""
        tiles = arguments.q.shape[0] * self.swap_ab.head_tiles
        return tiles * arguments.num_splits <= arguments.num_sms
