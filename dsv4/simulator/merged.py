"""Merged report of several simulations: findings once per cause, synchronisation that none ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4.simulator.report import Finding, LaunchReport, Report


@dataclass
class MergedReport:
    """The findings and launches of many calls.

    Attributes:
        findings, warnings: one for each kind and place.
        launches: all of them, in order.
        missed: by kernel, the synchronisation instructions that no launch of it has run.
    """

    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    launches: list[LaunchReport] = field(default_factory=list)
    missed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Add what one call found."""
        for mine, theirs in ((self.findings, report.races), (self.warnings, report.warnings)):
            known = {(f.kind, f.places) for f in mine}
            mine += [f for f in theirs if (f.kind, f.places) not in known]
        self.launches += report.launches
        for launch in report.launches:
            coverage = launch.coverage
            left = set(coverage.missed_sync)
            before = self.missed.get(launch.kernel, coverage.missed_sync)
            self.missed[launch.kernel] = [place for place in before if place in left]

    @property
    def uncovered(self) -> dict[str, list[str]]:
        """`missed`, of the kernels that miss something."""
        return {kernel: places for kernel, places in self.missed.items() if places}
