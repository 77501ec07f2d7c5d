"""Geometry of a paged FP8 cache: the 584-byte entry of FlashMLA ("MODEL1", vLLM's `fp8_ds_mla`),
for any head dimension.

An entry has a record, the e4m3 codes of the channels without rotation and the bf16 values of the
rotated ones, and a record of scales, one E8M0 byte per 64 codes, padded with zeros. A page of P
entries holds P records, then P records of scales. Imports neither torch nor cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 64  # codes that share a scale
ROPE_DIM = 64  # rotated channels of the released models
ALIGNMENT = 16  # bytes: of pages, and of rows of a bf16 pool
_SCALE_ALIGNMENT = 8  # bytes
# Bytes. The records of FP8 entries are aligned to 16, the entries that a pool's shape speaks of are
# not.
FP8_ENTRY_ALIGNMENT = 8
KV_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp8": "uint8"}
KV_FORMATS = tuple(KV_DTYPES)


@dataclass(frozen=True)
class Fp8Entry:
    """The entry of a latent of `head_dim` channels, the last `rope_dim` of them rotated.

    Raises:
        ValueError: the other channels are no whole groups of 64.
    """

    head_dim: int
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        if self.codes < 0 or self.codes % GROUP:
            raise ValueError(
                f"head_dim: got {self.head_dim}, an FP8 entry needs {GROUP} n + {self.rope_dim}"
            )

    @property
    def codes(self) -> int:
        """Channels that are stored as e4m3."""
        return self.head_dim - self.rope_dim

    @property
    def groups(self) -> int:
        """Scales."""
        return self.codes // GROUP

    @property
    def record_bytes(self) -> int:
        """Bytes of codes and rotated channels."""
        return self.codes + 2 * self.rope_dim

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, padding included."""
        return -(-self.groups // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT

    @property
    def bytes(self) -> int:
        """Bytes of an entry: 584 of 512 channels, 200 of 128, 128 of 64."""
        return self.record_bytes + self.scale_bytes

    def page_bytes(self, entries: int) -> int:
        """Stride of a page of so many entries as engines choose it: a multiple of the record."""
        return -(-entries * self.bytes // self.record_bytes) * self.record_bytes


def row_elements(kv_format: str, head_dim: int, rope_dim: int = ROPE_DIM) -> int:
    """Last dimension of a pool [pages, P, .]: channels, or bytes of an FP8 entry."""
    return Fp8Entry(head_dim, rope_dim).bytes if kv_format == "fp8" else head_dim
