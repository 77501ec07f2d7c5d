"""Basic blocks to Python functions over 32-lane numpy vectors.

Each block becomes `full_N(w, R)` for a full warp and `part_N(w, R)` for a warp with inactive lanes,
where `w` is the Warp and `R` its register file; both return the next block number (or BLOCKED,
DIVERGED). Inside a function a register is a local variable, held in as many *kinds* (u32, s32, f32,
...: views of the same bits) as its instructions ask for. Only registers that other blocks use are
written back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, REGISTER, UNSIGNED, RegisterMap
from dsv4.simulator.compile.vectorise import Argument, Batches
from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.blocks import EXIT_OPCODES, Block
from dsv4.simulator.ptx.entry import Entry, Instruction
from dsv4.simulator.ptx.types import TYPE_BITS

EXIT, BLOCKED, DIVERGED = -3, -1, -2

_SYNC = (
    "bar", "barrier", "mbarrier", "fence", "membar", "tcgen05", "wgmma", "cp.async", "cp.reduce",
    "atom", "red", "st.async", "griddepcontrol",
)  # fmt: skip

Emit = Callable[["BlockEmitter", Instruction], None]
EMITTERS: dict[str, Emit] = {}
ELEMENTWISE: set[Emit] = set()


def emits(*stems: str) -> Callable[[Emit], Emit]:
    """Register an emitter for opcode stems; the longest dotted prefix of an opcode wins."""

    def register(function: Emit) -> Emit:
        for stem in stems:
            EMITTERS[stem] = function
        return function

    return register


def computes(*stems: str) -> Callable[[Emit], Emit]:
    """Register an emitter of instructions that only compute registers, lane by lane: those that do
    not count may hold garbage."""

    def register(function: Emit) -> Emit:
        ELEMENTWISE.add(function)
        return emits(*stems)(function)

    return register


def emitter_of(ins: Instruction) -> Emit:
    """The emitter of an instruction; UnsupportedInstruction names opcode, PTX and Python line."""
    for n in range(len(ins.parts), 0, -1):
        found = EMITTERS.get(".".join(ins.parts[:n]))
        if found is not None:
            return found
    raise UnsupportedInstruction(f"opcode {ins.opcode} is not simulated: {ins.where()}")


def is_sync(opcode: str) -> bool:
    """True for instructions that synchronise, or start or finish asynchronous work."""
    return any(opcode == stem or opcode.startswith(stem + ".") for stem in _SYNC)


def is_collective(ins: Instruction) -> bool:
    """True for instructions at which the lanes of a warp wait for each other."""
    return "sync" in ins.parts or "aligned" in ins.parts


class BlockEmitter:
    """State while one block is turned into source: variables by register and kind, lines so far."""

    def __init__(self, entry: Entry, registers: RegisterMap, block: Block, full: bool, symbols):
        self.entry, self.registers, self.block, self.full = entry, registers, block, full
        self.symbols = symbols
        self.constants: dict[str, object] = {}
        self.lines: list[str] = []
        # Of a guarded instruction with effects: lines that run only if a lane's guard is true.
        self.effects: list[str] | None = None
        self.variables: dict[str, dict[str, str]] = {}
        self.defined: list[str] = []
        self.mask = "ALL" if full else "m"
        self.guarded = False
        self.ended = False
        self.temporaries = 0
        self.uses_mask = not full
        self.batches = Batches(self.early, self.temporary)

    # --- driver ----------------------------------------------------------------------------------
    def source(self) -> str:
        """The Python source of the block's function."""
        first, *others = self.entry.instructions[self.block.start : self.block.stop]
        pending = self.touches_asynchronous()
        synchronises = first.opcode.startswith(("wgmma.", "tcgen05.wait", "tcgen05.ld"))
        if pending and not synchronises:
            self.line("if w.unsettled: w.settle()")
        steps = self.symbols["tcgen05.ld registers"].steps(self.block)
        if steps:
            name = f"loaded_block_{self.block.number}"
            self.constants[name] = steps
            self.line(f"if w.pending_loads: check_loads(w, {name})")
        if self.touches_wgmma():
            self.line("w.wgmma_fenced = False")
        waits = first.opcode.startswith("wgmma.wait_group")
        if not waits:
            self._check_products()
        self.instruction(first)
        if waits:
            self._check_products()
        if pending and others and first.parts[0] == "wgmma":
            self.line("w.accumulators.write()")
        for ins in others:
            self.instruction(ins)
        if not self.ended:
            self.flush()
            self.line(f"return {self.block.successors[0]}")
        name = function_name(self.block.number, self.full)
        head = [f"def {name}(w, R):"] + ([] if self.full else [" m = w.mask"])
        return "\n".join(head + [" " + line for line in self.lines]) + "\n"

    def touches_asynchronous(self) -> bool:
        """True if the block touches registers that an asynchronous instruction may still write."""
        pending = self.symbols["asynchronous registers"]
        return not self.registers.by_block[self.block.number].isdisjoint(pending)

    def touches_wgmma(self) -> bool:
        """True if an ordinary instruction uses registers of wgmma. A move from one of them is only
        a copy, to where a loop or a branch wants it."""
        mine = self.symbols["wgmma registers"]
        if not mine or self.registers.by_block[self.block.number].isdisjoint(mine):
            return False

        def touches(ins: Instruction) -> bool:
            if ins.parts[0] == "wgmma" or mine.isdisjoint(REGISTER.findall(ins.text)):
                return False
            sources = REGISTER.findall(" ".join(ins.operands[1:]))
            return ins.parts[0] != "mov" or mine.isdisjoint(sources)

        return any(map(touches, self.entry.instructions[self.block.start : self.block.stop]))

    def _check_products(self) -> None:
        """Check the block's registers against products under way; guarded instructions do it
        themselves. Only a wait for them or a product changes what is, and it begins a block."""
        conflicts: dict[int, tuple[int, str]] = {}
        for ins in self.entry.instructions[self.block.start : self.block.stop]:
            if not ins.guard:
                conflicts = self.symbols["wgmma conflicts"](ins) | conflicts
        if conflicts:
            name = f"in_flight_block_{self.block.number}"
            self.constants[name] = conflicts
            self.line(f"if w.wgmma_pending: check_products(w, {name})")

    def instruction(self, ins: Instruction) -> None:
        """Emit one instruction under its guard."""
        emit = emitter_of(ins)
        control = ins.parts[0] == "bra" or ins.parts[0] in EXIT_OPCODES
        self.current = ins
        if not ins.guard or control:
            if is_collective(ins):
                self.line(self._gathering())
            self._emit(emit, ins)
            return
        previous = self.mask
        guard = self.value(ins.guard, "p")
        self.mask, self.guarded = self.temporary(), True
        sign, rest = "~" if ins.negated else "", "" if self.full else " & m"
        self.line(f"{self.mask} = {sign}{guard}{rest}")
        if emit in ELEMENTWISE:
            self._check_guarded(ins, f"if w.wgmma_pending and {self.mask}.any()")
            self._emit(emit, ins)
        else:
            self._guarded_effects(emit, ins)
        self.mask, self.guarded = previous, False

    def _guarded_effects(self, emit: Emit, ins: Instruction) -> None:
        """Emit an instruction that does more than compute registers: not at all if no lane's guard
        is true, and as if unguarded if all lanes' are."""
        self.effects = []
        if is_sync(ins.opcode):
            self.line(f"guards_taken.add({ins.index})")
        self._check_guarded(ins, "if w.wgmma_pending")
        if "aligned" in ins.parts:
            self.mark()
            self.line(f"whole_warp(w, {self.mask}, {ins.opcode!r})")
        if is_collective(ins):
            self.line(self._gathering())
        self._emit(emit, ins)
        effects, self.effects = self.effects, None
        if effects:
            self.line(f"if {self.mask}.any():")
            if self.full:
                self.line(f" if {self.mask}.all(): {self.mask} = ALL")
            self.lines += [" " + text for text in effects]

    def _check_guarded(self, ins: Instruction, condition: str) -> None:
        """Check a guarded instruction's registers against products under way."""
        conflicts = self.symbols["wgmma conflicts"](ins)
        if conflicts:
            self.constants[f"in_flight_{ins.index}"] = conflicts
            self.line(f"{condition}: check_products(w, in_flight_{ins.index})")

    def _emit(self, emit: Emit, ins: Instruction) -> None:
        try:
            emit(self, ins)
        except (KeyError, IndexError, ValueError, AssertionError, StopIteration) as error:
            raise UnsupportedInstruction(
                f"form of {ins.opcode} not simulated ({error!r}): {ins.where()}"
            ) from error

    def line(self, text: str) -> None:
        """Append one line of Python."""
        (self.lines if self.effects is None else self.effects).append(text)

    def early(self, text: str) -> None:
        """Append a line without effects, which runs whatever the guard of the instruction is."""
        self.lines.append(text)

    def park_unless(self, call: str) -> None:
        """Park the warp, to run the block again, unless a call says that it need not wait."""
        self.line(f"if not {call}: return {BLOCKED}")

    def mark(self) -> None:
        """Note the current instruction in the warp: error reports and checks name it."""
        self.line(f"w.at = {self.current.index}")

    def _gathering(self) -> str:
        """A statement that counts a collective, if all lanes of the warp take part."""
        if self.guarded:
            return f"if {self.mask}.all(): w.collectives += 1"
        if self.full:
            return "w.collectives += 1"
        return "if w.mask_bytes == w.frames[0].mask_bytes: w.collectives += 1"

    def temporary(self) -> str:
        """A fresh variable name."""
        self.temporaries += 1
        return f"t{self.temporaries}"

    # --- operands --------------------------------------------------------------------------------
    def variable(self, register: str, kind: str) -> str:
        return f"{kind}_{re.sub(r'[^0-9A-Za-z_]', '_', register)}"

    def kinds(self, operand: str) -> dict[str, str]:
        """The variables that hold a register now, by kind (loading it from R when needed)."""
        if self.batches.holds(operand):
            self.batches.fetch(operand)
        held = self.variables.get(operand)
        if held is None:
            kind = self.registers.kind[operand]
            name = self.variable(operand, kind)
            self.early(f"{name} = R[{self.registers.index[operand]}]")
            held = self.variables[operand] = {kind: name}
        return held

    def value(self, operand: str, kind: str) -> str:
        """An expression for an operand as an array of the given kind."""
        operand = operand.strip()
        if operand.startswith("!"):
            return f"(~{self.value(operand[1:], kind)})"
        bits = self.entry.width(operand)
        if bits is not None:
            held = self.kinds(operand)
            if kind in held:
                return held[kind]
            wanted = BITS_OF_KIND[kind]
            if bits == wanted:
                source_kind, source = next(iter(held.items()))
                name = self.variable(operand, kind)
                view = f"{source}.view({DTYPES[kind]})"
                if "f32x2" in (kind, source_kind):
                    view = f"contiguous({source}).view({DTYPES[kind]})"
                self.early(f"{name} = {view}")
                held[kind] = name
                return name
            if wanted < bits:
                return f"{self.value(operand, UNSIGNED[bits])}.astype({DTYPES[kind]})"
            if kind in ("u64", "s64") and bits == 32:
                return f"{self.value(operand, 'u32')}.astype({DTYPES[kind]})"
            raise ValueError(f"operand {operand} is narrower than {kind}")
        if operand.startswith("%"):
            return self.special(operand, kind)
        if re.match(r"^-?\d|^0[xXfFdD]", operand):
            return self.immediate(operand, kind)
        if operand == "WARP_SZ":
            return self.constant(32, kind)
        return self.symbol(operand, kind)

    def special(self, name: str, kind: str) -> str:
        cast = "" if kind == "u32" else f".astype({DTYPES[kind]})"
        if name.startswith(("%clock", "%globaltimer")):
            return f"w.clock({DTYPES[kind]})"
        return f"w.special({name!r}){cast}"

    def symbol(self, name: str, kind: str) -> str:
        """The address of a parameter or variable."""
        if name not in self.symbols:
            raise ValueError(f"unknown symbol {name}")
        space, address = self.symbols[name]
        if space == "shared":
            name = self.temporary()
            cast = "" if kind == "u32" else ".astype(u64)"
            self.early(f"{name} = (w.shared_base + {self.constant(address, 'u32')}){cast}")
            return name
        return self.constant(address, kind)

    def immediate(self, text: str, kind: str) -> str:
        if re.match(r"^0[fFdD][0-9a-fA-F]+$", text) and text[1] in "fFdD":
            value = int(text[2:], 16)
        else:
            value = int(text.rstrip("U"), 0)
        return self.constant(value, kind)

    def constant(self, value: int, kind: str) -> str:
        """A named 32-lane constant; `value` is the bit pattern."""
        bits = BITS_OF_KIND[kind]
        value = int(value != 0) if kind == "p" else value & ((1 << bits) - 1)
        name = f"C_{kind}_{value}"
        if name not in self.constants:
            raw = np.full(32, value, f"u{bits // 8}") if bits > 1 else np.full(32, bool(value))
            self.constants[name] = raw if bits == 1 else raw.view(_numpy_dtype(kind))
        return name

    def address(self, operand: str, kind: str | None = None) -> str:
        """The value of `[base + offset]`; kind None means as wide as the base register."""
        inner = operand.strip()
        if not (inner.startswith("[") and inner.endswith("]")):
            raise ValueError(f"address {operand}")
        inner = inner[1:-1].strip()
        m = re.match(r"^(.*?)\s*\+\s*(-?\w+)$", inner)
        base, offset = (m.group(1), int(m.group(2), 0)) if m else (inner, 0)
        if kind is None:
            kind = UNSIGNED[self.entry.width(base) or 32]
        value = self.value(base, kind)
        return f"({value} + {self.constant(offset, kind)})" if offset else value

    @staticmethod
    def vector(operand: str) -> list[str]:
        """The registers of `{a, b, ...}`, or of a single one."""
        operand = operand.strip()
        if operand.startswith("{"):
            return [t.strip() for t in operand[1:-1].split(",")]
        return [operand]

    # --- results ---------------------------------------------------------------------------------
    def carry(self, expression: str) -> None:
        """Assign the carry flag, in the active lanes only."""
        if self.guarded or not self.full:
            expression = f"where({self.mask}, {expression}, w.carry)"
        self.line(f"w.carry = {expression}")

    def define(self, register: str, expression: str, kind: str) -> None:
        """Assign an expression of `kind` to a register, in the active lanes only."""
        register = register.strip()
        if register == "_":
            self.line(expression)
            return
        bits = self.entry.width(register)
        if bits is None:
            raise ValueError(f"destination {register}")
        if BITS_OF_KIND[kind] != bits:
            expression, kind = self._resized(expression, kind, bits), UNSIGNED[bits]
        partial = self.guarded or (not self.full and register in self.registers.shared)
        if partial:
            if kind == "f32x2":
                expression, kind = f"({expression}).view(u64)", "u64"
            mask = f"{self.mask}[:, None]" if kind == "u128" else self.mask
            old = self.value(register, kind)
            expression = f"where({mask}, {expression}, {old})"
        self.batches.changes(register)
        name = self.variable(register, kind)
        if self.effects is not None and old != name:
            self.early(f"{name} = {old}")  # stays, if the effects do not happen
        self.line(f"{name} = {expression}")
        self._holds(register, kind, name)

    def _holds(self, register: str, kind: str, name: str) -> None:
        self.variables[register] = {kind: name}
        if register not in self.defined:
            self.defined.append(register)

    def elementwise(
        self, register: str, template: str, operands: list[str], kinds: tuple[str, str], *,
        broadcasts: bool = True,
    ) -> None:  # fmt: skip
        """Assign an expression with {} for each operand, whose lanes are those of the operands'
        last axis; perhaps together with others like it. `kinds` = (of the operands, of the result);
        `broadcasts` is False if the operands must have one shape."""
        register, (kind, out) = register.strip(), kinds
        arguments = None
        if self.full and not self.guarded and self.entry.width(register) == BITS_OF_KIND[out]:
            arguments = tuple(self._argument(operand.strip(), kind) for operand in operands)
        ahead = self.batches
        if arguments is None or register in {*ahead.level, *ahead.sources, *operands}:
            values = [self.value(operand, kind) for operand in operands]
            self.define(register, template.format(*values), out)
            return
        ahead.changes(register)
        name = self.variable(register, out)
        ahead.put_off(register, name, template, arguments, out, broadcasts)
        self._holds(register, out, name)

    def _argument(self, operand: str, kind: str) -> Argument:
        """An operand of an operation that may be put off."""
        if self.batches.holds(operand):
            held_kind, name = next(iter(self.variables[operand].items()))
            if held_kind == kind:
                return Argument(operand, name)
            if BITS_OF_KIND[held_kind] == BITS_OF_KIND[kind] and "f32x2" not in (held_kind, kind):
                return Argument(operand, name, f".view({DTYPES[kind]})")
        value = self.value(operand, kind)
        if not value.isidentifier():
            name = self.temporary()
            self.early(f"{name} = {value}")
            return Argument(None, name)
        return Argument(operand if self.entry.width(operand) else None, value)

    @staticmethod
    def _resized(expression: str, kind: str, bits: int) -> str:
        """Widen with the kind's signedness, or truncate, to the unsigned kind of `bits`."""
        unsigned = DTYPES[UNSIGNED[bits]]
        if kind.startswith("s") and bits > BITS_OF_KIND[kind]:
            return f"({expression}).astype(i{bits}).view({unsigned})"
        return f"({expression}).astype({unsigned})"

    def flush(self) -> None:
        """Write registers that other blocks use back to R."""
        for register in self.defined:
            if register in self.registers.shared:
                kind = self.registers.kind[register]
                self.line(f"R[{self.registers.index[register]}] = {self.value(register, kind)}")

    def jump(self, target: int) -> None:
        """End the block with an unconditional jump."""
        self.flush()
        self.line(f"return {target}")
        self.ended = True


def _numpy_dtype(kind: str):
    return getattr(numerics, DTYPES[kind])


def function_name(block: int, full: bool) -> str:
    """Name of a block's function in generated code."""
    return f"{'full' if full else 'part'}_{block}"


def type_of(ins: Instruction) -> str:
    """The last type suffix of an opcode."""
    for part in reversed(ins.parts):
        if part in TYPE_BITS:
            return part
    raise ValueError("no type suffix")
