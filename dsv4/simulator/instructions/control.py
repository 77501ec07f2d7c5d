"""Warp-level odds and ends of generated code: fences, traps, register budgets."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.warp import Warp

REGISTER_FILE = 65536


def trap(w: Warp, mask: np.ndarray) -> None:
    """trap: the kernel gave up."""
    if mask.any():
        raise KernelFault("trap")


def fence(w: Warp, opcode: str, mask: np.ndarray) -> None:
    """Memory is sequentially consistent here; only the checker cares about fences."""
    if w.launch.monitor is not None and mask.any():
        w.launch.monitor.fence(w, opcode, mask)


def warp_sync(w: Warp, mask: np.ndarray) -> None:
    """bar.warp.sync: lanes of a warp run in step already; only the checker cares."""
    if w.launch.monitor is not None and mask.any():
        w.launch.monitor.warp_sync(w)


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


def set_registers(w: Warp, direction: str, count: int) -> None:
    """setmaxnreg: the CTA's warps together must fit the register file."""
    if count % 8 or not 24 <= count <= 256:
        raise KernelFault(f"setmaxnreg {count}: a multiple of 8 in 24..256 is required")
    budgets = w.launch.register_budgets.setdefault(id(w.cta), {})
    budgets[w.number] = count
    warps = w.launch.warps
    total = 32 * sum(budgets.values())
    if len(budgets) == warps and total > REGISTER_FILE:
        raise KernelFault(
            f"setmaxnreg: the CTA's {warps} warps ask for {total} registers, "
            f"the register file has {REGISTER_FILE}"
        )
