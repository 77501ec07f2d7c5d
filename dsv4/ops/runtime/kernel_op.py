"""`KernelOp`: an operator family, declared once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.kernels.kit.args import Table, Values, check_table, optional_of, required_of, tensors_of
from dsv4.ops.runtime import checks, dispatch, launch, registry, runner
from dsv4.ops.runtime import state as states
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.library import register
from dsv4.ops.runtime.schema import schema_of

Sizes = Mapping[str, int]


class KernelOp:
    """Operator `torch.ops.dsv4.<name>` with a kernel per architecture and a torch implementation.

    A family subclasses it, and makes one object in its module. The operator writes the tensors that
    its table declares as outputs and returns nothing; `runner_id(...)` names its configuration.

    Attributes:
        name: of the operator.
        config: frozen dataclass of hashable fields; checks them, naming the one that is wrong.
        args: argument table, in the order of the operator and of the kernels' run-time call.
        kernels: architecture -> module with `build(config, options)`.
        early: tensors that kernels may read while the launch before still runs, where that is one
            that lets others start early: it must not write them.
        guessed: tensors that kernels read then, too, whoever writes them: what they find is
            compared with what is there behind the wait, and used where it is the same.
        overload: the registered operator, the object that is fastest to call.
    """

    name: ClassVar[str]
    config: ClassVar[type]
    args: ClassVar[Table]
    kernels: ClassVar[Mapping[str, str]]
    early: ClassVar[tuple[str, ...]] = ()
    guessed: ClassVar[tuple[str, ...]] = ()

    # ---- what a family says ----

    def values(self, config: Any) -> Values:
        """Sizes and dtypes that the kernel is compiled for, by their names in the table."""
        raise NotImplementedError

    def torch(self, config: Any, *tensors: Tensor | None) -> None:
        """Write the outputs in plain torch; tensors of the table but workspaces, all checked."""
        raise NotImplementedError

    def aot(self) -> Mapping[str, Any]:
        """Configurations of the released models by readable label: what `dsv4 compile` makes."""
        raise NotImplementedError

    def aot_for(self, arch: str) -> Mapping[str, Any]:
        """Those of an architecture, where they differ."""
        return self.aot()

    def compiled_config(self, config: Any, arch: str) -> Any:
        """The configuration with the fields blanked that the kernel of `arch` takes at run time."""
        return config

    def has_kernel(self, config: Any) -> bool:
        """Whether kernels take the configuration; the torch implementation runs all others."""
        return True

    def serves(self, config: Any, arch: str) -> bool:
        """Whether the kernel of an architecture takes the configuration; asked where some does."""
        return True

    def plan(self, config: Any, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """The table's scalars for a launch of these sizes. Remembered by sizes."""
        return ()

    def workspace_size(self, config: Any, sizes: Sizes, scalars: tuple[int, ...]) -> int:
        """fp32 elements of the workspace of a launch."""
        return 0

    def max_workspace_size(self, config: Any, rows: int, device: Device) -> int:
        """fp32 elements that no launch of up to `rows` rows (first dimension) exceeds."""
        return 0

    def check_sizes(self, config: Any, *tensors: Tensor | None) -> None:
        """Check what the table cannot say; metadata only, of tensors that fit the table."""

    def needs(self, config: Any, name: str) -> bool | None:
        """Whether a tensor that the table calls optional has to be there, must not be (False), or
        may be either (None)."""
        return None

    def check_values(self, config: Any, *tensors: Tensor | None) -> None:
        """Check values of CPU tensors that fit the table."""

    def probes(
        self, config: Any, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """Arguments of compiled calls that load every kernel of the configuration."""
        return states.smallest_calls(self, config, target, device)

    def make_launch(self, state: states.State) -> launch.Launch:
        """The launch of a configuration on a device; a family may write out its own."""
        return launch.make_launch(state)

    def warmup_hint(self, config: Any) -> str:
        """What to do before a capture, for the error of a cold one."""
        return "call it once with tensors of these sizes"

    # ---- what follows ----

    def __init__(self) -> None:
        check_table(self.args)
        self.tensors = tensors_of(self.args)
        self.num_required = len(required_of(self.args))
        self.num_optional = len(optional_of(self.args))
        # By runner id: launches that pass on what is not theirs, so that nothing else is looked up.
        self.launches: dict[int, launch.Launch] = {}
        cpu, cuda, fake = dispatch.implementations(self)
        self.cuda = cuda
        self.overload = register(schema_of(self.name, self.args), cpu=cpu, cuda=cuda, fake=fake)
        registry.OPS[self.name] = self

    def runner_id(self, *fields: Any) -> int:
        """Id of `config(*fields)`, what the operator takes; the same in every process."""
        return runner.runner_id(self, *fields)

    def compile_key(self, config: Any, arch: str) -> registry.CompileKey:
        """Identity of the kernel that serves `config` on `arch`; ValueError where there is none."""
        return registry.compile_key(self, config, arch)

    def check(self, config: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """Check types, dtypes, devices, shapes and strides: TypeError or ValueError."""
        checks.check_arguments(self.tensors, self.values(config), tensors)
        self.check_sizes(config, *tensors)

    def check_no_gradients(self, *tensors: Tensor | None) -> None:
        """Refuse inputs that require grad or carry a tangent; in the order of the table."""
        checks.check_no_gradients(self.name, self.tensors, tensors)

    def explain(self, *tensors: Any) -> None:
        """Name the argument of a public function's failed call that is of the wrong type or rank.

        In the order of the table, workspaces left out; None for what was not given. After a failure
        only: looking at every tensor costs as much as the rest of the call.
        """
        given = [
            (arg, tensor)
            for arg, tensor in zip(self.tensors, tensors)
            if tensor is not None or not (arg.is_output or arg.may_be_none)
        ]
        args, found = zip(*given)
        checks.check_are_tensors(args, found)
        checks.check_ranks(args, found)

    def warmup(self, config: Any, rows: int, device: torch.device) -> None:
        """Load the kernel and make the workspaces of launches of up to `rows` rows."""
        states.warm_up(self, config, rows, device)
