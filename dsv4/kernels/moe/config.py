"""Configuration that the experts of a layer are compiled for.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.moe.layout import ROW_BLOCKS
from dsv4.quoting import quoted

K_BLOCK = 128  # elements of a token that share a scale
FP4_GROUP = 32  # e2m1 weights of a row that share a scale
MAX_TOP_K = 16
EXPERT_DTYPES = ("fp4", "fp8", "nvfp4", "bfloat16")
SHARED_DTYPES = ("fp8", "bfloat16")
BF16_DTYPES = ("nvfp4", "bfloat16")  # multiplied with activations in bf16
SCALE_FORMS = ("packed", "row_packed", "raw", "tiled")
FOLDED_FORMS = ("packed", "row_packed")  # whose FP4 scales fold into e4m3 codes
SCALE_DTYPES = ("float8_e8m0fnu", "float32")
OUT_DTYPES = ("bfloat16", "float32")


def check_row_packed(name: str, width: int) -> None:
    """Refuse rows whose words have no room for an exponent of the row."""
    if width < ROW_BLOCKS * K_BLOCK:
        raise ValueError(
            f"{name} must be at least {ROW_BLOCKS * K_BLOCK} for row_packed scales, got {width}"
        )


@dataclass(frozen=True)
class ExpertsConfig:
    """Identity of a layer's experts.

    Attributes:
        hidden: D, width of a token; a multiple of 128.
        inner: I, width between the two products; a multiple of 128.
        top_k: experts of a token.
        expert_dtype: of the routed experts: "fp4" (E2M1 with an E8M0 scale per 32) or "fp8" (E4M3
            with a scale per 128 x 128); "nvfp4" (E2M1 with an E4M3 scale per 16 and one fp32 scale)
            or "bfloat16", whose products are of bf16.
        scale_form: of FP4 scales. "packed": the four groups of a row's k block are exponents of at
            most `layout.MAX_SPREAD` above a common one, and fold into the e4m3 codes. "row_packed":
            the same, with a common one for all of a row. "raw": any, and every 32 elements are
            summed by themselves. "tiled": any, on Blackwell, whose tensor core takes them; the
            order of all prepared weights there.
        scale_dtype: of FP8 experts.
        shared_scale_dtype: of the shared expert, where it is FP8.
        limit: gate is at most that, up within plus and minus that.
        out_dtype: of the result.
        shared_dtype: of the shared expert: "fp8"; or "bfloat16", beside such routed ones.
    """

    hidden: int
    inner: int
    top_k: int = 6
    expert_dtype: str = "fp4"
    scale_form: str = "packed"
    scale_dtype: str = "float8_e8m0fnu"
    shared_scale_dtype: str = "float8_e8m0fnu"
    limit: float = 10.0
    out_dtype: str = "bfloat16"
    shared_dtype: str = "fp8"

    def __post_init__(self) -> None:
        for name in ("hidden", "inner"):
            value = getattr(self, name)
            if value < K_BLOCK or value % K_BLOCK:
                raise ValueError(f"{name} must be a multiple of {K_BLOCK}, got {value}")
            if self.expert_dtype == "fp4" and self.scale_form == "row_packed":
                check_row_packed(name, value)
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be 1 to {MAX_TOP_K}, got {self.top_k}")
        if not self.limit > 0:
            raise ValueError(f"limit must be positive, got {self.limit}")
        for name, allowed in (
            ("expert_dtype", EXPERT_DTYPES),
            ("scale_form", SCALE_FORMS),
            ("scale_dtype", SCALE_DTYPES),
            ("shared_scale_dtype", SCALE_DTYPES),
            ("out_dtype", OUT_DTYPES),
            ("shared_dtype", SHARED_DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {quoted(value)}")
