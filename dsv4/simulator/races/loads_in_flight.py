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

from typing import NamedTuple

from dsv4.simulator.races.machine_code import (
    SCOREBOARDS,
    MachineFunction,
    MachineInstruction,
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
    before: list[int | None] = [None] * len(code)
    at_arrival: dict[int, int] = {}
    waiting = [0] if code else []
    if code:
        before[0] = 0
    while waiting:
        i = waiting.pop()
        ins, state = code[i], before[i]
        for scoreboard in _waited_for(ins):
            state &= ~counted[scoreboard]
        if ins.opcode.startswith(_FENCES):
            state = 0
        if state and ins.opcode.startswith(_HANDS_OVER):
            at_arrival[i] = at_arrival.get(i, 0) | state
        if i in bit and ins.scoreboard is not None:
            state |= bit[i]
        for after in successors[i]:
            joined = state if before[after] is None else before[after] | state
            if joined != before[after]:
                before[after] = joined
                waiting.append(after)
    return [
        HandOver(code[i], tuple(code[k] for k in loads if at_arrival[i] & bit[k]))
        for i in sorted(at_arrival)
    ]


def _waited_for(ins: MachineInstruction) -> set[int]:
    """Scoreboards that are at zero when an instruction starts."""
    found = set(ins.waits)
    if ins.opcode.startswith("DEPBAR.LE") and ins.body.split()[-1] == "0x0":
        found.add(int(ins.body.split()[1].strip(",")[2:]))
    return found
