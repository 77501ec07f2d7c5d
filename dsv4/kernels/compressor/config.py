"""Configuration of `compress`, and its arguments: B requests with up to C tokens, K blocks of a
request that may end with them, pages of P entries.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.args import In, InOut
from dsv4.kernels.kit.index_entry import INDEX_FORMATS, IndexEntry
from dsv4.kernels.kit.kv_entry import (
    ALIGNMENT,
    FP8_ENTRY_ALIGNMENT,
    KV_DTYPES,
    KV_FORMATS,
    ROPE_DIM,
    row_elements,
)
from dsv4.kernels.rows.config import MIN_EPS
from dsv4.kernels.rows.kv_insert_config import KvInsertConfig
from dsv4.quoting import quoted

LATENTS = {"bf16": "bfloat16", "fp32": "float32"}
SLICE = 128  # channels of a CTA
KERNEL_DIMS = (128, 512)
MAX_TERMS = 128  # tokens of a mean that a kernel holds in registers


@dataclass(frozen=True)
class CompressConfig:
    """Identity of a compiled `compress`.

    Attributes:
        dim: channels of an entry.
        ratio: tokens of a block.
        overlap: whether the block before is pooled, too.
        eps: added to the mean square; at least 1e-18.
        latent: what a mean is rounded to: "bf16" or "fp32".
        kv_format: of the pool: "bf16" or "fp32" rows, or "fp8" entries; of index keys also "fp4".
        is_index: whether entries are index keys: Hadamard-transformed and rounded to FP4 where
            `is_rounded`.
        is_rounded: whether rows hold what FP8 entries would.
        uniform_scale: as in `KvInsertConfig`.
        rope_dim: rotated channels, the last ones.
    """

    dim: int
    ratio: int
    overlap: bool
    eps: float
    latent: str = "bf16"
    kv_format: str = "fp8"
    is_index: bool = False
    is_rounded: bool = True
    uniform_scale: bool = False
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        for name in ("dim", "ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not MIN_EPS <= self.eps < float("inf"):
            raise ValueError(f"eps must be at least {MIN_EPS}, got {self.eps}")
        formats = (*KV_FORMATS, *INDEX_FORMATS[1:]) if self.is_index else KV_FORMATS
        for name, known in (("latent", tuple(LATENTS)), ("kv_format", formats)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {known}, got {quoted(getattr(self, name))}"
                )
        if not self.is_index:
            self.insertion  # noqa: B018 refuses what it cannot write
            return
        if not 0 <= self.rope_dim <= self.dim or self.rope_dim % 2:
            raise ValueError(
                f"rope_dim must be even and in 0..dim = {self.dim}, got {self.rope_dim}"
            )
        if self.is_packed and not self.is_rounded:
            raise ValueError("is_rounded: FP8 and FP4 index keys hold rounded keys, got False")
        if self.is_rounded:
            IndexEntry(self.dim)  # refuses channels that are no whole groups
            if self.dim & (self.dim - 1):
                raise ValueError(
                    f"dim: the Hadamard transform needs a power of two, got {self.dim}"
                )

    @property
    def is_packed(self) -> bool:
        """Whether entries are codes and scales."""
        return self.kv_format in INDEX_FORMATS

    @property
    def insertion(self) -> KvInsertConfig:
        """What writes entries that are no index keys."""
        fields = self.kv_format, self.is_rounded, self.uniform_scale, self.rope_dim
        return KvInsertConfig(self.dim, self.eps, *fields)

    @property
    def width(self) -> int:
        """Columns of a projection: one series of channels, or two."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def terms(self) -> int:
        """Tokens of a mean."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def row(self) -> int:
        """Last dimension of the pool."""
        if self.is_index:
            return IndexEntry(self.dim, self.kv_format).bytes if self.is_packed else self.dim
        return row_elements(self.kv_format, self.dim, self.rope_dim)


def has_kernel(config: CompressConfig) -> bool:
    """Whether kernels take a configuration: the released models'."""
    return (
        config.dim in KERNEL_DIMS
        and config.rope_dim == ROPE_DIM
        and config.latent == "bf16"
        and config.kv_format != "fp32"
        and not config.uniform_scale
        and (not config.is_index or (config.dim == SLICE and config.is_packed))
        and config.terms % 8 == 0
        and config.terms <= MAX_TERMS
    )


ARGS = (
    In("values", "B C width", "float32", align=16),
    In("scores", "B C width", "float32", align=16),
    In("ape", "ratio width", "float32", align=16),
    InOut("state", "rows size two width", "float32", align=16, differentiable=True),
    In("weight", "d", "float32", align=16),
    In("rope", "R rope_dim", "float32", align=16),
    In("state_rows", "B", "int32"),
    In("starts", "B", "int32"),
    In("lens", "B", "int32"),
    In("slots", "B K", "int32"),
    InOut(
        "pool",
        "pages P row",
        "kv_dtype",
        align=ALIGNMENT,
        inner_align="entry_align",
        differentiable=True,
    ),
)


def values(config: CompressConfig) -> dict[str, int | str]:
    """The sizes and dtypes that a kernel is compiled for."""
    alignment = ALIGNMENT
    if config.is_packed:
        alignment = FP8_ENTRY_ALIGNMENT
        if config.is_index:
            alignment = IndexEntry(config.dim, config.kv_format).alignment
    return {
        "d": config.dim,
        "width": config.width,
        "ratio": config.ratio,
        "two": 2,
        "rope_dim": config.rope_dim,
        "row": config.row,
        "kv_dtype": "uint8" if config.is_packed else KV_DTYPES[config.kv_format],
        "entry_align": alignment,
    }
