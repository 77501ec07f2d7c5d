"""Copies of requests' rings at ends of blocks."""

from __future__ import annotations

import torch

from dsv4.cache.model_cache import ModelCache


class RingSnapshots:
    """Rings of requests at ends of blocks, `count` of such: all that is read there beside blocks.

    The window's keys of every layer, and the state of compressors whose blocks overlap: those of
    the others have no block open there, since whole entries of every layer fit in a block.

    Attributes:
        bytes: of one snapshot.
    """

    def __init__(self, cache: ModelCache, count: int) -> None:
        self._rings = [layer.window.data[: cache.max_requests] for layer in cache.layers]
        for spec, layer in zip(cache.config.schedule, cache.layers, strict=True):
            if spec.overlap:
                self._rings += [ring.data for ring in layer.state.rings()]
        self._copies = [
            torch.empty(count, *ring.shape[1:], dtype=ring.dtype, device=ring.device)
            for ring in self._rings
        ]
        self.bytes = sum(copy[:1].nbytes for copy in self._copies)

    def save(self, slot: int, snapshot: int) -> None:
        """Copy the rings of a slot, in stream order."""
        self._copy(self._copies, snapshot, self._rings, slot)

    def restore(self, snapshot: int, slot: int) -> None:
        """Make a snapshot the rings of a slot, in stream order."""
        self._copy(self._rings, slot, self._copies, snapshot)

    def _copy(self, to: list, row: int, source: list, source_row: int) -> None:
        # Few launches for all layers together, by dtype.
        for dtype in {tensor.dtype for tensor in to}:
            pairs = [(a[row], b[source_row]) for a, b in zip(to, source) if a.dtype == dtype]
            torch._foreach_copy_(*(list(side) for side in zip(*pairs)))
