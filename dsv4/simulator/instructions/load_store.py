"""Loads and stores of 32 lanes in every state space.

All take the warp first. Addresses are uint32 (shared) or uint64 (global, generic) arrays; `mask` is
the module's ALL when every lane takes part. A vector access of `count` elements of `bits` each
gives or takes a list of `count` arrays.
"""

from __future__ import annotations

import re

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits, type_of
from dsv4.simulator.compile.registers import BITS_OF_KIND, DTYPES, KIND_OF_TYPE, UNSIGNED
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    Region,
)
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction

DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SHIFT = {8: 0, 16: 1, 32: 2, 64: 3}
_SIZE_SHIFT = {size: np.uint32(size.bit_length() - 1) for size in ELEMENT}
_SIZE_SHIFT_64 = {size: np.uint64(shift) for size, shift in _SIZE_SHIFT.items()}
_ZERO = {bits: np.zeros(32, dtype) for bits, dtype in DTYPE.items()}
WINDOW_MASK = ~((1 << 56) - 1)


def _expand(values: np.ndarray, mask: np.ndarray, dtype: type) -> np.ndarray:
    out = np.zeros(32, dtype)
    out[mask] = values
    return out


def _split(elements: np.ndarray, count: int, dtype: type, mask) -> list[np.ndarray]:
    """What each active lane loaded, as `count` arrays of 32 lanes."""
    rows = elements.view(dtype).reshape(-1, count)
    if mask is ALL:
        return [rows[:, k] for k in range(count)]
    return [_expand(rows[:, k], mask, dtype) for k in range(count)]


def _joined(values, dtype: type, size: int, mask) -> np.ndarray:
    """What each active lane stores, as one element of `size` bytes."""
    if mask is not ALL:
        values = [value[mask] for value in values]
    if len(values) == 1:
        return values[0]
    rows = np.empty((len(values[0]), len(values)), dtype)
    for k, value in enumerate(values):
        rows[:, k] = value
    return rows.view(ELEMENT[size])[:, 0]


# --- shared --------------------------------------------------------------------------------------
def _shared_offsets(w: Warp, address: np.ndarray, mask, size: int):
    """The CTA that the active lanes address and their offsets; (None, None) for several CTAs."""
    offsets = address - w.base if mask is ALL else (address - w.base)[mask]
    cta = w.cta
    # Tells of misalignment, and is no less than the largest offset: mostly all that is needed.
    bits = int(np.bitwise_or.reduce(offsets))
    if bits & (size - 1) == 0 and bits + size <= cta.shared_limit:
        return cta, offsets
    top = int(np.maximum.reduce(offsets, initial=0))
    if top > OFFSET_MASK:
        active = address if mask is ALL else address[mask]
        ranks = active >> np.uint32(RANK_SHIFT)
        if (ranks != ranks[0]).any():
            return None, None
        cta, offsets = w.cluster.cta_at(int(active[0])), active & np.uint32(OFFSET_MASK)
        top = int(offsets.max())
    if top + size > cta.shared_limit:
        raise KernelFault(
            f"shared access at offset {top:#x} of {size} bytes is past the CTA's "
            f"{cta.shared_limit:#x} bytes"
        )
    if size > 1 and int(np.bitwise_or.reduce(offsets)) & (size - 1):
        raise KernelFault(f"misaligned shared access of {size} bytes")
    return cta, offsets


def _lanes_by_cta(address: np.ndarray, mask) -> list[np.ndarray]:
    """The active lanes, grouped by the CTA they address."""
    ranks = address >> np.uint32(RANK_SHIFT)
    return [mask & (ranks == rank) for rank in np.unique(ranks[mask])]


def load_shared(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    if mask is not ALL and not mask.any():
        return [_ZERO[bits]] * count
    dtype, size = DTYPE[bits], count * bits // 8
    cta, offsets = _shared_offsets(w, address, mask, size)
    if cta is None:
        parts = [
            load_shared(w, address, count, bits, lanes) for lanes in _lanes_by_cta(address, mask)
        ]
        return [np.bitwise_or.reduce(values) for values in zip(*parts)]
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, cta, offsets, mask, size, False)
    return _split(cta.elements[size][offsets >> _SIZE_SHIFT[size]], count, dtype, mask)


def store_shared(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    if mask is not ALL and not mask.any():
        return
    size = len(values) * bits // 8
    cta, offsets = _shared_offsets(w, address, mask, size)
    if cta is None:
        for lanes in _lanes_by_cta(address, mask):
            store_shared(w, address, values, bits, lanes)
        return
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, cta, offsets, mask, size, True, values)
    index = offsets >> _SIZE_SHIFT[size]
    cta.elements[size][index] = _joined(values, DTYPE[bits], size, mask)


def clear_shared(w: Warp, address, size, mask) -> None:
    """st.bulk: zeros."""
    for lane in np.flatnonzero(mask).tolist():
        offset, n = int(address[lane]) - int(w.base), int(size[lane])
        if (offset | n) & 7 or not 0 <= offset <= offset + n <= w.cta.shared_limit:
            raise KernelFault(f"st.bulk of {n} bytes to shared offset {offset:#x}")
        if n and w.launch.monitor is not None:
            lanes = np.arange(32) == lane
            w.launch.monitor.shared(w, w.cta, np.array([offset], np.uint32), lanes, n, True)
        w.cta.s8[offset : offset + n] = 0


# --- global --------------------------------------------------------------------------------------
def _place(w: Warp, active: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The allocation that holds every active lane's bytes, as elements of `size` bytes, and their
    indices; None for several allocations, or one that does not start at a whole element."""
    launch = w.launch
    # An instruction mostly stays in one allocation; addresses below it wrap around to large ones.
    region = launch.regions.get(w.at)
    if region is not None:
        offsets = active - region.base
        if int(np.maximum.reduce(offsets)) > region.size - size:
            region = None
    if region is None:
        region = launch.regions[w.at] = _region(w, active, size)
        if region is None:
            return None
        offsets = active - region.base
    if region.start & (size - 1):
        return None
    return region.view(ELEMENT[size]), (offsets >> _SIZE_SHIFT_64[size]).view(np.int64)


def _region(w: Warp, active: np.ndarray, size: int) -> Region | None:
    low, high = int(active.min()), int(active.max()) + size
    memory = w.cluster.memory
    region = memory.find(low, low + size)
    if high > region.stop:
        region = memory.find(high - size, high)
    return region if low >= region.start else None


def load_global(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    if mask is not ALL and not mask.any():
        return [_ZERO[bits]] * count
    size = count * bits // 8
    active = address if mask is ALL else address[mask]
    _check_alignment(active, size)
    if w.launch.monitor is not None:
        w.launch.monitor.global_access(w, active, mask, size, False)
    place = _place(w, active, size)
    if place is None:
        elements = np.stack([w.cluster.memory.read(int(a), size) for a in active])
    else:
        elements = place[0][place[1]]
    return _split(elements, count, DTYPE[bits], mask)


def store_global(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    if mask is not ALL and not mask.any():
        return
    dtype, size = DTYPE[bits], len(values) * bits // 8
    active = address if mask is ALL else address[mask]
    _check_alignment(active, size)
    if w.launch.monitor is not None:
        w.launch.monitor.global_access(w, active, mask, size, True, values)
    place = _place(w, active, size)
    elements = _joined(values, dtype, size, mask)
    if place is not None:
        place[0][place[1]] = elements
        return
    for a, element in zip(active.tolist(), elements):
        w.cluster.memory.read(a, size).view(ELEMENT[size])[0] = element


def _check_alignment(active: np.ndarray, size: int) -> None:
    if size > 1 and int(np.bitwise_or.reduce(active)) & (size - 1):
        raise KernelFault(f"misaligned global access of {size} bytes")


# --- local, parameters, generic ------------------------------------------------------------------
def _local(w: Warp) -> np.ndarray:
    if w.local is None:
        w.local = np.zeros((32, w.program.local_bytes), np.uint8)
    return w.local


def load_local(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    rows = _local_rows(w, address, count, bits, mask)
    lanes = np.arange(32)
    return [rows[0][lanes, rows[1] + k] for k in range(count)]


def store_local(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    view, index = _local_rows(w, address, len(values), bits, mask)
    lanes = np.arange(32)[mask]
    for k, value in enumerate(values):
        view[lanes, index[mask] + k] = value[mask]


def _local_rows(w: Warp, address: np.ndarray, count: int, bits: int, mask):
    offsets = np.where(mask, address, 0).astype(np.int64)
    memory = _local(w)
    if int(offsets.max()) + count * bits // 8 > memory.shape[1]:
        raise KernelFault("local memory access outside the thread's frame")
    return memory.view(DTYPE[bits]), offsets >> _SHIFT[bits]


def load_param_at(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    """Kernel parameters at an address of each lane: of the parameter space, or generic."""
    raw, size = np.frombuffer(w.cluster.params, np.uint8), bits // 8
    offsets = np.where(mask, address & np.uint64(0xFFFFFFFF), 0).astype(np.int64)
    if int(offsets.max()) + count * size > len(raw):
        raise KernelFault(f"kernel parameters end at byte {len(raw)}, read at {offsets.max()}")
    lanes = raw[offsets[:, None] + np.arange(count * size)].reshape(32, count, size)
    return [np.ascontiguousarray(lanes[:, k]).view(DTYPE[bits])[:, 0] for k in range(count)]


def load_param(w: Warp, offset: int, count: int, bits: int) -> list[np.ndarray]:
    """A kernel parameter of the same place for every lane."""
    size = bits // 8
    raw = w.cluster.params
    return [
        np.full(32, int.from_bytes(raw[offset + k * size : offset + (k + 1) * size], "little"),
                DTYPE[bits])
        for k in range(count)
    ]  # fmt: skip


def in_space(address: np.ndarray, space: str) -> np.ndarray:
    """isspacep: does a generic address fall into a window?"""
    window = address & np.uint64(WINDOW_MASK & (2**64 - 1))
    wanted = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0}
    return window == np.uint64(wanted[space.split("::")[0]])


def _split_generic(address: np.ndarray, mask):
    """(window, lanes) groups of a generic access."""
    windows = (address & np.uint64(WINDOW_MASK & (2**64 - 1)))[mask]
    for window in np.unique(windows).tolist():
        lanes = mask & ((address & np.uint64(WINDOW_MASK & (2**64 - 1))) == np.uint64(window))
        yield window, (ALL if lanes.all() else lanes)


def load_generic(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    out = [_ZERO[bits]] * count
    for window, lanes in _split_generic(address, mask):
        plain = address - np.uint64(window)
        if window == SHARED_WINDOW:
            part = load_shared(w, plain.astype(np.uint32), count, bits, lanes)
        elif window == LOCAL_WINDOW:
            part = load_local(w, plain, count, bits, lanes)
        elif window == PARAM_WINDOW:
            part = load_param_at(w, plain, count, bits, lanes)
        else:
            part = load_global(w, plain, count, bits, lanes)
        out = part if lanes is ALL else [np.where(lanes, p, o) for p, o in zip(part, out)]
    return out


def store_generic(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    for window, lanes in _split_generic(address, mask):
        plain = address - np.uint64(window)
        if window == SHARED_WINDOW:
            store_shared(w, plain.astype(np.uint32), values, bits, lanes)
        elif window == LOCAL_WINDOW:
            store_local(w, plain, values, bits, lanes)
        else:
            store_global(w, plain, values, bits, lanes)


# --- emitters ------------------------------------------------------------------------------------
_SPACES = ("param", "shared", "global", "local", "const")
_STRONG = ("acquire", "relaxed", "volatile", "mmio")


def access_space(ins: Instruction) -> str:
    for part in ins.parts[1:]:
        stem = part.split("::")[0]
        if stem in _SPACES:
            return "global" if stem == "const" else stem
    return "generic"


def access_count(ins: Instruction) -> int:
    return next((int(p[1:]) for p in ins.parts if re.fullmatch(r"v\d", p)), 1)


@emits("ld", "ldu")
def emit_load(e: BlockEmitter, ins: Instruction) -> None:
    space, count = access_space(ins), access_count(ins)
    kind = KIND_OF_TYPE[type_of(ins)]
    targets = e.vector(ins.operands[0])
    out = e.temporary()
    if kind == "u128":
        _load_128(e, ins, space)
        return
    bits = BITS_OF_KIND[kind]
    e.mark()
    if space == "param":
        e.line(f"{out} = {_load_param(e, ins, count, bits)}")
    else:
        address = e.address(ins.operands[1], "u32" if space == "shared" else "u64")
        e.line(f"{out} = load_{space}(w, {address}, {count}, {bits}, {e.mask})")
    if space in ("global", "generic", "shared") and any(p in ins.parts for p in _STRONG):
        # A flag that another warp may set: give the others a turn before the next block.
        e.line("w.polling = True")
    for i, target in enumerate(targets):
        if target != "_":
            view = f".view({DTYPES[kind]})" if kind[0] in "sf" else ""
            e.define(target, f"{out}[{i}]{view}", kind)


def _load_128(e: BlockEmitter, ins: Instruction, space: str) -> None:
    address = e.address(ins.operands[1], "u32" if space == "shared" else "u64")
    e.mark()
    out = e.temporary()
    load = "load_param_at" if space == "param" else f"load_{space}"
    e.line(f"{out} = {load}(w, {address}, 2, 64, {e.mask})")
    e.define(ins.operands[0], f"np.stack({out}, 1)", "u128")


def _load_param(e: BlockEmitter, ins: Instruction, count: int, bits: int) -> str:
    inner = ins.operands[1][1:-1].strip()
    m = re.match(r"^([^\s+]+)\s*(?:\+\s*(-?\d+))?$", inner)
    name, extra = m.group(1), int(m.group(2) or 0)
    if name in e.entry.params:
        return f"load_param(w, {e.entry.params[name][0] + extra}, {count}, {bits})"
    address = e.address(ins.operands[1], "u64")
    return f"load_param_at(w, {address}, {count}, {bits}, {e.mask})"


@emits("st")
def emit_store(e: BlockEmitter, ins: Instruction) -> None:
    space = access_space(ins)
    e.mark()
    if "bulk" in ins.parts:
        address, size = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u64")
        if space != "shared" or int(ins.operands[2], 0):
            raise ValueError("st.bulk of anything but zeros to shared memory")
        e.line(f"clear_shared(w, {address}, {size}, {e.mask})")
        return
    kind = UNSIGNED[BITS_OF_KIND[KIND_OF_TYPE[type_of(ins)]]]
    bits = BITS_OF_KIND[kind]
    values = ", ".join(e.value(v, kind) for v in e.vector(ins.operands[1]))
    if kind == "u128":
        values, bits = f"*contiguous({values}.T)", 64
    address = e.address(ins.operands[0], "u32" if space == "shared" else "u64")
    e.line(f"store_{space}(w, {address}, ({values},), {bits}, {e.mask})")
