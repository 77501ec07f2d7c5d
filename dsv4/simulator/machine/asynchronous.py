"""Schedule of asynchronous operations (copies, matrix products, commits).

`eager` runs them at issue, `lazy` when nothing else can run, `random` at seeded random moments.
Operations of one queue keep their order; queues are independent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable

SCHEDULES = ("eager", "lazy", "random")


def check_schedule(schedule: str) -> None:
    """Refuse what is none: ValueError."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")


class AsyncEngine:
    """Queues of operations issued but not yet performed."""

    def __init__(self, schedule: str, seed: int):
        self.eager = schedule == "eager"
        self.schedule = schedule
        self.random = random.Random(seed)
        self.queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self.issued: dict[str, int] = {}
        self._serial = 0

    def issue(self, kind: str, queue: Hashable, operation: Callable[[], None]) -> None:
        """Perform now (eager) or queue; queue None means ordered with nothing."""
        self.issued[kind] = self.issued.get(kind, 0) + 1
        if self.eager:
            operation()
            return
        if queue is None:
            self._serial += 1
            queue = ("single", self._serial)
        self.queues.setdefault(queue, deque()).append(operation)

    def step(self) -> bool:
        """Perform the head of one queue; False if there is none."""
        if not self.queues:
            return False
        keys = list(self.queues)
        key = keys[self.random.randrange(len(keys))]
        queue = self.queues[key]
        operation = queue.popleft()
        if not queue:
            del self.queues[key]
        operation()
        return True

    def maybe_step(self) -> bool:
        """`random` only: perform a few operations now and then; whether any was performed."""
        stepped = False
        if self.schedule == "random":
            while self.queues and self.random.random() < 0.5:
                stepped = self.step()
        return stepped

    def drain(self) -> None:
        """Perform everything."""
        while self.step():
            pass
