"""The launches around: cluster launch control, and programmatic dependent launch."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.machine.memory import OFFSET_MASK, RANK_SHIFT
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction

RESPONSE_BYTES = 16


def try_cancel(w: Warp, target: np.ndarray, barrier: np.ndarray, multicast: bool, mask) -> None:
    """Take over a cluster that has not started; the response completes 16 bytes on an mbarrier.

    The response holds the first CTA's index in words 0..2 and whether there is one in word 3.
    """
    cluster = w.cluster
    for lane in np.flatnonzero(mask).tolist():
        response = np.zeros(4, np.uint32)
        if w.launch.waiting:
            _, origin = w.launch.waiting.pop()
            response[:] = (*origin, 1)
        ranks = range(len(cluster.ctas)) if multicast else (int(target[lane]) >> RANK_SHIFT,)
        offset = int(target[lane]) & OFFSET_MASK
        home = int(barrier[lane]) & OFFSET_MASK
        receivers = [(cluster.ctas[r], home | r << RANK_SHIFT) for r in ranks]
        offsets = np.array([offset])
        monitor = w.launch.monitor
        ticket = monitor.bulk_load(w, receivers, offsets, lane) if monitor is not None else None

        def perform(receivers=receivers, offset=offset, response=response, ticket=ticket) -> None:
            for cta, address in receivers:
                cta.s8[offset : offset + RESPONSE_BYTES] = response.view(np.uint8)
                found = cluster.barrier(address)
                if ticket is not None:
                    w.launch.monitor.bulk_load_done(ticket, cta, found)
                found.complete(RESPONSE_BYTES)

        cluster.engine.issue("try_cancel", None, perform)


@emits("clusterlaunchcontrol.try_cancel")
def emit_try_cancel(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    target, barrier = (e.address(x, "u32") for x in ins.operands[:2])
    multicast = any(p.startswith("multicast::cluster") for p in ins.parts)
    e.line(f"try_cancel(w, {target}, {barrier}, {multicast}, {e.mask})")


@emits("clusterlaunchcontrol.query_cancel")
def emit_query_cancel(e: BlockEmitter, ins: Instruction) -> None:
    words = e.temporary()
    e.line(f"{words} = words({e.value(ins.operands[1], 'u128')}, u32)")
    if ins.parts[2] == "is_canceled":
        e.define(ins.operands[0], f"{words}[:, 3] != 0", "p")
        return
    axis = ins.parts[2].split("::")
    first = "xyz".index(axis[1]) if len(axis) > 1 else 0
    for i, register in enumerate(e.vector(ins.operands[0])[:3]):
        if register != "_":
            e.define(register, f"{words}[:, {first + i}]", "u32")


# --- programmatic dependent launch ---------------------------------------------------------------
def grid_wait(w: Warp, mask: np.ndarray) -> bool:
    """griddepcontrol.wait: only a launch that has started early has to wait; False if it must."""
    if not mask.any():
        return True
    if not w.launch.launch_before_done:
        w.waiting = "the launch before to complete"
        return False
    if w.launch.monitor is not None:
        w.launch.monitor.grid_waited(w, mask)
    return True


def let_dependents_go(w: Warp, mask: np.ndarray) -> None:
    """griddepcontrol.launch_dependents, by any thread of the CTA."""
    if mask.any() and not w.cta.let_go:
        w.cta.let_go = True
        w.launch.ctas_let_go += 1


@emits("griddepcontrol")
def emit_grid_dependency(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    if ins.parts[1] == "wait":
        e.park_unless(f"grid_wait(w, {e.mask})")
    else:
        e.line(f"let_dependents_go(w, {e.mask})")
