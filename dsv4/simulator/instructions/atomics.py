"""Atomic operations, lane by lane, and the asynchronous stores to other CTAs that may combine.

All take the warp first; see load_store.py for addresses and masks.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.arithmetic.numerics import (
    bf16_of_f32,
    f16_of_f32,
    f32_of_bf16,
    f32_of_f16,
    flush,
)
from dsv4.simulator.compile.codegen import BlockEmitter, emits, type_of
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.load_store import WINDOW_MASK, access_count, access_space
from dsv4.simulator.machine.mbarrier import MemoryBarrier
from dsv4.simulator.machine.memory import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW, Cta
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction


def _word(w: Warp, space: str, address: int, dtype: type) -> np.ndarray:
    """A writable one-element view of the addressed word."""
    size = np.dtype(dtype).itemsize
    if space == "generic":
        window = address & WINDOW_MASK & (2**64 - 1)
        space = "shared" if window == SHARED_WINDOW else "global"
        address -= window
    if address % size:
        raise KernelFault(f"misaligned atomic at {address:#x}")
    if space.startswith("shared"):
        cta = w.cluster.cta_at(address)
        offset = address & OFFSET_MASK
        if offset + size > cta.shared_limit:
            raise KernelFault(f"shared atomic at offset {offset:#x} is out of bounds")
        return cta.s8[offset : offset + size].view(dtype)
    return w.cluster.memory.read(address, size).view(dtype)


def atomic(w: Warp, space: str, op: str, dtype: type, address, operands, mask) -> np.ndarray:
    """Apply `op` lane by lane (ascending); the old values, as `dtype` [32]."""
    old = np.zeros(32, dtype)
    w.polling = True  # another CTA may be waiting for this, or this may be a spin lock
    if w.launch.monitor is not None:
        w.launch.monitor.atomic(w, space, address, mask, np.dtype(dtype).itemsize)
    # float32 sums flush subnormals in global memory, but not in shared memory.
    flushes = dtype is np.float32 and op == "add" and space == "global"
    if flushes:
        operands = tuple(flush(x) for x in operands)
    with w.launch.atomics_lock, np.errstate(over="ignore", invalid="ignore"):
        for lane in np.flatnonzero(mask).tolist():
            word = _word(w, space, int(address[lane]), dtype)
            old[lane] = word[0]
            before = flush(word)[0] if flushes else word[0]
            after = _apply(op, before, [x[lane] for x in operands])
            word[0] = flush(after) if flushes else after
    return old


def _apply(op: str, old, operands):
    x = operands[0]
    if op == "add":
        return old + x
    if op == "exch":
        return x
    if op == "cas":
        return operands[1] if old == x else old
    if op == "min":
        return min(old, x)
    if op == "max":
        return max(old, x)
    if op == "and":
        return old & x
    if op == "or":
        return old | x
    if op == "xor":
        return old ^ x
    if op == "inc":
        return type(old)(0) if old >= x else old + type(old)(1)
    if op == "dec":
        return x if old == 0 or old > x else old - type(old)(1)
    raise KernelFault(f"atomic operation {op}")


_HALF = {
    "f16": (f32_of_f16, f16_of_f32), "bf16": (f32_of_bf16, bf16_of_f32),
}  # fmt: skip


def atomic_vector(w: Warp, space: str, op: str, name: str, address, values, mask):
    """atom/red on vectors and half types; the old values, one array per register."""
    scalar = name.removesuffix("x2")
    unit = 2 if scalar in _HALF else 4
    per = 2 if name.endswith("x2") else 1
    old = [np.zeros(32, np.uint32 if per == 2 or unit == 4 else np.uint16) for _ in values]
    if w.launch.monitor is not None:
        w.launch.monitor.atomic(w, space, address, mask, unit * per * len(values))
    w.polling = True
    with w.launch.atomics_lock:
        for lane in np.flatnonzero(mask).tolist():
            for k, value in enumerate(values):
                where = int(address[lane]) + k * unit * per
                word = _word(w, space, where, np.uint32 if unit * per == 4 else np.uint16)
                old[k][lane] = word[0]
                word[0] = _combine(op, scalar, word, value[lane : lane + 1])
    return old


def _combine(op: str, scalar: str, word: np.ndarray, value: np.ndarray):
    if scalar in _HALF:
        decode, encode = _HALF[scalar]
        a, b = decode(word.view(np.uint16)), decode(np.ascontiguousarray(value).view(np.uint16))
    else:
        a, b = word.view(np.float32), np.ascontiguousarray(value).view(np.float32)
    if op == "add":
        out = a + b
    else:
        out = (np.fmin if op == "min" else np.fmax)(a, b)
        # A signalling NaN counts as missing too, which numpy's loops do not agree on.
        out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, out))
    return (encode(out) if scalar in _HALF else out).view(word.dtype)[0]


def store_async(w: Warp, op, dtype, address, values, bits: int, barrier, mask) -> None:
    """st.async, red.async: store to a CTA of the cluster, or combine by `op` with the value of
    `dtype` there, and complete its bytes on an mbarrier there."""
    size = len(values) * bits // 8
    data = np.stack(values, 1).view(np.uint8)
    for lanes in _by_target(address >> RANK_SHIFT, barrier, np.flatnonzero(mask)):
        cta = w.cluster.cta_at(int(address[lanes[0]]))
        offsets = (address[lanes] & OFFSET_MASK).astype(np.int64)
        wrong = (offsets + size > cta.shared_limit) | (offsets % size != 0)
        if wrong.any():
            offset = int(offsets[int(wrong.argmax())])
            raise KernelFault(f"asynchronous store of {size} bytes to shared offset {offset:#x}")
        target = w.cluster.barrier(int(barrier[lanes[0]]))
        _store_to(w, cta, target, offsets, data[lanes], lanes, op, dtype)


def _by_target(ranks: np.ndarray, barrier: np.ndarray, lanes: np.ndarray) -> list[np.ndarray]:
    """The lanes of each CTA and mbarrier, in the order of their first ones."""
    groups: dict[tuple[int, int], list[int]] = {}
    for lane, *key in zip(lanes.tolist(), ranks[lanes].tolist(), barrier[lanes].tolist()):
        groups.setdefault(tuple(key), []).append(lane)
    return [np.array(group) for group in groups.values()]


def _store_to(
    w: Warp, cta: Cta, target: MemoryBarrier, offsets: np.ndarray, data: np.ndarray,
    lanes: np.ndarray, op, dtype,
) -> None:  # fmt: skip
    """Asynchronous stores of `data` [lane, byte] to one CTA, which complete on one mbarrier."""
    size, monitor = data.shape[1], w.launch.monitor
    tickets = [None] * len(lanes)
    if monitor is not None:
        tickets = monitor.store_async(w, cta, target, offsets, size, lanes)
    for ticket, offset, row in zip(tickets, offsets.tolist(), data):

        def perform(ticket=ticket, offset=offset, row=row) -> None:
            held = cta.s8[offset : offset + size]
            held[:] = row if op is None else _combined(op, held.view(dtype), row.view(dtype))
            if monitor is not None:
                monitor.bulk_load_done(ticket, cta, target)
            target.complete(size)

        w.cluster.engine.issue("st.async", None, perform)


def _combined(op: str, held: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Bytes of one word after an atomic operation."""
    with np.errstate(over="ignore"):
        return np.array([_apply(op, held[0], [data[0]])], held.dtype).view(np.uint8)


def atomic_wide(w: Warp, op: str, address, operands, mask) -> np.ndarray:
    """atom of 16 bytes in global or generic space: exch and cas; the old values [32, 2]."""
    old = np.zeros((32, 2), np.uint64)
    w.polling = True
    if w.launch.monitor is not None:
        w.launch.monitor.atomic(w, "generic", address, mask, 16)
    with w.launch.atomics_lock:
        for lane in np.flatnonzero(mask).tolist():
            where = int(address[lane])
            if where & 15 or where >= SHARED_WINDOW:
                raise KernelFault(f"16-byte atomic at {where:#x}")
            word = w.cluster.memory.read(where, 16).view(np.uint64)
            old[lane] = word
            if op == "exch" or (old[lane] == operands[0][lane]).all():
                word[:] = operands[-1][lane]
    return old


# --- emitters ------------------------------------------------------------------------------------
_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@emits("atom", "red")
def emit_atomic(e: BlockEmitter, ins: Instruction) -> None:
    returns = ins.parts[0] == "atom"
    target = ins.operands[0] if returns else "_"
    operands = ins.operands[1:] if returns else ins.operands
    op = next(p for p in ins.parts if p in _ATOMIC)
    name = type_of(ins)
    kind = KIND_OF_TYPE[name]
    space = access_space(ins)
    if name in ("f16x2", "bf16x2", "bf16", "f16") or access_count(ins) > 1:
        _atomic_vector(e, ins, target, operands, op, name)
        return
    address = e.address(operands[0], "u32" if space == "shared" else "u64")
    values = ", ".join(e.value(x, kind) for x in operands[1:])
    e.mark()
    if kind == "u128":
        if space == "shared":
            raise ValueError("16-byte atomics of shared memory")
        e.define(target, f"atomic_wide(w, {op!r}, {address}, ({values},), {e.mask})", kind)
        return
    out = f"atomic(w, {space!r}, {op!r}, {DTYPES[kind]}, {address}, ({values},), {e.mask})"
    e.define(target, out, kind)


def _atomic_vector(e, ins, target: str, operands: list[str], op: str, name: str) -> None:
    """Vector or half-precision add: element by element, lanes ascending."""
    space = access_space(ins)
    address = e.address(operands[0], "u32" if space == "shared" else "u64")
    kind = KIND_OF_TYPE[name]
    values = ", ".join(e.value(x, kind) for x in e.vector(operands[1]))
    out = e.temporary()
    e.mark()
    e.line(
        f"{out} = atomic_vector(w, {space!r}, {op!r}, {name!r}, {address}, ({values},), {e.mask})"
    )
    if target != "_":
        for i, register in enumerate(e.vector(target)):
            e.define(register, f"{out}[{i}].view({DTYPES[kind]})", kind)


@emits("st.async", "red.async")
def emit_store_async(e: BlockEmitter, ins: Instruction) -> None:
    """st.async and red.async: remote writes that complete bytes on an mbarrier."""
    kind = KIND_OF_TYPE[type_of(ins)]
    op = next((p for p in ins.parts if p in _ATOMIC), None)
    unsigned = UNSIGNED[BITS_OF_KIND[kind]]
    values = ", ".join(e.value(v, unsigned) for v in e.vector(ins.operands[1]))
    address, barrier = e.address(ins.operands[0], "u32"), e.address(ins.operands[2], "u32")
    e.mark()
    e.line(
        f"store_async(w, {op!r}, {DTYPES[kind]}, {address}, ({values},), {BITS_OF_KIND[kind]}, "
        f"{barrier}, {e.mask})"
    )
