"""mbarrier objects: pending arrivals, pending transaction bytes and the phase."""

from __future__ import annotations

from dsv4.simulator.errors import KernelFault

MAX_COUNT = (1 << 20) - 1


class MemoryBarrier:
    """State of one mbarrier. A phase completes when no arrival and no byte is pending."""

    __slots__ = (
        "address", "completed_in", "count", "launch", "pending", "phase", "places", "transactions",
    )  # fmt: skip

    def __init__(self, address: int, count: int, launch, at: int):
        if not 1 <= count <= MAX_COUNT:
            raise KernelFault(f"mbarrier.init with count {count}, allowed 1..{MAX_COUNT}")
        self.address, self.count, self.pending = address, count, count
        self.transactions, self.phase = 0, 0
        self.launch, self.completed_in = launch, launch.turn  # the turn of the last completion
        # The instructions that initialised it and last expected bytes.
        self.places: tuple[int, ...] = (at,)

    def _check(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.completed_in = self.launch.turn

    def arrive(self, count: int = 1) -> None:
        """Count arrivals; more than the phase expects is a fault."""
        if count > self.pending:
            raise KernelFault(
                f"mbarrier at {self.address:#x} over-arrival: {count} more, {self.pending} of "
                f"{self.count} pending in phase {self.phase}"
            )
        self.pending -= count
        self._check()

    def drop(self, count: int = 1) -> None:
        """arrive.drop: arrive and lower the expected count of later phases."""
        self.count -= count
        self.arrive(count)

    def expect(self, size: int, at: int) -> None:
        """Add bytes that asynchronous copies must complete in this phase.

        They may all have arrived before: with no arrival pending, this then completes the phase.
        """
        self._count(size)
        self.places = self.places[0], at
        self._check()

    def complete(self, size: int) -> None:
        """Bytes arrived. They may come before `expect`, the count is then negative meanwhile."""
        self._count(-size)
        self._check()

    def _count(self, size: int) -> None:
        self.transactions += size
        if abs(self.transactions) > MAX_COUNT:
            raise KernelFault(
                f"mbarrier at {self.address:#x}: {self.transactions} bytes pending, the count "
                f"holds {-MAX_COUNT}..{MAX_COUNT}"
            )

    def passed(self, parity: int) -> bool:
        """try_wait.parity: has the phase of this parity completed?"""
        return (self.phase & 1) != (parity & 1)

    def __str__(self) -> str:
        place = self.launch.program.entry.shared_names.place(self.address & 0xFFFFFF)
        return (
            f"mbarrier rank {self.address >> 24} {place}: phase "
            f"{self.phase}, {self.pending} of {self.count} arrivals and {self.transactions} bytes "
            "pending"
        )
