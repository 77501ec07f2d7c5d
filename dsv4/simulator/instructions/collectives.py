"""Warp collectives: shuffle, vote, match, reduce, elect, and the lanes that take part."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits, type_of
from dsv4.simulator.compile.registers import KIND_OF_TYPE
from dsv4.simulator.errors import KernelFault, UnsupportedInstruction
from dsv4.simulator.machine.warp import ALL, LANE, Warp
from dsv4.simulator.ptx.entry import Instruction

_LANE = LANE.astype(np.int32)
_BROADCAST = [np.full(32, lane, np.uint32) for lane in range(32)]
_ONE_LANE = [lane == LANE for lane in range(32)]
_NONE = np.zeros(32, np.bool_)
_UNDEFINED = np.uint32(0xDEADBEEF)
_OF_ONE_GROUP = ("vote", "redux", "match", "elect")  # computed over all lanes that execute them
_shuffle_sources: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}


def check_members(w: Warp, members: np.ndarray, mask: np.ndarray, opcode: str) -> None:
    """Every lane that executes a collective must be among the members that it names, and all
    members that have not exited must execute it: PTX defines nothing else."""
    named = int(np.bitwise_or.reduce(members[mask]))
    here = int(ballot(ALL, mask)[0])
    own = np.bitwise_and(members >> LANE, 1)[mask]
    if not own.all():
        lane = int(np.flatnonzero(mask)[own.argmin()])
        raise KernelFault(
            f"{opcode} by lane {lane}, which is not among the members that it names: "
            f"{int(members[lane]):#x}"
        )
    if opcode.startswith(_OF_ONE_GROUP) and (members[mask] != named).any():
        raise UnsupportedInstruction(f"{opcode} of several groups of lanes at once")
    absent = named & ~here & int(ballot(ALL, w.frames[0].mask)[0])
    if absent:
        raise KernelFault(f"{opcode} of lanes {named:#x}, of which {absent:#x} are elsewhere")


def shuffle(w: Warp, mode: str, value, b, c, mask) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync: values and the predicate of lanes in range. What is read from a lane that does not
    take part is not defined."""
    b0, c0 = int(b[0]), int(c[0])
    if (b == b0).all():
        source, inside = _shuffle_source(mode, b0 & 31, c0)
    else:
        source, inside = _source(mode, (b & np.uint32(31)).astype(np.int32), c0)
    if mask is not ALL:
        value = np.where(mask, value, _UNDEFINED)
    return value[source], inside


def _shuffle_source(mode: str, b: int, c: int):
    key = (mode, b, c)
    found = _shuffle_sources.get(key)
    if found is None:
        found = _shuffle_sources[key] = _source(mode, np.full(32, b, np.int32), c)
    return found


def _source(mode: str, b: np.ndarray, c: int) -> tuple[np.ndarray, np.ndarray]:
    clamp, segment = c & 31, (c >> 8) & 31
    low = _LANE & segment
    high = low | (clamp & ~segment)
    if mode == "idx":
        source = low | (b & ~segment)
    elif mode == "bfly":
        source = _LANE ^ b
    elif mode == "down":
        source = _LANE + b
    else:
        source = _LANE - b
    inside = source >= high if mode == "up" else source <= high
    return np.where(inside, source, _LANE), inside


def elect(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """elect.sync: the lowest active lane, and its predicate."""
    lane = int(mask.argmax())
    return _BROADCAST[lane], _ONE_LANE[lane]


def ballot(predicate: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """vote.ballot: bit per lane."""
    bits = np.packbits(predicate & mask, bitorder="little").view(np.uint32)[0]
    return np.full(32, bits, np.uint32)


def vote(mode: str, predicate: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """vote.any, all, uni."""
    active = predicate[mask]
    result = {
        "any": active.any(),
        "all": active.all(),
        "uni": active.all() or not active.any(),
    }[mode]
    return ALL if result else _NONE


def reduce(op: str, value: np.ndarray, mask: np.ndarray, nan: bool = False) -> np.ndarray:
    """redux.sync over the active lanes; `value` has the dtype of the operation."""
    active = value[mask]
    if op == "add":
        result = active.sum(dtype=value.dtype)
    elif op in ("min", "max"):
        if value.dtype.kind == "f":
            function = getattr(np, op + "imum") if nan else getattr(np, "f" + op)
            result = function.reduce(active)
        else:
            result = getattr(active, op)()
    else:
        result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op].reduce(
            active
        )
    return np.full(32, result, value.dtype)


def match_any(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """match.any: the lanes holding the same value."""
    out = np.zeros(32, np.uint32)
    for v in np.unique(value[mask]):
        same = mask & (value == v)
        out[same] = ballot(same, mask)[0]
    return out


def match_all(value: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """match.all: the active mask if all hold one value, else 0; and the predicate."""
    active = value[mask]
    same = bool((active == active[0]).all())
    bits = ballot(mask, mask) if same else np.zeros(32, np.uint32)
    return bits, ALL if same else _NONE


# --- emitters ------------------------------------------------------------------------------------
_EVERYONE = ("-1", "0xffffffff", "0xFFFFFFFF", "4294967295")  # as a member mask


def emit_check_members(e: BlockEmitter, ins: Instruction) -> None:
    """Compare the lanes that execute a collective with its member mask, the last operand."""
    if e.full and not e.guarded and ins.operands[-1] in _EVERYONE:
        return
    e.mark()
    e.line(f"check_members(w, {e.value(ins.operands[-1], 'u32')}, {e.mask}, {ins.opcode!r})")


@emits("shfl")
def emit_shuffle(e: BlockEmitter, ins: Instruction) -> None:
    emit_check_members(e, ins)
    targets = ins.operands[0].split("|")
    value, b, c = (e.value(x, "u32") for x in ins.operands[1:4])
    mode = next(p for p in ins.parts if p in ("idx", "bfly", "up", "down"))
    out, inside = e.temporary(), e.temporary()
    e.line(f"{out}, {inside} = shuffle(w, {mode!r}, {value}, {b}, {c}, {e.mask})")
    e.define(targets[0], out, "u32")
    if len(targets) > 1:
        e.define(targets[1], inside, "p")


@emits("elect")
def emit_elect(e: BlockEmitter, ins: Instruction) -> None:
    emit_check_members(e, ins)
    targets = ins.operands[0].split("|")
    lane, chosen = e.temporary(), e.temporary()
    e.line(f"{lane}, {chosen} = elect({e.mask})")
    e.define(targets[0], lane, "u32")
    e.define(targets[1], chosen, "p")


@emits("vote", "activemask")
def emit_vote(e: BlockEmitter, ins: Instruction) -> None:
    if ins.parts[0] == "activemask":
        e.define(ins.operands[0], f"ballot({e.mask}, {e.mask})", "u32")
        return
    emit_check_members(e, ins)
    mode = next(p for p in ins.parts if p in ("ballot", "any", "all", "uni"))
    predicate = e.value(ins.operands[1], "p")
    if mode == "ballot":
        e.define(ins.operands[0], f"ballot({predicate}, {e.mask})", "u32")
    else:
        e.define(ins.operands[0], f"vote({mode!r}, {predicate}, {e.mask})", "p")


@emits("redux")
def emit_reduce(e: BlockEmitter, ins: Instruction) -> None:
    emit_check_members(e, ins)
    kind = KIND_OF_TYPE[type_of(ins)]
    op = next(p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor"))
    value = e.value(ins.operands[1], kind)
    if "abs" in ins.parts:
        value = f"np.abs({value})"
    e.define(ins.operands[0], f"reduce({op!r}, {value}, {e.mask}, {'NaN' in ins.parts})", kind)


@emits("match")
def emit_match(e: BlockEmitter, ins: Instruction) -> None:
    emit_check_members(e, ins)
    value = e.value(ins.operands[1], KIND_OF_TYPE[type_of(ins)])
    if "any" in ins.parts:
        e.define(ins.operands[0], f"match_any({value}, {e.mask})", "u32")
        return
    targets = ins.operands[0].split("|")
    bits, same = e.temporary(), e.temporary()
    e.line(f"{bits}, {same} = match_all({value}, {e.mask})")
    e.define(targets[0], bits, "u32")
    if len(targets) > 1:
        e.define(targets[1], same, "p")
