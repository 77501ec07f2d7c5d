"""Findings of the checker: what is reported, once each, with both places."""

from __future__ import annotations

from dsv4.simulator.compile.tmem_registers import EARLY
from dsv4.simulator.machine.memory import OFFSET_MASK, RANK_SHIFT
from dsv4.simulator.ptx.source import role_at
from dsv4.simulator.races.cells.shadow import SEVERAL, Earlier
from dsv4.simulator.report import Finding

MAX_FINDINGS = 50
CONVERGENCE = "lanes ordered by convergence alone"
NARROW = "scope too narrow"


class Findings:
    """Races and tolerated oddities of one launch of `entry`."""

    def __init__(self, entry):
        self.entry = entry
        self.findings: list[Finding] = []
        self.warnings: list[Finding] = []
        self._known: set[tuple] = set()

    def _leak(self, message: str, *places: int) -> None:
        """Something is left behind at exit: the first CTA that does so speaks for all."""
        self.report("leak", message, places, places)

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
        instructions = [self.entry.instructions[p] for p in places]
        where = tuple(ins.where() for ins in instructions)
        to.append(Finding(kind, message, where, tuple(ins.lines for ins in instructions)))

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
        lacking: str = "",
    ) -> None:
        """An access of warp `w` that is not ordered after an earlier one of its cluster; or it is,
        but what is `lacking` would have to lie between.

        `once`: one of this kind speaks for all of the launch.
        """
        clocks = w.cluster.state.clocks
        name = clocks.names[earlier.agent]
        who = _who(name, w.cluster, self.role(earlier.at), self.entry)
        if name[0] in ("warp", "cp.async") and earlier.lane != SEVERAL:
            who += f", lane {earlier.lane}"
        elif earlier.agent == w.agent:
            who = "accesses of other lanes of the warp"
        message = f"{what} by {self.warp_at(w, w.at)} {relation(who, lacking)}"
        places = (earlier.at, w.at)
        if name[0] == "tcgen05.ld" and (EARLY, earlier.at) in self._known:
            return  # that nothing waits for the load is one finding
        if earlier.weak:
            kind, warning = CONVERGENCE, True
        if warning:
            self._add(self.warnings, kind, message, () if once else places, places)
        else:
            # A race is one, whichever of the two comes first.
            self.report(kind, message, tuple(sorted(places)), places)

    def role(self, at: int) -> str:
        """The role of a warp that executes an instruction: " (score)", or nothing."""
        role = role_at(self.entry.instructions[at].lines)
        return f" ({role})" if role else ""

    def warp_at(self, w, at: int) -> str:
        """A warp and the role in which it executes an instruction."""
        return f"{w.cta.name} warp {w.number}{self.role(at)}"

    def shared_place(self, cta, offset: int) -> str:
        """A place in a CTA's shared memory, by name where it has one."""
        return f"{self.entry.shared_names.place(offset)} of {cta.name}"


def relation(who: str, lacking: str) -> str:
    """How an access relates to an earlier one."""
    if lacking:
        return f"is ordered after {who}, but no {lacking} lies between"
    return f"is not ordered after {who}"


# What the clocks call an engine, and what people do.
_ENGINES = {
    "mma": "a tcgen05.mma", "tcgen05.ld": "a tcgen05.ld", "tcgen05.st": "a tcgen05.st",
    "cp.async": "a cp.async", "bulk stores": "a bulk store",
    "writes of bulk stores": "the write of a bulk store",
}  # fmt: skip


def _who(name: tuple, cluster, role: str, entry) -> str:
    """An agent's name for people."""
    kind, *rest = name
    if kind == "warp":
        return f"the access of {_warp(rest[0], cluster)}{role}"
    if kind == "copies":
        address = rest[0]
        cta = cluster.ctas[address >> RANK_SHIFT].name
        place = entry.shared_names.place(address & OFFSET_MASK)
        return f"the copy that completes on the mbarrier at {place} of {cta}"
    if kind == "wgmma":
        rank, group = rest
        return f"a wgmma of {cluster.ctas[rank].name} warpgroup {group}{role}"
    if kind in _ENGINES:
        return f"{_ENGINES[kind]} issued by {_warp(rest[0], cluster)}{role}"
    return f"what {kind} {rest} did"


def _warp(agent: int, cluster) -> str:
    """The warp of a cluster that is an agent."""
    found = next(warp for cta in cluster.ctas for warp in cta.warps if warp.agent == agent)
    return f"{found.cta.name} warp {found.number}"
