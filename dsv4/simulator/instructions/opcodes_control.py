"""Emitters for branches, barriers, mbarriers, warp collectives, fences and launch control."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits, type_of
from dsv4.simulator.compile.registers import DTYPES, KIND_OF_TYPE
from dsv4.simulator.ptx.blocks import may_block
from dsv4.simulator.ptx.entry import Instruction


@emits("bra")
def branch(e: BlockEmitter, ins: Instruction) -> None:
    if not ins.guard:
        e.jump(e.block.successors[0])
        return
    sign = "~" if ins.negated else ""
    guard = e.value(ins.guard, "p")
    e.flush()
    target, other = e.block.successors
    form = "full" if e.full else "masked"
    e.line(f"return w.branch_{form}({sign}{guard}, {target}, {other}, {e.block.rejoin})")
    e.ended = True


@emits("ret", "exit")
def leave(e: BlockEmitter, ins: Instruction) -> None:
    if not ins.guard:
        e.jump(e.block.successors[0])
        return
    sign = "~" if ins.negated else ""
    guard = e.value(ins.guard, "p")
    e.flush()
    e.line(f"return w.exit_lanes({sign}{guard}, {e.block.successors[1]})")
    e.ended = True


@emits("trap", "brkpt")
def trap(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"trap(w, {e.mask})")


@emits("vprintf")
def device_print(e: BlockEmitter, ins: Instruction) -> None:
    """A call of printf, as the parser writes it: result, format, packed arguments."""
    form, arguments = (e.value(operand, "u64") for operand in ins.operands[1:])
    e.mark()
    out = e.temporary()
    e.line(f"{out} = vprintf(w, {form}, {arguments}, {e.mask})")
    e.define(ins.operands[0], out, "u32")


def _park_unless(e: BlockEmitter, condition: str) -> None:
    e.line(f"if not {condition}: return {BLOCKED}")


# --- barriers ------------------------------------------------------------------------------------
@emits("bar", "barrier")
def barrier(e: BlockEmitter, ins: Instruction) -> None:
    parts = [p for p in ins.parts if p not in ("cta", "aligned")]
    e.mark()
    if parts[1] == "cluster":
        aligned = "aligned" in ins.parts
        if parts[2] == "arrive":
            e.line(f"cluster_arrive(w, {aligned}, {e.mask})")
        else:
            _park_unless(e, f"cluster_wait(w, {aligned}, {e.mask})")
    elif parts[1] == "warp":
        _check_members(e, ins)
        e.line(f"warp_sync(w, {e.mask})")
    elif parts[1] == "arrive":
        number, count = (e.value(x, "u32") for x in ins.operands[:2])
        e.line(f"bar_arrive(w, {number}, {count}, {e.mask})")
    elif parts[1] == "sync":
        number = e.value(ins.operands[0], "u32")
        count = e.value(ins.operands[1], "u32") if len(ins.operands) > 1 else "None"
        _park_unless(e, f"bar_sync(w, {number}, {count}, {e.mask})")
    elif parts[1] == "red":
        _barrier_reduce(e, ins, parts[2])
    else:
        raise ValueError("barrier form")


def _barrier_reduce(e: BlockEmitter, ins: Instruction, op: str) -> None:
    number = e.value(ins.operands[1], "u32")
    count = e.value(ins.operands[2], "u32") if len(ins.operands) > 3 else "None"
    predicate = e.value(ins.operands[-1], "p")
    out = e.temporary()
    e.line(f"{out} = bar_reduce(w, {op!r}, {number}, {count}, {predicate}, {e.mask})")
    e.line(f"if {out} is None: return {BLOCKED}")
    e.define(ins.operands[0], out, "u32" if op == "popc" else "p")


# --- mbarrier ------------------------------------------------------------------------------------
def _barrier_address(e: BlockEmitter, operand: str) -> str:
    return e.address(operand, "u32")


@emits("mbarrier")
def mbarrier(e: BlockEmitter, ins: Instruction) -> None:
    operation = ins.parts[1]
    e.mark()
    handler = {
        "init": _mbarrier_init,
        "inval": _mbarrier_inval,
        "arrive": _mbarrier_arrive,
        "arrive_drop": _mbarrier_arrive,
        "expect_tx": _mbarrier_bytes,
        "complete_tx": _mbarrier_bytes,
        "pending_count": _mbarrier_pending,
        "try_wait": _mbarrier_wait,
        "test_wait": _mbarrier_wait,
    }[operation]
    handler(e, ins)


def _mbarrier_init(e: BlockEmitter, ins: Instruction) -> None:
    address = _barrier_address(e, ins.operands[0])
    e.line(f"mbarrier_init(w, {address}, {e.value(ins.operands[1], 'u32')}, {e.mask})")


def _mbarrier_inval(e: BlockEmitter, ins: Instruction) -> None:
    e.line(f"mbarrier_inval(w, {_barrier_address(e, ins.operands[0])}, {e.mask})")


def _mbarrier_arrive(e: BlockEmitter, ins: Instruction) -> None:
    operands = list(ins.operands)
    state = "_" if operands[0].startswith("[") else operands.pop(0)
    address = _barrier_address(e, operands[0])
    extra = e.value(operands[1], "u32") if len(operands) > 1 else "None"
    with_bytes = "expect_tx" in ins.parts
    count, size = ("None", extra) if with_bytes else (extra, "None")
    drop = ins.parts[1] == "arrive_drop"
    out = f"mbarrier_arrive(w, {address}, {count}, {size}, {e.mask}, {drop})"
    e.define(state, out, "u64")


def _mbarrier_bytes(e: BlockEmitter, ins: Instruction) -> None:
    address, size = _barrier_address(e, ins.operands[0]), e.value(ins.operands[1], "u32")
    name = "mbarrier_expect" if ins.parts[1] == "expect_tx" else "mbarrier_complete"
    e.line(f"{name}(w, {address}, {size}, {e.mask})")


def _mbarrier_pending(e: BlockEmitter, ins: Instruction) -> None:
    state = e.value(ins.operands[1], "u64")
    e.define(ins.operands[0], f"mbarrier_pending({state})", "u32")


def _mbarrier_wait(e: BlockEmitter, ins: Instruction) -> None:
    address = _barrier_address(e, ins.operands[1])
    if "parity" not in ins.parts:
        state = e.value(ins.operands[2], "u64")
        out = f"mbarrier_test_state(w, {address}, {state}, {e.mask})"
        e.define(ins.operands[0], out, "p")
        return
    parity = e.value(ins.operands[2], "u32")
    if may_block(ins):
        _park_unless(e, f"mbarrier_wait(w, {address}, {parity}, {e.mask})")
        e.define(ins.operands[0], "ALL", "p")
    else:
        out = f"mbarrier_test(w, {address}, {parity}, {e.mask})"
        e.define(ins.operands[0], out, "p")


# --- collectives ---------------------------------------------------------------------------------
_EVERYONE = ("-1", "0xffffffff", "0xFFFFFFFF", "4294967295")  # as a member mask


def _check_members(e: BlockEmitter, ins: Instruction) -> None:
    """Compare the lanes that execute a collective with its member mask, the last operand."""
    if e.full and not e.guarded and ins.operands[-1] in _EVERYONE:
        return
    e.mark()
    e.line(f"check_members(w, {e.value(ins.operands[-1], 'u32')}, {e.mask}, {ins.opcode!r})")


@emits("shfl")
def shuffle(e: BlockEmitter, ins: Instruction) -> None:
    _check_members(e, ins)
    targets = ins.operands[0].split("|")
    value, b, c = (e.value(x, "u32") for x in ins.operands[1:4])
    mode = next(p for p in ins.parts if p in ("idx", "bfly", "up", "down"))
    out, inside = e.temporary(), e.temporary()
    e.line(f"{out}, {inside} = shuffle(w, {mode!r}, {value}, {b}, {c}, {e.mask})")
    e.define(targets[0], out, "u32")
    if len(targets) > 1:
        e.define(targets[1], inside, "p")


@emits("elect")
def elect(e: BlockEmitter, ins: Instruction) -> None:
    _check_members(e, ins)
    targets = ins.operands[0].split("|")
    lane, chosen = e.temporary(), e.temporary()
    e.line(f"{lane}, {chosen} = elect({e.mask})")
    e.define(targets[0], lane, "u32")
    e.define(targets[1], chosen, "p")


@emits("vote", "activemask")
def vote(e: BlockEmitter, ins: Instruction) -> None:
    if ins.parts[0] == "activemask":
        e.define(ins.operands[0], f"ballot({e.mask}, {e.mask})", "u32")
        return
    _check_members(e, ins)
    mode = next(p for p in ins.parts if p in ("ballot", "any", "all", "uni"))
    predicate = e.value(ins.operands[1], "p")
    if mode == "ballot":
        e.define(ins.operands[0], f"ballot({predicate}, {e.mask})", "u32")
    else:
        e.define(ins.operands[0], f"vote({mode!r}, {predicate}, {e.mask})", "p")


@emits("redux")
def reduce(e: BlockEmitter, ins: Instruction) -> None:
    _check_members(e, ins)
    kind = KIND_OF_TYPE[type_of(ins)]
    op = next(p for p in ins.parts if p in ("add", "min", "max", "and", "or", "xor"))
    value = e.value(ins.operands[1], kind)
    if "abs" in ins.parts:
        value = f"np.abs({value})"
    e.define(ins.operands[0], f"reduce({op!r}, {value}, {e.mask}, {'NaN' in ins.parts})", kind)


@emits("match")
def match(e: BlockEmitter, ins: Instruction) -> None:
    _check_members(e, ins)
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


# --- order and launch ----------------------------------------------------------------------------
@emits("fence", "membar")
def fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"fence(w, {ins.opcode!r}, {e.mask})")


@emits("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "pmevent")
def hint(e: BlockEmitter, ins: Instruction) -> None:
    """No effect on results; a policy register is never read by anything simulated."""
    if ins.parts[0] == "createpolicy":
        e.define(ins.operands[0], e.constant(0, "u64"), "u64")


@emits("nanosleep")
def sleep(e: BlockEmitter, ins: Instruction) -> None:
    e.line("w.polling = True")


@emits("griddepcontrol")
def grid_dependency(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    if ins.parts[1] == "wait":
        _park_unless(e, f"grid_wait(w, {e.mask})")
    else:
        e.line(f"let_dependents_go(w, {e.mask})")


@emits("setmaxnreg")
def set_registers(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    call = f"set_registers(w, {ins.parts[1]!r}, {int(ins.operands[0])}, {e.mask})"
    if may_block(ins):
        _park_unless(e, call)
    else:
        e.line(call)


@emits("mapa")
def map_address(e: BlockEmitter, ins: Instruction) -> None:
    """The same offset in the CTA of another rank."""
    wide = type_of(ins) == "u64"
    kind = "u64" if wide else "u32"
    address, rank = e.value(ins.operands[1], kind), e.value(ins.operands[2], "u32")
    dtype = DTYPES[kind]
    shifted = f"({rank}.astype({dtype}) << {dtype}(24))"
    keep = "0xff00000000ffffff" if wide else "0xffffff"
    e.define(ins.operands[0], f"({address} & {dtype}({keep})) | {shifted}", kind)


@emits("getctarank")
def cta_rank(e: BlockEmitter, ins: Instruction) -> None:
    address = e.value(ins.operands[1], KIND_OF_TYPE[type_of(ins)])
    e.define(ins.operands[0], f"(({address} >> 24) & 0xff).astype(u32)", "u32")
