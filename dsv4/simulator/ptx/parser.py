"""PTX text to instructions, registers and symbols of its entry functions.

Only the grammar that NVVM and CuTeDSL emit is read. Registers and labels declared inside a nested
scope (inline assembly is full of those) get unique names, so that an entry is one flat list.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.qualifiers import Order, order_of
from dsv4.simulator.ptx.source import SourceLine, describe

TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64,
    "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip

_IDENTIFIER = re.compile(r"(?<![\w%$.])[A-Za-z_$][\w$]*")
_LABEL = re.compile(r"([$\w%]+)\s*:(?!:)")
# A call's parameters behave as registers of its scope.
_SCOPED_REGISTER = re.compile(r"\.(?:reg|param)\s+\.(?!align)(\w+)\s+([^;\[]+);")
_CALL_PARAMETER = re.compile(r"\[(%s\d+_[\w$]+)(?:\+0)?\]")
_SCOPED_LABEL = re.compile(r"(?:^|[;{}\n])\s*([$A-Za-z_][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)([^\n]*)")
_INLINED_AT = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")
_DIRECTIVES = ("reqntid", "minnctapersm", "maxnreg")
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
class Symbol:
    """A variable in shared, local or global state space; `size` None means `extern ...[]`."""

    name: str
    space: str
    align: int
    size: int | None
    init: bytes = b""


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
    least_ctas: int = 1  # of a multiprocessor (.minnctapersm)
    most_registers: int | None = None  # of a thread at launch (.maxnreg)

    def width(self, register: str) -> int | None:
        """Bits of a register, None when the name is not a register."""
        bits = self.registers.get(register)
        if bits is None:
            for prefix, family_bits in self.families:
                if register.startswith(prefix) and register[len(prefix) :].isdigit():
                    self.registers[register] = bits = family_bits
                    break
        return bits


@dataclass
class Module:
    """A PTX translation unit."""

    target: str
    entries: dict[str, Entry]
    refused: dict[str, UnsupportedInstruction] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """An entry; raises UnsupportedInstruction for one with a construct that cannot be read,
        KeyError for an unknown name."""
        if name in self.refused:
            raise self.refused[name]
        return self.entries[name]


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


def parse_module(text: str) -> Module:
    """Parse one PTX module. Entries with constructs that no CuTeDSL kernel uses are refused one by
    one; UnsupportedInstruction is raised if no entry is left."""
    # Comments become blanks of the same length: line numbers stay those of the text.
    clean = re.sub(r"//[^\n]*", "", text)
    clean = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), clean, flags=re.S)
    target = re.search(r"\.target\s+(\w+)", clean)
    files = {int(n): path for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', clean)}
    newlines = [m.start() for m in re.finditer("\n", clean)]
    entries: dict[str, Entry] = {}
    refused: dict[str, UnsupportedInstruction] = {}
    spans = []
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", clean):
        reader = _EntryReader(clean, match, files, newlines)
        try:
            entries[match.group(1)] = reader.read()
        except UnsupportedInstruction as error:
            refused[match.group(1)] = error
            reader.end = _end_of_body(clean, match.end())
        spans.append((match.start(), reader.end))
    if refused and not entries:
        raise next(iter(refused.values()))
    outside, position = [], 0
    for start, end in spans:
        outside.append(clean[position:start])
        position = end
    outside.append(clean[position:])
    module_symbols = {s.name: s for s in map(_symbol, _declarations("".join(outside))) if s}
    for entry in entries.values():
        entry.symbols = {**module_symbols, **entry.symbols}
    return Module(target.group(1) if target else "", entries, refused)


def _end_of_body(text: str, start: int) -> int:
    """The position behind the braces that follow."""
    at = text.index("{", start)
    depth = 1
    while depth:
        at += 1
        depth += {"{": 1, "}": -1}.get(text[at], 0)
    return at + 1


def _declarations(text: str) -> list[str]:
    return re.findall(r"\.(?:shared|global|const|local)\s[^;]*;", text)


def _symbol(declaration: str) -> Symbol | None:
    m = re.match(
        r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
        r"(\[(\d*)\])?\s*(?:=\s*(.*?))?;?\s*$",
        declaration.strip().rstrip(";"),
        flags=re.S,
    )
    if m is None:
        return None
    space, align, kind, name, array, count, init = m.groups()
    unit = TYPE_BITS[kind] // 8
    size = unit if array is None else (int(count) * unit if count else None)
    data = b""
    if init:
        values = [int(v, 0) for v in re.findall(r"-?(?:0x[0-9a-fA-F]+|\d+)", init)]
        data = b"".join((v % (1 << (8 * unit))).to_bytes(unit, "little") for v in values)
    return Symbol(name, "global" if space == "const" else space, int(align or unit), size, data)


class _EntryReader:
    """Reads one entry body statement by statement, keeping the stack of scopes."""

    def __init__(self, text: str, match: re.Match, files: dict[int, str], newlines: list[int]):
        self.text, self.files, self.newlines = text, files, newlines
        self.entry = Entry(match.group(1))
        self.at = match.end()
        self.end = self.at
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_count = 0
        self.source: SourceLine | None = None
        self.inlined_at: tuple[SourceLine, ...] = ()
        # Source and calls of the last .loc of each line: an outer call is said where it is first.
        self.calls: dict[SourceLine, tuple[SourceLine, ...]] = {}

    def read(self) -> Entry:
        close = self.text.index(")", self.at)
        self._read_params(self.text[self.at : close])
        body = self.text.index("{", close)
        self._read_directives(self.text[close:body])
        self.at = body + 1
        while self._statement():
            pass
        self.end = self.at
        self.entry.families.sort(key=lambda family: -len(family[0]))
        return self.entry

    def _read_directives(self, text: str) -> None:
        """What an entry says of its launches: block size, CTAs of an SM, registers."""
        found = {name: re.search(rf"\.{name}\s+([\d,\s]+)", text) for name in _DIRECTIVES}
        numbers = {
            name: [int(v) for v in m.group(1).split(",") if v.strip()]
            for name, m in found.items()
            if m
        }
        if "reqntid" in numbers:
            self.entry.threads = tuple([*numbers["reqntid"], 1, 1][:3])
        self.entry.least_ctas = numbers.get("minnctapersm", [1])[0]
        self.entry.most_registers = numbers.get("maxnreg", [None])[0]

    def _read_params(self, text: str) -> None:
        offset = 0
        for declaration in split_operands(text):
            m = re.match(
                r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s.*?)?([\w$]+)(?:\[(\d+)\])?$",
                declaration.strip(),
                flags=re.S,
            )
            if m is None:
                raise UnsupportedInstruction(f"kernel parameter `{declaration}`")
            align, kind, name, count = m.groups()
            unit = TYPE_BITS[kind] // 8
            size = unit * int(count) if count else unit
            align = int(align) if align else unit
            offset = -(-offset // align) * align
            self.entry.params[name] = (offset, size)
            offset += size
        self.entry.param_bytes = offset

    def _statement(self) -> bool:
        """Consume one statement; False after the body's closing brace."""
        text = self.text
        while text[self.at].isspace():
            self.at += 1
        c = text[self.at]
        if c == "{":
            self._open_scope()
            return True
        if c == "}":
            self.at += 1
            self.scopes.pop()
            return bool(self.scopes)
        if c == ";":
            self.at += 1
            return True
        label = _LABEL.match(text, self.at)
        if label:
            self.entry.labels[self._rename(label.group(1))] = len(self.entry.instructions)
            self.at = label.end()
            return True
        if c == ".":
            self._directive()
            return True
        start = self.at
        end = text.index(";", start)
        self.at = end + 1
        self._instruction(" ".join(text[start:end].split()), start)
        return True

    def _open_scope(self) -> None:
        depth, end = 0, self.at
        while True:
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            if depth == 0:
                break
            end += 1
        body = self.text[self.at + 1 : end]
        self.scope_count += 1
        names: dict[str, str] = {}
        for kind, declared in _SCOPED_REGISTER.findall(body):
            for name in (n.strip() for n in declared.split(",")):
                unique = f"%s{self.scope_count}_{name.lstrip('%')}"
                names[name] = unique
                self.entry.registers[unique] = TYPE_BITS[kind]
        for name in _SCOPED_LABEL.findall(body):
            names[name] = f"$s{self.scope_count}_{name}"
        self.scopes.append(names)
        self.at += 1

    def _directive(self) -> None:
        text = self.text
        loc = _LOC.match(text, self.at)
        if loc:
            file, line = int(loc.group(1)), int(loc.group(2))
            if line:
                self.source = (self.files.get(file, "?"), line)
                call = _INLINED_AT.search(loc.group(4))
                self.inlined_at = ()
                if call:
                    at = (self.files.get(int(call.group(1)), "?"), int(call.group(2)))
                    self.inlined_at = (at, *self.calls.get(at, ()))
                self.calls[self.source] = self.inlined_at
            self.at = text.index("\n", self.at)
            return
        start, end = self.at, text.index(";", self.at)
        statement = " ".join(text[start:end].split())
        self.at = end + 1
        if statement.startswith(".reg"):
            if len(self.scopes) == 1:
                self._registers(statement)
        elif statement.startswith((".local", ".shared")):
            symbol = _symbol(statement)
            if symbol is None:
                raise UnsupportedInstruction(f"declaration `{statement}`")
            self.entry.symbols[symbol.name] = symbol
        elif statement.startswith(".param") and len(self.scopes) > 1 and "[" not in statement:
            pass  # declared when its scope was opened
        elif not statement.startswith(".pragma"):
            raise UnsupportedInstruction(
                f"directive `{statement}` inside a kernel is not simulated: {self._where(start)}"
            )

    def _where(self, position: int) -> str:
        """PTX line and Python line of a position in the text."""
        lines = describe((self.source, *self.inlined_at) if self.source else ())
        return f"PTX line {bisect.bisect_left(self.newlines, position) + 1} ({lines})"

    def _call(self, rest: str, position: int) -> str:
        """A statement that is part of a call, as one over registers; any other unchanged."""
        if rest.startswith(("st.param", "ld.param")):
            found = _CALL_PARAMETER.search(rest)
            if found is None:
                return rest
            opcode, _, operands = rest.partition(" ")
            kind = opcode.rpartition(".")[2]
            return f"mov.{kind} {_CALL_PARAMETER.sub(found.group(1), operands)}"
        if rest.partition(" ")[0] in ("call", "call.uni"):
            m = re.match(r"\S+ \((\S+)\), vprintf, \((\S+), (\S+)\)$", rest)
            if m is None:
                raise UnsupportedInstruction(
                    f"call of a function other than printf is not simulated: `{rest}`: "
                    f"{self._where(position)}"
                )
            return "vprintf {}, {}, {}".format(*m.groups())
        return rest

    def _registers(self, statement: str) -> None:
        kind, declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement).groups()
        for name in (n.strip() for n in declared.split(",")):
            family = re.match(r"(.*)<(\d+)>", name)
            if family:
                self.entry.families.append((family.group(1), TYPE_BITS[kind]))
            else:
                self.entry.registers[name] = TYPE_BITS[kind]

    def _rename(self, text: str) -> str:
        if len(self.scopes) == 1:
            return text

        def scoped(match: re.Match) -> str:
            name = match.group(0)
            for scope in reversed(self.scopes):
                if name in scope:
                    return scope[name]
            return name

        return re.sub(r"%[\w$]+", scoped, _IDENTIFIER.sub(scoped, text))

    def _instruction(self, statement: str, position: int) -> None:
        statement = self._rename(statement)
        guard, negated, rest = None, False, statement
        m = re.match(r"@(!?)(\S+)\s+(.*)", statement)
        if m:
            negated, guard, rest = bool(m.group(1)), m.group(2), m.group(3)
        opcode, _, operands = self._call(rest, position).partition(" ")
        parts = tuple(opcode.split("."))
        self.entry.instructions.append(
            Instruction(
                index=len(self.entry.instructions),
                opcode=opcode,
                parts=parts,
                operands=split_operands(operands),
                guard=guard,
                negated=negated,
                text=statement,
                ptx_line=bisect.bisect_left(self.newlines, position) + 1,
                source=self.source,
                order=order_of(parts),
                inlined_at=self.inlined_at,
            )
        )
