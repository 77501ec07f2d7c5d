"""cp.async: copies of 4, 8 or 16 bytes by each thread, their groups and arrivals."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction


def copy_async(w: Warp, target, source, size: int, source_size, mask) -> None:
    """cp.async of 4, 8 or 16 bytes per lane; bytes past `source_size` become zero."""
    lanes = np.flatnonzero(mask).tolist()
    if not lanes:
        return
    moves = []
    for lane in lanes:
        offset, address = int(target[lane]) - w.cta.base, int(source[lane])
        wanted = size if source_size is None else int(source_size[lane])
        if offset % size or (wanted and address % size):
            raise KernelFault(f"cp.async of {size} bytes is misaligned")
        if not 0 <= offset <= w.cta.shared_limit - size:
            raise KernelFault(f"cp.async to shared offset {offset:#x} is out of bounds")
        moves.append((lane, offset, address, wanted))
    monitor = w.launch.monitor
    clock = monitor.copy_issue(w, moves, size) if monitor is not None else 0

    waiting = moves[::-1]

    def perform() -> None:
        # Once: a copy may be in the group of a wait, and is before every later arrival.
        while waiting:
            _, offset, address, wanted = waiting.pop()
            w.cta.s8[offset : offset + size] = 0
            if wanted:
                w.cta.s8[offset : offset + wanted] = w.cluster.memory.read(address, wanted)

    if w.cluster.engine.eager:
        perform()
    w.copy_open.append((clock, perform))


def copy_commit(w: Warp) -> None:
    w.copy_groups.append(w.copy_open)
    w.copy_open = []


def copy_wait(w: Warp, groups: int) -> None:
    """cp.async.wait_group: at most `groups` youngest groups may be pending."""
    while len(w.copy_groups) > groups:
        _finish(w, w.copy_groups.popleft())


def _finish(w: Warp, group: list) -> None:
    if not w.cluster.engine.eager:
        for _, perform in group:
            perform()
    if w.launch.monitor is not None and group:
        w.launch.monitor.copy_waited(w, group[-1][0])


def copy_wait_all(w: Warp) -> None:
    copy_commit(w)
    copy_wait(w, 0)


def copy_arrive(w: Warp, address: np.ndarray, no_increment: bool, mask) -> None:
    """cp.async.mbarrier.arrive: the arrival follows every earlier cp.async of the thread."""
    earlier = [p for group in w.copy_groups for p in group] + w.copy_open
    lanes = np.flatnonzero(mask).tolist()
    targets = [w.cluster.barrier(int(address[lane])) for lane in lanes]
    if not no_increment:
        for barrier in targets:
            barrier.pending += 1
    monitor = w.launch.monitor
    snapshot = monitor.snapshot_copies(w) if monitor is not None else None

    def perform() -> None:
        if not w.cluster.engine.eager:
            for _, copy in earlier:
                copy()
        for barrier in targets:
            if monitor is not None:
                monitor.release_snapshot(snapshot, barrier)
            barrier.arrive(1)

    w.cluster.engine.issue("cp.async arrive", ("cp.async", w.cta.rank, w.number), perform)


# --- emitters ------------------------------------------------------------------------------------
@emits("cp.async")
def emit_copy(e: BlockEmitter, ins: Instruction) -> None:
    target, source = e.address(ins.operands[0], "u32"), e.address(ins.operands[1], "u64")
    size = int(ins.operands[2], 0)
    limit = e.value(ins.operands[3], "u32") if len(ins.operands) > 3 else "None"
    e.mark()
    e.line(f"copy_async(w, {target}, {source}, {size}, {limit}, {e.mask})")


@emits("cp.async.commit_group")
def emit_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.line("copy_commit(w)")


@emits("cp.async.wait_group")
def emit_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"copy_wait(w, {int(ins.operands[0], 0)})")


@emits("cp.async.wait_all")
def emit_wait_all(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line("copy_wait_all(w)")


@emits("cp.async.mbarrier")
def emit_arrive(e: BlockEmitter, ins: Instruction) -> None:
    address = e.address(ins.operands[0], "u32")
    e.mark()
    e.line(f"copy_arrive(w, {address}, {'noinc' in ins.parts}, {e.mask})")
