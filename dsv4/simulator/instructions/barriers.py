"""Named barriers, cluster barriers, mbarrier instructions and non-bulk asynchronous copies.

Functions that may have to wait return False when the warp must park; the block is run again later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.mbarrier import MemoryBarrier
from dsv4.simulator.machine.memory import OFFSET_MASK, NamedBarrier
from dsv4.simulator.machine.warp import ALL, Warp

NAMED_BARRIERS = 16
_MISSED = 0.25  # of the completions that a test in the `random` schedule may miss
_PENDING_SHIFT = 40  # of the pending count in a state token; the phase is below


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


# --- mbarrier ------------------------------------------------------------------------------------
def mbarrier_init(w: Warp, address: np.ndarray, count: np.ndarray, mask) -> None:
    for lane in np.flatnonzero(mask).tolist():
        a = int(address[lane])
        if a & 7:
            raise KernelFault(f"mbarrier address {a & OFFSET_MASK:#x} is not 8-byte aligned")
        cta = w.cluster.cta_at(a)
        offset = a & OFFSET_MASK
        if offset + 8 > cta.shared_limit:
            raise KernelFault(f"mbarrier at offset {offset:#x} is outside shared memory")
        w.cluster.barriers[a] = MemoryBarrier(a, int(count[lane]), w.launch, w.at)
        cta.s8[offset : offset + 8] = 0
        if w.launch.monitor is not None:
            w.launch.monitor.barrier_init(w, a)


def mbarrier_inval(w: Warp, address: np.ndarray, mask) -> None:
    for lane in np.flatnonzero(mask).tolist():
        a = int(address[lane])
        w.cluster.barrier(a)
        del w.cluster.barriers[a]
        if w.launch.monitor is not None:
            w.launch.monitor.barrier_inval(w, a)


def mbarrier_arrive(w: Warp, address, count, expected, mask, drop: bool = False) -> np.ndarray:
    """arrive, with the bytes of expect_tx if given; the token holds phase and pending count."""
    state = np.zeros(32, np.uint64)
    if expected is None and not drop and _arrive_together(w, address, count, mask, state):
        return state
    released = None
    for lane in mask.nonzero()[0].tolist():
        w.informed_in = w.turn
        barrier = w.cluster.barrier(int(address[lane]))
        state[lane] = barrier.phase | barrier.pending << _PENDING_SHIFT
        if w.launch.monitor is not None and released != (barrier.address, barrier.phase):
            released = barrier.address, barrier.phase
            w.launch.monitor.release_barrier(w, barrier, mask & (address == address[lane]))
        if expected is not None:
            barrier.expect(int(expected[lane]), w.at)
        n = 1 if count is None else int(count[lane])
        if drop:
            barrier.drop(n)
        else:
            barrier.arrive(n)
    return state


def _arrive_together(w: Warp, address, count, mask, state: np.ndarray) -> bool:
    """Let several lanes arrive at one barrier at once, if they do not complete its phase halfway;
    False if nothing was done."""
    lanes = mask.nonzero()[0]
    if len(lanes) < 2:
        return False
    first = address[lanes[0]]
    barrier = w.cluster.barrier(int(first))
    counts = np.ones(len(lanes), np.int64) if count is None else count[lanes].astype(np.int64)
    before = np.add.accumulate(counts)
    total = int(before[-1])
    if total > barrier.pending or np.logical_or.reduce(address[lanes] != first):
        return False
    w.informed_in = w.turn
    pending = barrier.pending + counts - before
    state[lanes] = barrier.phase | pending << _PENDING_SHIFT
    if w.launch.monitor is not None:
        w.launch.monitor.release_barrier(w, barrier, mask & (address == first))
    barrier.arrive(total)
    return True


def mbarrier_expect(w: Warp, address: np.ndarray, size: np.ndarray, mask) -> None:
    for lane in np.flatnonzero(mask).tolist():
        w.informed_in = w.turn
        w.cluster.barrier(int(address[lane])).expect(int(size[lane]), w.at)


def mbarrier_complete(w: Warp, address: np.ndarray, size: np.ndarray, mask) -> None:
    for lane in np.flatnonzero(mask).tolist():
        w.informed_in = w.turn
        w.cluster.barrier(int(address[lane])).complete(int(size[lane]))


class Awaited(NamedTuple):
    """Condition that a warp waits for; described on demand, as polls are many."""

    barrier: MemoryBarrier
    parity: int

    def __str__(self) -> str:
        return f"{self.barrier}, parity {self.parity & 1}"


def _uniform(values: np.ndarray) -> bool:
    """Whether all lanes hold one value; quicker than comparing arrays."""
    raw = values.tobytes()
    return raw == raw[: values.itemsize] * len(values)


def _passed(w: Warp, address: np.ndarray, parity: np.ndarray, mask) -> tuple[bool, object]:
    lane = 0 if mask is ALL else int(mask.argmax())
    a, p = int(address[lane]), int(parity[lane])
    if mask is ALL and _uniform(address) and _uniform(parity):
        differ = False
    else:
        differ = np.logical_or.reduce(((address != a) | (parity != p)) & mask)
    if differ:
        for lane in np.flatnonzero(mask).tolist():
            barrier = w.cluster.barrier(int(address[lane]))
            if not barrier.passed(int(parity[lane])):
                return False, Awaited(barrier, int(parity[lane]))
            _acquire(w, barrier, mask & (address == address[lane]))
        return True, ""
    barrier = w.cluster.barrier(a)
    if not barrier.passed(p):
        return False, Awaited(barrier, p)
    _acquire(w, barrier, mask)
    return True, ""


def _acquire(w: Warp, barrier: MemoryBarrier, mask: np.ndarray) -> None:
    w.informed_in = max(w.informed_in, barrier.completed_in)
    if w.launch.monitor is not None:
        w.launch.monitor.acquire_barrier(w, barrier, mask)


def mbarrier_wait(w: Warp, address: np.ndarray, parity: np.ndarray, mask) -> bool:
    """Blocking try_wait (with a suspend-time hint)."""
    if not mask.any():
        return True
    passed, w.waiting = _passed(w, address, parity, mask)
    return passed


def mbarrier_test(w: Warp, address: np.ndarray, parity: np.ndarray, mask) -> np.ndarray:
    """Polling test_wait or try_wait: the predicate."""
    out = np.zeros(32, np.bool_)
    if not mask.any():
        return out
    if w.launch.schedule == "random" and _tested_before(w, address[mask]):
        w.polling = True
        return out
    passed, waiting = _passed(w, address, parity, mask)
    if passed:
        return ALL
    w.polling, w.waiting = True, waiting
    return out


def _tested_before(w: Warp, addresses: np.ndarray) -> bool:
    """Let a test miss a completion now and then, as if the warp had been here a little earlier.

    It may, as long as nothing it did or waited for since then comes after the completion.
    """
    if w.polling or w.launch.random.random() >= _MISSED:
        return False
    return all(
        w.cluster.barrier(a).completed_in > w.informed_in for a in np.unique(addresses).tolist()
    )


def mbarrier_test_state(w: Warp, address: np.ndarray, state: np.ndarray, mask) -> np.ndarray:
    """test_wait with a state token: has the token's phase completed?"""
    return mbarrier_test(w, address, (state & np.uint64(1)).astype(np.uint32), mask)


def mbarrier_pending(state: np.ndarray) -> np.ndarray:
    """pending_count: what was pending before the arrival that returned the token."""
    return (state >> np.uint64(_PENDING_SHIFT)).astype(np.uint32)


# --- cp.async ------------------------------------------------------------------------------------
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
