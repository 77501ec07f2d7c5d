"""Accumulators of wgmma: sums of products, which become registers when something else needs them.

The products of a loop over K add to the same registers again and again. Their sum stays one tile of
the whole warpgroup meanwhile; a warp writes its registers before any instruction but a product
touches them. Float16 accumulators, rounded after every product, go to the registers at once.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.arithmetic.numerics import f32, i32, u16

ROWS = 16  # of the tile that each warp holds


class RegisterGroup:
    """The registers of one accumulator: indices into a warp's registers. Compared by identity."""

    def __init__(self, indices: tuple[int, ...]):
        self.indices = indices
        self.members = frozenset(indices)
        self.values = operator.itemgetter(*indices)  # of a warp's registers


# One object for each set of registers of a program, however many instructions name it.
register_group = lru_cache(maxsize=4096)(RegisterGroup)


@lru_cache(maxsize=4096)
def _disjoint(a: RegisterGroup, b: RegisterGroup) -> bool:
    return a.members.isdisjoint(b.members)


class _Share(NamedTuple):
    """A warp's rows of a tile, from row `first`; `rows` are its registers, if they were written."""

    tile: np.ndarray
    first: int
    rows: tuple | None = None


class Accumulators:
    """Accumulators of one warp's products. `R` is the warp's register file."""

    def __init__(self, R: list):
        self.R = R
        self.shares: dict[RegisterGroup, _Share] = {}
        # Groups whose sum the registers do not hold yet; they have no register in common.
        self.unwritten: dict[RegisterGroup, str] = {}  # to the accumulator's type

    def write(self) -> None:
        """Bring the registers up to date."""
        for group, d_type in self.unwritten.items():
            self._write(group, d_type)
        self.unwritten.clear()

    def _write(self, group: RegisterGroup, d_type: str) -> None:
        R, share = self.R, self.shares[group]
        tile = share.tile[share.first : share.first + ROWS]
        block = _by_register(tile).view(R[group.indices[0]].dtype)
        rows = tuple(block)
        for index, row in zip(group.indices, rows):
            R[index] = row
        self.shares[group] = share._replace(rows=rows)

    def _make_room(self, group: RegisterGroup) -> None:
        """Write the groups that share registers with one that is about to change."""
        if group not in self.unwritten:
            for other in [g for g in self.unwritten if not _disjoint(g, group)]:
                self._write(other, self.unwritten.pop(other))

    def share(self, group: RegisterGroup) -> _Share | None:
        """The sum of a group, unless the registers were changed since."""
        self._make_room(group)
        share = self.shares.get(group)
        if share is None or group in self.unwritten:
            return share
        return share if all(map(operator.is_, share.rows, group.values(self.R))) else None

    def tile(self, group: RegisterGroup, dtype: type) -> np.ndarray:
        """[16, N] that the registers of a group hold, as `dtype`."""
        share = self.share(group)
        if share is not None:
            return share.tile[share.first : share.first + ROWS]
        block = np.concatenate(group.values(self.R)).view(dtype)
        by_place = block.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2)
        return by_place.reshape(ROWS, -1)

    def keep(self, group: RegisterGroup, tile: np.ndarray, first: int, d_type: str) -> None:
        """The warp's rows of `tile` are the group's new contents."""
        self._make_room(group)
        self.shares[group] = _Share(tile, first)
        self.unwritten[group] = d_type


def _by_register(tile: np.ndarray) -> np.ndarray:
    """[16, N] to [registers, lanes]: register 4j + 2h + e of lane 4r + q holds row r + 8h, column
    8j + 2q + e."""
    columns = tile.shape[1]
    places = tile.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return places.reshape(columns // 2, 32)


def add_product(parts, d_type: str, product: np.ndarray) -> None:
    """Add a product, 16 rows for each part, to the parts' accumulators, or overwrite them.

    A part has `warp`, the `accumulators` as RegisterGroup, and `accumulate`.
    """
    if d_type == "f16":
        for k, part in enumerate(parts):
            _add_f16(part, _by_register(product[ROWS * k : ROWS * (k + 1)]))
        return
    adding = [part.accumulate for part in parts]
    if any(adding):
        tile = _common_tile(parts) if all(adding) else None
        if tile is not None:
            tile += product
            for part in parts:
                part.warp.accumulators.unwritten[part.accumulators] = d_type
            return
        product = _sum(parts, i32 if d_type == "s32" else f32, product)
    for k, part in enumerate(parts):
        part.warp.accumulators.keep(part.accumulators, product, ROWS * k, d_type)


def replace_sum(parts, d_type: str, add) -> None:
    """Give the parts' accumulators what `add` makes of their contents: float32 [16 * parts, N] to
    the same; accumulators that a product overwrites count as zeros. Arguments as of
    `add_product`, float accumulators alone."""
    columns = len(parts[0].accumulators.indices) * (4 if d_type == "f16" else 2)
    before = []
    for part in parts:
        if not part.accumulate:
            before.append(np.zeros((ROWS, columns), f32))
        elif d_type == "f16":
            before.append(_f16_tile(part))
        else:
            before.append(part.warp.accumulators.tile(part.accumulators, f32))
    tile = add(np.concatenate(before))
    for k, part in enumerate(parts):
        if d_type == "f16":
            _write_f16(part, _by_register(tile[ROWS * k : ROWS * (k + 1)]))
        else:
            part.warp.accumulators.keep(part.accumulators, tile, ROWS * k, d_type)


def _f16_tile(part) -> np.ndarray:
    """float32 [16, N] of packed float16 registers."""
    R = part.warp.registers
    pairs = [
        numerics.f32_of_f16(np.ascontiguousarray(numerics.words(R[index], u16).T))
        for index in part.accumulators.indices
    ]
    block = np.concatenate(pairs)  # registers of a float32 accumulator
    return block.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(ROWS, -1)


def _common_tile(parts) -> np.ndarray | None:
    """The tile that all parts hold their rows of, in order, if there is one."""
    tile = None
    for k, part in enumerate(parts):
        share = part.warp.accumulators.share(part.accumulators)
        if share is None or share.first != ROWS * k:
            return None
        if tile is None:
            tile = share.tile
        elif share.tile is not tile:
            return None
    return tile if len(tile) == ROWS * len(parts) else None


def _sum(parts, dtype: type, product: np.ndarray) -> np.ndarray:
    rows = []
    for k, part in enumerate(parts):
        new = product[ROWS * k : ROWS * (k + 1)]
        if part.accumulate:
            new = part.warp.accumulators.tile(part.accumulators, dtype) + new
        rows.append(new)
    return np.concatenate(rows)


def _add_f16(part, values: np.ndarray) -> None:
    """float32 [registers, lanes] of a product to packed float16 registers."""
    R = part.warp.registers
    for k, index in enumerate(part.accumulators.indices):
        pair = values[2 * k : 2 * k + 2]
        if part.accumulate:
            old = numerics.words(R[index], u16)
            pair = pair + numerics.f32_of_f16(np.ascontiguousarray(old.T))
        R[index] = _packed(pair).view(R[index].dtype)


def _write_f16(part, values: np.ndarray) -> None:
    """float32 [registers, lanes] to packed float16 registers."""
    R = part.warp.registers
    for k, index in enumerate(part.accumulators.indices):
        R[index] = _packed(values[2 * k : 2 * k + 2]).view(R[index].dtype)


def _packed(pair: np.ndarray) -> np.ndarray:
    bits = numerics.f16_of_f32(pair)
    return numerics.pack32(bits[0], bits[1])
