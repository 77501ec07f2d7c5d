"""Arguments of `fp8_linear` and of its kernels: y [T, M] = x [T, K] W [M, K]^T.

K has g blocks of 128, M has G, the last of which may be ragged. S is T where x is quantised by the
caller, and 0 where not. With the epilogue `head_rotation` M is that of H heads, each with N sums of
squares.
"""

from __future__ import annotations

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Scratch
from dsv4.kernels.kit.kv_entry import ROPE_DIM

# TMA reads from addresses and strides that are multiples of 16 bytes; so do vector loads. float32
# is for the torch implementation.
ARGS = (
    In("x", "T K", "x_dtype", also=("float32",), align=16, differentiable=True),
    In("weight", "M K", "float8_e4m3fn", align=16),
    In("scale", "G g", "scale_dtype", differentiable=True),
    In("x_scale", "S g", "float8_e8m0fnu"),
    Out("out", "T M", "out_dtype"),
    Scratch("codes", "T K", "float8_e4m3fn", align=16),
    Scratch("code_scales", "T g", "float8_e8m0fnu"),
    OptIn("rope", "R rope_dim", "float32", align=16),
    OptIn("positions", "T", "int32"),
    OptOut("squares", "T H N", "float32", align=16),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def values(config: Fp8LinearConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    return {
        "K": config.in_features,
        "g": config.k_blocks,
        "x_dtype": config.x_dtype,
        "scale_dtype": config.scale_dtype,
        "out_dtype": config.out_dtype,
        "rope_dim": ROPE_DIM,
        "N": config.rotation.parts if config.rotation else 1,
    }
