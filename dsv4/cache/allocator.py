"""Free list of the paged cache's physical blocks. Host memory only."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocksError(RuntimeError):
    """The paged cache has fewer free blocks than a request needs. Nothing was allocated."""


class BlockAllocator:
    """Free list over blocks `0 .. num_blocks - 1`; every call either happens in full or changes
    nothing.

    The list is last in, first out: a block given back a moment ago is the likeliest to be in a
        cache of the device.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            OutOfBlocksError: fewer than `count` blocks are free; none is taken.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise OutOfBlocksError(
                f"out of cache blocks: {count} needed, {len(self._free)} of {self.num_blocks} free"
            )
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give `blocks` back.

        Raises:
            ValueError: a block is not allocated, or is named twice; none is given back.
        """
        unique = set(blocks)
        wrong = sorted(unique - self._used)
        if wrong:
            raise ValueError(f"blocks {wrong} are not allocated: freed twice, or never handed out")
        if len(unique) != len(blocks):
            raise ValueError(f"blocks must be distinct, got {list(blocks)}")
        self._used -= unique
        self._free.extend(reversed(blocks))
