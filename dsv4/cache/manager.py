"""Host-side bookkeeping of the cache: which request owns which slot and blocks, and its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4.cache.allocator import BlockAllocator, OutOfBlocksError
from dsv4.cache.block_table import NO_BLOCK, BlockTable
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.prefixes import Prefixes
from dsv4.cache.staging import upload
from dsv4.cache.step import Step


class OutOfSlotsError(RuntimeError):
    """Every state-cache row belongs to a request. Nothing was allocated."""


class CacheManager:
    """Owner of the slots and blocks of a `ModelCache`, and the source of each forward's `Step`.

    A request is known by its slot, the row of the state cache it owns from `admit` to `release`.
    Its length is the number of positions written. Blocks are taken for positions to come (`admit`,
    `extend`), positions are written by forwards (`step`), and given up again when speculation was
    wrong (`truncate`): what the cache holds there is overwritten by position, so going back costs
    no device work. A call that fails changes nothing.

    Args:
        snapshots: of rings, with which `prefixes` are kept.
    """

    def __init__(self, cache: ModelCache, snapshots: int = 0) -> None:
        self.cache = cache
        self.block_size: int = cache.block_size
        self.allocator = BlockAllocator(cache.num_blocks)
        self.prefixes = Prefixes(self.allocator, cache.block_size, snapshots)
        self._table = BlockTable(cache.max_requests, cache.max_blocks_per_request)
        self._free_slots = list(range(cache.max_requests - 1, -1, -1))
        self._lengths: dict[int, int] = {}

    @property
    def num_free_slots(self) -> int:
        """Requests that can still be admitted, as far as slots go."""
        return len(self._free_slots)

    def length(self, slot: int) -> int:
        """Positions the request has written."""
        self._check(slot)
        return self._lengths[slot]

    def blocks(self, slot: int) -> int:
        """Blocks the request holds."""
        self._check(slot)
        return self._table.count(slot)

    def first_blocks(self, slot: int, count: int) -> list[int]:
        """The first `count` blocks that the request holds."""
        self._check(slot)
        return self._table.row(slot, count).tolist()

    def admit(self, reserve: int = 0, known: Sequence[int] = ()) -> int:
        """Give a new request a slot, and blocks for its first `reserve` positions.

        Args:
            known: blocks that hold its first positions already, which count as written.

        Raises:
            OutOfSlotsError: every slot is taken.
            OutOfBlocksError: too few blocks are free.
            ValueError: `reserve` exceeds what one request may hold.
        """
        if not self._free_slots:
            raise OutOfSlotsError(f"out of request slots: all {self.cache.max_requests} are taken")
        slot = self._free_slots[-1]
        self.allocator.share(known)
        self._table.append(slot, known)
        try:
            self._reserve(slot, reserve)
        except (OutOfBlocksError, ValueError):
            self.allocator.free(self._table.shrink(slot, 0))
            raise
        self._free_slots.pop()
        self._lengths[slot] = len(known) * self.block_size
        return slot

    def extend(self, slot: int, count: int) -> None:
        """Take the blocks that `count` positions past the request's length still need.

        Raises:
            OutOfBlocksError: too few blocks are free.
            ValueError: the request would exceed what one request may hold.
        """
        self._check(slot)
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self._reserve(slot, self._lengths[slot] + count)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` positions, and give back the blocks that hold none of them."""
        self._check(slot)
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"length of slot {slot} must be in [0, {self._lengths[slot]}], got {length}"
            )
        self._lengths[slot] = length
        self.allocator.free(self._table.shrink(slot, self._blocks_for(length)))

    def release(self, slot: int) -> None:
        """End the request: its slot and all its blocks are free again."""
        self._check(slot)
        self.allocator.free(self._table.shrink(slot, 0))
        del self._lengths[slot]
        self._free_slots.append(slot)

    def step(
        self, slots: Sequence[int], lens: Sequence[int], chunk: int, rows: int | None = None
    ) -> Step:
        """Describe a forward over the next `lens[i]` positions of request `slots[i]`, and count
        them as written.

        Args:
            slots: the requests, distinct; one row of the step each.
            lens: new positions per request, 1 .. chunk, for which it holds blocks already.
            chunk: positions per row, C; those past a row's `lens` are padding.
            rows: rows of the step, B, at least len(slots), which is the default; those past the
                requests are padding.

        Returns:
            A `Step` whose capacity is the smallest power-of-two number of blocks, at most a
            request's maximum, that covers every position of the step and the drafts chained to it.
        """
        rows = len(slots) if rows is None else rows
        self._check_step(slots, lens, range(1, chunk + 1), rows)
        starts = [self._lengths[slot] for slot in slots]
        capacity = self._write(slots, lens)
        width, used = capacity // self.block_size, len(slots)

        host = np.empty(rows * (3 + width), dtype=np.int64)
        fields, table = _split(host, rows, width)
        fields[:, used:] = [[-1], [0], [0]]
        fields[:, :used] = slots, starts, lens
        table[used:] = NO_BLOCK
        for row, slot in enumerate(slots):
            table[row] = self._table.row(slot, width)

        fields, table = _split(upload(host, self.cache.device), rows, width)
        return Step(*fields, block_table=table, chunk=chunk, capacity=capacity)

    def advance(self, slots: Sequence[int], lens: Sequence[int]) -> int:
        """Count the next `lens[i]` positions of request `slots[i]` as written, by a forward whose
        inputs are on the device already.

        Args:
            slots: the requests, distinct.
            lens: new positions per request, at most; it holds blocks for them.

        Returns:
            The capacity of such a step, as of `step`.
        """
        self._check_step(slots, lens, range(max(lens) + 1), len(slots))
        return self._write(slots, lens)

    def table_changes(self) -> np.ndarray:
        """Entries of the block tables that changed since the last call, [2, n] int64: flat index
        slot * max_blocks_per_request + i, and the block that is there now, -1 for none."""
        return self._table.take_changes()

    def _write(self, slots: Sequence[int], lens: Sequence[int]) -> int:
        """Count positions as written; returns the capacity of the step."""
        ends = [self._lengths[slot] + count for slot, count in zip(slots, lens)]
        self._lengths.update(zip(slots, ends))
        return self._bucket(max(ends, default=0) + self.cache.max_draft) * self.block_size

    def _check(self, slot: int) -> None:
        if slot not in self._lengths:
            raise ValueError(f"slot {slot} belongs to no request")

    def _check_step(
        self, slots: Sequence[int], lens: Sequence[int], sizes: range, rows: int
    ) -> None:
        if len(slots) != len(lens):
            raise ValueError(f"lens: expected one per slot, got {len(lens)} for {len(slots)} slots")
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots must be distinct, got {list(slots)}")
        if not max(1, len(slots)) <= rows <= self.cache.max_requests:
            raise ValueError(
                f"rows must be in [{max(1, len(slots))}, {self.cache.max_requests}], got {rows}"
            )
        for slot, count in zip(slots, lens):
            self._check(slot)
            if count not in sizes:
                raise ValueError(
                    f"lens must be in [{sizes[0]}, {sizes[-1]}], got {count} for slot {slot}"
                )
            room = self._table.count(slot) * self.block_size - self._lengths[slot]
            if count > room:
                raise ValueError(
                    f"slot {slot} holds blocks for {room} more positions, the step needs {count}"
                )

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _bucket(self, positions: int) -> int:
        """Blocks that cover `positions`, as a power of two: growing rarely changes a shape."""
        needed = max(1, self._blocks_for(positions))
        return min(1 << (needed - 1).bit_length(), self._table.max_blocks)

    def _reserve(self, slot: int, positions: int) -> None:
        """Make a slot's blocks cover its first `positions` positions."""
        needed = self._blocks_for(positions)
        if needed > self._table.max_blocks:
            raise ValueError(
                f"a request may hold {self._table.max_blocks * self.block_size} positions, "
                f"got {positions}"
            )
        missing = max(0, needed - self._table.count(slot))
        self.prefixes.make_room(missing)
        self._table.append(slot, self.allocator.allocate(missing))


def _split(flat, rows: int, width: int):
    """Slots, starts and lens [3, rows], block table [rows, width]: one array, so one copy."""
    return flat[: 3 * rows].reshape(3, rows), flat[3 * rows :].reshape(rows, width)
