"""Arguments of `grouped_linear` and of its kernels: y [T, M] of x [T, W] and W [M, K], whose M rows
are those of groups, one behind the other, as are the W columns of x.

W has w blocks of 128, K has g, M has G. C are the rows of the codes of T tokens, X those of x: T,
or C of codes. Where y are codes, each row has G scales, and x are codes, or both scratch tensors
are there.
"""

from __future__ import annotations

from dsv4.kernels.gemm.args import out_align
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.gemm.grouped_config import GroupedLinearConfig
from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Scratch

# TMA reads from addresses and strides that are multiples of 16 bytes; so do vector loads. float32
# is for the torch implementation.
ARGS = (
    In("x", "X W", "x_dtype", also=("float32",), align=16, differentiable=True),
    In("weight", "M K", "float8_e4m3fn", align=16),
    In("scale", "G g", "scale_dtype", differentiable=True),
    Out("out", "T M", "out_dtype", align="out_align"),
    Scratch("codes", "C W", "float8_e4m3fn", align=16),
    Scratch("code_scales", "T w", "float8_e8m0fnu"),
    OptOut("out_scale", "T G", "float8_e8m0fnu"),
    OptIn("x_scale", "T w", "float8_e8m0fnu"),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def values(config: GroupedLinearConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    width = config.groups * config.in_features
    return {
        "W": width,
        "w": width // K_BLOCK,
        "K": config.in_features,
        "g": config.k_blocks,
        "M": config.out_features,
        "G": config.out_features // K_BLOCK,
        "x_dtype": config.x_dtype,
        "scale_dtype": config.scale_dtype,
        "out_dtype": config.out_dtype,
        "out_align": out_align(config.out_dtype),
    }
