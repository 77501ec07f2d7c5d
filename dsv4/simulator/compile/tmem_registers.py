"""Registers of tcgen05.ld until tcgen05.wait::ld: what is done with them before it is a race.

A copy (mov, a packing of two registers, their unpacking) hands on that the value is still to come:
the compiler packs registers ahead of the wait, which costs no instruction. Anything else needs the
value.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4.simulator.compile.registers import REGISTER, RegisterMap
from dsv4.simulator.ptx.blocks import Block
from dsv4.simulator.ptx.entry import Entry, Instruction

EARLY = "tcgen05.ld without wait"
# First operands that are registers, but not written.
_ONLY_READS = ("bar", "barrier", "bra", "nanosleep", "setmaxnreg")


class Step(NamedTuple):
    """Uses that an instruction makes of registers tcgen05.ld may have loaded (numbers in R)."""

    at: int
    copies: bool
    targets: tuple[int, ...]
    sources: tuple[int, ...]


class TmemRegisters:
    """The steps of each block of an entry."""

    def __init__(self, entry: Entry, registers: RegisterMap):
        self.entry, self.index = entry, registers.index
        self.loaded = self._closure()

    def _closure(self) -> frozenset[str]:
        """Registers that loads write, and those that these are copied to."""
        loaded: set[str] = set()
        copies = []
        for ins in self.entry.instructions:
            if ins.opcode.startswith("tcgen05.ld"):
                loaded.update(REGISTER.findall(ins.operands[0]))
            elif ins.parts[0] == "mov":
                copies.append([REGISTER.findall(operand) for operand in ins.operands[:2]])
        size = -1
        while loaded and size != len(loaded):
            size = len(loaded)
            for targets, sources in copies:
                if not loaded.isdisjoint(sources):
                    loaded.update(targets)
        return frozenset(loaded)

    def steps(self, block: Block) -> tuple[Step, ...]:
        """What a block does with such registers; nothing, if it begins with the wait for them."""
        instructions = self.entry.instructions[block.start : block.stop]
        if not self.loaded or instructions[0].opcode.startswith("tcgen05.wait::ld"):
            return ()
        found = (self._step(ins) for ins in instructions)
        return tuple(step for step in found if step.targets or step.sources)

    def _step(self, ins: Instruction) -> Step:
        first, *others = ins.operands or ("",)
        if ins.opcode.startswith("tcgen05.ld"):
            first = ""  # the registers it is about to write
        elif first.startswith("[") or ins.parts[0] in _ONLY_READS:
            first, others = "", [first, *others]
        sources = " ".join((*others, ins.guard or ""))
        numbers = [
            tuple(self.index[r] for r in REGISTER.findall(text) if r in self.loaded)
            for text in (first, sources)
        ]
        return Step(ins.index, ins.parts[0] == "mov", *numbers)


def check_loads(w, steps: tuple[Step, ...]) -> None:
    """Follow the registers of warp `w` that are still to come through a block; report uses."""
    pending = w.pending_loads
    for at, copies, targets, sources in steps:
        late = next((pending[number] for number in sources if number in pending), None)
        if late is None:
            for number in targets:
                pending.pop(number, None)
        elif copies:
            pending.update(dict.fromkeys(targets, late))
        else:
            message = f"{w.cta.name} warp {w.number}: registers used before tcgen05.wait::ld"
            w.launch.monitor.report(EARLY, message, (late,), (late, at))
