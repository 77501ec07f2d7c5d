"""tcgen05: TMEM allocation, loads and stores, issue of products and copies, commits."""

from __future__ import annotations

import functools
import re
from functools import lru_cache

import numpy as np

from dsv4.simulator.arithmetic.numerics import f32, u32
from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.instructions.operands.formats import decompressed
from dsv4.simulator.instructions.operands.tensor_core import (
    Multiplication,
    accumulator_columns,
    check_owned,
    shift_rows,
)
from dsv4.simulator.machine.memory import OFFSET_MASK, RANK_SHIFT, TMEM_COLUMNS, TMEM_LANES, Cta
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction

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
    cta.tmem_allocations[start] = n, w.at
    cta.tensor_memory()
    lane = np.arange(32) == 0
    store(w, target, (np.full(32, start, u32),), 32, lane)
    return True


def deallocate(w: Warp, address: np.ndarray, columns: np.ndarray, group: int) -> None:
    """tcgen05.dealloc of exactly one allocation."""
    start, n = int(address[0]) & 0xFFFF, int(columns[0])
    if w.cta.tmem_allocations.get(start, (0, 0))[0] != n:
        raise KernelFault(f"tcgen05.dealloc of columns {start}..{start + n}: not an allocation")
    if w.launch.monitor is not None:
        w.launch.monitor.tmem_free(w, _pair(w, group), start, n)
    del w.cta.tmem_allocations[start]
    w.cta.tmem_owned[start : start + n] = False


def relinquish(w: Warp) -> None:
    """No more tcgen05.alloc in this CTA."""
    w.cta.tmem_relinquished = True


# --- loads and stores ----------------------------------------------------------------------------
@lru_cache(maxsize=256)
def lane_pattern(
    shape: str, repeats: int, half_offset: int, packed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(column, lane) of each register [registers, 32] of tcgen05.ld/st, relative to its address.

    With .pack::16b or .unpack::16b a register holds the low halves of two adjacent columns, and is
    given as two rows.
    """
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
            part = [(i + 0 * t, t % 16)]
        columns += [c for c, _ in part]
        lanes += [lane for _, lane in part]
    column, lane = np.array(columns), np.array(lanes)
    if packed:
        column = np.stack((2 * column, 2 * column + 1), 1).reshape(-1, 32)
        lane = lane.repeat(2, 0)
    if shape == "16x32bx2":
        column = column + half_offset * (t // 16)
    return column, lane


def _warn(w: Warp, kind: str, message: str) -> None:
    if w.launch.monitor is not None:
        w.launch.monitor.warn(kind, message, w.at)


def _locations(w: Warp, address: np.ndarray, pattern: tuple, mask):
    if mask is not ALL:
        raise KernelFault("tcgen05.ld/st needs all 32 lanes")
    first = int(address[0])
    column, lane = first & 0xFFFF, first >> 16
    if (address != address[0]).any():
        # Undefined, but compiled code does it and hardware takes one thread's address.
        _warn(w, "tcgen05.ld/st address", f"the TMEM address of warp {w.number} differs by lane")
    if lane < 32 and w.lane0:
        # Hardware takes the lane relative to the warp's own 32.
        _warn(w, "tcgen05.ld/st lane", f"TMEM lane {lane}: warp {w.number} reaches {w.lane0}..")
        lane += w.lane0
    allowed = (w.lane0,) if pattern[0] == "32x32b" else (w.lane0, w.lane0 + 16)
    if lane not in allowed:
        raise KernelFault(f"TMEM lane {lane}: warp {w.number} reaches lanes {w.lane0}..")
    columns, lanes = lane_pattern(*pattern)
    columns, lanes = columns + column, lanes + lane
    check_owned(w.cta, int(columns.min()), int(columns.max()) + 1)
    return columns, lanes


def _unpack16(values: np.ndarray) -> np.ndarray:
    """.pack::16b of a load: two 16-bit columns make one register."""
    return (values[0::2] & u32(0xFFFF)) | (values[1::2] << u32(16))


def tmem_load(w: Warp, address, shape: str, repeats: int, half: int, packed, registers, mask):
    """tcgen05.ld into registers (indices into R)."""
    columns, lanes = _locations(w, address, (shape, repeats, half, packed), mask)
    cta, R, monitor = w.cta, w.registers, w.launch.monitor
    if monitor is not None:
        monitor.tmem_access(w, cta, columns, lanes, False)
        w.pending_loads.update(dict.fromkeys(registers, w.at))

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
    columns, lanes = _locations(w, address, (shape, repeats, half, packed), mask)
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
        w.pending_loads.clear()
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
    scales, input_shift, zero_mask, a_shift, mask,
) -> None:  # fmt: skip
    """tcgen05.mma by each active lane (one, in a correct kernel); see Multiplication."""
    cta, monitor = w.cta, w.launch.monitor
    for lane in np.flatnonzero(mask).tolist():
        off = tuple(int(x[lane]) for x in disabled)
        product = Multiplication(
            kind, group, int(d[lane]), int(a[lane]), a_in_tmem, int(b[lane]), int(bits[lane]),
            bool(accumulate[lane]), off if any(off) else (), stationary,
            (int(scales[0][lane]), int(scales[1][lane]), scales[2]) if scales else None,
            input_shift, 0 if zero_mask is None else int(zero_mask[lane]), a_shift,
        )  # fmt: skip
        column = product.d & 0xFFFF
        columns = accumulator_columns(product.form, group, stationary)
        check_owned(cta, column, column + columns)
        if monitor is not None:
            monitor.multiply(w, cta, product, lane)
        perform = functools.partial(product.perform, cta)
        w.cluster.engine.issue("tcgen05.mma", _pipe(cta, group), perform)


def _pipe(cta: Cta, group: int) -> tuple:
    """The queue of a CTA's or a pair's tensor core: what is issued to it executes in order."""
    return ("tensor core", cta.rank & ~(group - 1))


def issue_shift(w: Warp, group: int, address, mask) -> None:
    """tcgen05.shift: 8 columns of 32 lanes move down by a row, in order with products."""
    for lane in np.flatnonzero(mask).tolist():
        column, first = int(address[lane]) & 0xFFFF, int(address[lane]) >> 16
        if first % 32:
            raise KernelFault(f"tcgen05.shift of TMEM lane {first}: a multiple of 32 is required")
        ctas = _pair(w, group)
        for cta in ctas:
            check_owned(cta, column, column + _SHIFT_COLUMNS)
            if w.launch.monitor is not None:
                lanes = np.arange(first, first + 32)
                w.launch.monitor.tmem_copy(w, cta, _NOTHING, column, _SHIFT_COLUMNS, lanes)
        perform = functools.partial(_shift, ctas, column, first)
        w.cluster.engine.issue("tcgen05.shift", _pipe(w.cta, group), perform)


_SHIFT_COLUMNS = 8
_NOTHING = np.empty(0, np.int64)  # of shared memory


def _shift(ctas: list[Cta], column: int, lane: int) -> None:
    for cta in ctas:
        shift_rows(cta, column, lane, _SHIFT_COLUMNS)


def _pair(w: Warp, group: int) -> list[Cta]:
    """The CTA, or both CTAs of its pair."""
    first = w.cta.rank & ~(group - 1)
    return w.cluster.ctas[first : first + group]


# Rows and bytes of each.
_COPY_SHAPES = {"128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16),
                "64x128b": (64, 16), "32x128b": (32, 16)}  # fmt: skip
# Lanes that row r goes to.
_COPY_LANES = {
    "128x256b": lambda r: [r],
    "128x128b": lambda r: [r],
    "4x256b": lambda r: [32 * r],
    "32x128b.warpx4": lambda r: [r + 32 * k for k in range(4)],
    "64x128b.warpx2::02_13": lambda r: [r, r + 64],
    "64x128b.warpx2::01_23": lambda r: [r + 32 * (r // 32), r + 32 * (r // 32) + 32],
}


def copy_lanes(form: str) -> list[np.ndarray]:
    """TMEM lanes of each row of a tcgen05.cp, relative to its address; `form` is the shape with
    its multicast. KeyError for a form that does not exist."""
    return [np.array(_COPY_LANES[form](r)) for r in range(_COPY_SHAPES[form.split(".")[0]][0])]


def issue_copy(w: Warp, group: int, form: str, bits: int, target, descriptor, mask) -> None:
    """tcgen05.cp: rows of shared memory to TMEM lanes, in order with the products.

    `bits` of 4 or 6 spreads padded groups of such elements over bytes; 0 copies as is.
    """
    rows, size = _COPY_SHAPES[form.split(".")[0]]
    for lane in np.flatnonzero(mask).tolist():
        column, base = int(target[lane]) & 0xFFFF, int(target[lane]) >> 16
        index = element_index(MatrixDescriptor.tcgen05(int(descriptor[lane])), rows, size, 1, True)
        lanes = [where + base for where in copy_lanes(form)]
        if max(int(where[-1]) for where in lanes) >= TMEM_LANES:
            raise KernelFault(f"tcgen05.cp.{form} from TMEM lane {base} leaves the TMEM")
        ctas = _pair(w, group)
        for cta in ctas:
            check_owned(cta, column, column + size // 4)
            if w.launch.monitor is not None:
                places = np.concatenate(lanes)
                w.launch.monitor.tmem_copy(w, cta, index, column, size // 4, places, lane)
        perform = functools.partial(_copy_rows, ctas, index, bits, column, lanes)
        w.cluster.engine.issue("tcgen05.cp", _pipe(w.cta, group), perform)


def _copy_rows(ctas: list[Cta], index, bits: int, column: int, lanes: list[np.ndarray]) -> None:
    for cta in ctas:
        data = cta.s8.take(index)
        words = (decompressed(data, bits) if bits else data).view(u32)
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


# --- emitters ------------------------------------------------------------------------------------
def _group(ins: Instruction) -> int:
    return 2 if "cta_group::2" in ins.parts else 1


@emits("tcgen05.alloc")
def emit_allocate(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    target, columns = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u32")
    e.line(
        f"if not allocate(w, {target}, {columns}, {_group(ins)}, store_shared): return {BLOCKED}"
    )


@emits("tcgen05.dealloc")
def emit_deallocate(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    start, columns = (e.value(operand, "u32") for operand in ins.operands[:2])
    e.line(f"deallocate(w, {start}, {columns}, {_group(ins)})")


@emits("tcgen05.relinquish_alloc_permit")
def emit_relinquish(e: BlockEmitter, ins: Instruction) -> None:
    e.line("relinquish(w)")


@emits("tcgen05.wait::ld", "tcgen05.wait::st")
def emit_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"tmem_wait(w, {ins.parts[1][-2:]!r})")


def _shape(ins: Instruction) -> tuple[str, int]:
    shape = next(p for p in ins.parts if p in REGISTERS_PER_REPEAT)
    repeats = next(int(p[1:]) for p in ins.parts if re.fullmatch(r"x\d+", p))
    return shape, repeats


@emits("tcgen05.ld")
def emit_load(e: BlockEmitter, ins: Instruction) -> None:
    if "red" in ins.parts:
        raise ValueError("tcgen05.ld.red exists on sm_103a and sm_101a only, not on sm_100a")
    e.mark()
    shape, repeats = _shape(ins)
    registers = e.vector(ins.operands[0])
    if len(registers) != repeats * REGISTERS_PER_REPEAT[shape]:
        raise ValueError("register count")
    half = int(ins.operands[2], 0) if len(ins.operands) > 2 else 0
    packed = "pack::16b" in ins.parts
    indices = tuple(e.registers.index[r] for r in registers)
    address = e.address(ins.operands[1], "u32")
    e.line(f"tmem_load(w, {address}, {shape!r}, {repeats}, {half}, {packed}, {indices}, {e.mask})")


@emits("tcgen05.st")
def emit_store(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    shape, repeats = _shape(ins)
    registers = e.vector(ins.operands[-1])
    if len(registers) != repeats * REGISTERS_PER_REPEAT[shape]:
        raise ValueError("register count")
    half = int(ins.operands[1], 0) if len(ins.operands) > 2 else 0
    packed = "unpack::16b" in ins.parts
    values = ", ".join(e.value(r, "u32") for r in registers)
    address = e.address(ins.operands[0], "u32")
    e.line(
        f"tmem_store(w, {address}, {shape!r}, {repeats}, {half}, {packed}, ({values},), {e.mask})"
    )


# Block scales per row of one instruction, by name of the block size and kind.
_SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
_DEFAULT_SCALES = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}


def _scales_per_row(ins: Instruction, kind: str) -> int:
    for part in ins.parts:
        if part in _SCALES:
            return _SCALES[part]
        if part in ("block16", "block32"):
            return {"mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}[kind] // int(part[5:])
    return _DEFAULT_SCALES[kind]


@emits("tcgen05.mma")
def emit_multiply(e: BlockEmitter, ins: Instruction) -> None:
    if "sp" in ins.parts:
        raise ValueError("sparse tcgen05.mma")
    e.mark()
    kind = next(p for p in ins.parts if p.startswith("kind::")).removeprefix("kind::")
    stationary = "ws" in ins.parts
    a_in_tmem = ins.operands[1].startswith("[")
    d = e.address(ins.operands[0], "u32")
    a = e.address(ins.operands[1], "u32") if a_in_tmem else e.value(ins.operands[1], "u64")
    b, bits = e.value(ins.operands[2], "u64"), e.value(ins.operands[3], "u32")
    rest = ins.operands[4:]
    disabled, scales, shift, zero_mask = "", "None", None, "None"
    if "block_scale" in ins.parts:
        places = ", ".join(e.address(x, "u32") for x in rest[:2])
        scales = f"({places}, {_scales_per_row(ins, kind)})"
        rest = rest[2:]
    elif rest[0].startswith("{"):
        disabled = "".join(f"{e.value(x, 'u32')}, " for x in e.vector(rest[0]))
        rest = rest[1:]
    accumulate = e.value(rest[0], "p")
    if len(rest) > 1 and not stationary:
        shift = int(rest[1], 0)
    elif len(rest) > 1:
        zero_mask = e.value(rest[1], "u64")
    e.line(
        f"issue_multiply(w, {_group(ins)}, {kind!r}, {d}, {a}, {a_in_tmem}, {b}, {bits}, "
        f"{accumulate}, ({disabled}), {stationary}, {scales}, {shift}, {zero_mask}, "
        f"{'ashift' in ins.parts}, {e.mask})"
    )


@emits("tcgen05.cp")
def emit_copy(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    form = ".".join(p for p in ins.parts if re.fullmatch(r"\d+x\d+b|warpx.*", p))
    copy_lanes(form)  # a KeyError, if there is no such form
    bits = next((_PADDED[p] for p in ins.parts if p in _PADDED), 0)
    target, descriptor = e.address(ins.operands[0], "u32"), e.value(ins.operands[1], "u64")
    e.line(f"issue_copy(w, {_group(ins)}, {form!r}, {bits}, {target}, {descriptor}, {e.mask})")


_PADDED = {"b6x16_p32": 6, "b4x16_p64": 4}  # bits of the elements that a copy spreads over bytes


@emits("tcgen05.shift")
def emit_shift(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"issue_shift(w, {_group(ins)}, {e.address(ins.operands[0], 'u32')}, {e.mask})")


@emits("tcgen05.commit")
def emit_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    barrier = e.address(ins.operands[0], "u32")
    multicast = e.value(ins.operands[1], "u16") if len(ins.operands) > 1 else "None"
    e.line(f"commit(w, {_group(ins)}, {barrier}, {multicast}, {e.mask})")
