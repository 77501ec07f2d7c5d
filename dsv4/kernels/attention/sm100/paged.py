"""Sparse attention over a paged cache for Blackwell (sm_100a): gather and attention in one launch.

The variants are those of `fmha.FmhaKernel`, and so is the combine of several splits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16

from dsv4.kernels.attention.paged_args import fake_arguments
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import has_kernel
from dsv4.kernels.attention.sm100.combine import Combine
from dsv4.kernels.attention.sm100.costs import variant_of
from dsv4.kernels.attention.sm100.paged_1cta import PagedFmha1Cta
from dsv4.kernels.attention.sm100.paged_2cta import PagedFmha2Cta


class PagedFmhaSm100:
    """Attention over the pages of a compressed and a window pool, fused with the sink (sm_100a)."""

    def __init__(self, config: PagedFmhaConfig):
        if not has_kernel(config):
            raise ValueError(f"no kernel serves {config}")
        self.config = config
        variant, _, _ = variant_of(config.head_dim, config.num_query_heads)
        self.variant = PagedFmha2Cta(config) if variant == "2cta" else PagedFmha1Cta(config)
        self.combine = Combine(config.head_dim, config.num_query_heads, config.sink_mode, BFloat16)

    @property
    def plan(self):
        """Budgets of the variant; prints."""
        return self.variant.plan

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        window_pool: cute.Tensor,
        window_indices: cute.Tensor,
        window_lens: cute.Tensor,
        compressed_pool: cute.Tensor,
        compressed_indices: cute.Tensor,
        compressed_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        o: cute.Tensor,
        stream,
        *,
        q_factor: cute.Tensor,
        rope: cute.Tensor,
        positions: cute.Tensor,
        block_table: cute.Tensor,
        request_ids: cute.Tensor,
        window_table: cute.Tensor,
        lse: cute.Tensor,
        max_logits: cute.Tensor,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,
        sliding_window: cutlass.Int32,
        ratio: cutlass.Int32,
    ):
        """Launch the attention, then with several splits the combine; see `PagedArguments`.

        A split knows the largest of its own scores alone: where they are asked for, there is one.
        """
        if max_logits.shape[0] > 0:
            num_splits = cutlass.Int32(1)
        arguments = PagedArguments(
            q,
            window_pool,
            window_indices,
            window_lens,
            compressed_pool,
            compressed_indices,
            compressed_lens,
            sink_logits,
            o,
            q_factor,
            rope,
            positions,
            block_table,
            request_ids,
            window_table,
            lse,
            max_logits,
            workspace,
            num_splits,
            num_ctas,
            sliding_window,
            ratio,
        )
        self.variant.launch(arguments, stream)
        if num_splits > 1:
            self.combine(workspace, sink_logits, o, lse, num_splits, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    kernel = PagedFmhaSm100(config)
    args, optional = fake_arguments(config)
    return cute.compile(kernel, *args, **optional, options=f"--enable-tvm-ffi {options}".strip())
