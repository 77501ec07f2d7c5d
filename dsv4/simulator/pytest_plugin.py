"""A pytest plugin: the fixture `sim` runs kernels under every schedule and checks all there is.

In a conftest.py: `pytest_plugins = ["dsv4.simulator.pytest_plugin"]`. In a test:

    def test_my_kernel(sim):
        sim(compiled, x, y)
        torch.testing.assert_close(y, expected)

The test fails for races, for results that depend on the schedule, and, at its end, for
synchronisation that none of its calls reached (unless it sets `sim.coverage = False`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dsv4.simulator.merged import MergedReport

SCHEDULES = ("eager", "lazy", "random")


class Sim:
    """Calls of a test; `report` has what they found together."""

    def __init__(self) -> None:
        from dsv4.simulator.merged import MergedReport

        self.report: MergedReport = MergedReport()
        self.coverage = True

    def __call__(
        self, compiled: Any, *args: Any, schedules: Sequence[str] = SCHEDULES, **options: Any
    ) -> None:
        """Simulate a compiled function; options are those of `dsv4.simulator.simulate`. Tensors end
        as the last schedule leaves them."""
        from dsv4.simulator import simulate

        tensors = [*args, *options.values(), *options.get("buffers", ())]
        self._run(
            lambda schedule: simulate(compiled, *args, schedule=schedule, **options),
            tensors,
            schedules,
        )

    def ptx(
        self, text: str, entry: str, *, schedules: Sequence[str] = SCHEDULES, **options
    ) -> None:
        """Simulate a kernel of a PTX module; options are those of `simulate_ptx`."""
        from dsv4.simulator import simulate_ptx

        tensors = [*options.get("params", ()), *options.get("buffers", ())]
        self._run(
            lambda schedule: simulate_ptx(text, entry, schedule=schedule, **options),
            tensors,
            schedules,
        )

    def _run(self, call, tensors: list, schedules: Sequence[str]) -> None:
        import torch

        from dsv4.simulator.all_schedules import run_schedules

        held = [x for x in tensors if isinstance(x, torch.Tensor)]
        before = len(self.report.findings)
        run_schedules(call, held, schedules, self.report)
        found = self.report.findings[before:]
        if found:
            pytest.fail("\n".join(map(str, found)), pytrace=False)

    def check_coverage(self) -> None:
        """Fail for synchronisation that no call reached."""
        lines = [
            f"{kernel}: {place}"
            for kernel, places in self.report.uncovered.items()
            for place in places
        ]
        if lines:
            pytest.fail("synchronisation never reached:\n" + "\n".join(lines), pytrace=False)


@pytest.fixture
def sim() -> Iterator[Sim]:
    """Runs kernels in the simulator; see the module."""
    found = Sim()
    yield found
    if found.coverage and not found.report.findings:
        found.check_coverage()
