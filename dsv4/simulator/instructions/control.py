"""Fences, traps, waits for the launch before, and register budgets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.barriers import whole_warp
from dsv4.simulator.machine.warp import Warp

LEAST_REGISTERS, MOST_REGISTERS = 24, 256  # of a thread by setmaxnreg


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


class RegisterChange(NamedTuple):
    """A setmaxnreg that a warp executed."""

    count: int
    at: int  # its instruction


class AwaitedRegisters(NamedTuple):
    """Registers that a warp at setmaxnreg.inc waits for."""

    count: int  # that each of its threads asks for
    warp: Warp

    def __str__(self) -> str:
        w = self.warp
        return (
            f"setmaxnreg.inc to {self.count} registers a thread: it has {w.register_count}, and "
            f"the CTA's pool {w.cta.spare_registers[w.number % 4]} more for it"
        )

    @property
    def reason(self) -> str:
        """Why no warp of the CTA will give it enough, if that is certain."""
        w = self.warp
        others = [other for other in w.cta.warps[w.number % 4 :: 4] if other is not w]
        if not all(other.done or _has_chosen(other) for other in others):
            return ""
        kept = ", ".join(f"{other.register_count} (warp {other.number})" for other in others)
        return (
            f": a CTA of {w.launch.threads} threads starts with at most "
            f"{w.launch.registers_at_launch} each, and others that share them keep {kept or 'none'}"
        )


def _has_chosen(w: Warp) -> bool:
    return bool(w.register_changes) or isinstance(w.waiting, AwaitedRegisters)


def set_registers(w: Warp, direction: str, count: int, mask: np.ndarray) -> bool:
    """setmaxnreg: registers go to the CTA's pool or come from it; False if it must wait for them.

    Warps whose numbers are equal modulo four share a quarter of the register file. Warps that have
    exited keep what they had.
    """
    if not mask.any():
        return True
    whole_warp(w, mask, "setmaxnreg")
    if count % 8 or not LEAST_REGISTERS <= count <= MOST_REGISTERS:
        raise KernelFault(
            f"setmaxnreg {count}: a multiple of 8 in {LEAST_REGISTERS}..{MOST_REGISTERS} is "
            "required"
        )
    spare, quarter = w.cta.spare_registers, w.number % 4
    more = count - w.register_count
    if direction == "inc" and more > spare[quarter]:
        w.waiting = AwaitedRegisters(count, w)
        return False
    if (more > 0) == (direction == "inc"):
        spare[quarter] -= more
        w.register_count = count
    w.register_changes.append(RegisterChange(count, w.at))
    return True
