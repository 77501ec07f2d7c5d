"""Fixed-size state of every request: rings over its latest positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.step import Step

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig


class Ring:
    """The last `size` positions of every request: position p lives at index p mod size.

    Writing a position again overwrites it, so a rejected draft is rolled back by continuing at an
    earlier start; reading n positions after drafts of d tokens needs size >= n + d + 1. A reader
    asks for positions, never for "what is there": what an earlier request left is never looked at.

    Attributes:
        data: [rows + 1, size, *dims]; the last row swallows the writes of padding.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.size = size
        self.data = torch.zeros(rows + 1, size, *dims, dtype=dtype, device=device)

    def history(self, step: Step, n: int) -> Tensor:
        """Return the `n` positions before every request's start, oldest first: [B, n, *dims].

        Entries of negative positions are undefined, NaN included: the caller masks them.

        Raises:
            ValueError: the ring holds fewer than `n` positions.
        """
        if n > self.size:
            raise ValueError(f"history of {n} positions asked of a ring of {self.size}")
        rows, index = step.once(
            ("ring history", len(self.data), self.size, n), lambda: self._history_index(step, n)
        )
        return self.data[rows, index]

    def append(self, step: Step, values: Tensor) -> None:
        """Write the valid tokens of `values` [B, C, *dims], the last `size` of them."""
        rows, index = step.once(
            ("ring append", len(self.data), self.size), lambda: self._append_index(step)
        )
        self.data[rows, index] = values.to(self.data.dtype)

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the given rows."""
        self.data[rows] = 0

    @property
    def _trash(self) -> int:
        return len(self.data) - 1

    def _history_index(self, step: Step, n: int) -> tuple[Tensor, Tensor]:
        rows = torch.where(step.slots < 0, self._trash, step.slots)[:, None]
        back = torch.arange(-n, 0, device=rows.device)
        return rows, (step.starts[:, None] + back) % self.size

    def _append_index(self, step: Step) -> tuple[Tensor, Tensor]:
        # Of two tokens with the same index only the later may write: index_put leaves their order
        # open.
        kept = step.valid & (step.offsets >= step.lens[:, None] - self.size)
        rows = torch.where(kept, step.slots[:, None], self._trash)
        return rows, step.positions % self.size


@dataclass(frozen=True)
class LayerState:
    """Rings of one layer.

    Attributes:
        window: [.., head_dim] in the model dtype: keys (= values) of the sliding window.
        compressor: [.., 2, width] fp32: projection and score (position bias added) of every token
            that a block still to be completed can need; width is head_dim, 2 * head_dim when blocks
            overlap. None without one.
        indexer: the same of the indexer's compressor. None without an indexer.
    """

    window: Ring
    compressor: Ring | None
    indexer: Ring | None

    def rings(self) -> tuple[Ring, ...]:
        """Return the rings that exist."""
        return tuple(r for r in (self.window, self.compressor, self.indexer) if r is not None)


class StateCache:
    """The rings of every layer, MTP layers included, for `rows` requests at once.

    Args:
        config: the model.
        rows: requests that can be cached at the same time.
        dtype: of the window keys.
        max_draft: tokens a step may write past the last accepted one.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_draft: int = 0,
    ) -> None:
        self.layers = tuple(
            _layer_state(config, spec, rows, dtype, device, max_draft) for spec in config.schedule
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
    dtype: torch.dtype,
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
        window=Ring(rows, config.sliding_window + max_draft, (config.head_dim,), dtype, device),
        compressor=tail(config.head_dim) if spec.ratio else None,
        indexer=tail(config.index_head_dim) if spec.overlap else None,
    )
