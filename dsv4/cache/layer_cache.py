"""What one layer keeps between steps: rings of its latest positions, pages of its entries."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.cache.pages import Pages
from dsv4.cache.rings import Ring
from dsv4.cache.state_cache import LayerState


@dataclass(frozen=True)
class LayerCache:
    """Everything one layer keeps between steps.

    Attributes:
        state: the rings.
        entries: compressed keys (= values), [.., head_dim]. None in SWA layers.
        index_keys: keys of the indexer, [.., index_head_dim]. None without an indexer.
    """

    state: LayerState
    entries: Pages | None
    index_keys: Pages | None

    @property
    def window(self) -> Ring:
        """Keys of the sliding window."""
        return self.state.window
