"""Sparse attention over a paged cache for Hopper (sm_90a): gather and attention in one launch."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.paged_call import PagedFmhaCall
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import multiplies_codes
from dsv4.kernels.attention.sm90.paged_codes import PagedCodes
from dsv4.kernels.attention.sm90.paged_heads_m import PagedHeadsM
from dsv4.kernels.attention.sm90.paged_swap_ab import PagedSwapAB
from dsv4.kernels.attention.sm90.variants import Variants


class PagedFmhaSm90(PagedFmhaCall):
    """Attention over the pages of a compressed and a window pool, fused with the sink (sm_90a)."""

    arch = "sm_90a"

    def __init__(self, config: PagedFmhaConfig):
        super().__init__(config)
        is_one_kernel = config.num_splits is not None or config.batch_invariant
        self.variants = Variants(config, is_one_kernel, PagedSwapAB, PagedHeadsM)
        self.codes = PagedCodes(config) if multiplies_codes(config) else None

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Launch the kernel for a launch of this size; products of codes are those without
        splits."""
        if cutlass.const_expr(self.codes is None):
            self.variants.launch(arguments, stream)
        elif arguments.num_splits == 1:
            self.codes.launch(arguments, stream)
        else:
            self.variants.launch(arguments, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return PagedFmhaSm90(config).compile(options)
