"""Sparse attention over a paged cache for Hopper (sm_90a): gather and attention in one launch."""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.paged_args import fake_arguments
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.paged_plan import has_kernel
from dsv4.kernels.attention.sm90.paged_heads_m import PagedHeadsM
from dsv4.kernels.attention.sm90.paged_swap_ab import PagedSwapAB
from dsv4.kernels.attention.split_kv import MOST_SWAP_AB_HEADS, SWAP_AB_TILE_HEADS, TILED_HEADS


class PagedFmhaSm90:
    """Attention over the pages of a compressed and a window pool, fused with the sink (sm_90a)."""

    def __init__(self, config: PagedFmhaConfig):
        if not has_kernel(config):
            raise ValueError(f"no kernel serves {config}")
        heads = config.num_query_heads
        self.swap_ab = self.heads_m = None
        if heads <= MOST_SWAP_AB_HEADS:
            self.swap_ab = PagedSwapAB(config, heads)
        else:
            self.heads_m = PagedHeadsM(config)
            # Where a token's bits must not depend on the batch, it has one kernel.
            is_free = config.num_splits is None and not config.batch_invariant
            if heads in TILED_HEADS and is_free:
                self.swap_ab = PagedSwapAB(config, SWAP_AB_TILE_HEADS)

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
        """Launch the attention; see `PagedArguments`.

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
        if cutlass.const_expr(self.heads_m is None):
            self.swap_ab.launch(arguments, stream)
        elif cutlass.const_expr(self.swap_ab is None):
            self.heads_m.launch(arguments, stream)
        elif q.shape[0] * self.swap_ab.head_tiles * num_splits <= num_ctas:
            self.swap_ab.launch(arguments, stream)
        else:
            self.heads_m.launch(arguments, stream)


def build(config: PagedFmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    kernel = PagedFmhaSm90(config)
    args, optional = fake_arguments(config)
    return cute.compile(kernel, *args, **optional, options=f"--enable-tvm-ffi {options}".strip())
