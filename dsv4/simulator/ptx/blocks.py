"""Basic blocks of an entry, their successors and immediate post-dominators.

A block ends at a branch or exit and before each instruction that may block, so that a warp can be
parked at a block boundary and resumed by running the same block again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.entry import Entry, Instruction

_BLOCKING = (
    "bar.sync", "bar.red", "barrier.sync", "barrier.cta.sync", "barrier.cta.red", "barrier.red",
    "barrier.cluster.wait", "cp.async.bulk.wait_group", "cp.async.wait_", "tcgen05.wait",
    "tcgen05.alloc", "wgmma.wait_group", "griddepcontrol.wait",
    "setmaxnreg.inc",
)  # fmt: skip
# These write registers behind the back of the block's local variables.
_REGISTER_WRITERS = ("wgmma.mma_async", "tcgen05.ld")
EXIT_OPCODES = ("ret", "exit")


@dataclass(frozen=True)
class Block:
    """Instructions [start, stop); `exits` holds block numbers, the block count meaning exit."""

    number: int
    start: int
    stop: int
    successors: tuple[int, ...]
    rejoin: int  # immediate post-dominator: where diverged lanes meet again


def blocks_of(entry: Entry) -> list[Block]:
    """Cut an entry into blocks, numbered in program order."""
    instructions = entry.instructions
    starts = {0} | {i for i in entry.labels.values() if i < len(instructions)}
    for ins in instructions:
        if ins.parts[0] == "bra" or ins.parts[0] in EXIT_OPCODES:
            starts.add(ins.index + 1)
        if may_block(ins):
            starts.add(ins.index)
        if ins.opcode.startswith(_REGISTER_WRITERS):
            starts.update((ins.index, ins.index + 1))
    ordered = sorted(s for s in starts if s < len(instructions))
    number = {start: i for i, start in enumerate(ordered)}
    number[len(instructions)] = len(ordered)
    spans = list(zip(ordered, [*ordered[1:], len(instructions)]))
    successors = [
        _successors(instructions[stop - 1], i, number, entry) for i, (_, stop) in enumerate(spans)
    ]
    rejoin = _post_dominators(successors)
    return [
        Block(i, start, stop, tuple(successors[i]), rejoin[i])
        for i, (start, stop) in enumerate(spans)
    ]


def may_block(ins: Instruction) -> bool:
    """True for instructions that can park a warp."""
    if ins.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        # With a suspend-time hint the wait spins in hardware; without, it is a poll.
        return ins.parts[1] == "try_wait" and len(ins.operands) == 4
    return ins.opcode.startswith(_BLOCKING)


def _successors(last: Instruction, i: int, number: dict[int, int], entry: Entry) -> list[int]:
    if last.parts[0] == "bra":
        label = last.operands[0]
        if label not in entry.labels:
            raise UnsupportedInstruction(f"branch to unknown label: {last.where()}")
        target = number[entry.labels[label]]
        return [target, i + 1] if last.guard else [target]
    if last.parts[0] in EXIT_OPCODES:
        count = len(number) - 1
        return [count, i + 1] if last.guard else [count]
    return [i + 1]


def _post_dominators(successors: list[list[int]]) -> list[int]:
    """Immediate post-dominator of each block, by iteration over bit sets."""
    count = len(successors)
    everything = (1 << (count + 1)) - 1
    dominators = [everything] * count + [1 << count]
    changed = True
    while changed:
        changed = False
        for i in range(count - 1, -1, -1):
            meet = everything
            for s in successors[i]:
                meet &= dominators[s]
            meet |= 1 << i
            if meet != dominators[i]:
                dominators[i], changed = meet, True
    sizes = [bits.bit_count() for bits in dominators]
    immediate = []
    for i in range(count):
        best, rest = count, dominators[i] & ~(1 << i)
        best_size = -1
        while rest:
            j = (rest & -rest).bit_length() - 1
            rest &= rest - 1
            # The nearest post-dominator is the one with the most post-dominators of its own.
            if sizes[j] > best_size:
                best, best_size = j, sizes[j]
        immediate.append(best)
    return immediate
