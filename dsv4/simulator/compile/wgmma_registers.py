"""Registers of wgmmas under way: which instructions of a kernel may not use them.

From a wgmma.mma_async until the wgmma.wait_group for it, nothing but another product may use its
accumulators, and nothing may write its A fragment. The registers are PTX's: where they live is up
to ptxas, which sees the waits.
"""

from __future__ import annotations

from collections import defaultdict

from dsv4.simulator.compile.registers import REGISTER
from dsv4.simulator.ptx.entry import Entry, Instruction

USED = "accumulators of a wgmma used before it is waited for"
REWRITTEN = "A fragment of a wgmma rewritten before it is waited for"
# First operands that are registers, but not written.
_ONLY_READS = ("bar", "barrier", "bra", "nanosleep", "setmaxnreg")

# What an instruction, or a few, must not do while products are under way: by the product's
# instruction, the offending one and what is wrong.
Conflicts = dict[int, tuple[int, str]]


class WgmmaRegisters:
    """Accumulators and A fragments of an entry's products, with those products' instructions."""

    def __init__(self, entry: Entry):
        self.accumulators: dict[str, set[int]] = defaultdict(set)
        self.fragments: dict[str, set[int]] = defaultdict(set)
        for ins in entry.instructions:
            if ins.opcode.startswith("wgmma.mma_async"):
                for operand, owners in zip(ins.operands, (self.accumulators, self.fragments)):
                    if operand.startswith("{"):
                        for register in REGISTER.findall(operand):
                            owners[register].add(ins.index)

    def conflicts(self, ins: Instruction) -> Conflicts:
        """The products that must not be under way when an instruction is executed."""
        if not self.accumulators:
            return {}
        written, used = _registers(ins)
        found: Conflicts = {}
        for register in written:
            for product in self.fragments.get(register, ()):
                found[product] = ins.index, REWRITTEN
        for register in used:
            for product in self.accumulators.get(register, ()):
                found[product] = ins.index, USED
        return found


def _registers(ins: Instruction) -> tuple[list[str], list[str]]:
    """Registers that an instruction writes; those it may not share with a product's sums."""
    first, *others = ins.operands or ("",)
    targets = [] if first.startswith("[") or ins.parts[0] in _ONLY_READS else [first]
    if ins.parts[0] != "wgmma":
        others = [first, *others]
    return REGISTER.findall(" ".join(targets)), REGISTER.findall(" ".join(others))


def check_products(w, conflicts: Conflicts) -> None:
    """Report the conflicts of warp `w` with its products that it has not waited for."""
    monitor = w.launch.monitor
    if monitor is None:
        return
    for product in w.wgmma_pending:
        if product.at in conflicts:
            at, what = conflicts[product.at]
            message, places = f"{w.cta.name} warp {w.number}: {what}", (product.at, at)
            monitor.report("wgmma register in flight", message, places, places)
