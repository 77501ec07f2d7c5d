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

from dsv4.kernels.attention.args import fake_arguments
from dsv4.kernels.attention.config import FmhaConfig, check_kernel_config
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.sm90.heads_m import FmhaHeadsM
from dsv4.kernels.attention.sm90.swap_ab import FmhaSwapAB
from dsv4.kernels.attention.split_kv import MOST_SWAP_AB_HEADS, SWAP_AB_TILE_HEADS, TILED_HEADS


class FmhaKernelSm90:
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
        config = FmhaConfig(
            head_dim,
            num_query_heads,
            sliding_window,
            top_k,
            is_causal,
            sink_mode,
            softmax_scale,
            num_splits,
        )
        check_kernel_config(config, (q_dtype, kv_dtype, o_dtype), (qk_acc_dtype, pv_acc_dtype))
        self.swap_ab = self.heads_m = None
        if num_query_heads <= MOST_SWAP_AB_HEADS:
            self.swap_ab = FmhaSwapAB(config, num_query_heads)
        else:
            self.heads_m = FmhaHeadsM(config)
            # A fixed number of splits promises that a token's bits do not depend on the batch: it
            # has one kernel.
            if num_query_heads in TILED_HEADS and num_splits is None:
                self.swap_ab = FmhaSwapAB(config, SWAP_AB_TILE_HEADS)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [T, n_h, head_dim] bf16
        compressed_kv: cute.Tensor,  # [T, top_k, head_dim] bf16
        swa_kv: cute.Tensor,  # [batch, W, head_dim] bf16
        swa_lens: cute.Tensor,  # [batch] int32
        sink_logits: cute.Tensor,  # [n_h] fp32
        request_ids: cute.Tensor,  # [T] int32
        o: cute.Tensor,  # [T, n_h, head_dim] bf16, written
        stream,
        *,
        compressed_lens: cute.Tensor,  # [T] int32, or [0]: every row counts
        lse: cute.Tensor,  # [T, n_h] fp32, written, or [0, n_h]: not wanted
        workspace: cute.Tensor,  # [>= workspace_size] fp32 when num_splits > 1, zeros when new
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,  # persistent CTAs at most: the number of SMs
    ):
        """Launch the attention."""
        arguments = FmhaArguments(
            q,
            compressed_kv,
            swa_kv,
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            num_splits,
            num_ctas,
        )
        if cutlass.const_expr(self.heads_m is None):
            self.swap_ab.launch(arguments, stream)
        elif cutlass.const_expr(self.swap_ab is None):
            self.heads_m.launch(arguments, stream)
        elif q.shape[0] * self.swap_ab.head_tiles * num_splits <= num_ctas:
            self.swap_ab.launch(arguments, stream)
        else:
            self.heads_m.launch(arguments, stream)


# ---- compilation ----


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
    args, optional = fake_arguments(config)
    return cute.compile(kernel, *args, **optional, options=f"--enable-tvm-ffi {options}".strip())
