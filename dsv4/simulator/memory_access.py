"""Loads and stores of 32 lanes in every state space, and atomics.

All take the warp first. Addresses are uint32 (shared) or uint64 (global, generic) arrays; `mask` is
the module's ALL when every lane takes part. A vector access of `count` elements of `bits` each
gives or takes a list of `count` arrays.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.memory import (
    CHUNK,
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    Region,
)
from dsv4.simulator.numerics import bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16, flush
from dsv4.simulator.operand_formats import unpacked
from dsv4.simulator.warp import ALL, Warp

DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SHIFT = {8: 0, 16: 1, 32: 2, 64: 3}
_ZERO = {bits: np.zeros(32, dtype) for bits, dtype in DTYPE.items()}
WINDOW_MASK = ~((1 << 56) - 1)


def _expand(values: np.ndarray, mask: np.ndarray, dtype: type) -> np.ndarray:
    out = np.zeros(32, dtype)
    out[mask] = values
    return out


# --- shared --------------------------------------------------------------------------------------
def _shared_offsets(w: Warp, address: np.ndarray, mask, size: int):
    """The CTA that the active lanes address and their offsets; (None, None) for several CTAs."""
    offsets = address - w.base if mask is ALL else (address - w.base)[mask]
    cta = w.cta
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
    dtype, shift = DTYPE[bits], _SHIFT[bits]
    cta, offsets = _shared_offsets(w, address, mask, count * bits // 8)
    if cta is None:
        parts = [
            load_shared(w, address, count, bits, lanes) for lanes in _lanes_by_cta(address, mask)
        ]
        return [np.bitwise_or.reduce(values) for values in zip(*parts)]
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, cta, offsets, mask, count * bits // 8, False)
    rows = cta.views[dtype].reshape(-1, count)[
        offsets >> np.uint32(shift + (count.bit_length() - 1))
    ]
    if mask is ALL:
        return [rows[:, k] for k in range(count)]
    return [_expand(rows[:, k], mask, dtype) for k in range(count)]


def store_shared(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    if mask is not ALL and not mask.any():
        return
    dtype, shift = DTYPE[bits], _SHIFT[bits]
    count = len(values)
    cta, offsets = _shared_offsets(w, address, mask, count * bits // 8)
    if cta is None:
        for lanes in _lanes_by_cta(address, mask):
            store_shared(w, address, values, bits, lanes)
        return
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, cta, offsets, mask, count * bits // 8, True, values)
    rows = cta.views[dtype].reshape(-1, count)
    index = offsets >> np.uint32(shift + (count.bit_length() - 1))
    for k, value in enumerate(values):
        rows[index, k] = value if mask is ALL else value[mask]


# --- global --------------------------------------------------------------------------------------
def _region(w: Warp, active: np.ndarray, size: int) -> Region:
    """The allocation that holds every active lane's bytes."""
    low, high = int(active.min()), int(active.max()) + size
    hint = w.launch.last_region
    if hint is not None and hint.start <= low and high <= hint.stop:
        return hint
    memory = w.cluster.memory
    region = memory.find(low, low + size)
    if high > region.stop:
        region = memory.find(high - size, high)
        if low < region.start:
            return None
    w.launch.last_region = region
    return region


def load_global(w: Warp, address: np.ndarray, count: int, bits: int, mask) -> list[np.ndarray]:
    if mask is not ALL and not mask.any():
        return [_ZERO[bits]] * count
    dtype, size = DTYPE[bits], count * bits // 8
    active = address if mask is ALL else address[mask]
    _check_alignment(active, size)
    if w.launch.monitor is not None:
        w.launch.monitor.global_access(w, active, mask, size, False)
    region = _region(w, active, size)
    if region is None:
        rows = np.stack([w.cluster.memory.read(int(a), size).view(dtype) for a in active])
    else:
        start = np.uint64(region.start)
        index = (active - start) >> np.uint64(_SHIFT[bits])
        view = region.view(dtype)
        rows = np.stack([view[index + np.uint64(k)] for k in range(count)], 1)
    if mask is ALL:
        return [rows[:, k] for k in range(count)]
    return [_expand(rows[:, k], mask, dtype) for k in range(count)]


def store_global(w: Warp, address: np.ndarray, values, bits: int, mask) -> None:
    if mask is not ALL and not mask.any():
        return
    count = len(values)
    dtype, size = DTYPE[bits], count * bits // 8
    active = address if mask is ALL else address[mask]
    _check_alignment(active, size)
    if w.launch.monitor is not None:
        w.launch.monitor.global_access(w, active, mask, size, True)
    region = _region(w, active, size)
    for k, value in enumerate(values):
        value = value if mask is ALL else value[mask]
        if region is None:
            for a, v in zip(active.tolist(), value):
                w.cluster.memory.read(a + k * bits // 8, bits // 8).view(dtype)[0] = v
        else:
            index = (active - np.uint64(region.start)) >> np.uint64(_SHIFT[bits])
            region.view(dtype)[index + np.uint64(k)] = value


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


def load_param(w: Warp, offset: int, count: int, bits: int) -> list[np.ndarray]:
    """Kernel parameters are the same for every lane."""
    size = bits // 8
    raw = w.launch.param_bytes
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
            part = load_param(w, int(plain[lanes][0]), count, bits)
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


# --- atomics -------------------------------------------------------------------------------------
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


# --- matrix loads and stores ---------------------------------------------------------------------
def _matrix_rows(w: Warp, address: np.ndarray, count: int, mask, write: bool, size: int = 16):
    if mask is not ALL:
        raise KernelFault("ldmatrix and stmatrix need all 32 lanes")
    rows = address[: 8 * count]
    offsets = rows - w.base
    if int(offsets.max()) + size > w.cta.shared_limit:
        raise KernelFault("matrix row outside shared memory")
    if int(np.bitwise_or.reduce(offsets)) & (size - 1):
        raise KernelFault(f"matrix row not {size}-byte aligned")
    if w.launch.monitor is not None:
        w.launch.monitor.shared(w, w.cta, offsets, None, size, write)
    return offsets


def load_matrix_padded(w: Warp, address, count: int, bits: int, mask) -> list[np.ndarray]:
    """ldmatrix m8n16 of 4- or 6-bit elements, padded to 16 bytes a row: one byte for each."""
    offsets = _matrix_rows(w, address, count, mask, False)
    rows = unpacked(w.cta.rows[offsets >> np.uint32(4)][:, : 2 * bits], bits)
    return list(np.ascontiguousarray(rows).view(np.uint32).reshape(count, 32))


def load_matrix(w: Warp, address, count: int, transposed: bool, mask) -> list[np.ndarray]:
    """ldmatrix m8n8 b16: one uint32 array per matrix."""
    offsets = _matrix_rows(w, address, count, mask, False)
    data = w.cta.chunks[offsets >> np.uint32(4)].view(np.uint16).reshape(count, 8, 8)
    if transposed:
        data = data.transpose(0, 2, 1)
    data = np.ascontiguousarray(data).view(np.uint32).reshape(count, 32)
    return [data[k] for k in range(count)]


def store_matrix(w: Warp, address, values, transposed: bool, mask) -> None:
    """stmatrix m8n8 b16."""
    offsets = _matrix_rows(w, address, len(values), mask, True)
    data = np.concatenate(values).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        data = data.transpose(0, 2, 1)
    w.cta.chunks[offsets >> np.uint32(4)] = np.ascontiguousarray(data).view(CHUNK).reshape(-1)


# Byte j of thread t's register, of a 16 x 8 matrix: (memory row, byte in it). Memory rows are the
# matrix's columns.
_LANE, _BYTE = np.arange(32)[:, None], np.arange(4)[None, :]
_STORED_BYTE = (2 * (_LANE % 4) + _BYTE % 2, _LANE // 4 + 8 * (_BYTE // 2))


def store_matrix_b8(w: Warp, address, values, mask) -> None:
    """stmatrix m16n8 trans b8."""
    offsets = _matrix_rows(w, address, len(values), mask, True)
    for k, value in enumerate(values):
        data = np.empty((8, 16), np.uint8)
        data[_STORED_BYTE] = np.ascontiguousarray(value).view(np.uint8).reshape(32, 4)
        w.cta.rows[offsets[8 * k : 8 * k + 8] >> np.uint32(4)] = data


def load_matrix_b8(w: Warp, address, count: int, bits: int, mask) -> list[np.ndarray]:
    """ldmatrix m16n16 trans b8, or of padded elements of `bits`: two registers per matrix."""
    offsets = _matrix_rows_wide(w, address, count, mask)
    out = []
    for k in range(count):
        rows = w.cta.rows[offsets[16 * k : 16 * k + 16] >> np.uint32(4)]
        tile = (unpacked(rows[:, : 2 * bits], bits) if bits < 8 else rows).T
        words = np.ascontiguousarray(tile).view(np.uint32)  # [16 rows, 4 words]
        out += [words[:8].reshape(32), words[8:].reshape(32)]
    return out


def _matrix_rows_wide(w: Warp, address: np.ndarray, count: int, mask) -> np.ndarray:
    if mask is not ALL:
        raise KernelFault("ldmatrix needs all 32 lanes")
    offsets = address[: 16 * count] - w.base
    if int(offsets.max()) + 16 > w.cta.shared_limit or int(np.bitwise_or.reduce(offsets)) & 15:
        raise KernelFault("matrix row outside shared memory or misaligned")
    return offsets


# --- half-precision and vector atomics, remote asynchronous stores ------------------
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
    monitor = w.launch.monitor
    for lane in np.flatnonzero(mask).tolist():
        where = int(address[lane])
        cta, offset = w.cluster.cta_at(where), where & OFFSET_MASK
        if offset + size > cta.shared_limit or offset % size:
            raise KernelFault(f"asynchronous store of {size} bytes to shared offset {offset:#x}")
        data = np.array([value[lane] for value in values]).view(np.uint8)
        target = w.cluster.barrier(int(barrier[lane]))
        ticket = None
        if monitor is not None:
            ticket = monitor.store_async(w, cta, target, offset, size, lane)

        def perform(cta=cta, offset=offset, data=data, target=target, ticket=ticket) -> None:
            held = cta.s8[offset : offset + size]
            held[:] = data if op is None else _combined(op, held.view(dtype), data.view(dtype))
            if monitor is not None:
                monitor.bulk_load_done(ticket, cta, target)
            target.complete(size)

        w.cluster.engine.issue("st.async", None, perform)


def _combined(op: str, held: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Bytes of one word after an atomic operation."""
    with np.errstate(over="ignore"):
        return np.array([_apply(op, held[0], [data[0]])], held.dtype).view(np.uint8)


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
