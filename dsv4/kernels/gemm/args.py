"""Arguments of `fp8_linear` and of its kernels: y [T, M] = x [T, K] W [M, K]^T.

K has g blocks of 128, M has G, the last of which may be ragged. S is T where x is quantised by the
caller, and 0 where not. With an epilogue M is that of H heads, each with N sums of squares,
or of C, each with a scale of its codes.
"""

from __future__ import annotations

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.epilogues import CODES
from dsv4.kernels.kit.args import DTYPES, In, OptIn, OptOut, Out, Scalar, Scratch
from dsv4.kernels.kit.kv_entry import ROPE_DIM

CODE_BYTES = 8  # of codes, which are stored together

# TMA reads from addresses and strides that are multiples of 16 bytes; so do vector loads. float32
# is for the torch implementation.
ARGS = (
    In("x", "T K", "x_dtype", also=("float32",), align=16, differentiable=True),
    In("weight", "M K", "float8_e4m3fn", align=16),
    In("scale", "G g", "scale_dtype", differentiable=True),
    In("x_scale", "S g", "float8_e8m0fnu"),
    Out("out", "T M", "out_dtype", align="out_align"),
    Scratch("codes", "T K", "float8_e4m3fn", align=16),
    Scratch("code_scales", "T g", "float8_e8m0fnu"),
    OptIn("rope", "R rope_dim", "float32", align=16),
    OptIn("positions", "T", "int32"),
    OptOut("squares", "T H N", "float32", align=16),
    OptOut("head_scales", "T C", "float32"),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def out_align(out_dtype: str) -> int:
    """Bytes that the rows of an output start at multiples of."""
    return CODE_BYTES if out_dtype == CODES else DTYPES[out_dtype]


def values(config: Fp8LinearConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    return {
        "K": config.in_features,
        "g": config.k_blocks,
        "x_dtype": config.x_dtype,
        "scale_dtype": config.scale_dtype,
        "out_dtype": config.out_dtype,
        "rope_dim": ROPE_DIM,
        "out_align": out_align(config.out_dtype),
        "N": config.head_epilogue.parts if config.head_epilogue else 1,
    }
