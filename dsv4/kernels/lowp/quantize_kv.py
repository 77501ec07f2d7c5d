"""`quantize_kv`: keys and values as codes, for any GPU that has FP8 conversions.

Three launches. `TileStatistics`: of every tile of 128 rows, sums of the keys' channels and extremes
of the values'. `SequenceStatistics`: from those to means and scales of a sequence, in the one order
of `ops.quantized_attention.quantizers.column_sums`. `Codes`: rows of keys as int8, columns of
values as e4m3, transposed and permuted within 16 keys (`groups.V_ORDER`) on their way through
shared memory. Bits are those of torch.
"""

from __future__ import annotations

from cutlass import cute

from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.lowp.args import QUANTIZE_KV_ARGS, values
from dsv4.kernels.lowp.config import QuantizeKvConfig
from dsv4.kernels.lowp.kv_codes import Codes
from dsv4.kernels.lowp.kv_statistics import Operands, SequenceStatistics, TileStatistics


class QuantizeKv:
    """Kernels of one configuration."""

    def __init__(self, config: QuantizeKvConfig):
        self.tiles = TileStatistics(config)
        self.sequences = SequenceStatistics(config)
        self.codes = Codes(config)

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,  # [b, Hk, S, d] bf16 or fp16
        v: cute.Tensor,  # [b, Hk, S, d]
        k_codes: cute.Tensor,  # [b, Hk, S, dp] int8, written
        k_scale: cute.Tensor,  # [b, Hk, tiles, scales] fp32, written
        v_codes: cute.Tensor,  # [b, Hk, tiles, dp, 128] e4m3, written
        stream,
        *,
        v_scale: cute.Tensor,  # [N, Hk, dp] fp32, written
        v_block_scale: cute.Tensor,
        km: cute.Tensor,  # [N, Hk, d], written, or [0, ..]: nothing is taken off keys
        vm: cute.Tensor,  # [N, Hk, d] fp32, written, or [0, ..]
        k_smooth: cute.Tensor,
        cu_seqlens_k: cute.Tensor,  # [N + 1] int32 of packed sequences
        workspace: cute.Tensor,
    ):
        """Launch all."""
        operands = Operands(
            k, v, k_codes, k_scale, v_codes, v_scale, km, vm, cu_seqlens_k, workspace
        )
        self.tiles.launch(operands, stream)
        self.sequences.launch(operands, stream)
        self.codes.launch(operands, stream)


def build(config: QuantizeKvConfig, options: str = ""):
    """Compile the kernels of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(QuantizeKv(config), QUANTIZE_KV_ARGS, values(config), options)
