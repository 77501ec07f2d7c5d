"""Configuration of `index_topk`, and its arguments: T tokens of h index heads of d channels, N
entries at most, pages of P keys. A row of q has qd elements: the channels of all heads, or pairs of
their codes, which have scales then.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.args import In, OptIn, Out, Scalar, Workspace
from dsv4.kernels.kit.index_entry import ALIGNMENT, INDEX_FORMATS, MODEL_DIM, IndexEntry
from dsv4.quoting import quoted

KEY_FORMATS = {"bf16": "bfloat16", "fp32": "float32", "fp8": "uint8", "fp4": "uint8"}
RANKS = {"bf16": "bfloat16", "fp32": "float32"}
KERNEL_HEADS, KERNEL_DIM, KERNEL_ROPE_DIM = 64, MODEL_DIM, 64  # of the released models
TILE_KEYS = 64  # rows of a product
FP4_PAGES = (16, 32, 64)  # keys of a page of FP4 keys that kernels take
# Of a selection: bins of the upper bits of a score, whose counts the scores' kernel makes.
BINS = 2048
BIN_SHIFT = 5  # bits of an order key below its bin
FP32_BIN_SHIFT = 21  # the same of scores in fp32
LOW_KEYS = 1 << BIN_SHIFT  # keys of a bin
MAX_TOPK = 8192


@dataclass(frozen=True)
class IndexTopkConfig:
    """Identity of a compiled `index_topk`.

    Attributes:
        heads, dim, rope_dim: index heads, their channels, those that are rotated (the last ones).
        topk: entries chosen for a token.
        page: keys of a page.
        weight_scale: factor of the heads' weights.
        key_format: of the pages: "bf16" or "fp32" rows, or "fp8" or "fp4" (`kit.index_entry`).
        is_rounded: whether queries pass through the Hadamard transform and FP4, as keys have.
        rank: what scores are rounded to before they are compared: "bf16", or "fp32", not at all.
        gives_slots: whether chosen entries are named by their slots, page * P + place, not by
            their numbers.
        has_codes: whether queries come rotated and rounded, as e4m3 codes with a scale a head.
    """

    heads: int
    dim: int
    rope_dim: int
    topk: int
    page: int
    weight_scale: float
    key_format: str = "fp8"
    is_rounded: bool = True
    rank: str = "bf16"
    gives_slots: bool = False
    has_codes: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "topk", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"topk must be at most {MAX_TOPK}, got {self.topk}")
        if not 0 <= self.rope_dim <= self.dim or self.rope_dim % 2:
            raise ValueError(
                f"rope_dim must be even and in 0..dim = {self.dim}, got {self.rope_dim}"
            )
        for name, known in (("key_format", KEY_FORMATS), ("rank", RANKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {tuple(known)}, got {quoted(getattr(self, name))}"
                )
        if self.is_rounded and self.dim & (self.dim - 1):
            raise ValueError(f"dim: the Hadamard transform needs a power of two, got {self.dim}")
        if self.has_codes and not self.is_rounded:
            raise ValueError("has_codes: codes are rounded, is_rounded must be True, got False")
        if self.is_rounded or self.is_packed:
            IndexEntry(self.dim)  # refuses channels that are no whole groups

    @property
    def is_packed(self) -> bool:
        """Whether keys are codes and scales."""
        return self.key_format in INDEX_FORMATS

    @property
    def bin_shift(self) -> int:
        """Bits of a score's order key below its bin."""
        return FP32_BIN_SHIFT if self.rank == "fp32" else BIN_SHIFT

    @property
    def row(self) -> int:
        """Last dimension of the pages."""
        return IndexEntry(self.dim, self.key_format).bytes if self.is_packed else self.dim

    @property
    def page_tiles(self) -> bool:
        """Whether a tile of keys is whole pages, or a page whole tiles."""
        return TILE_KEYS % self.page == 0 or self.page % TILE_KEYS == 0


def has_kernel(config: IndexTopkConfig) -> bool:
    """Whether kernels take a configuration: the released models', with FP8 or FP4 keys."""
    sizes = (config.heads, config.dim, config.rope_dim)
    # A box of the tensor map is whole swizzle atoms; one of FP4 keys is a page with its scales,
    # whose 16 rows of a warp lie in one page.
    has_boxes = config.page % 8 == 0 and config.page_tiles
    if config.key_format == "fp4":
        has_boxes = config.page in FP4_PAGES
    return (
        sizes == (KERNEL_HEADS, KERNEL_DIM, KERNEL_ROPE_DIM)
        and config.is_packed
        and config.is_rounded
        and has_boxes
    )


_ROWS = {"dtype": "bfloat16", "also": ("float32",)}

ARGS = (
    In("q", "T qd", align=16, **_ROWS),
    In("weights", "T h", **_ROWS),
    In("rope", "R rope_dim", "float32", align=16),
    In("positions", "T", "int32"),
    In("lens", "T", "int32"),
    In("request_ids", "T", "int32"),
    In("block_table", "B W", "int32"),
    In(
        "keys",
        "pages P row",
        "key_dtype",
        align=ALIGNMENT,
        inner_align="key_align",
        differentiable=True,
    ),
    Out("indices", "T k", "int32", public="out"),
    Out("scores", "T N", "rank_dtype", align=16, public="scores_out", differentiable=True),
    OptIn("q_scale", "T h", "float32"),
    Workspace(),
    Scalar("num_ctas"),
    Scalar("cluster"),
)


def values(config: IndexTopkConfig) -> dict[str, int | str]:
    """What a kernel is compiled for."""
    key_align = ALIGNMENT
    if config.is_packed:
        key_align = IndexEntry(config.dim, config.key_format).alignment
    return {
        "qd": config.heads * config.dim // (2 if config.has_codes else 1),
        "h": config.heads,
        "rope_dim": config.rope_dim,
        "P": config.page,
        "row": config.row,
        "k": config.topk,
        "key_dtype": KEY_FORMATS[config.key_format],
        "key_align": key_align,
        "rank_dtype": RANKS[config.rank],
    }
