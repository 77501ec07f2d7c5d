"""Branches, exits and traps."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction


def trap(w: Warp, mask: np.ndarray) -> None:
    """trap: the kernel gave up."""
    if mask.any():
        raise KernelFault("trap")


# --- emitters ------------------------------------------------------------------------------------
@emits("bra")
def emit_branch(e: BlockEmitter, ins: Instruction) -> None:
    if not ins.guard:
        e.jump(e.block.successors[0])
        return
    sign = "~" if ins.negated else ""
    guard = e.value(ins.guard, "p")
    e.flush()
    target, other = e.block.successors
    form = "full" if e.full else "masked"
    e.line(f"return w.branch_{form}({sign}{guard}, {target}, {other}, {e.block.rejoin})")
    e.ended = True


@emits("ret", "exit")
def emit_exit(e: BlockEmitter, ins: Instruction) -> None:
    if not ins.guard:
        e.jump(e.block.successors[0])
        return
    sign = "~" if ins.negated else ""
    guard = e.value(ins.guard, "p")
    e.flush()
    e.line(f"return w.exit_lanes({sign}{guard}, {e.block.successors[1]})")
    e.ended = True


@emits("trap", "brkpt")
def emit_trap(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"trap(w, {e.mask})")
