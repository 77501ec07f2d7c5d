"""Calls of compiled kernels, derived from an operator's argument table.

A family says which tensors its inputs are, by the names of the table. Outputs, absent tensors,
workspaces and scalars follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.kernels.kit.args import (
    InOut,
    Scratch,
    Table,
    TensorArg,
    Values,
    Workspace,
    optional_of,
    required_of,
    scalars_of,
    tensors_of,
)
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.cache import RUNNERS
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.ops.runtime.launch import run_torch
from dsv4.ops.runtime.registry import CompileKey
from dsv4.ops.runtime.registry import build as build_product
from dsv4.ops.runtime.state import sized_dimensions
from dsv4.testing.harness import Build, Call, Outcome, Target, TorchCode, run_all


def make_call(
    table: Table,
    values: Values,
    tensors: Mapping[str, Tensor | None],
    scalars: Mapping[str, int],
    *,
    wanted: Collection[str] = (),
    workspace: int = 0,
    padding: int = 0,
    sizes: Mapping[str, int] | None = None,
) -> Call:
    """Arguments of a compiled kernel in the order of its table.

    Args:
        values: what the kernel is compiled for, by the table's names.
        tensors: inputs by the table's names, optional ones where they are there; and outputs that
            are not to be made here. Those written in part are given, and not poisoned.
        scalars: all of the table.
        wanted: optional outputs that are made. Required ones always are.
        workspace: fp32 elements, zeros as when new.
        padding: elements between the rows of outputs that are made.
        sizes: of outputs, by name, where no input has them.

    Raises:
        ValueError: a name that the table does not have, or one that is missing.
    """
    known = [arg.name for arg in tensors_of(table)]
    _check_names("tensors", [*tensors, *wanted], known)
    _check_names("scalars", scalars, [scalar.name for scalar in scalars_of(table)], complete=True)
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    sizes = {**_sizes(table, tensors), **(sizes or {})}
    found: dict[str, Tensor] = {}
    outputs, scratch = {}, {}
    for arg in tensors_of(table):
        tensor = tensors.get(arg.name)
        is_kept = isinstance(arg, Scratch | InOut)
        is_made = arg.is_output and (not arg.is_optional or arg.name in wanted)
        is_made = is_made and not isinstance(arg, InOut)
        if tensor is None and isinstance(arg, Workspace):
            tensor = torch.zeros(workspace, device=device)
        elif tensor is None and is_made:
            margin = 0 if is_kept else padding
            tensor = _apart(arg, values, sizes, device, margin)
        elif tensor is None and arg.may_be_none:
            tensor = make.absent(arg, values, device, sizes)
        elif tensor is None:
            raise ValueError(f"{arg.name}: got nothing, the kernel needs it")
        elif not arg.is_output:
            found[arg.name] = tensor
            continue
        found[arg.name] = tensor
        if is_kept:
            scratch[arg.name] = tensor
        elif is_made or tensors.get(arg.name) is not None:
            outputs[arg.name] = tensor
    options: dict[str, Any] = {arg.name: found[arg.name] for arg in optional_of(table)}
    options |= {scalar.name: scalars[scalar.name] for scalar in scalars_of(table)}
    return Call(tuple(found[a.name] for a in required_of(table)), options, outputs, scratch)


def _check_names(
    what: str, given: Collection[str], known: Collection[str], complete: bool = False
) -> None:
    strange = [name for name in given if name not in known]
    missing = [name for name in known if name not in given] if complete else []
    if strange or missing:
        problem = f"got {', '.join(strange)}" if strange else f"missing {', '.join(missing)}"
        raise ValueError(f"{what}: {problem}; the table has {', '.join(known)}")


def _sizes(table: Table, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Sizes by name, as the given tensors have them."""
    sizes: dict[str, int] = {}
    for arg in required_of(table):
        tensor = tensors.get(arg.name)
        if tensor is not None:
            for name, size in zip(arg.shape, tensor.shape, strict=True):
                sizes.setdefault(name, size)
    return sizes


def _apart(
    arg: TensorArg, values: Values, sizes: Mapping[str, int], device: torch.device, padding: int
) -> Tensor:
    """An output whose rows are slices of wider ones."""
    if not padding:
        return make.empty(arg, values, sizes, device)
    last = arg.shape[-1]
    width = int(values[last] if last in values else sizes[last])
    wide = {**dict(values), **sizes, last: width + padding}
    return make.empty(arg, wide, {}, device)[..., :width]


def _stored(key: CompileKey) -> Callable[..., None]:
    """A kernel as its operator runs it: compiled once on a machine, and called by position."""
    runner = RUNNERS.get(key)
    return lambda *args, **options: runner(*args, *options.values())


def _torch_code(op: KernelOp, config: Any) -> Callable[..., None]:
    """An operator's torch implementation, called as its kernel is: what is absent has no rows."""
    required = [arg.name for arg in required_of(op.args)]

    def run(*args: Tensor, **options: Any) -> None:
        given = {**dict(zip(required, args, strict=True)), **options}
        tensors = [(arg, given[arg.name]) for arg in op.tensors]
        run_torch(op, config, tuple(None if _is_absent(*each) else each[1] for each in tensors))

    return run


def _is_absent(arg: TensorArg, tensor: Tensor) -> bool:
    return arg.is_optional and tensor.numel() == 0


class OpInputs:
    """Inputs of one case of an operator: what a family declares, to run on any target.

    Attributes:
        op: the operator.
        wanted: optional outputs that a call writes.
        padding: elements between the rows of its outputs.
    """

    op: ClassVar[KernelOp]
    wanted: tuple[str, ...] = ()
    padding: int = 0

    @property
    def config(self) -> Any:
        """The operator's configuration."""
        raise NotImplementedError

    @property
    def arguments(self) -> Mapping[str, Tensor | None]:
        """Inputs by the table's names; None for what is absent."""
        raise NotImplementedError

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of outputs, by name, where no input has them."""
        return {}

    def call(self, device: Device, given: Mapping[str, Tensor] | None = None, **scalars) -> Call:
        """A call of the compiled kernel.

        Args:
            device: that the launch is planned for.
            given: tensors that are not made here: outputs, a workspace.
            scalars: instead of the planned ones.
        """
        op, config = self.op, self.config
        tensors = {**self.arguments, **(given or {})}
        sizes = {**_sizes(op.args, tensors), **self.sizes}
        sizes = {name: sizes[name] for name in sized_dimensions(op, config) if name in sizes}
        names = [scalar.name for scalar in scalars_of(op.args)]
        if set(scalars) != set(names):
            scalars = {**dict(zip(names, op.plan(config, sizes, device))), **scalars}
        size = op.workspace_size(config, sizes, tuple(scalars[name] for name in names))
        return make_call(
            op.args,
            op.values(config),
            tensors,
            scalars,
            wanted=self.wanted,
            workspace=size,
            padding=self.padding,
            sizes=self.sizes,
        )


class OpKernels:
    """The kernels of an operator on a target."""

    def __init__(self, op: KernelOp, target: Target) -> None:
        self.op = op
        self.target = target

    @property
    def planned_for(self) -> Device:
        """The target as launches are planned for it."""
        return Device(self.target.arch, self.target.multiprocessors)

    def compile(self, config: Any, build: Build | None = None) -> Any:
        """The kernel that `build` makes of `config`; by default the package's."""
        if build is not None:
            return self.target.compile(build, config)
        if isinstance(self.target, TorchCode):
            return self.target.compile(lambda config, _: _torch_code(self.op, config), config)
        # Configurations that differ in what is known at run time share a compilation.
        key = self.op.compile_key(config, self.target.arch)
        if self.target.device == "cuda":
            return _stored(key)
        return self.target.compile(build_product, key)

    def call(
        self, inputs: OpInputs, given: Mapping[str, Tensor] | None = None, **scalars: int
    ) -> Call:
        """A call on the target's device."""
        return inputs.call(self.planned_for, given, **scalars).to(self.target.device)

    def run(
        self,
        inputs: OpInputs,
        seed: int = 0,
        schedules: int | None = 1,
        compiled: Any = None,
        races: bool = True,
        **scalars: int,
    ) -> Outcome:
        """Run in the first few schedules, all for None, whose outputs must agree in every bit.

        Args:
            compiled: instead of the kernel of the inputs' configuration.
            races: whether the simulator looks for them, for three times the time.
            scalars: instead of the planned ones.
        """
        compiled = self.compile(inputs.config) if compiled is None else compiled
        return run_all(
            self.target,
            compiled,
            lambda: self.call(inputs, **scalars),
            seed,
            self.target.schedules[:schedules],
            races=races,
        )
