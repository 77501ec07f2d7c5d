"""Sparse decode attention for Hopper (sm_90a): compressed keys, sliding window and sink in one
launch.

`FmhaKernelSm90` is what callers construct, compile and call. It picks one of two kernels, which
share key spans, the split-KV semaphore and the merge:

- `FmhaSwapAB`: keys as the rows of the products; up to 24 heads, where the time goes into reading
  keys, all in one CTA. And 32, 64 or 128 heads, in tiles of 16, while there is an SM for each: more
  of these tiles would wait for each other's reads of the same keys.
- `FmhaHeadsM`: 64 heads of a token in one CTA, heads as the rows of the products.

Either way a key tile is read from global memory once for both products. With several splits of the
keys, CTAs combine them through the workspace (`kit.semaphore`): launches that may run at the same
time need workspaces of their own.

The softmax keeps one maximum per row that all of P is relative to, so that the final division is
exact and nothing overflows. `sink_gate` says what the sink of `swa_gate` does to it.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.call import FmhaCall
from dsv4.kernels.attention.config import FmhaConfig, check_kernel_config
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.sm90.variants import Variants


class FmhaKernelSm90(FmhaCall):
    """Attention over compressed entries and a sliding window, fused with the sink merge (sm_90a).

    Args:
        head_dim: 64, 128, 256 or 512.
        num_query_heads: a multiple of 8 up to 128.
        sliding_window: window of `is_causal=True`; else every row below `swa_lens` is visible.
        top_k: promised bound of compressed rows; the real capacity is a runtime size.
        softmax_scale: positive; default head_dim**-0.5.
        num_splits: fixed number of KV splits, or None where each launch says.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        sliding_window: int,
        top_k: int,
        q_dtype=cutlass.BFloat16,
        kv_dtype=cutlass.BFloat16,
        o_dtype=cutlass.BFloat16,
        qk_acc_dtype=cutlass.Float32,
        pv_acc_dtype=cutlass.Float32,
        is_causal: bool = False,
        *,
        softmax_scale: float | None = None,
        sink_mode: str = "swa_gate",
        num_splits: int | None = None,
    ):
        if head_dim not in (64, 128, 256, 512):
            raise ValueError(f"head_dim must be 64, 128, 256 or 512, got {head_dim}")
        if num_query_heads % 8 or not 8 <= num_query_heads <= 128:
            raise ValueError(
                f"num_query_heads must be a multiple of 8 in 8..128, got {num_query_heads}"
            )
        self.config = FmhaConfig(
            head_dim,
            num_query_heads,
            sliding_window,
            top_k,
            is_causal,
            sink_mode,
            softmax_scale,
            num_splits,
        )
        check_kernel_config(self.config, (q_dtype, kv_dtype, o_dtype), (qk_acc_dtype, pv_acc_dtype))
        # A fixed number of splits promises that a token's bits do not depend on the batch.
        self.variants = Variants(self.config, is_one_kernel=num_splits is not None)

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Launch the kernel for a launch of this size."""
        self.variants.launch(arguments, stream)


def build(config: FmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    if config.dtype != "bfloat16":
        raise ValueError(f"dtype must be bfloat16 on sm_90a, got {config.dtype}")
    kernel = FmhaKernelSm90(
        config.head_dim,
        config.num_query_heads,
        config.sliding_window,
        config.top_k,
        is_causal=config.is_causal,
        softmax_scale=config.softmax_scale,
        sink_mode=config.sink_mode,
        num_splits=config.num_splits,
    )
    return kernel.compile(options)
