"""Findings of the checker: what is reported, once each, with both places."""

from __future__ import annotations

from dsv4.simulator.races.cells.shadow import SEVERAL, Earlier
from dsv4.simulator.report import Finding

MAX_FINDINGS = 50
CONVERGENCE = "lanes ordered by convergence alone"


class Findings:
    """Races and tolerated oddities of one launch of `entry`."""

    def __init__(self, entry):
        self.entry = entry
        self.findings: list[Finding] = []
        self.warnings: list[Finding] = []
        self._known: set[tuple] = set()

    def _leak(self, message: str, *places: int) -> None:
        self.report("leak", message, (), places)

    def report(self, kind: str, message: str, key: tuple, places: tuple[int, ...]) -> None:
        """A finding; one of each kind and key."""
        self._add(self.findings, kind, message, key or (message,), places)

    def warn(self, kind: str, message: str, *places: int) -> None:
        """A finding of the tolerated class."""
        self._add(self.warnings, kind, message, places, places)

    def _add(self, to: list, kind: str, message: str, key: tuple, places: tuple[int, ...]) -> None:
        if (kind, *key) in self._known or len(to) >= MAX_FINDINGS:
            return
        self._known.add((kind, *key))
        to.append(Finding(kind, message, tuple(self.entry.instructions[p].where() for p in places)))

    def adopt(self, findings: list[Finding], warnings: list[Finding]) -> None:
        """Add what another process found, once each."""
        for mine, theirs in ((self.findings, findings), (self.warnings, warnings)):
            mine += [
                f for f in theirs if all((f.kind, f.places) != (g.kind, g.places) for g in mine)
            ]

    def race(
        self,
        w,
        kind: str,
        what: str,
        earlier: Earlier,
        *,
        warning: bool = False,
        once: bool = False,
    ) -> None:
        """An access of warp `w` that is not ordered after an earlier one of its cluster.

        `once`: one of this kind speaks for all of the launch.
        """
        clocks = w.cluster.state.clocks
        name = clocks.names[earlier.agent]
        who = _who(name)
        if name[0] == "warp" and earlier.lane != SEVERAL:
            who += f", lane {earlier.lane}"
        elif earlier.agent == w.agent:
            who = "accesses of other lanes of the warp"
        message = f"{what} by {w.cta.name} warp {w.number} is not ordered after {who}"
        places = (earlier.at, w.at)
        if earlier.weak:
            kind, warning = CONVERGENCE, True
        if warning:
            self._add(self.warnings, kind, message, () if once else places, places)
        else:
            self.report(kind, message, places, places)


def _who(name: tuple) -> str:
    """An agent's name for people."""
    kind, *rest = name
    if kind == "warp":
        return f"the access of warp agent {rest[0]}"
    if kind == "copies":
        return f"the copy completing on the mbarrier at {rest[0]:#x}"
    return f"the {kind} of agent {rest}"
