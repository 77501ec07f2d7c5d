"""Loads from shared memory that are not complete when their warp hands the memory over.

An arrival at an mbarrier (released to the CTA) or a named barrier does not wait for a load whose
registers are not used yet: the load stands in a queue of the multiprocessor. Ordinary stores by
others come behind it in that queue, but a bulk or tensor copy does not: an H200 then loads what the
copy wrote. What makes a load complete there: a use of its registers, fence.proxy.async or another
fence of memory, a release to the cluster; not the use of a later load's registers. A proxy fence of
global memory alone promises nothing of shared memory, and does not count.

A use counts where PTX has it. ptxas moves arithmetic behind arrivals, so that a load may be under
way in machine code where this finds none: `loads_in_flight` looks there.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.registers import REGISTER
from dsv4.simulator.ptx.blocks import blocks_of
from dsv4.simulator.ptx.entry import Entry, Instruction

_COPIES = ("cp.async.bulk", "cp.reduce.async.bulk")


def incomplete_loads(entry: Entry) -> dict[int, tuple[int, ...]]:
    """For each release, the loads that may be under way there, by instruction numbers."""
    instructions = entry.instructions
    loads = [ins.index for ins in instructions if _loads_shared(ins)]
    if not loads or not any(_copies_into_shared(ins) for ins in instructions):
        return {}
    number = {index: k for k, index in enumerate(loads)}
    mentioned = _mentioned_loads(instructions, number)
    flow = _Flow(instructions, number, mentioned)
    blocks = blocks_of(entry)
    before: list[list[int]] = [[] for _ in range(len(blocks) + 1)]
    for block in blocks:
        for successor in block.successors:
            before[successor].append(block.number)
    leaving = [0] * len(blocks)
    last = None
    while leaving != last:
        last = leaving.copy()
        for block in blocks:
            state = 0
            for number_before in before[block.number]:
                state |= leaving[number_before]
            leaving[block.number] = flow.through(block, state)
    return {
        at: tuple(index for index, k in number.items() if pending >> k & 1)
        for at, pending in flow.at_release.items()
        if pending
    }


def _loads_shared(ins: Instruction) -> bool:
    if ins.parts[0] == "ldmatrix":
        return True
    return ins.parts[0] == "ld" and any(p.startswith("shared") for p in ins.parts)


def _copies_into_shared(ins: Instruction) -> bool:
    """A copy by the asynchronous proxy whose target is shared memory."""
    spaces = (p for p in ins.parts if p.startswith(("shared", "global")))
    return ins.opcode.startswith(_COPIES) and next(spaces, "").startswith("shared")


def _releases(ins: Instruction) -> bool:
    if ins.parts[0] == "mbarrier":
        return ins.parts[1] in ("arrive", "arrive_drop") and "cluster" not in ins.parts
    return ins.parts[0] in ("bar", "barrier") and not {"warp", "cluster"} & set(ins.parts)


def _completes(ins: Instruction) -> bool:
    """Fences of memory and releases to the cluster, which begin with one."""
    if ins.parts[0] in ("mbarrier", "barrier"):
        return "cluster" in ins.parts and "relaxed" not in ins.parts
    if ins.opcode.startswith("fence.proxy.async"):
        return "global" not in ins.parts
    return ins.opcode.startswith(("fence.acq_rel", "fence.sc", "fence.release", "membar"))


def _mentioned_loads(instructions: list[Instruction], number: dict[int, int]) -> list[int]:
    """For each instruction, a bit for every load whose registers it names. A register that another
    was moved to stands for it: the move may not exist on hardware."""
    owners: dict[str, int] = {}
    for index, k in number.items():
        for register in REGISTER.findall(instructions[index].operands[0]):
            owners[register] = owners.get(register, 0) | 1 << k
    moves = [
        (REGISTER.findall(ins.operands[0]), REGISTER.findall(" ".join(ins.operands[1:])))
        for ins in instructions
        if ins.parts[0] == "mov"
    ]
    changed = True
    while changed:
        changed = False
        for targets, sources in moves:
            held = 0
            for source in sources:
                held |= owners.get(source, 0)
            for target in targets if held else ():
                if held & ~owners.get(target, 0):
                    owners[target] = owners.get(target, 0) | held
                    changed = True
    out = []
    for ins in instructions:
        bits = 0
        if ins.parts[0] != "mov":
            for register in REGISTER.findall(" ".join((*ins.operands, ins.guard or ""))):
                bits |= owners.get(register, 0)
        out.append(bits)
    return out


class _Flow:
    """Loads under way, as bits, through a block; notes those at each release."""

    def __init__(self, instructions: list[Instruction], number: dict[int, int], mentioned):
        self.instructions, self.number, self.mentioned = instructions, number, mentioned
        self.at_release: dict[int, int] = {}

    def through(self, block, state: int) -> int:
        """The loads under way at the block's end."""
        for ins in self.instructions[block.start : block.stop]:
            state &= ~self.mentioned[ins.index]
            if _completes(ins):
                state = 0
            elif _releases(ins):
                self.at_release[ins.index] = self.at_release.get(ins.index, 0) | state
            elif ins.index in self.number:
                state |= 1 << self.number[ins.index]
        return state


class ReadsInFlight:
    """Loads in flight of one cluster, and since when other agents may know them complete.

    `watched` holds the cells that each warp last read by a load, `late` per CTA and warp the clock
    that covers the reads and their instructions, by cell.
    """

    def __init__(self, cells: int):
        self.cells = cells
        self.watched: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self.late: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {}

    def read(self, agent: int, at: int, rank: int, cells: np.ndarray) -> None:
        """A load that matters, of a CTA's cells of 4 bytes."""
        self.watched[agent, at] = rank, cells

    def released(self, agent: int, loads: tuple[int, ...], clock: int) -> None:
        """A warp released while loads were under way: only its next release, at `clock`, can
        cover them."""
        for at in loads:
            rank, cells = self.watched.get((agent, at), (0, None))
            if cells is None:
                continue
            late = self.late.setdefault(rank, {})
            if agent not in late:
                late[agent] = np.zeros(self.cells, np.int32), np.zeros(self.cells, np.int32)
            late[agent][0][cells], late[agent][1][cells] = clock, at

    def under(self, rank: int, cells: np.ndarray, seen: np.ndarray):
        """(warp, instruction, clock, index) of a read that a copy over the cells may come before,
        or None."""
        for agent, (clocks, places) in self.late.get(rank, {}).items():
            late = clocks[cells] > seen[agent]
            if late.any():
                i = int(late.argmax())
                return agent, int(places[cells][i]), int(clocks[cells][i]), i
        return None
