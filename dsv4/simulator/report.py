"""Report of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4.simulator.coverage import Coverage


@dataclass(frozen=True)
class Finding:
    """One thing the checker reports.

    Attributes:
        kind, message: what is wrong, in the words of docs/simulator.md, and between whom.
        places: the instructions as text, PTX and source lines, most recent last.
        lines: of each place, (file, line) of its source, then of the calls it was inlined at.
    """

    kind: str
    message: str
    places: tuple[str, ...] = ()
    lines: tuple[tuple[tuple[str, int], ...], ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.kind}: {self.message}", *self.places])


@dataclass
class LaunchReport:
    """One kernel launch: its configuration, work done, coverage."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    instructions: int
    operations: dict[str, int]
    seconds: float
    coverage: Coverage

    @property
    def instructions_per_second(self) -> float:
        """Simulated warp instructions per second of wall time."""
        return self.instructions / max(self.seconds, 1e-9)


@dataclass
class Report:
    """Everything `simulate` learnt. Output tensors were written in place."""

    launches: list[LaunchReport] = field(default_factory=list)
    races: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    early_starts: int = 0  # launches that started while the one before them ran

    @property
    def coverage(self) -> list[Coverage]:
        """Coverage of each launched kernel."""
        return [launch.coverage for launch in self.launches]

    def raise_if_racy(self) -> None:
        """Raise AssertionError listing every finding, if there is one."""
        if self.races:
            raise AssertionError("\n".join(str(f) for f in self.races))

    def __str__(self) -> str:
        lines = [
            f"{r.kernel[:60]} grid {r.grid} cluster {r.cluster} block {r.block}: "
            f"{r.instructions} warp instructions in {r.seconds:.2f} s, coverage {r.coverage}"
            for r in self.launches
        ]
        lines += [str(f) for f in [*self.races, *self.warnings]]
        return "\n".join(lines)
