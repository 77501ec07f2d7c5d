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


@emits("fence", "membar", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def emit_fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"fence(w, {ins.opcode!r}, {e.mask})")
