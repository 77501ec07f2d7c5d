"""Instructions without a result: hints to caches, and sleep."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.ptx.entry import Instruction


@emits("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "pmevent")
def emit_hint(e: BlockEmitter, ins: Instruction) -> None:
    """No effect on results; a policy register is never read by anything simulated."""
    if ins.parts[0] == "createpolicy":
        e.define(ins.operands[0], e.constant(0, "u64"), "u64")


@emits("nanosleep")
def emit_sleep(e: BlockEmitter, ins: Instruction) -> None:
    e.line("w.polling = True")
