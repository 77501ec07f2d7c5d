"""Runs compiled sm_100a and sm_90a kernels on a CPU."""

from dsv4.simulator.api import simulate
from dsv4.simulator.errors import Deadlock, KernelFault, SimulatorError, UnsupportedInstruction
from dsv4.simulator.host import CudaView
from dsv4.simulator.raw import simulate_ptx
from dsv4.simulator.report import Finding, LaunchReport, Report

__all__ = [
    "CudaView", "Deadlock", "Finding", "KernelFault", "LaunchReport", "Report", "SimulatorError",
    "UnsupportedInstruction", "simulate", "simulate_ptx",
]  # fmt: skip
