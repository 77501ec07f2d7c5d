"""`dsv4 sim loads`: shared loads under way at arrivals, in the machine code of a cubin."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from dsv4.cli.arguments import input_path
from dsv4.cli.sim_status import CHECK_FAILED

if TYPE_CHECKING:
    from dsv4.simulator.races.machine_code import MachineInstruction


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "loads",
        help="shared loads under way at arrivals, in a cubin",
        description="List the loads of shared memory that no instruction has waited for when their "
        "warp arrives at a barrier. Ordinary stores of the CTA come behind them; a copy by TMA "
        "into the same place may not, whatever PTX says: the race checker cannot see where ptxas "
        "puts the use of a loaded value. Needs nvdisasm. Exit status 1 where such an arrival is "
        "in another CTA.",
    )
    parser.add_argument("file", type=input_path, metavar="FILE", help="a cubin")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List them by kernel and place, the number of loads in front."""
    from dsv4.simulator.races.loads_in_flight import loads_in_flight
    from dsv4.simulator.races.machine_code import disassemble

    has_remote = False
    for function in disassemble(args.file):
        found = loads_in_flight(function)
        print(f"{function.name}: {len(found)} arrivals with loads under way")
        has_remote |= any(hand_over.is_remote for hand_over in found)
        places = Counter(
            f"load at {_place(load)}, {'remote ' * hand_over.is_remote}arrival at "
            f"{_place(hand_over.arrival)}"
            for hand_over in found
            for load in hand_over.loads
        )
        for place, count in places.items():
            print(f"  {count} x {place}")
    return CHECK_FAILED if has_remote else 0


def _place(ins: MachineInstruction) -> str:
    return f"{ins.source[0]}:{ins.source[1]}" if ins.source else f"`{ins.text}`"
