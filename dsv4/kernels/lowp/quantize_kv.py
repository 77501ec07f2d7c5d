"""`quantize_kv`: keys and values as codes, for any GPU that has FP8 conversions; those of FP4 for
Blackwell.

Three launches. `TileStatistics`: of every tile of 128 rows, sums of the keys' channels and extremes
of the values'. `SequenceStatistics`: from those to means and scales of a sequence, in the one order
of `ops.quantized_attention.quantizers.column_sums`. `Codes`: rows of keys as int8, columns of
values as e4m3, transposed and permuted within 16 keys (`groups.V_ORDER`) on their way through
shared memory; `Fp4Codes` both in blocks of 16. Where codes need no statistics, they are the only
launch. Bits are those of torch.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.lowp.args import QUANTIZE_KV_ARGS, values
from dsv4.kernels.lowp.config import QuantizeKvConfig
from dsv4.kernels.lowp.kv_codes import Codes
from dsv4.kernels.lowp.kv_fp4 import Fp4Codes
from dsv4.kernels.lowp.kv_statistics import Operands, SequenceStatistics, TileStatistics


class QuantizeKv:
    """Kernels of one configuration."""

    def __init__(self, config: QuantizeKvConfig):
        self.config = config
        self.tiles = TileStatistics(config)
        self.sequences = SequenceStatistics(config)
        self.codes = (Fp4Codes if config.qk == "nvfp4" else Codes)(config)

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # [b, Hk, S, d] bf16 or fp16
        v: cute.Tensor,  # [b, Hk, S, d]
        k_codes: cute.Tensor,  # [b, Hk, S, dp] int8 or e4m3, written; FP4 [.., dp / 2]
        k_scale: cute.Tensor,  # [b, Hk, tiles, scales] fp32, written; of FP4 e4m3
        v_codes: cute.Tensor,  # [b, Hk, tiles, dp, n] e4m3, written; FP4 [.., n / 2]; fp16 [.., n,
        # dp]
        stream,
        *,
        v_scale: cute.Tensor,  # [N, Hk, dp] fp32, written
        v_block_scale: cute.Tensor,  # [b, Hk, tiles, dp n / 16] e4m3, of FP4, written
        km: cute.Tensor,  # [N, Hk, d], written, or [0, ..]: nothing is taken off keys
        vm: cute.Tensor,  # [N, Hk, d] fp32, written, or [0, ..]
        k_smooth: cute.Tensor,  # [b, Hk, S, d], written, or [0, ..]: queries keep their means
        cu_seqlens_k: cute.Tensor,  # [N + 1] int32 of packed sequences
        workspace: cute.Tensor,
    ):
        """Launch all."""
        operands = Operands(
            k, v, k_codes, k_scale, v_codes, v_scale, km, vm, cu_seqlens_k, workspace,
            v_block_scale, k_smooth,
        )  # fmt: skip
        if cutlass.const_expr(self.config.has_statistics):
            self.tiles.launch(operands, stream)
            self.sequences.launch(operands, stream)
        self.codes.launch(operands, stream)


def build(config: QuantizeKvConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(QuantizeKv(config), QUANTIZE_KV_ARGS, values(config), options)
