"""Epilogues of linears: what becomes of an output on its way to memory, as configurations name it.

An epilogue has device functions of its own: `sm90.head_rotation`, which a warp calls with each
block of 16 rows of a weight and 8 tokens, `sm90.rounded_tile`, which both warpgroups call with 128
rows, as they do with an index head (`index_heads`), and `sm90.best_rows`, a warp with 16 rows of
all tokens of a tile, once their sums over K are complete. Imports neither cutlass nor torch, so
that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.head_squares import CHANNELS, parts
from dsv4.kernels.kit.index_entry import MODEL_DIM
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.quoting import quoted

HEAD_ROTATION, INDEX_ROUNDING = "head_rotation", "index_rounding"
MAX_HEAD_DIM = 4096
CODES = "float8_e4m3fn"
OUT_DTYPES = ("bfloat16", "float32")
# 32-bit words of the workspace of an `ArgMax`: how many CTAs are done, then the key of each token.
COUNTER_WORDS, KEY_WORDS = 2, 2


class OfHeads:
    """Epilogue of a weight whose rows are heads."""

    head_dim: int
    parts = 1  # sums of squares of a head
    out_dtypes = OUT_DTYPES

    def heads(self, rows: int) -> int:
        """Heads of a weight; ValueError where they are not whole."""
        if rows % self.head_dim:
            raise ValueError(f"{rows} rows are no whole heads of {self.head_dim}")
        return rows // self.head_dim


@dataclass(frozen=True)
class HeadRotation(OfHeads):
    """Rotation of the last channels of each head, and the sums of squares of its channels before.

    Attributes:
        head_dim: channels of a head, a multiple of 64: the rotated ones are the last rows of a row
            tile.
    """

    head_dim: int

    def __post_init__(self) -> None:
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % ROPE_DIM:
            raise ValueError(
                f"head_dim must be a multiple of {ROPE_DIM} up to {MAX_HEAD_DIM}, "
                f"got {self.head_dim}"
            )

    def __str__(self) -> str:
        return f"{HEAD_ROTATION}:{self.head_dim}"

    @property
    def parts(self) -> int:
        """Sums of squares of a head."""
        return parts(self.head_dim)


@dataclass(frozen=True)
class IndexRounding(OfHeads):
    """Rotation of the last channels of each index head, its Hadamard transform and FP4, of outputs
    that were rounded to bf16: e4m3 codes, and a scale for each head, as `index_topk` makes them of
    its queries. A head is a row tile, and activations come in codes: row tiles of few tokens that
    are rounded on the way have half as many rows."""

    head_dim = MODEL_DIM
    out_dtypes = (CODES,)

    def __str__(self) -> str:
        return INDEX_ROUNDING


@dataclass(frozen=True)
class Rounding:
    """e4m3 codes of outputs that were rounded to bf16, with a scale per 128 rows of a token: what
    the next linear would make of them."""


@dataclass(frozen=True)
class ArgMax:
    """Row of each token's largest output, beside the outputs or in place of them."""

    @staticmethod
    def workspace_words(tokens: int) -> int:
        """fp32 elements of a launch's workspace."""
        return COUNTER_WORDS + KEY_WORDS * tokens


HeadEpilogue = HeadRotation | IndexRounding
Epilogue = HeadEpilogue | Rounding | ArgMax
ROUNDINGS = (IndexRounding, Rounding)  # those whose outputs are codes


def parse(text: str) -> HeadEpilogue | None:
    """The epilogue of what `str` makes of one, "head_rotation:512" or "index_rounding"; "" stands
    for none."""
    if not text:
        return None
    if text == INDEX_ROUNDING:
        return IndexRounding()
    name, _, head_dim = text.partition(":")
    if name != HEAD_ROTATION or not head_dim.isdecimal():
        raise ValueError(
            f"got {quoted(text)}, needs '{HEAD_ROTATION}:<head_dim>', '{INDEX_ROUNDING}' or ''"
        )
    return HeadRotation(int(head_dim))


def check(text: str, rows: int) -> None:
    """Refuse an epilogue that is none, or none for a weight of so many rows: ValueError."""
    epilogue = parse(text)
    if epilogue is not None:
        epilogue.heads(rows)


def out_dtypes(text: str) -> tuple[str, ...]:
    """Dtypes of an output with an epilogue."""
    epilogue = parse(text)
    return OUT_DTYPES if epilogue is None else epilogue.out_dtypes


def check_input(text: str, has_codes: bool) -> None:
    """Refuse an epilogue that needs activations in codes: ValueError."""
    if isinstance(parse(text), IndexRounding) and not has_codes:
        raise ValueError(f"{text} needs x in {CODES}, with its scales")


assert ROPE_DIM % CHANNELS == 0
