"""Beginnings that requests share: kept at ends of blocks, found and restored for later requests."""

from __future__ import annotations

from dsv4.cache.manager import CacheManager
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.prefixes import Match
from dsv4.cache.ring_snapshots import RingSnapshots
from dsv4.engine.request import Request


class PrefixReuse:
    """Prefix cache of an engine: blocks by their tokens, with the rings at ends of some.

    Args:
        snapshots: of rings, at most; 0: nothing is kept.
    """

    def __init__(self, manager: CacheManager, cache: ModelCache, snapshots: int) -> None:
        self._manager = manager
        self._prefixes = manager.prefixes
        self._block_size = cache.block_size
        self._rings = RingSnapshots(cache, snapshots) if snapshots else None

    def find(self, request: Request) -> Match:
        """The longest known beginning of a request, short of its last token, whose logits nothing
        keeps."""
        return self._prefixes.find(request.tokens, len(request.tokens) - 1)

    def restore(self, request: Request, match: Match) -> int:
        """Continue a request, which holds the blocks of a beginning, behind that.

        Returns:
            Its positions.
        """
        request.prefix = match.node
        if match.snapshot is None:
            return 0
        self._rings.restore(match.snapshot, request.slot)
        return len(match.blocks) * self._block_size

    def cut(self, start: int, stop: int) -> int:
        """Where a chunk of a prompt ends, so that rings can be copied at the end of a block."""
        end = stop // self._block_size * self._block_size
        return end if self._rings is not None and end > start else stop

    def save(self, request: Request) -> int | None:
        """Copy the rings of a request behind the forwards that were started.

        Returns:
            Their snapshot; None where no block ends with what these cache.
        """
        length = self._manager.length(request.slot)
        if self._rings is None or length % self._block_size:
            return None
        snapshot = self._prefixes.take_snapshot()
        if snapshot is not None:
            try:
                self._rings.save(request.slot, snapshot)
            except BaseException:
                self._prefixes.give_snapshot(snapshot)
                raise
        return snapshot

    def file(self, request: Request, snapshot: int | None, length: int) -> None:
        """Keep the first `length` positions of a request, whose tokens are known now."""
        if snapshot is None:
            return
        blocks = self._manager.first_blocks(request.slot, length // self._block_size)
        tokens = request.tokens[:length]
        request.prefix = self._prefixes.insert(tokens, blocks, snapshot, request.prefix)

    def give_back(self, snapshot: int | None) -> None:
        """Forget the rings of a request that is over."""
        if snapshot is not None:
            self._prefixes.give_snapshot(snapshot)
