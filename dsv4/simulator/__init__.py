"""Simulator of compiled sm_100a and sm_90a kernels on a CPU, instruction by instruction.

`simulate(compiled, *args)` runs what `cute.compile` made, on CPU tensors: the real compiled host
code launches, a stand-in for the CUDA runtime catches the launches, and the PTX is executed
over 32-lane numpy vectors. A compiled object must carry its PTX (`--keep-ptx`); with
`--generate-line-info` errors and findings also name Python lines.

What it is for: the right answer without the GPU; results under the `eager`, `lazy` and `random`
schedules; races, missing fences, uninitialised reads and leaks (`Report.races`); which code the
test data reached (`Report.coverage`); deadlocks that name their root cause; loops that never end.

What it does not execute is an error that names the opcode and both lines: sparse products, im2col
copies, stochastic rounding, multimem, wmma, textures. Time has no meaning here; see
`dsv4.simulator.timing`.
"""

from dsv4.simulator.api import simulate
from dsv4.simulator.chain import ChainCall, simulate_chain
from dsv4.simulator.errors import (
    Deadlock,
    Endless,
    KernelFault,
    SimulatorError,
    UnsupportedInstruction,
)
from dsv4.simulator.frontend.cutedsl import CudaView
from dsv4.simulator.frontend.kernel_names import named
from dsv4.simulator.frontend.ptx_text import simulate_ptx
from dsv4.simulator.report import Finding, LaunchReport, Report

__all__ = [
    "ChainCall", "CudaView", "Deadlock", "Endless", "Finding", "KernelFault", "LaunchReport",
    "Report", "SimulatorError", "UnsupportedInstruction", "named", "simulate", "simulate_chain",
    "simulate_ptx",
]  # fmt: skip
