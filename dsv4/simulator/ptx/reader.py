"""One entry of a PTX module to flat instructions.

Registers and labels declared inside a nested scope (inline assembly is full of those) get unique
names, and calls of device functions are replaced by their bodies.
"""

from __future__ import annotations

import bisect
import re

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.entry import Entry, Instruction, split_operands
from dsv4.simulator.ptx.functions import Function, Parameter, call_of, parameter
from dsv4.simulator.ptx.qualifiers import order_of
from dsv4.simulator.ptx.scopes import Scope, Scopes
from dsv4.simulator.ptx.source import SourceLine, describe
from dsv4.simulator.ptx.symbols import symbol
from dsv4.simulator.ptx.types import TYPE_BITS

_LABEL = re.compile(r"([$\w%]+)\s*:(?!:)")
_REGISTERS = re.compile(r"\.reg\s+((?:\.\w+\s+)+)([^;]+);")
_SCOPED_LABEL = re.compile(r"(?:^|[;{}\n])\s*([$A-Za-z_][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)([^\n]*)")
_INLINED_AT = re.compile(r"inlined_at\s+(\d+)\s+(\d+)")


def end_of_body(text: str, start: int) -> int:
    """The position behind the next pair of braces."""
    at = text.index("{", start)
    depth = 1
    while depth:
        at += 1
        depth += {"{": 1, "}": -1}.get(text[at], 0)
    return at + 1


def _dimensions(directive: str, header: str) -> tuple[int, int, int] | None:
    """The (x, y, z) of a directive of an entry; None without it."""
    found = re.search(rf"\.{directive}\s+([\d,\s]+)", header)
    if found is None:
        return None
    sizes = [int(n) for n in re.findall(r"\d+", found.group(1))]
    return tuple([*sizes, 1, 1][:3])


class EntryReader:
    """Reader of one entry body, by statements, with its stack of scopes; a call of a device
    function is replaced by its body."""

    def __init__(
        self, text: str, match: re.Match, files: dict[int, str], newlines: list[int],
        functions: dict[str, Function],
    ):  # fmt: skip
        self.text, self.files, self.newlines = text, files, newlines
        self.functions = functions
        self.entry = Entry(match.group(1))
        self.at = match.end()
        self.end = self.at
        self.scopes = Scopes()
        self.calling: list[tuple[str, str]] = []  # functions, with the labels behind their bodies
        self.targets: dict[str, list[str]] = {}  # labels of indirect branches, by name of the list
        self.source: SourceLine | None = None
        self.inlined_at: tuple[SourceLine, ...] = ()
        self.called_at: tuple[SourceLine, ...] = ()  # calls that bodies have replaced
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
        """What an entry says of its launches: block, cluster, CTAs of an SM, registers."""
        self.entry.threads = _dimensions("reqntid", text)
        self.entry.cluster = _dimensions("reqnctapercluster", text)
        self.entry.least_ctas = (_dimensions("minnctapersm", text) or (1,))[0]
        self.entry.most_registers = (_dimensions("maxnreg", text) or (None,))[0]

    def _read_params(self, text: str) -> None:
        offset = 0
        for declaration in split_operands(text):
            declared = parameter(declaration)
            offset = -(-offset // declared.align) * declared.align
            self.entry.params[declared.name] = (offset, declared.size)
            offset += declared.size
        self.entry.param_bytes = offset

    # --- statements ------------------------------------------------------------------------------
    def _statement(self) -> bool:
        """Consume one statement; False after the brace that closes the entry or function."""
        text = self.text
        while text[self.at].isspace():
            self.at += 1
        c = text[self.at]
        if c == "{":
            self._open_scope(Scope())
            return True
        if c == "}":
            self.at += 1
            return bool(not self.scopes.open.pop().closed and self.scopes.open)
        if c == ";":
            self.at += 1
            return True
        label = _LABEL.match(text, self.at)
        if label:
            self.at = label.end()
            name = self.scopes.find(label.group(1))
            if not self._branch_targets(name):
                self._label_here(name)
            return True
        if c == ".":
            self._directive()
            return True
        start = self.at
        end = text.index(";", start)
        self.at = end + 1
        self._instruction(" ".join(text[start:end].split()), start)
        return True

    def _branch_targets(self, name: str) -> bool:
        """Read the list of labels, or the prototype of calls, that a name stands for."""
        match = re.compile(r"\s*\.(branchtargets|callprototype|calltargets)\s([^;]*);").match(
            self.text, self.at
        )
        if match is None:
            return False
        self.at = match.end()
        if match.group(1) == "branchtargets":
            self.targets[name] = [self.scopes.find(t.strip()) for t in match.group(2).split(",")]
        return True

    def _open_scope(self, scope: Scope) -> None:
        """Enter a scope: what is declared up to the brace that closes it gets unique names."""
        body = self.text[self.at + 1 : end_of_body(self.text, self.at) - 1]
        self.scopes.open.append(scope)
        for types, declared in _REGISTERS.findall(body):
            self._declare(types, declared)
        for name in _SCOPED_LABEL.findall(body):
            scope.names[name] = self.scopes.unique(name, "$")
        self.at += 1

    def _directive(self) -> None:
        text = self.text
        loc = _LOC.match(text, self.at)
        if loc:
            self._line(loc)
            self.at = text.index("\n", self.at)
            return
        start, end = self.at, text.index(";", self.at)
        statement = " ".join(text[start:end].split())
        self.at = end + 1
        if statement.startswith(".reg"):
            if len(self.scopes.open) == 1:
                self._declare(*_REGISTERS.match(statement + ";").groups())
        elif statement.startswith((".local", ".shared")):
            declared = symbol(statement)
            if declared is None:
                raise UnsupportedInstruction(f"declaration `{statement}`")
            self.entry.symbols[declared.name] = declared
        elif statement.startswith(".param"):
            declared = parameter(statement)
            self._variable(declared, declared.name)
        elif not statement.startswith(".pragma"):
            raise UnsupportedInstruction(
                f"directive `{statement}` inside a kernel is not simulated: {self._where(start)}"
            )

    def _line(self, loc: re.Match) -> None:
        """A .loc: where the next instructions come from."""
        file, line = int(loc.group(1)), int(loc.group(2))
        if not line:
            return
        self.source = (self.files.get(file, "?"), line)
        call = _INLINED_AT.search(loc.group(4))
        chain = ()
        if call:
            at = (self.files.get(int(call.group(1)), "?"), int(call.group(2)))
            chain = (at, *self.calls.get(at, ()))
        self.calls[self.source] = chain
        self.inlined_at = (*chain, *self.called_at)

    def _where(self, position: int) -> str:
        """PTX line and Python line of a position in the text."""
        lines = describe((self.source, *self.inlined_at) if self.source else ())
        return f"PTX line {bisect.bisect_left(self.newlines, position) + 1} ({lines})"

    # --- declarations ----------------------------------------------------------------------------
    def _declare(self, types: str, declared: str) -> None:
        """Registers of a `.reg` statement, for the innermost scope. Those of the entry itself keep
        their names, if these are recognisable as registers."""
        scope, outermost = self.scopes.open[-1], len(self.scopes.open) == 1
        *vector, kind = (part for part in types.replace(".", " ").split())
        if kind not in TYPE_BITS or vector not in ([], ["v2"], ["v4"]):
            raise UnsupportedInstruction(f"registers `.reg {types.strip()} {declared.strip()}`")
        for name in (part.strip() for part in declared.split(",")):
            family = re.match(r"(.*)<(\d+)>", name)
            if family:
                prefix = family.group(1)
                if not outermost or not prefix.startswith("%"):
                    scope.families[prefix] = self.scopes.unique(prefix)
                self.entry.families.append((scope.families.get(prefix, prefix), TYPE_BITS[kind]))
                continue
            registers = [name]
            if vector:
                count = int(vector[0][1:])
                registers = [self.scopes.unique(f"{name}{i}") for i in range(count)]
                scope.vectors[name] = registers
            elif not outermost or not name.startswith("%"):
                scope.names[name] = registers[0] = self.scopes.unique(name)
            self.entry.registers.update(dict.fromkeys(registers, TYPE_BITS[kind]))

    def _variable(self, declared: Parameter, name: str) -> str:
        """Thread-local memory for a parameter of calls; its unique name."""
        unique = self.scopes.open[-1].names[name] = self.scopes.unique(name, "$")
        self.entry.symbols[unique] = declared.variable(unique)
        return unique

    # --- instructions ----------------------------------------------------------------------------
    def _instruction(self, statement: str, position: int) -> None:
        guard, negated, rest = "", False, statement
        match = re.match(r"@(!?)\s*(\S+)\s+(.*)", statement)
        if match:
            negated, guard, rest = bool(match.group(1)), match.group(2), match.group(3)
        opcode, _, operands = rest.partition(" ")
        stem = opcode.partition(".")[0]
        if stem == "call":
            self._call(guard, negated, operands, position)
            return
        guard, operands = self.scopes.rename(guard), self.scopes.rename(operands)
        if opcode == "brx.idx" or opcode.startswith("brx.idx."):
            self._indirect_branch(guard, negated, operands, position)
            return
        if stem == "ret" and self.calling:
            opcode, operands = "bra", self.calling[-1][1]
        if opcode.startswith(("ld.param", "st.param")) and self._is_variable(operands):
            opcode = opcode.replace(".param::func", ".local").replace(".param", ".local")
        self._append(opcode, operands, position, guard, negated)

    def _is_variable(self, operands: str) -> bool:
        """True for an access of a call's parameters, not of the kernel's."""
        match = re.search(r"\[\s*([\w$]+)", operands)
        return match is not None and match.group(1) in self.entry.symbols

    def _append(
        self, opcode: str, operands: str, position: int, guard: str = "", negated: bool = False
    ) -> None:
        """Add an instruction whose names are final."""
        sign = f"@{'!' if negated else ''}{guard} " if guard else ""
        parts = tuple(opcode.split("."))
        self.entry.instructions.append(
            Instruction(
                index=len(self.entry.instructions),
                opcode=opcode,
                parts=parts,
                operands=split_operands(operands),
                guard=guard or None,
                negated=negated,
                text=f"{sign}{opcode} {operands}".strip(),
                ptx_line=bisect.bisect_left(self.newlines, position) + 1,
                source=self.source,
                order=order_of(parts),
                inlined_at=self.inlined_at,
            )
        )

    def _register(self, kind: str, name: str) -> str:
        """A new register."""
        unique = self.scopes.unique(name)
        self.entry.registers[unique] = TYPE_BITS[kind]
        return unique

    def _label_here(self, name: str) -> None:
        self.entry.labels[name] = len(self.entry.instructions)

    def _indirect_branch(self, guard: str, negated: bool, operands: str, position: int) -> None:
        """`brx.idx`: a branch for each label of its list."""
        index, name = split_operands(operands)
        targets = self.targets.get(name)
        if not targets:
            raise UnsupportedInstruction(f"brx.idx without its labels: {self._where(position)}")
        behind = self.scopes.unique("behind", "$")
        if guard:
            self._append("bra", behind, position, guard, not negated)
        chosen = self._register("pred", "chosen")
        for number, label in enumerate(targets[:-1]):
            self._append("setp.eq.u32", f"{chosen}, {index}, {number}", position)
            self._append("bra", label, position, chosen)
        self._append("bra", targets[-1], position)
        self._label_here(behind)

    # --- calls -----------------------------------------------------------------------------------
    def _call(self, guard: str, negated: bool, operands: str, position: int) -> None:
        call = call_of(operands)
        if call is None:
            raise UnsupportedInstruction(
                f"call through a register is not simulated: `{operands}`: {self._where(position)}"
            )
        behind = self.scopes.unique("behind", "$")
        if guard:
            self._append("bra", behind, position, self.scopes.rename(guard), not negated)
        given = [self.scopes.rename(name) for name in call.arguments]
        results = [self.scopes.rename(name) for name in call.results]
        if call.function == "vprintf":
            self._print(given, results, position)
        elif call.function == "__assertfail":
            self._append("trap", "", position)
        elif call.function in self.functions:
            self._inline(self.functions[call.function], given, results, position)
        else:
            raise UnsupportedInstruction(
                f"call of {call.function}, which the module does not define, is not simulated: "
                f"{self._where(position)}"
            )
        self._label_here(behind)

    def _print(self, given: list[str], results: list[str], position: int) -> None:
        """vprintf: an instruction over registers."""
        values = [self._register("b64", "printed") for _ in given]
        for value, name in zip(values, given):
            self._append("ld.local.b64", f"{value}, [{name}]", position)
        count = self._register("b32", "count")
        self._append("vprintf", ", ".join([count, *values]), position)
        for name in results:
            self._append("st.local.b32", f"[{name}], {count}", position)

    def _inline(
        self, function: Function, given: list[str], results: list[str], position: int
    ) -> None:
        """The body of a function, in place of a call."""
        if any(function.name == name for name, _ in self.calling):
            raise UnsupportedInstruction(
                f"{function.name} calls itself, which is not simulated: {self._where(position)}"
            )
        formals = (*function.parameters, *function.results)
        actual = [*given, *results]
        if len(formals) != len(actual):
            raise UnsupportedInstruction(
                f"call of {function.name} with {len(given)} arguments and {len(results)} results: "
                f"{self._where(position)}"
            )
        state = self.at, self.source, self.inlined_at, self.called_at, self.calls
        scope = Scope(closed=True)
        copies = []  # results that come back in registers
        for number, (formal, name) in enumerate(zip(formals, actual)):
            if formal.register is None and name in self.entry.symbols:
                scope.names[formal.name] = name
                continue
            is_result = number >= len(given)
            if formal.register is None:
                self.scopes.open.append(scope)
                place = f"[{self._variable(formal, formal.name)}]"
                self.scopes.open.pop()
                kind = f"b{8 * formal.size}"
                store, load = f"st.local.{kind}", f"ld.local.{kind}"
            else:
                place = scope.names[formal.name] = self._register(formal.register, formal.name)
                store = load = f"mov.{formal.register}"
            if is_result:
                copies.append((load, f"{name}, {place}"))
            else:
                self._append(store, f"{place}, {name}", position)
        self.called_at = (self.source, *self.inlined_at) if self.source else ()
        self.calls = {}
        self.at = function.body
        self.calling.append((function.name, self.scopes.unique(f"{function.name}_end", "$")))
        self._open_scope(scope)
        while self._statement():
            pass
        self._label_here(self.calling.pop()[1])
        self.at, self.source, self.inlined_at, self.called_at, self.calls = state
        for opcode, operands in copies:
            self._append(opcode, operands, position)
