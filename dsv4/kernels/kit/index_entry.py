"""Geometry of a paged cache of index keys: 132 or 68 bytes a key of 128 channels, for any number of
them.

"fp8": a page of P keys holds the e4m3 codes of P keys, then their P scales in fp32, powers of two
(DeepGEMM's and vLLM's layout of FP8 index keys). A key that was rounded to FP4 fits without loss
where the scales of its groups of 32 lie within a factor of 2^14: codes of e2m1 are codes of e4m3,
and what the scales of the groups differ by goes into their exponents.

"fp4": the e2m1 codes of P keys, even channels in the low nibbles, then a record of E8M0 scales for
each of them, a byte a group of 32 (DeepGEMM's layout of MXFP4 index keys). Groups that a row of
"fp8" does not hold without loss are multiplied as if it did, so that both have the same scores.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.quoting import quoted

FP4_GROUP = 32  # channels that share a scale of FP4
ALIGNMENT = 16  # bytes: of pages
SCALE_BYTES = 4  # of "fp8"
WORD = 4  # bytes
INDEX_FORMATS = ("fp8", "fp4")
MODEL_DIM = 128  # channels, of the released models
MODEL_FORMAT = "fp8"  # of this package's caches
# Exponent of the largest group's scale over that of its key: 6 * 2^6 is the largest code, 384.
TOP_SHIFT = 6
MIN_EXPONENT = -126  # of a key's scale: fp32 below it is subnormal


@dataclass(frozen=True)
class IndexEntry:
    """An index key of `dim` channels.

    Attributes:
        dim: channels.
        key_format: "fp8" or "fp4".

    Raises:
        ValueError: the channels are no whole groups of 32, or there is no such format.
    """

    dim: int
    key_format: str = "fp8"

    def __post_init__(self) -> None:
        if self.key_format not in INDEX_FORMATS:
            raise ValueError(
                f"key_format must be one of {INDEX_FORMATS}, got {quoted(self.key_format)}"
            )
        if self.dim < 1 or self.dim % FP4_GROUP:
            raise ValueError(f"dim: index keys need a multiple of {FP4_GROUP}, got {self.dim}")

    @property
    def code_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.dim if self.key_format == "fp8" else self.dim // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a key's scales."""
        return SCALE_BYTES if self.key_format == "fp8" else self.dim // FP4_GROUP

    @property
    def bytes(self) -> int:
        """Bytes of a key, its scales included."""
        return self.code_bytes + self.scale_bytes

    @property
    def alignment(self) -> int:
        """Bytes that the keys of a page lie at multiples of."""
        return WORD if self.bytes % WORD == 0 else 1

    def page_bytes(self, keys: int) -> int:
        """Stride of a page of so many keys: a multiple of 16."""
        return -(-keys * self.bytes // ALIGNMENT) * ALIGNMENT


def format_of(dim: int, row: int) -> str:
    """Format of pages of bytes whose last dimension is `row`, of keys of `dim` channels; "fp8" also
    of what is neither, which a check of the shape refuses."""
    is_fp4 = dim > 0 and dim % FP4_GROUP == 0 and row == IndexEntry(dim, "fp4").bytes
    return "fp4" if is_fp4 else "fp8"
