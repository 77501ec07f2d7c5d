"""Barriers of the warp, of the CTA by number, and of the cluster.

Functions that may have to wait return False when the warp must park; the block is run again later.
"""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.collectives import emit_check_members
from dsv4.simulator.machine.memory import NamedBarrier
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction

NAMED_BARRIERS = 16


def whole_warp(w: Warp, mask: np.ndarray, instruction: str) -> None:
    """All threads of the warp that have not exited must take part."""
    if mask is not ALL and (w.frames[0].mask & ~mask).any():
        raise KernelFault(f"{instruction} in a part of a warp: all its threads must take it")


def _named(w: Warp, number: int, count: int | None) -> tuple[NamedBarrier, int]:
    if not 0 <= number < NAMED_BARRIERS:
        raise KernelFault(f"named barrier {number}, there are {NAMED_BARRIERS}")
    expected = w.launch.padded_threads if count is None else count
    if expected % 32 or not 0 < expected <= w.launch.padded_threads:
        raise KernelFault(
            f"barrier {number} expects {expected} threads: not a multiple of 32 "
            f"up to the CTA's {w.launch.padded_threads}"
        )
    barrier = w.cta.named.setdefault(number, NamedBarrier())
    if barrier.arrived and barrier.expected != expected:
        raise KernelFault(
            f"barrier {number} used with {expected} threads while {barrier.arrived} of "
            f"{barrier.expected} have arrived"
        )
    barrier.expected, barrier.everyone = expected, count is None
    return barrier, expected


def _arrive_named(w: Warp, number: int, barrier: NamedBarrier, expected: int) -> None:
    barrier.arrived += 32
    if barrier.arrived > expected:
        raise KernelFault(
            f"barrier {number}: {barrier.arrived} threads arrived, {expected} expected"
        )
    if w.launch.monitor is not None:
        w.launch.monitor.release(w, ("bar", w.cta.rank, number, barrier.generation))
    if barrier.arrived == expected:
        barrier.complete(w.turn)


def _others_exited(w: Warp, barrier: NamedBarrier) -> bool:
    """True if all that a barrier of the whole CTA still waits for are threads that have exited."""
    if not barrier.everyone or barrier.detached:
        return False
    exited = 32 * sum(warp.done for warp in w.cta.warps)
    return barrier.arrived + exited == barrier.expected


def bar_arrive(w: Warp, number: np.ndarray, count: np.ndarray, mask) -> None:
    if not mask.any():
        return
    whole_warp(w, mask, "bar.arrive")
    n = int(number[mask.argmax()])
    barrier, expected = _named(w, n, int(count[mask.argmax()]))
    barrier.detached += 32
    _arrive_named(w, n, barrier, expected)


def bar_sync(w: Warp, number: np.ndarray, count: np.ndarray | None, mask) -> bool:
    if not mask.any():
        return True
    whole_warp(w, mask, "bar.sync")
    lane = int(mask.argmax())
    n = int(number[lane])
    if w.bar_ticket is None:
        barrier, expected = _named(w, n, None if count is None else int(count[lane]))
        w.bar_ticket = (n, barrier.generation)
        _arrive_named(w, n, barrier, expected)
    barrier = w.cta.named[n]
    if barrier.generation == w.bar_ticket[1] and _others_exited(w, barrier):
        barrier.complete(w.turn)
    if barrier.generation == w.bar_ticket[1]:
        w.waiting = f"barrier {n} ({barrier.arrived} of {barrier.expected} threads arrived)"
        return False
    if w.launch.monitor is not None:
        w.launch.monitor.acquire(w, ("bar", w.cta.rank, n, w.bar_ticket[1]))
    w.bar_ticket = None
    w.informed_in = max(w.informed_in, barrier.completed_in)
    return True


def bar_reduce(w: Warp, op: str, number, count, predicate, mask) -> np.ndarray | None:
    """bar.red: the reduction over all threads, None while waiting."""
    lane = int(mask.argmax())
    n = int(number[lane])
    if w.bar_ticket is None:
        barrier, _ = _named(w, n, None if count is None else int(count[lane]))
        if barrier.arrived == 0:
            barrier.reduction = []
        barrier.reduction.append(predicate[mask].copy())
        # Kept: the barrier may be in use again when this warp resumes.
        w.bar_values = barrier.reduction
    values = w.bar_values
    if not bar_sync(w, number, count, mask):
        return None
    every = np.concatenate(values)
    if op == "popc":
        return np.full(32, every.sum(), np.uint32)
    return np.full(32, every.all() if op == "and" else every.any(), np.bool_)


def cluster_arrive(w: Warp, aligned: bool, mask: np.ndarray) -> None:
    """Every thread of the cluster arrives for itself."""
    if not mask.any():
        return
    if aligned:
        whole_warp(w, mask, "barrier.cluster.arrive.aligned")
    if (w.cluster_tickets[mask] >= 0).any():
        raise KernelFault("barrier.cluster.arrive twice without a wait")
    cluster = w.cluster
    w.cluster_tickets[mask] = cluster.barrier_generation
    if w.launch.monitor is not None:
        w.launch.monitor.cluster_arrive(w, cluster.barrier_generation, mask)
    cluster.barrier_arrived += int(mask.sum())
    _complete_cluster(w)


def _complete_cluster(w: Warp) -> None:
    """Pass the cluster barrier if every thread has arrived, or has exited without."""
    cluster = w.cluster
    missing = 32 * cluster.warps_total - cluster.barrier_arrived
    if missing:
        for warp in (warp for cta in cluster.ctas for warp in cta.warps):
            if warp.frames and warp.frames[0].mask is ALL:
                continue  # no thread has exited: the common case
            exited = ~warp.frames[0].mask if warp.frames else ALL
            missing -= int((exited & (warp.cluster_tickets != cluster.barrier_generation)).sum())
    if not missing:
        cluster.barrier_arrived = 0
        cluster.barrier_generation += 1
        cluster.barrier_completed_in = w.turn


def cluster_wait(w: Warp, aligned: bool, mask: np.ndarray) -> bool:
    """Wait for the generation in which each thread arrived."""
    if not mask.any():
        return True
    if aligned:
        whole_warp(w, mask, "barrier.cluster.wait.aligned")
    tickets = w.cluster_tickets[mask]
    if (tickets < 0).any():
        raise KernelFault("barrier.cluster.wait without an arrive")
    cluster = w.cluster
    if (tickets == cluster.barrier_generation).any():
        _complete_cluster(w)
    if (tickets == cluster.barrier_generation).any():
        threads = 32 * cluster.warps_total
        w.waiting = f"cluster barrier ({cluster.barrier_arrived} of {threads} threads arrived)"
        return False
    if w.launch.monitor is not None:
        for generation in np.unique(tickets).tolist():
            lanes = mask & (w.cluster_tickets == generation)
            w.launch.monitor.cluster_wait(w, generation, lanes)
    w.cluster_tickets[mask] = -1
    w.informed_in = max(w.informed_in, cluster.barrier_completed_in)
    return True


def warp_sync(w: Warp, mask: np.ndarray) -> None:
    """bar.warp.sync: lanes of a warp run in step already; only the checker cares."""
    if w.launch.monitor is not None and mask.any():
        w.launch.monitor.warp_sync(w)


# --- emitters ------------------------------------------------------------------------------------
@emits("bar", "barrier")
def emit_barrier(e: BlockEmitter, ins: Instruction) -> None:
    parts = [p for p in ins.parts if p not in ("cta", "aligned")]
    e.mark()
    if parts[1] == "cluster":
        aligned = "aligned" in ins.parts
        if parts[2] == "arrive":
            e.line(f"cluster_arrive(w, {aligned}, {e.mask})")
        else:
            e.park_unless(f"cluster_wait(w, {aligned}, {e.mask})")
    elif parts[1] == "warp":
        emit_check_members(e, ins)
        e.line(f"warp_sync(w, {e.mask})")
    elif parts[1] == "arrive":
        number, count = (e.value(x, "u32") for x in ins.operands[:2])
        e.line(f"bar_arrive(w, {number}, {count}, {e.mask})")
    elif parts[1] == "sync":
        number = e.value(ins.operands[0], "u32")
        count = e.value(ins.operands[1], "u32") if len(ins.operands) > 1 else "None"
        e.park_unless(f"bar_sync(w, {number}, {count}, {e.mask})")
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
