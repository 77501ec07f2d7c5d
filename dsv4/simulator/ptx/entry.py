"""Entries of a PTX module: flat instructions, registers, labels, parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4.simulator.ptx.qualifiers import Order
from dsv4.simulator.ptx.shared_names import SharedNames
from dsv4.simulator.ptx.source import SourceLine, describe
from dsv4.simulator.ptx.symbols import Symbol

SHOWN_TEXT = 400  # characters of an instruction: tensor copies with all their coordinates fit


@dataclass(slots=True)
class Instruction:
    """One PTX instruction: `@guard opcode operands`, its memory order and where it came from."""

    index: int
    opcode: str
    parts: tuple[str, ...]
    operands: list[str]
    guard: str | None
    negated: bool
    text: str
    ptx_line: int
    source: SourceLine | None
    order: Order
    inlined_at: tuple[SourceLine, ...] = ()  # calls of the functions around it, innermost first

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """Lines of source code, innermost first; none without line information."""
        return (self.source, *self.inlined_at) if self.source else ()

    def where(self) -> str:
        """Both places a reader wants: the PTX line and the kernel's source lines."""
        return f"PTX line {self.ptx_line} `{self.text[:SHOWN_TEXT]}` ({describe(self.lines)})"


@dataclass
class Entry:
    """One `.entry`: flat instructions, labels (name to instruction index), parameters,
    registers."""

    name: str
    params: dict[str, tuple[int, int]] = field(default_factory=dict)
    param_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    families: list[tuple[str, int]] = field(default_factory=list)
    threads: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    least_ctas: int = 1  # of a multiprocessor (.minnctapersm)
    most_registers: int | None = None  # of a thread at launch (.maxnreg)
    shared_names: SharedNames = field(default_factory=SharedNames)

    def width(self, register: str) -> int | None:
        """Bits of a register, None when the name is not a register."""
        bits = self.registers.get(register)
        if bits is None:
            for prefix, family_bits in self.families:
                if register.startswith(prefix) and register[len(prefix) :].isdigit():
                    self.registers[register] = bits = family_bits
                    break
        return bits


def split_operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*out, tail] if tail else out
