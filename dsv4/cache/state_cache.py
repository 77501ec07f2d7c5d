"""Fixed-size state of the compressors of every request: the rings of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.rings import Ring

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


@dataclass(frozen=True)
class LayerState:
    """Rings of one layer.

    Attributes:
        compressor: [.., 2, width] fp32: projection and score (position bias added) of every token
            that a block still to be completed can need; width is head_dim, 2 * head_dim when blocks
            overlap. None without one.
        indexer: the same of the indexer's compressor. None without an indexer.
    """

    compressor: Ring | None
    indexer: Ring | None

    def rings(self) -> tuple[Ring, ...]:
        """Return the rings that exist."""
        return tuple(r for r in (self.compressor, self.indexer) if r is not None)


class StateCache:
    """The rings of every layer, MTP layers included, for `rows` requests at once.

    Args:
        config: the model.
        rows: requests that can be cached at the same time.
        max_draft: tokens a step may write past the last accepted one.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        device: torch.device | str,
        max_draft: int = 0,
    ) -> None:
        self.layers = tuple(
            _layer_state(config, spec, rows, device, max_draft) for spec in config.schedule
        )

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the state of the given rows in every layer."""
        for layer in self.layers:
            for ring in layer.rings():
                ring.reset(rows)


def _layer_state(
    config: ModelConfig,
    spec: LayerSpec,
    rows: int,
    device: torch.device | str,
    max_draft: int,
) -> LayerState:
    series = 2 if spec.overlap else 1

    def tail(dim: int) -> Ring:
        # A block that ends at the first new token reaches back over series * ratio positions, that
        # token included.
        size = series * spec.ratio + max_draft
        return Ring(rows, size, (2, series * dim), torch.float32, device)

    return LayerState(
        compressor=tail(config.head_dim) if spec.ratio else None,
        indexer=tail(config.index_head_dim) if spec.overlap else None,
    )
