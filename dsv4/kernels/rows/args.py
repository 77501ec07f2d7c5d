"""Arguments of `rms_norm_fp8` and of its kernel: T rows of d elements in g groups of 128."""

from __future__ import annotations

from dsv4.kernels.kit.args import In, OptOut, Out, Scalar
from dsv4.kernels.rows.config import RmsNormFp8Config

# Rows are loaded 16 bytes at a time, codes stored 8. float32 is for the torch implementation.
_ROWS = {"dtype": "bfloat16", "also": ("float32",), "align": 16}

ARGS = (
    In("x", "T d", **_ROWS),
    In("weight", "w", "weight_dtype", align=16, differentiable=True),
    Out("out", "T d", "float8_e4m3fn", align=8),
    Out("scale_out", "T g", "float8_e8m0fnu"),
    OptOut("norm_out", "T d", **_ROWS),
    Scalar("num_ctas"),
)


def values(config: RmsNormFp8Config) -> dict[str, int | str]:
    """What a kernel is compiled for. Without a weight, `weight` may have any size, 0 too."""
    weight = {} if config.weight_dtype is None else {"w": config.dim}
    dtype = config.weight_dtype or "float32"
    return {"d": config.dim, "g": config.groups, "weight_dtype": dtype, **weight}
