"""Fences, which order memory for the checker alone."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction


def fence(w: Warp, opcode: str, mask: np.ndarray) -> None:
    """Memory is sequentially consistent here; only the checker cares about fences."""
    if w.launch.monitor is not None and mask.any():
        w.launch.monitor.fence(w, opcode, mask)


def map_fence(w: Warp, address, mask: np.ndarray) -> None:
    """fence.proxy.tensormap::generic: an acquire of the map at each lane's address; None: a
    release."""
    monitor = w.launch.monitor
    if monitor is None or not mask.any():
        return
    if address is None:
        monitor.map_fence(w, None, mask)
        return
    for place in np.unique(address[mask]).tolist():
        monitor.map_fence(w, place, mask & (address == place))


@emits("fence.proxy.tensormap::generic")
def emit_map_fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    address = e.address(ins.operands[0], "u64") if ins.operands else None
    e.line(f"map_fence(w, {address}, {e.mask})")


@emits("fence", "membar", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def emit_fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"fence(w, {ins.opcode!r}, {e.mask})")
