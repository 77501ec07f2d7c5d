"""mbarrier instructions; machine/mbarrier.py has the barriers themselves.

Functions that may have to wait return False when the warp must park; the block is run again later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.mbarrier import MemoryBarrier
from dsv4.simulator.machine.memory import OFFSET_MASK
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.blocks import may_block
from dsv4.simulator.ptx.entry import Instruction

_MISSED = 0.25  # of the completions that a test in the `random` schedule may miss
_PENDING_SHIFT = 40  # of the pending count in a state token; the phase is below


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

    Allowed while the warp has learnt of nothing newer than the completion.
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


# --- emitters ------------------------------------------------------------------------------------
def _barrier_address(e: BlockEmitter, operand: str) -> str:
    return e.address(operand, "u32")


@emits("mbarrier")
def emit_mbarrier(e: BlockEmitter, ins: Instruction) -> None:
    operation = ins.parts[1]
    e.mark()
    handler = {
        "init": _mbarrier_init,
        "inval": _mbarrier_inval,
        "arrive": _mbarrier_arrive,
        "arrive_drop": _mbarrier_arrive,
        "expect_tx": _mbarrier_bytes,
        "complete_tx": _mbarrier_bytes,
        "pending_count": _mbarrier_pending,
        "try_wait": _mbarrier_wait,
        "test_wait": _mbarrier_wait,
    }[operation]
    handler(e, ins)


def _mbarrier_init(e: BlockEmitter, ins: Instruction) -> None:
    address = _barrier_address(e, ins.operands[0])
    e.line(f"mbarrier_init(w, {address}, {e.value(ins.operands[1], 'u32')}, {e.mask})")


def _mbarrier_inval(e: BlockEmitter, ins: Instruction) -> None:
    e.line(f"mbarrier_inval(w, {_barrier_address(e, ins.operands[0])}, {e.mask})")


def _mbarrier_arrive(e: BlockEmitter, ins: Instruction) -> None:
    operands = list(ins.operands)
    state = "_" if operands[0].startswith("[") else operands.pop(0)
    address = _barrier_address(e, operands[0])
    extra = e.value(operands[1], "u32") if len(operands) > 1 else "None"
    with_bytes = "expect_tx" in ins.parts
    count, size = ("None", extra) if with_bytes else (extra, "None")
    drop = ins.parts[1] == "arrive_drop"
    out = f"mbarrier_arrive(w, {address}, {count}, {size}, {e.mask}, {drop})"
    e.define(state, out, "u64")


def _mbarrier_bytes(e: BlockEmitter, ins: Instruction) -> None:
    address, size = _barrier_address(e, ins.operands[0]), e.value(ins.operands[1], "u32")
    name = "mbarrier_expect" if ins.parts[1] == "expect_tx" else "mbarrier_complete"
    e.line(f"{name}(w, {address}, {size}, {e.mask})")


def _mbarrier_pending(e: BlockEmitter, ins: Instruction) -> None:
    state = e.value(ins.operands[1], "u64")
    e.define(ins.operands[0], f"mbarrier_pending({state})", "u32")


def _mbarrier_wait(e: BlockEmitter, ins: Instruction) -> None:
    address = _barrier_address(e, ins.operands[1])
    if "parity" not in ins.parts:
        state = e.value(ins.operands[2], "u64")
        out = f"mbarrier_test_state(w, {address}, {state}, {e.mask})"
        e.define(ins.operands[0], out, "p")
        return
    parity = e.value(ins.operands[2], "u32")
    if may_block(ins):
        e.park_unless(f"mbarrier_wait(w, {address}, {parity}, {e.mask})")
        e.define(ins.operands[0], "ALL", "p")
    else:
        out = f"mbarrier_test(w, {address}, {parity}, {e.mask})"
        e.define(ins.operands[0], out, "p")
