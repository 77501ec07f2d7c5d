"""Configuration of a merged linear: several weights that one input is multiplied with.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dsv4.kernels.gemm import epilogues
from dsv4.kernels.gemm.config import (
    K_BLOCK,
    K_STEP,
    MAX_IN_FEATURES,
    SCALE_DTYPES,
    Kind,
    has_kernel,
)
from dsv4.quoting import quoted

MOST_FP8, MOST_PLAIN = 2, 5  # weights of a launch
PLAIN = "bfloat16"


@dataclass(frozen=True)
class Weight:
    """One of the weights.

    Attributes:
        rows: M, its output features.
        stored: dtype of the scales of an FP8 weight, or "bfloat16" of a plain one.
        out_dtype: of its output.
        epilogue: "", or one as `epilogues.parse` takes it, of an FP8 weight.
    """

    rows: int
    stored: str
    out_dtype: str
    epilogue: str = ""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"weights: rows must be positive, got {self.rows}")
        try:
            epilogues.check(self.epilogue, self.rows)
        except ValueError as error:
            raise ValueError(f"weights: epilogue: {error}") from None
        for what, value, allowed in (
            ("scales must be", self.stored, (*SCALE_DTYPES, PLAIN)),
            ("outputs must be", self.out_dtype, epilogues.out_dtypes(self.epilogue)),
        ):
            if value not in allowed:
                raise ValueError(f"weights: {what} one of {allowed}, got {quoted(value)}")
        if self.epilogue and self.kind is Kind.BF16:
            raise ValueError(f"weights: plain ones have no epilogue, got {quoted(self.epilogue)}")

    @property
    def kind(self) -> Kind:
        return Kind.BF16 if self.stored == PLAIN else Kind.FP8

    @property
    def head_epilogue(self) -> epilogues.HeadEpilogue | None:
        """The epilogue, where there is one."""
        return epilogues.parse(self.epilogue)

    def __str__(self) -> str:
        return f"{self.rows} {self.stored} {self.out_dtype} {self.epilogue}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Weight:
        """A weight of what `str` makes of one: "1024 float8_e8m0fnu bfloat16"."""
        try:
            rows, stored, out_dtype, *epilogue = text.split()
            return cls(int(rows), stored, out_dtype, "".join(epilogue))
        except ValueError as error:
            if str(error).startswith("weights"):
                raise
            raise ValueError(
                f"weights: got {quoted(text)}, needs rows, dtype of the scales or {PLAIN}, dtype "
                "of the output, and the epilogue where there is one"
            ) from None


@dataclass(frozen=True)
class MergedLinearConfig:
    """Identity of a merged linear.

    Attributes:
        in_features: K, a multiple of 512 up to 16,384.
        weights: "rows stored out_dtype" of each, as in `Weight`, and its epilogue where it has one,
            between commas; FP8 ones first.
        has_codes: whether x comes in e4m3, too.
    """

    in_features: int
    weights: str
    has_codes: bool = False

    def __post_init__(self) -> None:
        if not has_kernel(self.in_features):
            raise ValueError(
                f"in_features must be a multiple of {K_STEP} up to {MAX_IN_FEATURES}, "
                f"got {self.in_features}"
            )
        kinds = [weight.kind for weight in self.parsed]
        if kinds != sorted(kinds, key=lambda kind: kind.value):
            raise ValueError(f"weights: FP8 ones must come first, got {quoted(self.weights)}")
        if not 1 <= len(self.fp8) <= MOST_FP8 or len(self.plain) > MOST_PLAIN:
            raise ValueError(
                f"weights: needs 1 to {MOST_FP8} in FP8 and up to {MOST_PLAIN} in {PLAIN}, got "
                f"{len(self.fp8)} and {len(self.plain)}"
            )
        if len({weight.stored for weight in self.fp8}) > 1:
            raise ValueError(f"weights: scales must share a dtype, got {quoted(self.weights)}")
        for weight in self.fp8:
            try:
                epilogues.check_input(weight.epilogue, self.has_codes)
            except ValueError as error:
                raise ValueError(f"weights: epilogue: {error}") from None

    @cached_property
    def parsed(self) -> tuple[Weight, ...]:
        return tuple(Weight.parse(part) for part in self.weights.split(","))

    @property
    def fp8(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.parsed if weight.kind is Kind.FP8)

    @property
    def plain(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.parsed if weight.kind is Kind.BF16)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those with the longest rows first: their tiles take longest."""
        return (Kind.BF16, Kind.FP8) if self.plain else (Kind.FP8,)

    @property
    def head_epilogues(self) -> tuple[epilogues.HeadEpilogue | None, ...]:
        """Epilogue of each FP8 weight; nothing where none has one."""
        found = tuple(weight.head_epilogue for weight in self.fp8)
        return found if any(found) else ()

    def of_kind(self, kind: Kind) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.parsed if weight.kind is kind)

    @property
    def k_blocks(self) -> int:
        """Scales of a token."""
        return self.in_features // K_BLOCK


def weights_text(weights: Iterable[Weight]) -> str:
    """Weights as `MergedLinearConfig` takes them."""
    return ", ".join(map(str, weights))
