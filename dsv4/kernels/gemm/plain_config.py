"""Configuration of a plain linear: a bf16 weight.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.gemm.config import K_STEP, MAX_IN_FEATURES, OUT_DTYPES, has_kernel
from dsv4.quoting import quoted


@dataclass(frozen=True)
class PlainLinearConfig:
    """Identity of a plain linear.

    Attributes:
        in_features: K, a multiple of 512 up to 16,384.
        out_features: M; compiled kernels take it at run time.
        out_dtype: of the result.
    """

    in_features: int
    out_features: int
    out_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not has_kernel(self.in_features):
            raise ValueError(
                f"in_features must be a multiple of {K_STEP} up to {MAX_IN_FEATURES}, "
                f"got {self.in_features}"
            )
        if self.out_features < 1:
            raise ValueError(f"out_features must be positive, got {self.out_features}")
        if self.out_dtype not in OUT_DTYPES:
            raise ValueError(f"out_dtype must be one of {OUT_DTYPES}, got {quoted(self.out_dtype)}")
