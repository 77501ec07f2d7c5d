"""Costs to a warp of the instructions between two events: issue slots, pipes, and dependences.

PTX is not machine code. The compiler removes copies and reorders freely, so a stretch of
instructions is scheduled here by its data flow alone, and copies of registers are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from dsv4.simulator.ptx.entry import Entry, Instruction
from dsv4.simulator.timing.machine import Machine

_REGISTER = re.compile(r"%[\w$]+")
_FREE = ("mov", "cvta", "createpolicy", "prefetch", "prefetchu", "wgmma.fence")
_MUFU = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
_MEMORY = ("ld", "st", "ldmatrix", "stmatrix", "atom", "red")
_FLOAT = ("f32", "f32x2", "f16x2", "bf16x2", "f16", "bf16")
_FUSED = ("add", "sub", "mul", "fma", "mad")
DIVISION_INSTRUCTIONS = 16  # an integer division is a subroutine of about this many
# Results that come late whatever the pipe: opcode stems and the machine's field.
_LATE = {"shfl": "shuffle_latency", "redux": "shuffle_latency", "vote": "arithmetic_latency"}


@dataclass(frozen=True, slots=True)
class Cost:
    """One warp instruction: issue slots, the pipe it occupies and for how long, its latency."""

    issue: int
    pipe: str  # "fma", "alu", "mufu" or "" for none
    cycles: float
    latency: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive instructions without an event between them.

    Attributes:
        issue: issue slots. pipes: cycles by pipe of the sub-core.
        length: cycles until the last one issues, if every register they start from is ready.
        uses: earliest cycle at which each such register is needed.
        results: cycle at which each register is ready, for those ready after `length`.
        copies: registers that copy some it starts from: theirs is the time when they are ready.
    """

    issue: int
    pipes: dict[str, float]
    length: float
    uses: dict[str, float]
    results: dict[str, float]
    copies: dict[str, tuple[str, ...]]


def _is_free(ins: Instruction) -> bool:
    if ins.opcode.startswith(_FREE) or ins.opcode == "bra.uni":
        return True
    if ins.parts[0] in ("not", "and", "or") and ins.parts[-1] == "pred":
        return True  # folded into the instruction that makes or uses the predicate
    return ins.parts[:2] == ("ld", "param")  # operands from the constant bank


@lru_cache(maxsize=1024)
def _cost(opcode: str, machine: Machine) -> Cost:
    parts = opcode.split(".")
    stem, kind = parts[0], parts[-1]
    latency = machine.arithmetic_latency
    if stem in _MUFU or (stem == "div" and kind == "f32"):
        return Cost(1, "mufu", machine.mufu_cycles, machine.mufu_latency)
    if stem in _MEMORY:
        shared = "shared" in opcode or stem.endswith("matrix")
        late = machine.shared_latency if shared else machine.global_latency
        return Cost(1, "", 0, late if stem in ("ld", "ldmatrix", "atom") else latency)
    if stem in ("div", "rem"):
        slots = DIVISION_INSTRUCTIONS
        return Cost(slots, "alu", slots * machine.alu_cycles, slots * latency)
    if stem in _FUSED and kind == "f32x2":
        return Cost(1, "fma", machine.fma_packed_cycles, latency)
    if stem in _FUSED and kind in _FLOAT:
        return Cost(1, "fma", machine.fma_cycles, latency)
    if stem in ("mul", "mad"):
        wide = 2 if kind in ("s64", "u64") else 1
        return Cost(wide, "fma", 2 * wide * machine.fma_cycles, wide * latency)
    if stem == "cvt":
        return Cost(1, "alu", machine.convert_cycles, latency)
    if stem.startswith("fence") or stem == "membar":
        return Cost(1, "", 0, machine.fence_latency)
    if stem in ("tcgen05", "wgmma", "mbarrier", "bar", "barrier", "cp", "setmaxnreg"):
        return Cost(1, "", 0, latency)
    wide = 2 if kind in ("b64", "s64", "u64", "f64") else 1
    late = getattr(machine, _LATE[stem]) if stem in _LATE else wide * latency
    return Cost(wide, "alu", wide * machine.alu_cycles, late)


def cost_of(ins: Instruction, machine: Machine) -> Cost:
    """Cost of one instruction."""
    if _is_free(ins):
        return Cost(0, "", 0, 0)
    return _cost(ins.opcode, machine)


def _registers(operands: Iterable[str], entry: Entry) -> list[str]:
    names = _REGISTER.findall(" ".join(operands))
    return [name for name in names if entry.width(name)]


def targets_and_sources(ins: Instruction, entry: Entry) -> tuple[list[str], list[str]]:
    """Registers an instruction writes and reads."""
    operands = ins.operands
    no_result = ("st", "red", "bra", "bar", "cp", "fence", "ret", "exit")
    if ins.parts[0] in no_result or not operands or operands[0].startswith("["):
        targets, sources = [], _registers(operands, entry)
    else:
        targets, sources = _registers(operands[:1], entry), _registers(operands[1:], entry)
    if ins.guard:
        sources += [ins.guard, *targets]  # a guarded result depends on the old one
    return targets, sources


def make_segment(entry: Entry, start: int, stop: int, machine: Machine) -> Segment:
    """The cost of instructions [start, stop) of an entry."""
    issue, length = 0, 0.0
    pipes: dict[str, float] = {}
    uses: dict[str, float] = {}
    ready: dict[str, float] = {}
    copies: dict[str, tuple[str, ...]] = {}
    for ins in entry.instructions[start:stop]:
        cost = cost_of(ins, machine)
        targets, sources = targets_and_sources(ins, entry)
        inside = [register for register in sources if register in ready]
        outside = [
            origin
            for register in sources
            if register not in ready
            for origin in copies.get(register, (register,))
        ]
        if ins.parts[0] == "mov" and outside and not inside and not ins.guard:
            # Another name: nothing waits for the value here.
            for register in targets:
                ready.pop(register, None)
                copies[register] = tuple(outside)
            continue
        begin = max((ready[register] for register in inside), default=0.0)
        for register in outside:
            uses[register] = min(uses.get(register, begin), begin)
        for register in targets:
            ready[register] = begin + cost.latency
            copies.pop(register, None)
        issue += cost.issue
        if cost.pipe:
            pipes[cost.pipe] = pipes.get(cost.pipe, 0.0) + cost.cycles
        length = max(length, begin + cost.issue)
    length = max(length, issue)
    results = {register: t for register, t in ready.items() if t > length}
    return Segment(issue, pipes, length, uses, results, copies)
