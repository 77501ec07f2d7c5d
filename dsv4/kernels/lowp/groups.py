"""Groups of rows that share a scale, and the tiles of queries and keys that they are made for.

A group is what one thread, warp or CTA of SageAttention's tensor-core kernels holds, so that it
needs one scale. Plain Python; index arithmetic works on integers and on integer tensors alike.
"""

from __future__ import annotations

from typing import NamedTuple

# Position p of 16 neighbouring keys of V holds this one: what an accumulator of scores holds as its
# registers is then the FP8 operand of P V, without a shuffle.
V_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
V_ALIGN = 16  # keys that take part in V's statistics: zeros fill the last of them
FP4_BLOCK = 16  # elements that share an e4m3 scale


class Geometry(NamedTuple):
    """Tiles of a kernel.

    Attributes:
        block_q, block_k: queries and keys of a tile.
        warp_q: queries of a warp.
    """

    block_q: int
    warp_q: int
    block_k: int


GEOMETRIES = {"sm90": Geometry(64, 16, 128), "sm89": Geometry(128, 32, 64)}


class Groups(NamedTuple):
    """Division of a block of rows into groups of one scale each.

    A row of a block is (i * count + group) * run + j: `run` neighbours belong together, `count`
    groups take turns, `rounds` times.
    """

    rounds: int
    count: int
    run: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.rounds * self.count * self.run

    def group_of(self, row):
        """Group of a row, counted over all blocks."""
        return row // self.rows * self.count + row % (self.count * self.run) // self.run


def query_groups(granularity: str, geometry: Geometry) -> Groups:
    """Groups of queries: of a tile or of a warp. Of "per_head" those of "per_row", whose scales
    are made one."""
    if granularity in ("per_row", "per_head"):
        return Groups(1, geometry.block_q, 1)
    if granularity == "per_64":
        return Groups(1, geometry.block_q // 64, 64)
    if granularity == "per_thread":
        return Groups(geometry.warp_q // 8, 8, 1)
    return Groups(1, 1, geometry.block_q if granularity == "per_block" else geometry.warp_q)


def key_groups(granularity: str, geometry: Geometry) -> Groups:
    """Groups of the keys of a tile."""
    rows = geometry.block_k
    if granularity == "per_row":
        return Groups(1, rows, 1)
    if granularity == "per_64":
        return Groups(1, rows // 64, 64)
    if granularity == "per_thread":
        return Groups(rows // 8, 4, 2)
    return Groups(1, 1, rows)


def num_blocks(rows: int, block: int, sequences: int | None = None) -> int:
    """Blocks of `rows` rows; of sequences of unknown lengths as many as there may be.

    Sequence i, whose rows begin at row r, takes blocks from r // block + i on: a place that needs
    no sum over the sequences before, and no two sequences meet.
    """
    return -(-rows // block) if sequences is None else rows // block + sequences


def first_block(row, sequence, block: int):
    """First block of a sequence that begins at `row`."""
    return row // block + sequence
