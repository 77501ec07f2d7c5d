"""Configuration that a linear is compiled for, and the order of its sums.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dsv4.kernels.gemm import epilogues
from dsv4.quoting import quoted

K_BLOCK = 128  # elements that share a scale; also rows of a weight
STEP_BYTES = 128  # of a row of a weight, in a step of a kernel
K_STEP = 4 * K_BLOCK  # that a kernel's in_features are a multiple of
MAX_IN_FEATURES = 16384
MOST_SLICES = 4
TERMS = 2  # e4m3 codes of an activation that is not rounded
TERM_ROWS = 8  # tokens whose codes of a term lie together, where activations have two
# Of a group that is rounded to two terms, whose scale is as small as its values; far above what
# fp32 cannot hold beside the scale of a weight.
TERMS_AMAX_FLOOR = 2.0**-90
MIN_SLICE_BLOCKS = 4  # of a slice, where K has enough for more than two
X_DTYPES = ("bfloat16", "float8_e4m3fn")
SCALE_DTYPES = ("float8_e8m0fnu", "float32")
OUT_DTYPES = epilogues.OUT_DTYPES


class Kind(Enum):
    """Elements of a weight and of the activations that it is multiplied with, and their bytes."""

    FP8 = 1
    BF16 = 2

    @property
    def step(self) -> int:
        """Elements of a row of a weight in a step of a kernel."""
        return STEP_BYTES // self.value


@dataclass(frozen=True)
class Fp8LinearConfig:
    """Identity of an FP8 linear.

    Attributes:
        in_features: K, a multiple of 512 up to 16,384.
        out_features: M; compiled kernels take it at run time.
        x_dtype: "bfloat16", quantised by the kernel, or "float8_e4m3fn".
        scale_dtype: of the weight's scales.
        out_dtype: of the result: "bfloat16" or "float32", or "float8_e4m3fn" where the epilogue
            makes codes.
        epilogue: "", or one as `epilogues.parse` takes it.
    """

    in_features: int
    out_features: int
    x_dtype: str = "bfloat16"
    scale_dtype: str = "float8_e8m0fnu"
    out_dtype: str = "bfloat16"
    epilogue: str = ""

    def __post_init__(self) -> None:
        if not has_kernel(self.in_features):
            raise ValueError(
                f"in_features must be a multiple of {K_STEP} up to {MAX_IN_FEATURES}, "
                f"got {self.in_features}"
            )
        if self.out_features < 1:
            raise ValueError(f"out_features must be positive, got {self.out_features}")
        try:
            epilogues.check(self.epilogue, self.out_features)
            epilogues.check_input(self.epilogue, self.x_dtype != "bfloat16")
        except ValueError as error:
            raise ValueError(f"epilogue: {error}") from None
        for name, allowed in (
            ("x_dtype", X_DTYPES),
            ("scale_dtype", SCALE_DTYPES),
            ("out_dtype", epilogues.out_dtypes(self.epilogue)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {quoted(value)}")

    @property
    def head_epilogue(self) -> epilogues.HeadEpilogue | None:
        """The epilogue, where there is one."""
        return epilogues.parse(self.epilogue)

    @property
    def k_blocks(self) -> int:
        """Scales of a token."""
        return self.in_features // K_BLOCK

    @property
    def quantizes(self) -> bool:
        """Whether the kernel gets bf16 activations."""
        return self.x_dtype == "bfloat16"


def has_kernel(in_features: int) -> bool:
    """Whether the operator takes inputs of this width."""
    return in_features % K_STEP == 0 and K_STEP <= in_features <= MAX_IN_FEATURES


def num_slices(in_features: int) -> int:
    """Slices of K whose sums are added as a balanced binary tree, a power of two.

    Given by K alone: the bits of a result depend on neither the number of tokens nor the tiling.
    """
    blocks, slices = in_features // K_BLOCK, 2
    while slices < MOST_SLICES and blocks % (2 * slices) == 0:
        if blocks // (2 * slices) < MIN_SLICE_BLOCKS:
            break
        slices *= 2
    return slices


def num_code_rows(tokens, terms: int):
    """Rows of the codes of so many tokens; of a number known at run time, too."""
    return tokens if terms == 1 else (tokens + TERM_ROWS - 1) // TERM_ROWS * (TERM_ROWS * terms)
