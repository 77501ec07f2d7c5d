"""setmaxnreg: registers that warps of a CTA give up and ask for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.named_barriers import whole_warp
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.blocks import may_block
from dsv4.simulator.ptx.entry import Instruction

LEAST_REGISTERS, MOST_REGISTERS = 24, 256  # of a thread by setmaxnreg


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


# --- emitters ------------------------------------------------------------------------------------
@emits("setmaxnreg")
def emit_set_registers(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    call = f"set_registers(w, {ins.parts[1]!r}, {int(ins.operands[0])}, {e.mask})"
    if may_block(ins):
        e.park_unless(call)
    else:
        e.line(call)
