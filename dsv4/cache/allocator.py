"""Free list of the paged cache's physical blocks. Host memory only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence


class OutOfBlocksError(RuntimeError):
    """The paged cache has fewer free blocks than a request needs. Nothing was allocated."""


class BlockAllocator:
    """Free list over blocks `0 .. num_blocks - 1`; every call either happens in full or changes
    nothing.

    A block may have several holders, and be kept for later ones: it is free again when it has no
    holder and is not kept. The list is last in, first out: a block given back a moment ago is the
    likeliest to be in a cache of the device.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: Counter[int] = Counter()
        self._kept: set[int] = set()
        self._idle = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that are kept without a holder."""
        return self._idle

    def is_held(self, block: int) -> bool:
        """Whether a block has a holder."""
        return block in self._holders

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
        self._holders.update(taken)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Hold `blocks` once more.

        Raises:
            ValueError: a block is neither held nor kept, or is named twice; none is held.
        """
        self._check(blocks, self._holders, self._kept)
        self._idle -= sum(block not in self._holders for block in blocks)
        self._holders.update(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give `blocks` back.

        Raises:
            ValueError: a block is not allocated, or is named twice; none is given back.
        """
        self._check(blocks, self._holders)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._kept:
                    self._idle += 1
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Keep a block, which has a holder, when its holders give it back."""
        self._check([block], self._holders)
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Keep a block no longer."""
        self._check([block], self._kept)
        self._kept.remove(block)
        if block not in self._holders:
            self._idle -= 1
            self._free.append(block)

    def _check(self, blocks: Sequence[int], *known: Container[int]) -> None:
        unique = set(blocks)
        wrong = sorted(block for block in unique if not any(block in some for some in known))
        if wrong:
            raise ValueError(f"blocks {wrong} are not allocated: freed twice, or never handed out")
        if len(unique) != len(blocks):
            raise ValueError(f"blocks must be distinct, got {list(blocks)}")
