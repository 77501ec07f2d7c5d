"""A forward that was started and whose results the host has not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.engine.mailbox import Letter
from dsv4.engine.request import Request


@dataclass(frozen=True)
class Flight:
    """A forward on its way.

    Attributes:
        letter: its results.
        rows: of the results, those that chose tokens, with their requests.
        chunk: positions whose tokens a row reports.
        tokens: prompt tokens that it caches; None: it is a decode forward.
        started: `perf_counter` before it was started.
        computed: the same once the host had computed it; None: a device does so later.
        saved: snapshots of rings that were taken behind it, by row.
    """

    letter: Letter
    rows: Sequence[tuple[int, Request]]
    chunk: int
    tokens: int | None
    started: float
    computed: float | None
    saved: dict[int, int | None] = field(default_factory=dict)

    def take_off(self) -> Flight:
        """Count it as pending in its requests."""
        for _, request in self.rows:
            request.pending += 1
            request.ahead += self.chunk
        return self

    def land(self, request: Request) -> None:
        """Count it as read in one of its requests."""
        request.pending -= 1
        request.ahead -= self.chunk
