"""Arguments of `plain_linear` and of its kernels: y [T, M] = x [T, K] W [M, K]^T."""

from __future__ import annotations

from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.kit.args import In, Out, Scalar

# TMA reads from addresses and strides that are multiples of 16 bytes. float32 is for the torch
# implementation.
ARGS = (
    In("x", "T K", also=("float32",), align=16, differentiable=True),
    In("weight", "M K", also=("float32",), align=16, differentiable=True),
    Out("out", "T M", "out_dtype"),
    Scalar("tiling"),
    Scalar("num_sms"),
)


def values(config: PlainLinearConfig) -> dict[str, int | str]:
    """What the kernels are compiled for."""
    return {"K": config.in_features, "out_dtype": config.out_dtype}
