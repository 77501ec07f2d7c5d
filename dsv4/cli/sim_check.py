"""Common part of single operators' commands: options, checked launches, reports, exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4.cli import sim_output

if TYPE_CHECKING:
    from dsv4.simulator.html import Modelled
    from dsv4.simulator.merged import MergedReport
    from dsv4.testing.harness import Call, Outcome

ARCHITECTURES = ("sm_100a", "sm_90a")
STATUS = (
    "Exit status 1 when a result is wrong or a kernel is racy, 2 when synchronisation was not "
    "reached."
)


class Size(NamedTuple):
    """An integer option: the name without its dashes, the default, and what it counts."""

    name: str
    default: int
    meaning: str


def add_command(
    kernels: argparse._SubParsersAction,
    name: str,
    summary: str,
    description: str,
    sizes: Sequence[Size],
    run: Callable[[argparse.Namespace], int],
    has_arch: bool = False,
) -> argparse.ArgumentParser:
    """Declare the command of an operator.

    Args:
        kernels: the subcommands of `dsv4 sim`.
        summary, description: for `dsv4 sim --help` and for the command's own help.
        sizes: its integer options, each at least 1.
        run: what it does; returns the exit status.
        has_arch: whether there are kernels for both architectures.
    """
    parser = kernels.add_parser(name, help=summary, description=f"{description} {STATUS}")
    if has_arch:
        parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    for size in sizes:
        parser.add_argument(
            f"--{size.name}",
            type=int,
            default=size.default,
            metavar="N",
            help=f"{size.meaning} (default: {size.default})",
        )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of `random`")
    sim_output.add_reports(parser)

    def checked(args: argparse.Namespace) -> int:
        for size in sizes:
            got = getattr(args, size.name.replace("-", "_"))
            if got < 1:
                raise ValueError(f"--{size.name}: got {got}, needs at least 1")
        if importlib.util.find_spec("cutlass") is None:
            raise ImportError(sim_output.NO_COMPILER)
        return run(args)

    parser.set_defaults(run=checked, races=True)
    return parser


class CheckedLaunches:
    """The launches of one command, and what the race checker says of them.

    Attributes:
        target: compiles and simulates, with source lines in its findings.
        report: of all launches.
    """

    def __init__(self, args: argparse.Namespace, arch: str) -> None:
        from dsv4.simulator.merged import MergedReport
        from dsv4.testing.harness import Simulator

        self.target = Simulator(arch, has_lines=True)
        self.report: MergedReport = MergedReport()
        self._args = args
        self._modelled: dict[int, list[Modelled]] = {}  # by the compiled function

    def run(self, compiled: Any, make: Callable[[], Call], schedule: str) -> Outcome:
        """Simulate a call, made anew.

        Raises:
            AssertionError: the checker found something.
            SimulatorError: the kernel faulted, or never ended.
        """
        from dsv4.simulator.races.tensor_memory import MISSING_FENCE

        self._model(compiled, make)
        outcome = self.target.simulate(compiled, make(), schedule, self._args.seed)
        found = outcome.report
        found.races += [said for said in found.warnings if said.kind == MISSING_FENCE]
        self.report.add(found)
        found.raise_if_racy()
        return outcome

    def _model(self, compiled: Any, make: Callable[[], Call]) -> None:
        """Model the time of a function's first call for the page, if it is wanted."""
        from dsv4.simulator import SimulatorError
        from dsv4.simulator.html import Modelled
        from dsv4.simulator.timing import predict

        if self._args.html is None or id(compiled) in self._modelled:
            return
        self._modelled[id(compiled)] = []
        call = make()
        # Clusters that wait for others cannot be modelled alone.
        with contextlib.suppress(SimulatorError):
            found = predict(compiled, *call.args, **call.options)
            self._modelled[id(compiled)] = [Modelled(found.machine, x) for x in found.launches]

    @contextlib.contextmanager
    def checks(self) -> Iterator[None]:
        """Block that a wrong result, a race or a fault ends; `finish` says what it was."""
        from dsv4.simulator import SimulatorError
        from dsv4.simulator.formats import finding_of
        from dsv4.simulator.report import Finding

        try:
            yield
        except SimulatorError as fault:
            self.report.findings.append(finding_of(fault))
        except AssertionError as wrong:
            if not self.report.findings:  # a comparison, not the checker
                self.report.findings.append(Finding("wrong result", str(wrong)))

    def finish(self) -> int:
        """Print and write the reports; the exit status of the command."""
        modelled = [launch for launches in self._modelled.values() for launch in launches]
        return sim_output.finish(self.report, self._args, modelled)
