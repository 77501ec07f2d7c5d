"""Every operator of the process by name, and what is compiled for them.

A kernel module offers `build(config, options: str) -> compiled`; it imports the kernel compiler, so
it is loaded only when something has to be compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv4 import arch as archs
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp

# By name. A family's module fills it when `dsv4.ops`, which lists the families, imports it; and
# importing anything below `dsv4.ops` imports that first.
OPS: dict[str, KernelOp] = {}


@dataclass(frozen=True)
class CompileKey:
    """Identity of one compiled kernel: everything its machine code depends on but its sources.

    Attributes:
        kernel: module with `build`.
        arch: architecture it is compiled for.
        config: configuration without what is known at run time.
    """

    kernel: str
    arch: str
    config: Any

    @property
    def stem(self) -> str:
        """Readable part of the names of stored objects."""
        return "-".join(self.kernel.removeprefix("dsv4.kernels.").split("."))


def compile_key(op: KernelOp, config: Any, arch: str) -> CompileKey:
    """Key of the kernel that serves an operator's `config` on `arch`.

    Raises:
        ValueError: no kernel for `arch`.
    """
    if arch not in op.kernels:
        raise ValueError(f"arch: got {quoted(arch)}, needs one of {', '.join(op.kernels)}")
    return CompileKey(op.kernels[arch], arch, op.compiled_config(config, arch))


def ran_as_kernel(op: KernelOp, arguments: tuple[Any, ...]) -> bool:
    """Whether a call of an operator on a GPU, which is over, was a launch of its kernel; else its
    torch implementation served it.

    Args:
        arguments: of the call: positional ones, the runner's id among them.
    """
    return arguments[op.num_required] in op.launches


def build(key: CompileKey, options: str = "") -> Any:
    """Compile the kernel of `key`; the process must target `key.arch`. Needs no GPU."""
    return importlib.import_module(key.kernel).build(key.config, options)


def ahead_of_time(arch: str) -> Iterator[tuple[str, CompileKey]]:
    """Labelled keys of everything the released models need on an architecture, each once."""
    archs.of_name(arch)
    for op in OPS.values():
        found: set[CompileKey] = set()
        for label, config in op.aot_for(arch).items() if arch in op.kernels else ():
            key = compile_key(op, config, arch)
            if key not in found:
                found.add(key)
                yield f"{arch}, {op.name}: {label}", key
