"""tcgen05 at run time: TMEM allocation, loads and stores, issue of products and copies, commits."""

from __future__ import annotations

import functools
from functools import lru_cache

import numpy as np

from dsv4.simulator.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.memory import OFFSET_MASK, RANK_SHIFT, TMEM_COLUMNS, Cta
from dsv4.simulator.numerics import f32, u32
from dsv4.simulator.tensor_core import Multiplication, accumulator_columns, check_owned
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
    if w.launch.monitor is not None:
        w.launch.monitor.tmem_free(w, w.cta, start, n)
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
    check_owned(w.cta, int(columns.min()), int(columns.max()) + 1)
    return columns, lanes


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


# --- issue and commit ----------------------------------------------------------------------------
def issue_multiply(
    w: Warp, group: int, kind: str, d, a, a_in_tmem, b, bits, accumulate, disabled, stationary,
    scales, shift, mask,
) -> None:  # fmt: skip
    """tcgen05.mma by each active lane (one, in a correct kernel); see Multiplication."""
    cta, monitor = w.cta, w.launch.monitor
    for lane in np.flatnonzero(mask).tolist():
        off = tuple(int(x[lane]) for x in disabled)
        product = Multiplication(
            kind, group, int(d[lane]), int(a[lane]), a_in_tmem, int(b[lane]), int(bits[lane]),
            bool(accumulate[lane]), off if any(off) else (), stationary,
            (int(scales[0][lane]), int(scales[1][lane]), scales[2]) if scales else None, shift,
        )  # fmt: skip
        column = product.d & 0xFFFF
        columns = accumulator_columns(product.form, group, stationary)
        check_owned(cta, column, column + columns)
        if monitor is not None:
            monitor.multiply(w, cta, product)
        perform = functools.partial(product.perform, cta)
        w.cluster.engine.issue("tcgen05.mma", _pipe(cta, group), perform)


def _pipe(cta: Cta, group: int) -> tuple:
    """The queue of a CTA's or a pair's tensor core: what is issued to it executes in order."""
    return ("tensor core", cta.rank & ~(group - 1))


_COPY_SHAPES = {"128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16),
                "64x128b": (64, 16), "32x128b": (32, 16)}  # fmt: skip
_COPY_LANES = {
    "warpx4": lambda r: [r + 32 * k for k in range(4)],
    "warpx2::02_13": lambda r: [r, r + 64],
    "warpx2::01_23": lambda r: [r + 32 * (r // 32), r + 32 * (r // 32) + 32],
    "": lambda r: [r],
}


def issue_copy(w: Warp, group: int, shape: str, spread: str, target, descriptor, mask) -> None:
    """tcgen05.cp: rows of shared memory to TMEM lanes, in order with the products."""
    rows, size = _COPY_SHAPES[shape]
    first = w.cta.rank & ~(group - 1)
    for lane in np.flatnonzero(mask).tolist():
        column, base = int(target[lane]) & 0xFFFF, int(target[lane]) >> 16
        index = element_index(MatrixDescriptor.tcgen05(int(descriptor[lane])), rows, size, 1, True)
        lanes = [np.array(_COPY_LANES[spread](r)) + base for r in np.arange(rows)]
        for cta in w.cluster.ctas[first : first + group]:
            check_owned(cta, column, column + size // 4)
            if w.launch.monitor is not None:
                w.launch.monitor.tmem_copy(w, cta, index, column, size // 4, np.concatenate(lanes))
        ctas = w.cluster.ctas[first : first + group]
        perform = functools.partial(_copy_rows, ctas, index, column, lanes)
        w.cluster.engine.issue("tcgen05.cp", _pipe(w.cta, group), perform)


def _copy_rows(ctas: list[Cta], index: np.ndarray, column: int, lanes: list[np.ndarray]) -> None:
    for cta in ctas:
        words = cta.s8.take(index).view(u32)
        for row, where in zip(words, lanes):
            cta.tmem[column : column + len(row), where] = row[:, None]


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

        cluster.engine.issue("tcgen05.commit", _pipe(w.cta, group), perform)
