"""Sparse decode attention for Blackwell (sm_100a): compressed keys, sliding window and sink in one
launch.

`FmhaKernel` is what callers construct, compile and call. It picks one of two variants, which share
masks, softmax and merge:

- `Fmha1Cta`: one CTA computes 64 query heads of one token; any head_dim, any number of heads.
- `Fmha2Cta`: the two CTAs of a cluster compute 128 heads of one token with one pair of tensor cores
  (cta_group::2); head_dim 512 and more than 64 heads.

Either way a KV tile is read from global memory once for all heads of a CTA or cluster, and once for
both products. With several splits of the keys the variants leave partial results, which a second
kernel combines in split order.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import tcgen05

from dsv4.kernels.attention.call import FmhaCall
from dsv4.kernels.attention.config import FmhaConfig, check_kernel_config
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.sm100.combine import Combine
from dsv4.kernels.attention.sm100.fmha_1cta import Fmha1Cta
from dsv4.kernels.attention.sm100.fmha_2cta import Fmha2Cta
from dsv4.kernels.attention.sm100.plan_1cta import ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HEAD_DIM as HEAD_DIM_2CTA

ONE, TWO = tcgen05.CtaGroup.ONE, tcgen05.CtaGroup.TWO


class FmhaKernel(FmhaCall):
    """Attention over compressed entries and a sliding window, fused with the sink merge (sm_100a).

    Args:
        head_dim: 64, 128, 256 or 512.
        num_query_heads: any; computed in blocks of 64.
        sliding_window: window of `is_causal=True`; otherwise all rows below `swa_lens` are visible.
        top_k: promised bound of compressed rows; the real capacity is a runtime size.
        cta_group: CTAs that one tensor core instruction spans. None chooses: TWO for head_dim 512
            and more than 64 heads, which is all that TWO can do, else ONE.
        cluster_shape_mn: None, or the cluster of the variant: (2, 1) where two CTAs of a token
            share the loads of its keys, else (1, 1), which is also taken for None.
        softmax_scale: positive; default head_dim**-0.5.
        num_splits: fixed number of KV splits, or None where each launch says.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        sliding_window: int,
        top_k: int,
        q_dtype=BFloat16,
        kv_dtype=BFloat16,
        o_dtype=BFloat16,
        qk_acc_dtype=Float32,
        pv_acc_dtype=Float32,
        is_causal: bool = False,
        cta_group: tcgen05.CtaGroup | None = None,
        cluster_shape_mn: tuple[int, int] | None = None,
        *,
        softmax_scale: float | None = None,
        sink_mode: str = "swa_gate",
        num_splits: int | None = None,
    ):
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
        self.variant = _choose_variant(self.config, cta_group)
        cluster = self.variant.cluster
        if cluster_shape_mn not in (None, (1, 1), cluster[:2]):
            raise ValueError(
                f"cluster_shape_mn must be None or {cluster[:2]} here, got {cluster_shape_mn}"
            )
        self.combine = Combine(head_dim, num_query_heads, sink_mode, o_dtype)

    @classmethod
    def from_config(cls, config: FmhaConfig):
        """The kernel of a configuration; ValueError for what it cannot compute."""
        if config.dtype != "bfloat16":
            raise ValueError(f"dtype must be bfloat16 on sm_100a, got {config.dtype}")
        return cls(
            config.head_dim,
            config.num_query_heads,
            config.sliding_window,
            config.top_k,
            is_causal=config.is_causal,
            softmax_scale=config.softmax_scale,
            sink_mode=config.sink_mode,
            num_splits=config.num_splits,
        )

    @property
    def plan(self):
        """Budgets of the variant; prints."""
        return self.variant.plan

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Launch the attention, then with several splits the combine."""
        self.variant.launch(arguments, stream)
        if arguments.num_splits > 1:
            self.combine.launch(arguments, stream)


def _choose_variant(config: FmhaConfig, cta_group: tcgen05.CtaGroup | None) -> Fmha1Cta | Fmha2Cta:
    """The variant of a configuration; ValueError for a `cta_group` that does not suit it."""
    has_2cta = config.head_dim == HEAD_DIM_2CTA and config.num_query_heads > ROWS
    if cta_group not in (None, ONE, TWO):
        raise ValueError(f"cta_group must be None, ONE or TWO, got {cta_group}")
    if cta_group == TWO and not has_2cta:
        raise ValueError(
            f"cta_group TWO needs head_dim {HEAD_DIM_2CTA} and more than {ROWS} query heads, "
            f"got {config.head_dim} and {config.num_query_heads}"
        )
    if has_2cta and cta_group != ONE:
        return Fmha2Cta(config)
    return Fmha1Cta(config)


def build(config: FmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return FmhaKernel.from_config(config).compile(options)
