"""Loads of shared memory that are under way where their warp hands over, in machine code.

An arrival at a barrier does not wait for a load that was issued before it: whoever waits for the
arrival may write over what is still to be read. Ordinary stores of the CTA come behind the load; a
copy by TMA, or another CTA's, may not. The race checker knows PTX, where a use of the loaded value
may stand before the arrival (`reads_in_flight`); ptxas moves such uses behind it. Here the
scoreboards of the machine code tell: a load is under way from its issue until an instruction waits
for its scoreboard, or a fence for all of them.

What is found is no fault by itself: that depends on who writes there next.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from dsv4.simulator.races.machine_code import (
    SCOREBOARDS,
    MachineFunction,
    MachineInstruction,
    flow,
)

_LOADS = ("LDS", "LDSM")
_HANDS_OVER = ("SYNCS.ARRIVE", "BAR.", "UCGABAR_ARV")
_FENCES = ("MEMBAR", "FENCE.VIEW.ASYNC")


class HandOver(NamedTuple):
    """An arrival, and what its warp is still loading there."""

    arrival: MachineInstruction
    loads: tuple[MachineInstruction, ...]

    @property
    def is_remote(self) -> bool:
        """Whether the arrival may be in another CTA, where nothing orders the loads before it."""
        return ".RED" in self.arrival.opcode or self.arrival.opcode.startswith("UCGABAR")


def loads_in_flight(function: MachineFunction) -> list[HandOver]:
    """Arrivals of a kernel with loads under way, on any path through it."""
    code = function.instructions
    loads = [i for i, ins in enumerate(code) if ins.opcode.split(".")[0] in _LOADS]
    bit = {i: 1 << k for k, i in enumerate(loads)}
    counted = [0] * SCOREBOARDS  # by scoreboard, its loads
    for i in loads:
        if code[i].scoreboard is not None:
            counted[code[i].scoreboard] |= bit[i]
    successors = function.successors()

    def under_way(i: int, state: int) -> int:
        """The loads that an instruction, once it starts, has left of those before it."""
        if code[i].opcode.startswith(_FENCES):
            return 0
        for scoreboard in _waited_for(code[i]):
            state &= ~counted[scoreboard]
        return state

    def step(i: int, state: int) -> tuple[int, list[int]]:
        issued = bit.get(i, 0) if code[i].scoreboard is not None else 0
        return under_way(i, state) | issued, successors[i]

    found = []
    for i, state in enumerate(flow(len(code), 0, step, operator.or_)):
        if state is None or not code[i].opcode.startswith(_HANDS_OVER):
            continue
        left = under_way(i, state)
        if left:
            found.append(HandOver(code[i], tuple(code[k] for k in loads if left & bit[k])))
    return found


def _waited_for(ins: MachineInstruction) -> set[int]:
    """Scoreboards that are at zero when an instruction starts."""
    found = set(ins.waits)
    if ins.opcode.startswith("DEPBAR.LE") and ins.body.split()[-1] == "0x0":
        found.add(int(ins.body.split()[1].strip(",")[2:]))
    return found
