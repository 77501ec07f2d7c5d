"""Arguments of `linear_argmax` and of its kernels: for each row of y [T, M] = x [T, K] W [M, K]^T
the column of its largest element, and y where it is wanted."""

from __future__ import annotations

from dsv4.kernels.kit.args import In, OptOut, Out, Scalar, Workspace

# As those of `plain_linear`.
ARGS = (
    In("x", "T K", also=("float32",), align=16, differentiable=True),
    In("weight", "M K", also=("float32",), align=16, differentiable=True),
    Out("rows", "T", "int64"),
    OptOut("out", "T M", "out_dtype"),
    Workspace(),
    Scalar("tiling"),
    Scalar("num_sms"),
)
