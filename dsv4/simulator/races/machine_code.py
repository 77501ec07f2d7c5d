"""Machine code of Hopper and Blackwell as nvdisasm lists it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dsv4.simulator.errors import SimulatorError

State = TypeVar("State")
SCOREBOARDS = 6
_NONE = 7  # the scoreboard of an instruction that has none

_SECTION = re.compile(r"\s*\.section\s+(\S+?),")
_LINE = re.compile(r'\s*//## File "(.*?)", line (\d+)')
_LABEL = re.compile(r"(\.?[\w$.]+):$")
# Low and high half of an instruction's 128 bits; the halves stand on lines of their own.
_LOW = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_HIGH = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/$")
_GUARD = re.compile(r"@!?U?P[T\d]\d*\s+")
_TARGET = re.compile(r"`\((\S+?)\)")


@dataclass
class MachineInstruction:
    """An instruction.

    Attributes:
        text: without the semicolon.
        source: file and line, where the code has line information.
        scoreboard: the one that counts it until its result is there; None for an instruction of
            fixed latency.
        waits: scoreboards that must be at zero before it starts.
    """

    text: str
    source: tuple[str, int] | None
    scoreboard: int | None = None
    waits: frozenset[int] = frozenset()

    @property
    def body(self) -> str:
        """Without the guard."""
        return _GUARD.sub("", self.text, count=1)

    @property
    def opcode(self) -> str:
        return self.body.split()[0]

    @property
    def operands(self) -> str:
        return self.body.partition(" ")[2].strip()

    @property
    def is_guarded(self) -> bool:
        return self.text.startswith("@") and not self.text.startswith("@PT")

    def decode(self, high: int) -> None:
        """Read bits 110 to 112 and 116 to 121, from the upper half."""
        scoreboard = high >> 46 & 7
        self.scoreboard = None if scoreboard == _NONE else scoreboard
        self.waits = frozenset(i for i in range(SCOREBOARDS) if high >> 52 + i & 1)


def flow(
    count: int,
    start: State,
    step: Callable[[int, State], tuple[State, Iterable[int]]],
    join: Callable[[State, State], State],
) -> list[State | None]:
    """What holds before each of so many instructions, on any path; None where none leads.

    Args:
        start: what holds before the first one.
        step: of an instruction and what holds before it, what holds behind it, and where next.
        join: what holds on either of two paths.
    """
    before: list[State | None] = [start, *[None] * (count - 1)][:count]
    waiting = [0] if count else []
    while waiting:
        i = waiting.pop()
        state, successors = step(i, before[i])
        for after in successors:
            joined = state if before[after] is None else join(before[after], state)
            if joined != before[after]:
                before[after] = joined
                waiting.append(after)
    return before


@dataclass
class MachineFunction:
    """A kernel: its instructions, and where its labels stand among them."""

    name: str
    instructions: list[MachineInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def successors(self) -> list[list[int]]:
        """What may run after each instruction.

        BSYNC goes on where the BSSY that set its barrier says: which ones reach it is found along
        the way, since a barrier has many uses.
        """
        meetings = flow(len(self.instructions), {}, self._step, _joined)
        return [
            self._step(i, known)[1] if known is not None else [] for i, known in enumerate(meetings)
        ]

    def _step(
        self, i: int, meetings: dict[str, frozenset[int]]
    ) -> tuple[dict[str, frozenset[int]], list[int]]:
        """Where threads meet behind an instruction, by barrier, and what may run after it."""
        ins = self.instructions[i]
        if ins.opcode.startswith("BSSY"):
            barrier = ins.operands.split(",")[0]
            meeting = frozenset({self.labels[_TARGET.search(ins.text)[1]]})
            meetings = {**meetings, barrier: meeting}
        count = len(self.instructions)
        return meetings, [after for after in self._after(i, ins, meetings) if after < count]

    def _after(
        self, i: int, ins: MachineInstruction, meetings: dict[str, frozenset[int]]
    ) -> list[int]:
        target = _TARGET.search(ins.text)
        opcode = ins.opcode.split(".")[0]
        if opcode == "BRA" and target:
            # Conditions stand before the target, too: `BRA.U UP0, ...`, `BRA.DIV UR4, ...`.
            may_fall_through = ins.is_guarded or not ins.operands.startswith("`")
            return [self.labels[target[1]], *([i + 1] if may_fall_through else [])]
        if opcode in ("EXIT", "RET", "KILL"):
            return [i + 1] if ins.is_guarded else []
        if opcode in ("BRX", "JMX", "BRXU"):
            return list(self.labels.values())
        if opcode == "BSYNC":
            return [i + 1, *meetings.get(ins.operands, ())]
        if opcode == "CALL" and target:
            return [i + 1, self.labels[target[1]]]
        return [i + 1]


def _joined(
    one: dict[str, frozenset[int]], other: dict[str, frozenset[int]]
) -> dict[str, frozenset[int]]:
    """What holds on either of two ways."""
    empty: frozenset[int] = frozenset()
    return {key: one.get(key, empty) | other.get(key, empty) for key in {*one, *other}}


def read_listing(text: str) -> list[MachineFunction]:
    """The kernels of a listing by `nvdisasm -hex`, with `-g` or without."""
    functions: list[MachineFunction] = []
    current, source = None, None
    for line in text.splitlines():
        if found := _SECTION.match(line):
            current = None
            if found[1].startswith(".text."):
                current = MachineFunction(found[1].removeprefix(".text."))
                functions.append(current)
        elif current is None:
            continue
        elif found := _LINE.match(line):
            source = found[1], int(found[2])
        elif found := _LABEL.match(line.strip()):
            current.labels[found[1]] = len(current.instructions)
        elif found := _LOW.match(line):
            current.instructions.append(MachineInstruction(found[1], source))
        elif (found := _HIGH.match(line)) and current.instructions:
            current.instructions[-1].decode(int(found[1], 16))
    return functions


def disassemble(cubin: Path) -> list[MachineFunction]:
    """The kernels of a cubin.

    Raises:
        SimulatorError: nvdisasm is missing, or refuses the file.
    """
    command = [_nvdisasm(), "-hex", "-g", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise SimulatorError(f"{cubin}: nvdisasm cannot read it: {reason}")
    return read_listing(done.stdout)


def _nvdisasm() -> str:
    """The program on the PATH, or that of the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    raise SimulatorError("nvdisasm is not installed (`pip install nvidia-cuda-nvdisasm`)")
