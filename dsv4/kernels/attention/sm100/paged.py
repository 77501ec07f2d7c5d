"""Sparse attention over a paged cache for Blackwell (sm_100a): gather and attention in one launch.

The variants are those of `fmha.FmhaKernel`, and so is the combine of several splits.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16

from dsv4.kernels.attention.paged_call import PagedFmhaCall
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import (
    always_rounds_rows,
    may_round_rows,
    multiplies_codes,
    rounds_rows,
)
from dsv4.kernels.attention.sm100.codes_combine import CodesCombine
from dsv4.kernels.attention.sm100.combine import Combine
from dsv4.kernels.attention.sm100.costs import variant_of
from dsv4.kernels.attention.sm100.paged_1cta import PagedFmha1Cta
from dsv4.kernels.attention.sm100.paged_2cta import PagedFmha2Cta
from dsv4.kernels.attention.sm100.paged_codes import PagedCodes2Cta


class PagedFmhaSm100(PagedFmhaCall):
    """Attention over the pages of a compressed and a window pool, fused with the sink (sm_100a)."""

    arch = "sm_100a"

    def __init__(self, config: PagedFmhaConfig):
        super().__init__(config)
        variant, _, _ = variant_of(config.head_dim, config.num_query_heads)
        self.variant = PagedFmha2Cta(config) if variant == "2cta" else PagedFmha1Cta(config)
        self.rows = None  # the kernel that rounds no rows, where there are two
        if may_round_rows(config, self.arch) and not always_rounds_rows(config, self.arch):
            self.rows = PagedFmha2Cta(replace(config, rounds_output=False))
        self.codes = PagedCodes2Cta(config) if multiplies_codes(config) else None
        self.combine = self._make_combine(config)

    def _make_combine(self, config: PagedFmhaConfig) -> Combine:
        if may_round_rows(config, self.arch):
            return CodesCombine(config)
        return Combine(config.head_dim, config.num_query_heads, config.sink_mode, BFloat16)

    @property
    def plan(self):
        """Budgets of the variant; prints."""
        return self.variant.plan

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Launch the attention, then with several splits the combine; products of codes are those
        without splits."""
        if cutlass.const_expr(self.codes is None):
            self._launch_variant(arguments, stream)
        elif arguments.num_splits == 1:
            self.codes.launch(arguments, stream)
        else:
            self._launch_variant(arguments, stream)
        if arguments.num_splits > 1:
            self.combine.launch(arguments, stream)

    @cute.jit
    def _launch_variant(self, arguments: PagedArguments, stream):
        """Launch the kernel that rounds rows of the output, or the one that does not."""
        sizes = arguments.q.shape[0], arguments.num_splits, arguments.num_sms
        if cutlass.const_expr(self.rows is not None):
            if rounds_rows(self.config, *sizes, self.arch):
                self.variant.launch(arguments, stream)
            else:
                self.rows.launch(arguments, stream)
        else:
            self.variant.launch(arguments, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return PagedFmhaSm100(config).compile(options)
