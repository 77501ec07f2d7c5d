"""Host-side bookkeeping of the cache: which request owns which slot and blocks, and how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.block_table import NO_BLOCK, BlockTable
from dsv4.cache.paged_cache import ModelCache
from dsv4.cache.staging import StagedTensor
from dsv4.cache.step import Step


class OutOfSlotsError(RuntimeError):
    """Every state-cache row belongs to a request. Nothing was allocated."""


class CacheManager:
    """Hands out the slots and blocks of a `ModelCache` and describes each forward as a `Step`.

    A request is known by its slot, the row of the state cache it owns from `admit` to `release`. Its length is the
    number of positions written. Blocks are taken for positions to come (`admit`, `extend`), positions are written by
    forwards (`step`), and given up again when speculation was wrong (`truncate`): what the cache holds there is
    overwritten by position, so going back costs no device work. A call that fails changes nothing.
    """

    def __init__(self, cache: ModelCache) -> None:
        self.cache = cache
        self.block_size: int = cache.block_size
        self.allocator = BlockAllocator(cache.num_blocks)
        self._table = BlockTable(cache.max_requests, cache.max_blocks_per_request)
        self._free_slots = list(range(cache.max_requests - 1, -1, -1))
        self._lengths: dict[int, int] = {}
        self._buffers: dict[tuple[int, int, int], _StepBuffers] = {}

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

    def admit(self, reserve: int = 0) -> int:
        """Give a new request a slot, and blocks for its first `reserve` positions.

        Raises:
            OutOfSlotsError: every slot is taken.
            OutOfBlocksError: too few blocks are free.
            ValueError: `reserve` exceeds what one request may hold.
        """
        if not self._free_slots:
            raise OutOfSlotsError(f"out of request slots: all {self.cache.max_requests} are taken")
        slot = self._free_slots[-1]
        self._reserve(slot, reserve)
        self._free_slots.pop()
        self._lengths[slot] = 0
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
        """Go back to the first `length` positions and give back the blocks that holds none of them."""
        self._check(slot)
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"length must be in [0, {self._lengths[slot]}], what slot {slot} has written, got {length}"
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
        """Describe a forward that writes the next `lens[i]` positions of request `slots[i]`, and count them as written.

        Args:
            slots: the requests, distinct; one row of the step each.
            lens: new positions per request, 1 .. chunk, for which it holds blocks already.
            chunk: positions per row, C; those past a row's `lens` are padding.
            rows: rows of the step, B >= len(slots), default len(slots); those past the requests are padding.

        Returns:
            A `Step` whose capacity is the smallest power-of-two number of blocks, at most a request's maximum, that
            covers every position of the step and the drafts chained to it. Tensors of equal (rows, chunk, capacity)
            share one memory: the step is valid until the next of its shape is made.
        """
        rows = len(slots) if rows is None else rows
        self._check_step(slots, lens, chunk, rows)
        ends = [self._lengths[slot] + count for slot, count in zip(slots, lens)]
        width = self._bucket(max(ends, default=0) + self.cache.max_draft)
        key = (rows, chunk, width)
        if key not in self._buffers:
            self._buffers[key] = _StepBuffers.make(rows, width, self.cache.device)
        buffers = self._buffers[key]

        table = buffers.fill(slots, [self._lengths[slot] for slot in slots], lens)
        for row, slot in enumerate(slots):
            table[row] = self._table.row(slot, width)
        self._lengths.update(zip(slots, ends))
        return buffers.upload(chunk, capacity=width * self.block_size)

    def _check(self, slot: int) -> None:
        if slot not in self._lengths:
            raise ValueError(f"slot {slot} belongs to no request")

    def _check_step(self, slots: Sequence[int], lens: Sequence[int], chunk: int, rows: int) -> None:
        if len(slots) != len(lens):
            raise ValueError(f"lens: expected one per slot, got {len(lens)} for {len(slots)} slots")
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots must be distinct, got {list(slots)}")
        if rows < len(slots):
            raise ValueError(f"rows must be at least the {len(slots)} requests, got {rows}")
        for slot, count in zip(slots, lens):
            self._check(slot)
            if not 1 <= count <= chunk:
                raise ValueError(
                    f"lens must be in [1, chunk = {chunk}], got {count} for slot {slot}"
                )
            room = self._table.count(slot) * self.block_size - self._lengths[slot]
            if count > room:
                raise ValueError(
                    f"slot {slot} holds blocks for {room} more positions, the step needs {count}"
                )

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _bucket(self, positions: int) -> int:
        """Blocks that cover `positions`, rounded up to a power of two: a longer context rarely changes a shape."""
        needed = max(1, self._blocks_for(positions))
        return min(1 << (needed - 1).bit_length(), self._table.max_blocks)

    def _reserve(self, slot: int, positions: int) -> None:
        """Make a slot's blocks cover its first `positions` positions."""
        needed = self._blocks_for(positions)
        if needed > self._table.max_blocks:
            raise ValueError(
                f"a request may hold {self._table.max_blocks * self.block_size} positions, got {positions}"
            )
        missing = max(0, needed - self._table.count(slot))
        self._table.append(slot, self.allocator.allocate(missing))


@dataclass(frozen=True)
class _StepBuffers:
    """The tensors of a `Step` of one shape: parts of one staged tensor, so that a step costs one copy."""

    rows: int
    width: int
    staged: StagedTensor

    @classmethod
    def make(cls, rows: int, width: int, device: torch.device) -> _StepBuffers:
        return cls(rows, width, StagedTensor([rows * (3 + width)], torch.int64, device))

    def fill(self, slots: Sequence[int], starts: Sequence[int], lens: Sequence[int]) -> np.ndarray:
        """Write the per-row fields; returns the block table, [rows, width], all `NO_BLOCK`, to be written."""
        array = self.staged.writable()
        fields = array[: 3 * self.rows].reshape(3, self.rows)
        used = len(slots)
        fields[:, used:] = [[-1], [0], [0]]
        fields[:, :used] = [slots, starts, lens]
        table = array[3 * self.rows :].reshape(self.rows, self.width)
        table[:] = NO_BLOCK
        return table

    def upload(self, chunk: int, capacity: int) -> Step:
        flat: Tensor = self.staged.upload()
        slots, starts, lens = flat[: 3 * self.rows].view(3, self.rows)
        return Step(
            slots=slots,
            starts=starts,
            lens=lens,
            block_table=flat[3 * self.rows :].view(self.rows, self.width),
            chunk=chunk,
            capacity=capacity,
        )
