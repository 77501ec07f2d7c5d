"""Arguments of `merged_linear` and of its kernels: y_i [T, M_i] = x [T, K] W_i [M_i, K]^T.

K has g blocks of 128, M_i has G_i, the last of which may be ragged. FP8 weights have scales, plain
ones have the dtype of x. Epilogues of FP8 weights share the table and positions; each of the H_i
heads of weight i has N_i sums of squares, or a scale of its codes.
"""

from __future__ import annotations

from dsv4.kernels.gemm.args import out_align
from dsv4.kernels.gemm.merged_config import MOST_FP8, MOST_PLAIN, MergedLinearConfig
from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Scratch
from dsv4.kernels.kit.kv_entry import ROPE_DIM


def _fp8(i: int, read: type[In], written: type[Out]) -> tuple[In | Out, ...]:
    return (
        read(f"weight_{i}", f"M{i} K", "float8_e4m3fn", align=16),
        read(f"scale_{i}", f"G{i} g", "scale_dtype", differentiable=True),
        written(
            f"out_{i}", f"T M{i}", f"out_{i}_dtype", align=f"out_{i}_align", differentiable=True
        ),
    )


def _plain(i: int) -> tuple[In | Out, ...]:
    return (
        OptIn(f"plain_{i}", f"P{i} K", also=("float32",), align=16, differentiable=True),
        OptOut(f"plain_out_{i}", f"T P{i}", f"plain_out_{i}_dtype", differentiable=True),
    )


# TMA reads from addresses and strides that are multiples of 16 bytes; so do vector loads. float32
# is for the torch implementation.
ARGS = (
    In("x", "T K", also=("float32",), align=16, differentiable=True),
    *_fp8(0, In, Out),
    *(arg for i in range(1, MOST_FP8) for arg in _fp8(i, OptIn, OptOut)),
    *(arg for i in range(MOST_PLAIN) for arg in _plain(i)),
    OptIn("x_codes", "T K", "float8_e4m3fn", align=16),
    OptIn("x_scale", "T g", "float8_e8m0fnu"),
    Scratch("codes", "T K", "float8_e4m3fn", align=16),
    Scratch("code_scales", "T g", "float8_e8m0fnu"),
    OptIn("rope", "R rope_dim", "float32", align=16),
    OptIn("positions", "T", "int32"),
    *(OptOut(f"squares_{i}", f"T H{i} N{i}", "float32", align=16) for i in range(MOST_FP8)),
    *(OptOut(f"head_scales_{i}", f"T H{i}", "float32") for i in range(MOST_FP8)),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def values(config: MergedLinearConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    found: dict[str, int | str] = {
        "K": config.in_features,
        "g": config.k_blocks,
        "scale_dtype": config.fp8[0].stored,
        "rope_dim": ROPE_DIM,
    }
    for i in range(MOST_FP8):
        found |= {f"out_{i}_dtype": "bfloat16", f"out_{i}_align": out_align("bfloat16")}
        found[f"N{i}"] = 1
    for i in range(MOST_PLAIN):
        found[f"plain_out_{i}_dtype"] = "bfloat16"
    for i, weight in enumerate(config.fp8):
        blocks = -(-weight.rows // (config.in_features // config.k_blocks))
        found |= {f"M{i}": weight.rows, f"G{i}": blocks, f"out_{i}_dtype": weight.out_dtype}
        found[f"out_{i}_align"] = out_align(weight.out_dtype)
        epilogue = weight.head_epilogue
        if epilogue is not None:
            found |= {f"H{i}": epilogue.heads(weight.rows), f"N{i}": epilogue.parts}
    for i, weight in enumerate(config.plain):
        found |= {f"P{i}": weight.rows, f"plain_out_{i}_dtype": weight.out_dtype}
    return found
