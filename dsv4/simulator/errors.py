"""Errors of a simulation, one class per kind."""

from __future__ import annotations


class SimulatorError(RuntimeError):
    """Base of everything the simulator raises on purpose."""


class UnsupportedInstruction(SimulatorError):
    """The PTX holds an opcode, modifier or operand the simulator does not execute."""


class KernelFault(SimulatorError):
    """The kernel did something the hardware would trap on or silently get wrong."""


class Deadlock(SimulatorError):
    """No warp can run and nothing asynchronous is under way."""


class Endless(SimulatorError):
    """A warp ran more instructions than a launch is allowed: most likely it never ends."""
