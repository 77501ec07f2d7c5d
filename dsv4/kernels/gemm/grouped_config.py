"""Configuration of a grouped linear: the rows of a weight in groups, each with inputs of its own.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.gemm.config import (
    K_BLOCK,
    K_STEP,
    OUT_DTYPES,
    SCALE_DTYPES,
    X_DTYPES,
)
from dsv4.kernels.gemm.epilogues import CODES, Rounding
from dsv4.quoting import quoted

ACTS = ("bf16", "fp8")
MAX_GROUP_FEATURES = 8192  # two terms of eight tokens fit beside a ring
GROUP_STEP = 2 * K_BLOCK  # rows: what two CTAs that share activations take


@dataclass(frozen=True)
class GroupedLinearConfig:
    """Identity of a grouped linear.

    Attributes:
        in_features: K of a group, a multiple of 512 up to 8,192.
        group_rows: output features of a group, a multiple of 256.
        groups: their number.
        act: what the activations are multiplied as: "bf16", as they are, or "fp8", rounded to e4m3
            with a scale per 128 elements.
        scale_dtype: of the weight's scales.
        out_dtype: of the result; "float8_e4m3fn": bf16 results become codes, with a scale per 128.
        x_dtype: "bfloat16", or "float8_e4m3fn": codes of `act`, as `quantize` makes them.
    """

    in_features: int
    group_rows: int
    groups: int
    act: str = "bf16"
    scale_dtype: str = "float8_e8m0fnu"
    out_dtype: str = "bfloat16"
    x_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not _has_width(self.in_features):
            raise ValueError(
                f"in_features must be a multiple of {K_STEP} up to {MAX_GROUP_FEATURES}, "
                f"got {self.in_features}"
            )
        if self.group_rows < 1 or self.group_rows % GROUP_STEP:
            raise ValueError(
                f"group_rows must be a positive multiple of {GROUP_STEP}, got {self.group_rows}"
            )
        if self.groups < 1:
            raise ValueError(f"groups must be positive, got {self.groups}")
        for name, allowed in (
            ("act", ACTS),
            ("scale_dtype", SCALE_DTYPES),
            ("out_dtype", (*OUT_DTYPES, CODES)),
            ("x_dtype", X_DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {quoted(value)}")

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.groups * self.group_rows

    @property
    def k_blocks(self) -> int:
        """Scales of a row of the weight."""
        return self.in_features // K_BLOCK

    @property
    def rounds_output(self) -> bool:
        """Whether outputs are codes."""
        return self.out_dtype == CODES

    @property
    def quantizes(self) -> bool:
        """Whether activations come in bf16, and become codes here."""
        return self.x_dtype == "bfloat16"

    @property
    def epilogues(self) -> tuple[Rounding, ...]:
        """Epilogue of the weight, if it has one."""
        return (Rounding(),) if self.rounds_output else ()

    @property
    def terms(self) -> int:
        """e4m3 codes of an activation: see `quantize`."""
        return 2 if self.act == "bf16" else 1


def takes_groups(in_features: int, group_rows: int) -> bool:
    """Whether there is a configuration of these groups."""
    return _has_width(in_features) and group_rows > 0 and group_rows % GROUP_STEP == 0


def _has_width(in_features: int) -> bool:
    return in_features % K_STEP == 0 and K_STEP <= in_features <= MAX_GROUP_FEATURES
