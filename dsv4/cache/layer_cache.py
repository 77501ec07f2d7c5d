"""State of one layer between steps: keys of the window and of entries, state of compressors."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.cache.entries import EntryPool
from dsv4.cache.index_keys import IndexKeyPool
from dsv4.cache.state_cache import LayerState
from dsv4.cache.window import WindowPool


@dataclass(frozen=True)
class LayerCache:
    """Everything one layer keeps between steps.

    Attributes:
        window: keys (= values) of the sliding window.
        state: the rings of the compressors.
        entries: compressed keys (= values). None in SWA layers.
        index_keys: keys of the indexer. None without one.
        batch_invariant: whether attention over them may depend on a token's own keys alone.
    """

    window: WindowPool
    state: LayerState
    entries: EntryPool | None
    index_keys: IndexKeyPool | None
    batch_invariant: bool = False
