"""Sparse decode attention for Hopper (sm_90a): compressed keys, sliding window and sink in one
launch.

`FmhaKernelSm90` is what callers construct, compile and call. It picks one of two kernels, which
share lengths, the split-KV protocol and the merge:

- `FmhaFewHeads`: keys as the rows of the products; up to 24 heads, where the time goes into reading
  keys, all in one CTA. And 32, 64 or 128 heads, in tiles of 16, while there is a multiprocessor for
  each: more of these tiles would wait for each other's reads of the same keys.
- `FmhaManyHeads`: 64 heads of a token in one CTA, heads as the rows of the products.

Either way a block of keys is read from global memory once for both products. With several splits of
the keys, CTAs meet in the workspace (`fmha_sm90_meeting`): launches that may run at the same time
need workspaces of their own.

The softmax keeps one reference per head that all weights are relative to, so that the final
division is exact and nothing overflows. The `swa_gate` sink is a bias on one branch's scores:
-max(sink, 0) on compressed scores, min(sink, 0) on window scores. The branch with the larger weight
keeps bias 0, which makes sinks of any size, infinities included, exact.
"""

import cutlass
from cutlass import cute

from dsv4.kernels.attention.args import fake_arguments
from dsv4.kernels.attention.config import FmhaConfig, check_kernel_config
from dsv4.kernels.attention.sm90.heads_m import FmhaManyHeads
from dsv4.kernels.attention.sm90.swap_ab import FmhaFewHeads
from dsv4.kernels.attention.split_kv import MOST_FEW_HEADS, TILE_OF_HEADS, TILED_HEADS


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
        self.few = self.many = None
        if num_query_heads <= MOST_FEW_HEADS:
            self.few = FmhaFewHeads(config, num_query_heads, q_dtype)
        else:
            self.many = FmhaManyHeads(config, q_dtype)
            # A fixed number of splits promises that a token's bits do not depend on the batch: it
            # has one kernel.
            if num_query_heads in TILED_HEADS and num_splits is None:
                self.few = FmhaFewHeads(config, TILE_OF_HEADS, q_dtype)

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
        tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o, stream)
        options = {
            "compressed_lens": compressed_lens,
            "lse": lse,
            "workspace": workspace,
            "num_splits": num_splits,
            "num_ctas": num_ctas,
        }
        if cutlass.const_expr(self.many is None):
            self.few(*tensors, **options)
        elif cutlass.const_expr(self.few is None):
            self.many(*tensors, **options)
        elif q.shape[0] * self.few.head_tiles * num_splits <= num_ctas:
            self.few(*tensors, **options)
        else:
            self.many(*tensors, **options)


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
