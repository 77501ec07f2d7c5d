"""Families that are refused, whatever their modifiers, each with its reason."""

from __future__ import annotations

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.ptx.entry import Instruction


@emits("multimem")
def emit_multimem(e: BlockEmitter, ins: Instruction) -> None:
    raise ValueError("multimem addresses name several GPUs, one is simulated")


@emits("wmma")
def emit_wmma(e: BlockEmitter, ins: Instruction) -> None:
    raise ValueError("wmma's fragments are opaque: mma.sync and ldmatrix are simulated")
