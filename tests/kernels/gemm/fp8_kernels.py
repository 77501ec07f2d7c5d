"""Runs of the kernels of `fp8_linear`, by tiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.ops.fp8_linear import PLANS
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.testing.harness import Outcome, Simulator
from dsv4.testing.kernel_call import OpKernels

FEW_SMS = 1  # a cluster has several tiles, its ring wraps


def tilings(kernels: OpKernels, config: Fp8LinearConfig) -> tuple:
    return PLANS[kernels.target.arch].tilings(config)


def choose(kernels: OpKernels, config: Fp8LinearConfig, tokens: int) -> int:
    return PLANS[kernels.target.arch].choose(config, tokens, FEW_SMS)


def run(
    kernels: OpKernels, inputs, tiling: int, seed: int = 0, schedules: int | None = 1
) -> Outcome:
    """Run one tiling in the first few schedules, all for None."""
    return kernels.run(inputs, seed, schedules, tiling=tiling, num_sms=FEW_SMS)


@contextmanager
def some_tilings(
    op: KernelOp, which: slice, name: str = "tilings", arch: str = "sm_100a"
) -> Iterator[OpKernels]:
    """Kernels with some of their tilings alone: compiling all takes ten seconds.

    Args:
        name: of what the kernel's module takes tilings from, a function or all of them.
    """
    kernels = OpKernels(op, Simulator(arch))
    module = import_module(op.kernels[arch])
    every = getattr(module, name)
    some = (lambda config: every(config)[which]) if callable(every) else every[which]
    with mock.patch.object(module, name, some):
        yield kernels
