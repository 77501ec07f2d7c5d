"""Block table: the physical block of each logical block of each request. Host memory only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_BLOCK = -1


class BlockTable:
    """One row per state-cache slot; entry `i` of a row is the block of original tokens `i *
    block_size ...`.

    Entries past a row's blocks are `NO_BLOCK`.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        for name, value in (("num_slots", num_slots), ("max_blocks", max_blocks)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_blocks = max_blocks
        self._rows = np.full((num_slots, max_blocks), NO_BLOCK, dtype=np.int64)
        self._counts = [0] * num_slots
        self._changed: dict[int, int] = {}

    def count(self, slot: int) -> int:
        """Blocks the slot holds."""
        return self._counts[slot]

    def row(self, slot: int, width: int) -> np.ndarray:
        """The slot's first `width` entries, [width] int64 (a view)."""
        return self._rows[slot, :width]

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        """Add blocks at the end of a row.

        Raises:
            ValueError: the row has no room for them; the row is unchanged.
        """
        first = self._counts[slot]
        last = first + len(blocks)
        if last > self.max_blocks:
            raise ValueError(f"slot {slot} would hold {last} blocks, its row has {self.max_blocks}")
        self._set(slot, first, blocks)
        self._counts[slot] = last

    def shrink(self, slot: int, count: int) -> list[int]:
        """Keep the first `count` blocks of a row, at most; returns the blocks removed."""
        held = self._counts[slot]
        if count >= held:
            return []
        removed = self._rows[slot, count:held].tolist()
        self._set(slot, count, [NO_BLOCK] * len(removed))
        self._counts[slot] = count
        return removed

    def take_changes(self) -> np.ndarray:
        """Entries that changed since the last call, [2, n] int64: flat index slot * max_blocks + i,
        and the block that is there now."""
        changes = np.array(list(self._changed.items()), dtype=np.int64).reshape(-1, 2).T
        self._changed.clear()
        return changes

    def _set(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        self._rows[slot, first : first + len(blocks)] = blocks
        base = slot * self.max_blocks + first
        self._changed.update((base + i, block) for i, block in enumerate(blocks))
