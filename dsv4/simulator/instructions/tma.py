"""Bulk and tensor copies between global and shared memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.tensor_map import (
    MAP_BYTES,
    Placement,
    TensorMap,
    reduce_bytes,
)
from dsv4.simulator.machine.memory import CHUNK, OFFSET_MASK, PARAM_WINDOW, RANK_SHIFT, Cta
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.races.cells.footprints import run_footprint, tensor_footprint

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


# --- at run time ---------------------------------------------------------------------------------
def _map(w: Warp, address: int, lane: int) -> TensorMap:
    if address & 63:
        raise KernelFault(f"tensor map at {address:#x} is not 64-byte aligned")
    if address >= PARAM_WINDOW:
        offset = address - PARAM_WINDOW
        raw = w.cluster.params[offset : offset + MAP_BYTES]
    else:
        raw = w.cluster.memory.read(address, MAP_BYTES).tobytes()
        if w.launch.monitor is not None:
            w.launch.monitor.map_read(w, address, lane)
    found = w.launch.tensor_maps.get(raw)
    if found is None:
        found = w.launch.tensor_maps[raw] = TensorMap(raw, w.cluster.memory)
    return found


def _signed(value) -> int:
    bits = int(value)
    return bits - (bits >> 31 << 32)


def _check_room(cta: Cta, stop: int) -> None:
    if stop > cta.shared_limit:
        raise KernelFault(
            f"copy reaches shared offset {stop:#x}, the CTA has {cta.shared_limit:#x} bytes"
        )


def _chunks(cta: Cta, offsets: np.ndarray) -> np.ndarray:
    """Row numbers of 16-byte chunks, after the bounds check."""
    if not len(offsets):
        return offsets
    _check_room(cta, int(offsets.max()) + 16)
    return offsets >> 4


def _targets(w: Warp, target: int, barrier: int, multicast: int | None, pair: bool):
    """(CTA, barrier address) for each CTA that receives the copy."""
    if multicast is None:
        return [(w.cluster.cta_at(target), barrier)]
    out = []
    for rank, cta in enumerate(w.cluster.ctas):
        if multicast >> rank & 1:
            # With cta_group::2 the signal goes to the CTA of the pair that the barrier names.
            home = (rank & ~1) | (barrier >> RANK_SHIFT & 1) if pair else rank
            out.append((cta, (barrier & OFFSET_MASK) | home << RANK_SHIFT))
    if multicast >> len(w.cluster.ctas):
        raise KernelFault(f"multicast mask {multicast:#x} names CTAs outside the cluster")
    return out


def tensor_load(w: Warp, form, tensor, coordinates, target, barrier, multicast, mask) -> None:
    """cp.async.bulk.tensor global -> shared. `form` = (mode, cta pair?)."""
    mode, pair = form
    for lane in np.flatnonzero(mask).tolist():
        m = _map(w, int(tensor[lane]), lane)
        origin = [_signed(c[lane]) for c in coordinates]
        a, b = int(target[lane]), int(barrier[lane])
        _check_tile(m, mode, origin, a & OFFSET_MASK, stored=False)
        rows = None if mode == "tile" else 4
        receivers = _targets(w, a, b, None if multicast is None else int(multicast[lane]), pair)
        _issue_load(w, m, mode, origin, receivers, m.placement(a & OFFSET_MASK, rows), lane)


def _check_tile(m: TensorMap, mode: str, origin: list[int], offset: int, *, stored: bool) -> None:
    wanted = m.rank if mode == "tile" else 5
    if len(origin) != wanted:
        raise KernelFault(f"{len(origin)} coordinates for a rank-{m.rank} tensor map ({mode})")
    if offset & 127:
        raise KernelFault(f"tensor copy to shared offset {offset:#x}: 128-byte alignment needed")
    m.check_origin(origin, stored=stored)


def _issue_load(
    w: Warp, m: TensorMap, mode: str, origin, receivers, place: Placement, lane: int
) -> None:
    monitor = w.launch.monitor
    for cta, _ in receivers:
        _check_room(cta, place.stop)
    offsets, chunks, _ = place
    size = len(offsets) * m.chunk_bytes
    ticket = None
    if monitor is not None:
        source = tensor_footprint(m, mode, origin)
        ticket = monitor.bulk_load(w, receivers, offsets, lane, source)

    def perform() -> None:
        data = m.in_place(m.load_chunks(mode, origin), offsets)
        for cta, address in receivers:
            cta.chunks[chunks] = data
            target = w.cluster.barrier(address)
            if monitor is not None:
                monitor.bulk_load_done(ticket, cta, target)
            target.complete(size)

    w.cluster.engine.issue("tensor load", None, perform)


def tensor_store(w: Warp, form, tensor, coordinates, source, mask) -> None:
    """cp(.reduce).async.bulk.tensor shared -> global. `form` = (mode, op, dtype)."""
    mode, op = form
    seen = set()
    for lane in np.flatnonzero(mask).tolist():
        m = _map(w, int(tensor[lane]), lane)
        origin = [_signed(c[lane]) for c in coordinates]
        a = int(source[lane])
        # Compiled code lets a whole warp reach a store that one thread is meant to issue.
        key = (id(m), tuple(origin), a)
        if key in seen:
            continue
        seen.add(key)
        _check_tile(m, mode, origin, a & OFFSET_MASK, stored=True)
        offsets, rows, stop = m.placement(a & OFFSET_MASK, None if mode == "tile" else 4)
        _check_room(w.cta, stop)
        if w.launch.monitor is not None:
            target = tensor_footprint(m, mode, origin)
            w.launch.monitor.bulk_store(w, w.cta, offsets, lane, target, op)

        def write(data, m=m, origin=origin, offsets=offsets) -> None:
            m.store_chunks(mode, origin, m.in_place(data, offsets), op)

        _issue_store(w, rows, write, "tensor store")


class BulkStore:
    """A copy out of shared memory: its source is read, then its target written."""

    def __init__(self, cta: Cta, rows: np.ndarray, write: Callable[[np.ndarray], None], at: int):
        self.cta, self.rows, self.write, self.at = cta, rows, write, at
        self.data: np.ndarray | None = None

    def read(self) -> None:
        """Read the source, once."""
        if self.data is None:
            self.data = self.cta.chunks[self.rows]

    def perform(self) -> None:
        """Write the target, once."""
        if self.write is not None:
            self.read()
            self.write(self.data)
            self.write = None


def _issue_store(w: Warp, rows: np.ndarray, write, kind: str) -> None:
    """Add to the open bulk group: performed now (eager) or when the group must be complete."""
    store = BulkStore(w.cta, rows, write, w.at)
    w.bulk_open.append(store)
    w.cluster.engine.issue(kind, None, store.perform)


def bulk_commit(w: Warp, mask) -> None:
    if mask.any():
        w.bulk_groups.append(w.bulk_open)
        w.bulk_open = []
        if w.launch.monitor is not None:
            w.launch.monitor.bulk_committed(w)


def bulk_wait(w: Warp, groups: int, read: bool, mask) -> bool:
    """cp.async.bulk.wait_group: complete all but the youngest `groups` groups; with .read they
    have read their sources, and may write later."""
    if not mask.any():
        return True
    monitor = w.launch.monitor
    while len(w.bulk_groups) - w.bulk_read > groups:
        for store in w.bulk_groups[w.bulk_read]:
            store.read()
        w.bulk_read += 1
        if monitor is not None:
            monitor.bulk_waited(w, mask)
    while not read and len(w.bulk_groups) > groups:
        for store in w.bulk_groups.popleft():
            store.perform()
        w.bulk_read -= 1
        if monitor is not None:
            monitor.bulk_written(w, mask)
    return True


def bulk_load(w: Warp, source, target, size, barrier, multicast, mask) -> None:
    """cp.async.bulk global -> shared (1-D)."""
    for lane in np.flatnonzero(mask).tolist():
        a, s, n, b = int(target[lane]), int(source[lane]), int(size[lane]), int(barrier[lane])
        _check_bulk(a | s | n)
        receivers = _targets(w, a, b, None if multicast is None else int(multicast[lane]), False)
        offsets = (a & OFFSET_MASK) + np.arange(n // 16) * 16
        data = w.cluster.memory.read(s, n).view(CHUNK)
        _issue_bulk(w, lambda data=data: data, receivers, offsets, lane, source=run_footprint(s, n))


def _check_bulk(bits: int) -> None:
    if bits & 15:
        raise KernelFault("bulk copy: addresses and size must be multiples of 16 bytes")


def _issue_bulk(
    w: Warp, fetch: Callable[[], np.ndarray], receivers, offsets, lane: int, source=None,
    reduction: tuple[str, str] | None = None,
) -> None:  # fmt: skip
    """Copy what `fetch` gives, or combine it by `reduction` = (operation, type)."""
    if not len(offsets):
        return
    monitor = w.launch.monitor
    chunks = [_chunks(cta, offsets) for cta, _ in receivers]
    ticket = None
    if monitor is not None:
        ticket = monitor.bulk_load(w, receivers, offsets, lane, source)

    def perform() -> None:
        data = fetch()
        for (cta, address), rows in zip(receivers, chunks):
            if reduction is not None:
                old = cta.chunks[rows].view(np.uint8)
                data = reduce_bytes(*reduction, old, data.view(np.uint8)).view(CHUNK)
            cta.chunks[rows] = data
            target = w.cluster.barrier(address)
            if monitor is not None:
                monitor.bulk_load_done(ticket, cta, target)
            target.complete(data.nbytes)

    w.cluster.engine.issue("bulk load", None, perform)


def bulk_store(w: Warp, op, dtype, target, source, size, bytes_of_16, mask) -> None:
    """cp(.reduce).async.bulk shared -> global (1-D).

    Bit i of `bytes_of_16` says whether byte i of each 16 is written; None writes all.
    """
    for lane in np.flatnonzero(mask).tolist():
        a, s, n = int(target[lane]), int(source[lane]), int(size[lane])
        _check_bulk(a | s | n)
        offsets = (s & OFFSET_MASK) + np.arange(n // 16) * 16
        rows = _chunks(w.cta, offsets)
        memory = w.cluster.memory.read(a, n)
        monitor = w.launch.monitor
        if monitor is not None:
            monitor.bulk_store(w, w.cta, offsets, lane, run_footprint(a, n), op)

        kept = _kept_bytes(bytes_of_16, lane, n)

        def write(data, memory=memory, kept=kept) -> None:
            data = data.view(np.uint8)
            if op is not None:
                data = reduce_bytes(op, dtype, memory.copy(), data)
            memory[:] = data if kept is None else np.where(kept, memory, data)

        _issue_store(w, rows, write, "bulk store")


def _kept_bytes(bytes_of_16, lane: int, size: int) -> np.ndarray | None:
    """bool [size]: the bytes a masked copy leaves alone."""
    if bytes_of_16 is None:
        return None
    written = np.unpackbits(np.array([bytes_of_16[lane]], "<u2").view(np.uint8), bitorder="little")
    return np.tile(written == 0, size // 16)


def bulk_to_cluster(w: Warp, reduction, target, source, size, barrier, mask) -> None:
    """cp(.reduce).async.bulk shared::cta -> shared::cluster."""
    for lane in np.flatnonzero(mask).tolist():
        a, s, n, b = int(target[lane]), int(source[lane]), int(size[lane]), int(barrier[lane])
        _check_bulk(a | s | n)
        chunk = np.arange(n // 16) * 16
        rows = _chunks(w.cta, (s & OFFSET_MASK) + chunk)
        if w.launch.monitor is not None:
            w.launch.monitor.cluster_copy(w, (s & OFFSET_MASK) + chunk, b, lane)
        fetch = functools.partial(w.cta.chunks.__getitem__, rows)
        receivers = [(w.cluster.cta_at(a), b)]
        _issue_bulk(w, fetch, receivers, (a & OFFSET_MASK) + chunk, lane, reduction=reduction)


# --- emitters ------------------------------------------------------------------------------------
def _tensor_operand(e: BlockEmitter, ins: Instruction, operand: str) -> tuple[str, str]:
    m = re.match(r"^\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]$", operand)
    if m is None:
        raise ValueError(f"tensor operand {operand}")
    names = m.group(2).split(",")
    dimensions = next(int(p[0]) for p in ins.parts if re.fullmatch(r"\dd", p))
    # A column and four rows, or a coordinate for each dimension.
    if _mode(ins) != "tile" and (dimensions, len(names)) != (2, 5):
        raise ValueError("gather4 and scatter4 of anything but two dimensions")
    if _mode(ins) == "tile" and dimensions != len(names):
        raise ValueError(f"{len(names)} coordinates")
    coordinates = ", ".join(e.value(c, "u32") for c in names)
    return e.value(m.group(1), "u64"), f"({coordinates},)"


def _mode(ins: Instruction) -> str:
    for mode in ("tile::gather4", "tile::scatter4"):
        if mode in ins.parts:
            return mode.split("::")[1]
    if any(p.startswith("im2col") for p in ins.parts):
        raise ValueError("im2col")
    return "tile"


@emits("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def emit_tensor(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    if ".global.shared::cta" in ins.opcode:
        tensor, coordinates = _tensor_operand(e, ins, ins.operands[0])
        op = next((p for p in ins.parts if p in _REDUCTIONS), None)
        source = e.address(ins.operands[1], "u32")
        form = (_mode(ins), op if ins.parts[1] == "reduce" else None)
        e.line(f"tensor_store(w, {form!r}, {tensor}, {coordinates}, {source}, {e.mask})")
        return
    tensor, coordinates = _tensor_operand(e, ins, ins.operands[1])
    target, barrier = e.address(ins.operands[0], "u32"), e.address(ins.operands[2], "u32")
    multicast = "None"
    if "multicast::cluster" in ins.parts:
        multicast = e.value(ins.operands[3], "u16")
    form = (_mode(ins), "cta_group::2" in ins.parts)
    e.line(
        f"tensor_load(w, {form!r}, {tensor}, {coordinates}, {target}, {barrier}, {multicast}, "
        f"{e.mask})"
    )


@emits("cp.async.bulk.commit_group")
def emit_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.line(f"bulk_commit(w, {e.mask})")


@emits("cp.async.bulk.wait_group")
def emit_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    groups, read = int(ins.operands[0], 0), "read" in ins.parts
    e.line(f"if not bulk_wait(w, {groups}, {read}, {e.mask}): return {BLOCKED}")


@emits("cp.async.bulk.prefetch")
def emit_prefetch(e: BlockEmitter, ins: Instruction) -> None:
    """A hint: no effect on memory."""


@emits("cp.async.bulk", "cp.reduce.async.bulk")
def emit_bulk(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    spaces = [p for p in ins.parts if p.startswith(("shared", "global"))]
    size = e.value(ins.operands[2], "u32")
    op = None
    if ins.parts[1] == "reduce":
        op = next(p for p in ins.parts if p in _REDUCTIONS)
    dtype = ins.parts[-1]
    if spaces[0] == "global":
        target, source = e.address(ins.operands[0], "u64"), e.address(ins.operands[1], "u32")
        written = e.value(ins.operands[-1], "u16") if "cp_mask" in ins.parts else "None"
        e.line(f"bulk_store(w, {op!r}, {dtype!r}, {target}, {source}, {size}, {written}, {e.mask})")
        return
    target, barrier = e.address(ins.operands[0], "u32"), e.address(ins.operands[3], "u32")
    if spaces[1] == "global":
        multicast = "None"
        if "multicast::cluster" in ins.parts:
            multicast = e.value(ins.operands[4], "u16")
        source = e.address(ins.operands[1], "u64")
        e.line(f"bulk_load(w, {source}, {target}, {size}, {barrier}, {multicast}, {e.mask})")
    else:
        source = e.address(ins.operands[1], "u32")
        form = (op, dtype) if op else None
        e.line(f"bulk_to_cluster(w, {form!r}, {target}, {source}, {size}, {barrier}, {e.mask})")
