"""Geometry of a paged cache of index keys: 132 bytes a key of 128 channels, for any number of them.

A page of P keys holds the e4m3 codes of P keys, then their P scales in fp32, powers of two
(DeepGEMM's and vLLM's layout of FP8 index keys). A key that was rounded to FP4 fits without loss
where the scales of its groups of 32 lie within a factor of 2^14: codes of e2m1 are codes of e4m3,
and what the scales of the groups differ by goes into their exponents. Imports neither torch nor
cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass

FP4_GROUP = 32  # channels that share a scale of FP4
ALIGNMENT = 16  # bytes: of pages
SCALE_BYTES = 4
# Exponent of the largest group's scale over that of its key: 6 * 2^6 is the largest code, 384.
TOP_SHIFT = 6
MIN_EXPONENT = -126  # of a key's scale: fp32 below it is subnormal


@dataclass(frozen=True)
class IndexEntry:
    """An index key of `dim` channels.

    Raises:
        ValueError: the channels are no whole groups of 32.
    """

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 1 or self.dim % FP4_GROUP:
            raise ValueError(f"dim: index keys need a multiple of {FP4_GROUP}, got {self.dim}")

    @property
    def bytes(self) -> int:
        """Bytes of a key, its scale included."""
        return self.dim + SCALE_BYTES

    def page_bytes(self, keys: int) -> int:
        """Stride of a page of so many keys: a multiple of 16."""
        return -(-keys * self.bytes // ALIGNMENT) * ALIGNMENT
