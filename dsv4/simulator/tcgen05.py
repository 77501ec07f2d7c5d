"""The tensor core of sm_100a: TMEM allocation, loads and stores, MMA and commits."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsv4.simulator import numerics
from dsv4.simulator.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.memory import OFFSET_MASK, RANK_SHIFT, TMEM_COLUMNS, Cta
from dsv4.simulator.numerics import f32, u8, u16, u32
from dsv4.simulator.warp import ALL, Warp

REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


# --- allocation ----------------------------------------------------------------------------------
def allocate(w: Warp, target: np.ndarray, columns: np.ndarray, group: int, store) -> bool:
    """tcgen05.alloc: first fit of a power of two; waits while there is no room."""
    n = int(columns[0])
    if n & (n - 1) or not 32 <= n <= TMEM_COLUMNS:
        raise KernelFault(f"tcgen05.alloc of {n} columns: a power of two in 32..512 is required")
    cta = w.cta
    if cta.tmem_relinquished:
        raise KernelFault("tcgen05.alloc after relinquish_alloc_permit")
    for start in range(0, TMEM_COLUMNS - n + 1, n):
        if not cta.tmem_owned[start : start + n].any():
            break
    else:
        w.waiting = f"tcgen05.alloc of {n} columns"
        return False
    cta.tmem_owned[start : start + n] = True
    cta.tmem_allocations[start] = n
    cta.tensor_memory()
    lane = np.arange(32) == 0
    store(w, target, (np.full(32, start, u32),), 32, lane)
    return True


def deallocate(w: Warp, address: np.ndarray, columns: np.ndarray) -> None:
    """tcgen05.dealloc of exactly one allocation."""
    start, n = int(address[0]) & 0xFFFF, int(columns[0])
    if w.cta.tmem_allocations.get(start) != n:
        raise KernelFault(f"tcgen05.dealloc of columns {start}..{start + n}: not an allocation")
    del w.cta.tmem_allocations[start]
    w.cta.tmem_owned[start : start + n] = False


def relinquish(w: Warp) -> None:
    """No more tcgen05.alloc in this CTA."""
    w.cta.tmem_relinquished = True


# --- loads and stores ----------------------------------------------------------------------------
@lru_cache(maxsize=256)
def lane_pattern(shape: str, repeats: int, half_offset: int) -> tuple[np.ndarray, np.ndarray]:
    """(column, lane) of each register [registers, 32] of tcgen05.ld/st, relative to its address."""
    t = np.arange(32)
    columns, lanes = [], []
    for i in range(repeats):
        if shape == "32x32b":
            part = [(i + 0 * t, t)]
        elif shape == "16x64b":
            part = [(2 * i + t // 2 % 2, t // 4 + 8 * (t % 2))]
        elif shape == "16x128b":
            part = [(4 * i + t % 4, t // 4 + 8 * j) for j in range(2)]
        elif shape == "16x256b":
            part = [(8 * i + 2 * (t % 4) + j % 2, t // 4 + 8 * (j // 2)) for j in range(4)]
        else:
            part = [(i + half_offset * (t // 16), t % 16)]
        columns += [c for c, _ in part]
        lanes += [lane for _, lane in part]
    return np.array(columns), np.array(lanes)


def _locations(w: Warp, address: np.ndarray, repeats: int, shape: str, half: int, mask):
    if mask is not ALL:
        raise KernelFault("tcgen05.ld/st needs all 32 lanes")
    first = int(address[0])
    column, lane = first & 0xFFFF, first >> 16
    if (address != address[0]).any():
        raise KernelFault("tcgen05.ld/st: the TMEM address differs between lanes")
    allowed = (w.lane0,) if shape == "32x32b" else (w.lane0, w.lane0 + 16)
    if lane not in allowed:
        raise KernelFault(f"TMEM lane {lane}: warp {w.number} reaches lanes {w.lane0}..")
    columns, lanes = lane_pattern(shape, repeats, half)
    columns, lanes = columns + column, lanes + lane
    _check_owned(w.cta, int(columns.min()), int(columns.max()) + 1)
    return columns, lanes


def _check_owned(cta: Cta, start: int, stop: int) -> None:
    if stop > TMEM_COLUMNS or not cta.tmem_owned[start:stop].all():
        raise KernelFault(f"TMEM columns {start}..{stop} are not all allocated")


def _unpack16(values: np.ndarray) -> np.ndarray:
    """.pack::16b of a load: two 16-bit columns make one register."""
    return (values[0::2] & u32(0xFFFF)) | (values[1::2] << u32(16))


def tmem_load(w: Warp, address, shape: str, repeats: int, half: int, packed, registers, mask):
    """tcgen05.ld into registers (indices into R)."""
    count = repeats * (2 if packed else 1)
    columns, lanes = _locations(w, address, count, shape, half, mask)
    cta, R, monitor = w.cta, w.registers, w.launch.monitor
    if monitor is not None:
        monitor.tmem_access(w, cta, columns, lanes, False)

    def perform() -> None:
        values = cta.tmem[columns, lanes]
        if packed:
            values = _unpack16(values)
        for index, value in zip(registers, values):
            R[index] = value if w.program.u32_at[index] else value.view(f32)

    if w.cluster.engine.eager:
        perform()
    else:
        w.tmem_loads.append(perform)
    w.unwaited_loads = True
    w.unsettled = monitor is not None or bool(w.tmem_loads)


def tmem_store(w: Warp, address, shape: str, repeats: int, half: int, packed, values, mask):
    """tcgen05.st from registers."""
    columns, lanes = _locations(w, address, repeats * (2 if packed else 1), shape, half, mask)
    block = np.stack(values)
    if packed:
        wide = np.empty((2 * len(block), 32), u32)
        wide[0::2], wide[1::2] = block & u32(0xFFFF), block >> u32(16)
        block = wide
    cta, monitor = w.cta, w.launch.monitor
    if monitor is not None:
        monitor.tmem_access(w, cta, columns, lanes, True)

    def perform() -> None:
        cta.tmem[columns, lanes] = block

    if w.cluster.engine.eager:
        perform()
    else:
        w.tmem_stores.append(perform)


def tmem_wait(w: Warp, kind: str) -> None:
    """tcgen05.wait::ld / ::st."""
    if kind == "ld":
        w.unwaited_loads = False
        w.settle()
    else:
        for operation in w.tmem_stores:
            operation()
        w.tmem_stores = []
    if w.launch.monitor is not None:
        w.launch.monitor.tmem_waited(w, kind)


# --- matrix product ------------------------------------------------------------------------------
class InstructionDescriptor:
    """The 32-bit instruction descriptor of the kinds without block scaling."""

    def __init__(self, bits: int, kind: str):
        self.m, self.n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
        self.d_format, self.a_format, self.b_format = bits >> 4 & 3, bits >> 7 & 7, bits >> 10 & 7
        self.negate = bool((bits >> 13 & 1) ^ (bits >> 14 & 1))
        self.a_k_major, self.b_k_major = not bits >> 15 & 1, not bits >> 16 & 1
        if bits & 4:
            raise KernelFault("sparse tcgen05.mma is not simulated")
        self.saturate = bool(bits & 8)
        self.kind = kind


# kind -> format code -> (bytes per element, K per instruction, decoder)
def _small(name: str):
    return numerics.SMALL_FLOATS[name].decode


_FORMATS = {
    "f16": {0: (2, numerics.f32_of_f16), 1: (2, numerics.f32_of_bf16)},
    "tf32": {2: (4, lambda x: (x & u32(0xFFFFE000)).view(f32))},
    "f8f6f4": {
        0: (1, _small("e4m3")), 1: (1, _small("e5m2")), 3: (1, _small("e2m3")),
        4: (1, _small("e3m2")), 5: (1, _small("e2m1")),
    },
    "i8": {0: (1, lambda x: x.astype(f32)), 1: (1, lambda x: x.view(np.int8).astype(f32))},
}  # fmt: skip
_DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
_UNSIGNED = {1: u8, 2: u16, 4: u32}


def operand_sizes(form: InstructionDescriptor) -> tuple[int, int, int]:
    """K of one instruction, and bytes per element of A and B in shared memory."""
    return (
        _DEPTH[form.kind],
        _format(form.kind, form.a_format)[0],
        _format(form.kind, form.b_format)[0],
    )


def shared_operand(cta: Cta, bits: int, rows: int, depth: int, size: int, decode, k_major: bool):
    """[rows, depth] float32 of an operand in shared memory."""
    index = element_index(MatrixDescriptor.tcgen05(bits), rows, depth, size, k_major)
    return decode(cta.views[_UNSIGNED[size]].take(index))


def _tmem_operand(cta: Cta, address: int, rows: int, depth: int, size: int, decode) -> np.ndarray:
    """[rows, depth] float32 of operand A in TMEM, elements packed along columns."""
    column, lane = address & 0xFFFF, address >> 16
    columns = depth * size // 4
    _check_owned(cta, column, column + columns)
    words = np.ascontiguousarray(cta.tmem[column : column + columns, lane : lane + rows].T)
    return decode(words.view(_UNSIGNED[size]))


def _product(a: np.ndarray, b: np.ndarray, integer: bool) -> np.ndarray:
    """[N, M] of B A^T: float32, or exact integers."""
    if integer:
        return (b.astype(np.float64) @ a.T.astype(np.float64)).astype(np.int32)
    return b @ a.T


def multiply(cta: Cta, group: int, kind: str, operands, scale_exponent: int | None) -> None:
    """One tcgen05.mma. `operands` = (D, A, A in TMEM?, B, descriptor, accumulate?, disabled
    lanes)."""
    d, a, a_in_tmem, b, bits, accumulate, disabled = operands
    form = InstructionDescriptor(bits, kind)
    depth = _DEPTH[kind]
    ctas = [cta]
    if group == 2:
        first = cta.rank & ~1
        ctas = cta.cluster.ctas[first : first + 2]
    rows = form.m // group
    _check_shape(form, group)
    size_a, decode_a = _format(kind, form.a_format)
    size_b, decode_b = _format(kind, form.b_format)
    tiles = [
        shared_operand(c, b, form.n // group, depth, size_b, decode_b, form.b_k_major) for c in ctas
    ]
    b_tile = tiles[0] if group == 1 else np.concatenate(tiles)
    for c in ctas:
        if a_in_tmem:
            duplicated = 2 if group == 2 and rows == 64 else 1
            a_tile = _tmem_operand(c, a, rows, depth, size_a, decode_a)
            if duplicated == 2:
                other = _tmem_operand(c, a + (64 << 16), rows, depth, size_a, decode_a)
                _accumulate_halves(c, d, form, (a_tile, other), b_tile, accumulate, disabled,
                                   scale_exponent)  # fmt: skip
                continue
        else:
            a_tile = shared_operand(c, a, rows, depth, size_a, decode_a, form.a_k_major)
        result = _product(a_tile, b_tile, kind == "i8")
        _accumulate(c, d, form, group, rows, result, accumulate, disabled, scale_exponent)


def _format(kind: str, code: int):
    try:
        return _FORMATS[kind][code]
    except KeyError:
        raise KernelFault(f"tcgen05.mma kind::{kind}: element format {code}") from None


def _check_shape(form: InstructionDescriptor, group: int) -> None:
    allowed = {1: {64: 8, 128: 16}, 2: {128: 16, 256: 16}}[group]
    step = allowed.get(form.m)
    if step is None or not step <= form.n <= 256 or form.n % step:
        raise KernelFault(f"tcgen05.mma cta_group::{group} of M={form.m}, N={form.n}")


def _accumulate_halves(c, d, form, a_halves, b_tile, accumulate, disabled, scale) -> None:
    """M=128 over a CTA pair with A in TMEM: each lane half multiplies its own copy of A."""
    half = form.n // 2
    result = np.concatenate(
        [
            _product(a_halves[0], b_tile[:half], form.kind == "i8"),
            _product(a_halves[1], b_tile[half:], form.kind == "i8"),
        ],
        axis=1,
    )
    _write(c, d, form, np.arange(128), result, accumulate, disabled, scale)


def _accumulate(c, d, form, group, rows, result, accumulate, disabled, scale) -> None:
    if group == 2 and rows == 64:
        half = form.n // 2
        result = np.concatenate([result[:half], result[half:]], axis=1)
        lanes = np.arange(128)
    elif rows == 128:
        lanes = np.arange(128)
    else:
        # M = 64 in one CTA: 16 rows in each warp's 32 lanes.
        lanes = (32 * np.arange(4)[:, None] + np.arange(16)).reshape(-1)
    _write(c, d, form, lanes, result, accumulate, disabled, scale)


def _write(c: Cta, d: int, form, lanes, result, accumulate, disabled, scale) -> None:
    column, lane = d & 0xFFFF, d >> 16
    lanes = lanes + lane
    if form.d_format == 0 and form.kind != "i8":
        raise KernelFault("f16 accumulators are not simulated")
    columns = result.shape[0]
    _check_owned(c, column, column + columns)
    if int(lanes[-1]) >= 128:
        raise KernelFault(f"tcgen05.mma: accumulator lanes end at {int(lanes[-1])}")
    dtype = np.int32 if form.kind == "i8" else f32
    if form.negate:
        result = -result
    whole = len(lanes) == 128
    target = c.tmem[column : column + columns]
    old = (target if whole else target[:, lanes]).view(dtype)
    if accumulate:
        if scale:
            old = old * f32(2.0**-scale)
        result = old + result
    result = np.ascontiguousarray(result, dtype)
    if disabled:
        keep = np.array([disabled[i // 32] >> (i % 32) & 1 for i in lanes.tolist()], np.bool_)
        result = np.where(keep, old, result)
    if whole:
        target[:] = result.view(u32)
    else:
        target[:, lanes] = result.view(u32)


def issue_multiply(w: Warp, group: int, kind: str, d, a, a_in_tmem, b, bits, accumulate, disabled,
                   scale, mask) -> None:  # fmt: skip
    """tcgen05.mma by each active lane (one, in a correct kernel)."""
    cta, monitor = w.cta, w.launch.monitor
    for lane in np.flatnonzero(mask).tolist():
        off = tuple(int(x[lane]) for x in disabled)
        operands = (int(d[lane]), int(a[lane]), a_in_tmem, int(b[lane]), int(bits[lane]),
                    bool(accumulate[lane]), off if any(off) else ())  # fmt: skip
        form = InstructionDescriptor(operands[4], kind)
        _check_shape(form, group)
        wide = form.n // 2 if form.m == 128 and group == 2 else form.n
        _check_owned(cta, operands[0] & 0xFFFF, (operands[0] & 0xFFFF) + wide)
        if monitor is not None:
            monitor.multiply(w, cta, group, kind, operands)

        def perform(operands=operands) -> None:
            multiply(cta, group, kind, operands, scale)

        w.cluster.engine.issue("tcgen05.mma", ("tensor core", cta.rank & ~(group - 1)), perform)


def commit(w: Warp, group: int, barrier: np.ndarray, multicast, mask) -> None:
    """tcgen05.commit: arrive on mbarriers once all earlier work of the thread is complete."""
    cluster, monitor = w.cluster, w.launch.monitor
    for lane in np.flatnonzero(mask).tolist():
        a = int(barrier[lane])
        targets = [a]
        if multicast is not None:
            ranks = int(multicast[lane])
            targets = [
                (a & OFFSET_MASK) | rank << RANK_SHIFT
                for rank in range(len(cluster.ctas))
                if ranks >> rank & 1
            ]
        ticket = None
        if monitor is not None:
            ticket = monitor.commit(w, [cluster.barrier(t) for t in targets])

        def perform(targets=targets, ticket=ticket) -> None:
            for target in targets:
                found = cluster.barrier(target)
                if monitor is not None:
                    monitor.commit_done(ticket, found)
                found.arrive(1)

        cluster.engine.issue("tcgen05.commit", ("tensor core", w.cta.rank & ~(group - 1)), perform)
