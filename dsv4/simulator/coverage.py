"""Coverage of a kernel: its basic blocks and synchronisation instructions that ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4.simulator.compile.program import Program
from dsv4.simulator.ptx.blocks import Block, may_block
from dsv4.simulator.ptx.entry import Instruction


@dataclass
class Coverage:
    """Executed and missed parts of one kernel; adds up over launches."""

    kernel: str
    blocks: int
    blocks_run: int
    sync: int
    sync_run: int
    missed: list[str]
    missed_sync: list[str]  # synchronisation instructions among it, one by one
    program: Program = field(repr=False, compare=False)  # whose counts these are

    @property
    def complete(self) -> bool:
        """Every block and every synchronisation instruction ran."""
        return not self.missed

    def __str__(self) -> str:
        return f"{self.blocks_run}/{self.blocks} blocks, {self.sync_run}/{self.sync} sync"


def coverage_of(program: Program) -> Coverage:
    """Coverage accumulated by a program over its launches."""
    missed, missed_sync, sync, sync_run, run, total = [], [], 0, 0, 0, 0
    for block in program.blocks:
        if _is_retry(program, block):
            continue
        total += 1
        hit = program.hits[block.number] > 0
        run += hit
        for ins in program.sync[block.number]:
            sync += 1
            reached = ran(program, ins, program.hits[block.number])
            sync_run += reached
            if not reached:
                missed_sync.append(ins.where())
            if hit and not reached:
                missed.append(f"guard never true: {ins.where()}")
        if not hit:
            first = program.entry.instructions[block.start]
            missed.append(f"block never ran: {first.where()}")
    return Coverage(program.entry.name, total, run, sync, sync_run, missed, missed_sync, program)


def ran(program: Program, ins: Instruction, hits: int) -> bool:
    """Whether an instruction that synchronises has run, in a block with so many hits."""
    return hits > 0 and (ins.guard is None or ins.index in program.guards_taken)


def _is_retry(program: Program, block: Block) -> bool:
    """The jump back to a blocking wait: a parked warp resumes the wait itself, so it never runs."""
    instructions = program.entry.instructions
    last = instructions[block.stop - 1]
    if block.stop - block.start != 1 or last.parts[0] != "bra" or last.guard:
        return False
    return may_block(instructions[program.blocks[block.successors[0]].start])


def instructions_run(program: Program) -> int:
    """Warp instructions executed so far."""
    return sum(hits * (b.stop - b.start) for hits, b in zip(program.hits, program.blocks))
