"""Configuration of `kv_insert`, and its arguments: N latents, a pool of pages of P entries.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from dsv4.kernels.kit.args import In, InOut, Scalar
from dsv4.kernels.kit.kv_entry import (
    ALIGNMENT,
    FP8_ENTRY_ALIGNMENT,
    GROUP,
    KV_DTYPES,
    KV_FORMATS,
    ROPE_DIM,
    row_elements,
)
from dsv4.kernels.rows.config import MAX_DIM, MIN_EPS
from dsv4.quoting import quoted


@dataclass(frozen=True)
class KvInsertConfig:
    """Identity of a compiled `kv_insert`.

    Attributes:
        dim: channels of a latent.
        eps: added to the mean square; at least 1e-18.
        kv_format: of the pool: "bf16" or "fp32" rows, or "fp8" entries.
        is_rounded: whether rows hold what FP8 entries would; entries do anyway.
        uniform_scale: whether all groups of an entry have the largest of their scales.
        rope_dim: rotated channels, the last ones, which are not rounded to FP8.
    """

    dim: int
    eps: float
    kv_format: str = "fp8"
    is_rounded: bool = True
    uniform_scale: bool = False
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        for name in ("dim", "rope_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: got {quoted(value)}, needs an integer")
        for name in ("is_rounded", "uniform_scale"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {quoted(getattr(self, name))}, needs True or False")
        if isinstance(self.eps, bool) or not isinstance(self.eps, Real):
            raise TypeError(f"eps: got {quoted(self.eps)}, needs a real number")
        if not MIN_EPS <= self.eps < float("inf"):
            raise ValueError(f"eps must be at least {MIN_EPS}, got {self.eps}")
        if not isinstance(self.kv_format, str) or self.kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format must be one of {KV_FORMATS}, got {quoted(self.kv_format)}")
        if not 1 <= self.dim <= MAX_DIM:
            raise ValueError(f"dim must be in 1..{MAX_DIM}, got {self.dim}")
        if not 0 <= self.rope_dim <= self.dim or self.rope_dim % 2:
            raise ValueError(
                f"rope_dim must be even and in 0..dim = {self.dim}, got {self.rope_dim}"
            )
        if self.quantizes and (self.dim - self.rope_dim) % GROUP:
            raise ValueError(f"dim: got {self.dim}, FP8 rounding needs {GROUP} n + {self.rope_dim}")

    @property
    def quantizes(self) -> bool:
        """Whether values pass through FP8."""
        return self.kv_format == "fp8" or self.is_rounded

    @property
    def row(self) -> int:
        """Last dimension of the pool."""
        return row_elements(self.kv_format, self.dim, self.rope_dim)


ARGS = (
    In("x", "N d", "bfloat16", also=("float32",), align=16),
    In("weight", "d", "float32", align=16),
    In("rope", "R rope_dim", "float32", align=16),
    In("positions", "N", "int32"),
    In("slots", "N", "int32"),
    InOut(
        "pool",
        "pages P row",
        "kv_dtype",
        align=ALIGNMENT,
        inner_align="entry_align",
        differentiable=True,
    ),
    Scalar("num_ctas"),
)


def values(config: KvInsertConfig) -> dict[str, int | str]:
    """The sizes and dtypes that a kernel is compiled for."""
    is_packed = config.kv_format == "fp8"
    return {
        "d": config.dim,
        "rope_dim": config.rope_dim,
        "row": config.row,
        "kv_dtype": KV_DTYPES[config.kv_format],
        "entry_align": FP8_ENTRY_ALIGNMENT if is_packed else ALIGNMENT,
    }
