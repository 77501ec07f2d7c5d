"""Keys of the sliding window: a page per request, and pages for the tokens of a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.formats import KeyPool, KvFormat
from dsv4.cache.step import Step
from dsv4.ops.step_indices import ring_slots


class WindowPool(KeyPool):
    """The latest positions of every request, and the tokens of the chunk that is being computed.

    Page r is a ring: position p of the request of slot r lies at entry p mod size. Size is the
    window and the drafts that may be taken back, so that a step of up to 1 + max_draft tokens per
    request attends to the ring in place. A longer chunk would overwrite what its first tokens still
    see: its keys go to the pages behind the rings, the index lists of its tokens name both, and its
    last keys are written to the rings after attention. No key is ever gathered or moved.

    Args:
        rows: requests that can be cached at the same time.
        window: positions that a token sees, its own included.
        max_draft: tokens a step may write past the last accepted one.
        max_tokens: B * C of the largest step with longer chunks.
    """

    def __init__(
        self,
        kv_format: KvFormat,
        rows: int,
        window: int,
        max_draft: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        size = window + max_draft
        super().__init__(kv_format, rows + -(-max_tokens // size), size, device)
        self.rows = rows
        self.window = window
        self.max_tokens = max_tokens

    def is_in_place(self, step: Step) -> bool:
        """Whether the rings alone hold what a step's tokens see."""
        return step.chunk <= self.size - self.window + 1

    def view(self, step: Step) -> WindowView:
        """Where the keys of a step are written and found; the same for every layer.

        Raises:
            ValueError: the step has more tokens than the pool was made for.
        """
        if self.is_in_place(step):
            return step.derive(_in_place, self.size)
        if step.batch * step.chunk > self.max_tokens:
            raise ValueError(
                f"step: got {step.batch} x {step.chunk} tokens, the cache was made for "
                f"max_tokens = {self.max_tokens} in chunks"
            )
        return step.derive(_in_chunk, self.rows, self.size, self.window)

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the rings of the given rows."""
        self.data[rows] = 0


class WindowView(NamedTuple):
    """Slots of a step's keys in every layer's `WindowPool`, T = B * C tokens.

    Attributes:
        slots: [T] int32: where keys go before attention; -1 for padding.
        table: [B, 1] int32, the requests' rings, which tokens see the last positions of; or None:
        indices, lens: [T, window] and [T] int32, what every token sees, oldest first.
        kept: [T] int32: where keys go after attention, -1 for those that no later step sees; None:
            nowhere else.
    """

    slots: Tensor
    table: Tensor | None
    indices: Tensor | None
    lens: Tensor | None
    kept: Tensor | None


def _in_place(step: Step, size: int) -> WindowView:
    """Keys in the rings alone."""
    table = step.requests[0][:, None]
    if step.indices is not None:
        return WindowView(step.indices.window_slots.flatten(), table, None, None, None)
    slots = ring_slots(step.slots, step.positions, step.valid, size)
    return WindowView(slots.flatten(), table, None, None, None)


def _in_chunk(step: Step, rows: int, size: int, window: int) -> WindowView:
    """Keys of the chunk behind the rings, those before it in the rings."""
    positions, starts = step.positions.to(torch.int32), step.starts[:, None].to(torch.int32)
    ring = step.slots[:, None].to(torch.int32) * size
    count = positions.numel()
    slots = torch.arange(rows * size, rows * size + count, device=positions.device).int()
    first_slot = slots.view(positions.shape)[:, :1]
    first = (positions - (window - 1)).clamp_(min=0)
    seen = first[..., None] + torch.arange(window, device=positions.device).int()
    is_new = seen >= starts[..., None]
    indices = torch.where(
        is_new, seen + (first_slot - starts)[..., None], seen % size + ring[..., None]
    )
    lens = torch.where(step.valid, positions - first + 1, 0)
    # The last positions alone: of two with one entry only the later may be written.
    is_kept = step.valid & (step.offsets >= step.lens[:, None] - size)
    return WindowView(
        slots=torch.where(step.valid.flatten(), slots, -1),
        table=None,
        indices=indices.flatten(0, 1),
        lens=lens.flatten(),
        kept=torch.where(is_kept, ring + positions % size, -1).flatten(),
    )
