"""Chains of launches under test: the calls that layers make, recorded with the tensors they get.

A model on the CPU runs as on a GPU; what its operators would launch there is compiled and
simulated, call by call, each with what memory held before it. Any run of neighbours can then be
repeated as one chain, with launches that start early, and must leave what the calls have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dsv4.kernels.kit.args import InOut, Scratch, Workspace, optional_of
from dsv4.ops.runtime import backend, registry
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.runner import config_of
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.harness import Simulator, assert_clean, poison
from dsv4.testing.kernel_call import OpKernels

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp
    from dsv4.simulator import Report

# Of torch: what gives a view, or memory that nothing is written to. All else is a launch.
_NO_LAUNCHES = (
    "alias", "as_strided", "detach", "empty", "expand", "flatten", "new_empty", "permute",
    "reshape", "select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view",
)  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """A call of a compiled function, one or several launches.

    Attributes:
        op: the operator.
        compiled, args: the function and what it got.
        written: those of the tensors that it may write.
        before: contents of each storage that it got, by address.
        section: number of launches of torch before it: those wait for all before them, and all
            that follows for them.
    """

    op: KernelOp
    compiled: Any
    args: tuple[Any, ...]
    written: tuple[Tensor, ...]
    before: dict[int, Tensor]
    section: int

    @property
    def tensors(self) -> list[Tensor]:
        """Those among its arguments that have memory."""
        return [x for x in self.args if _has_memory(x)]

    @property
    def late(self) -> list[Tensor]:
        """Those that its kernels may not touch while the launch before still runs."""
        named = zip(self.op.tensors, self.args)
        return [x for arg, x in named if _has_memory(x) and arg.name not in self.op.early]

    @property
    def guessed(self) -> list[Tensor]:
        """Those that its kernels may read before their wait, whoever writes them."""
        named = zip(self.op.tensors, self.args)
        return [x for arg, x in named if _has_memory(x) and arg.name in self.op.guessed]


class _State:
    """The part of `dsv4.ops.runtime.state.State` that a launch of an operator needs."""

    def __init__(self, op: KernelOp, config: Any, recorder: Recorder) -> None:
        self.op, self.config, self.target = op, config, recorder.device
        self.device = torch.device("cpu")
        values = op.values(config)
        self.absent = tuple(make.absent(arg, values, self.device) for arg in optional_of(op.args))
        self.run = lambda *arguments: recorder.run(op, config, arguments)
        self.workspaces = recorder.workspaces
        self.launch = op.make_launch(self)

    def workspace(self, size: int, rows: int) -> Tensor:
        """One for all launches of the operator, as on a stream."""
        known = self.workspaces.get(self.op.name)
        if known is None or known.numel() < size:
            known = self.workspaces[self.op.name] = torch.zeros(size)
        return known


class Recorder(TorchDispatchMode):
    """Mode that simulates what operators launch, and keeps the calls."""

    def __init__(self, target: Simulator) -> None:
        super().__init__()
        self.target = target
        self.device = Device(target.arch, target.multiprocessors)
        self.calls: list[Recorded] = []
        self.workspaces: dict[str, Tensor] = {}
        self._states: dict[tuple[str, Any], _State] = {}
        self._section = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "dsv4":
            name = func.name().removeprefix("aten::").split(".")[0]
            self._section += name not in _NO_LAUNCHES
            return func(*args, **(kwargs or {}))
        op = registry.OPS[func.name().removeprefix("dsv4::")]
        config = config_of(op, args[op.num_required])
        if not self._has_kernel(op, config):
            self._section += 1
            return func(*args, **(kwargs or {}))
        known = self._states.get((op.name, config))
        if known is None:
            known = self._states[op.name, config] = _State(op, config, self)
        with self.as_gpu():
            return known.launch(*args)

    @contextmanager
    def as_gpu(self) -> Iterator[None]:
        """Code that runs for tensors on a GPU of the target's architecture."""
        from dsv4.simulator.frontend import cuda_tensors

        allocated = cuda_tensors._as_allocated

        def aligned(tensor: Tensor) -> Tensor:
            with _disable_current_modes():  # no launch: a GPU allocates so
                return allocated(tensor)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(cuda_tensors, "_as_allocated", aligned))
            stack.enter_context(mock.patch.object(backend, "device_of", lambda _: self.device))
            if not hasattr(torch._C, "_cuda_getDevice"):
                torch._C._cuda_getDevice = lambda: 0
                stack.callback(delattr, torch._C, "_cuda_getDevice")
            stack.enter_context(cuda_tensors.CudaTensors())
            yield

    def _has_kernel(self, op: KernelOp, config: Any) -> bool:
        arch = self.target.arch
        return arch in op.kernels and op.has_kernel(config) and op.serves(config, arch)

    def run(self, op: KernelOp, config: Any, arguments: tuple) -> None:
        """Simulate a call into poisoned outputs, and keep it."""
        compiled = OpKernels(op, self.target).compile(config)
        with torch._C.DisableTorchFunction():
            written = []
            for arg, tensor in zip(op.tensors, arguments):
                if arg.is_output and tensor.numel():
                    written.append(tensor)
                    if not isinstance(arg, InOut | Scratch | Workspace):
                        poison(tensor)
            storages = {x.untyped_storage().data_ptr(): x for x in arguments if _has_memory(x)}
            before = {start: _bytes_of(x).clone() for start, x in storages.items()}
            call = Recorded(op, compiled, arguments, tuple(written), before, self._section)
            self.calls.append(call)
            _simulate((call,), {}, races=False)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


@contextmanager
def recorded(
    target: Simulator, warm_up: Callable[[], None] | None = None
) -> Iterator[list[Recorded]]:
    """Run code as on a GPU of the target's architecture; the calls it makes.

    Args:
        warm_up: what is done there before, unrecorded.
    """
    recorder = Recorder(target)
    with recorder.as_gpu():
        if warm_up is not None:
            warm_up()
        with recorder:
            yield recorder.calls


@dataclass(frozen=True)
class Chain:
    """Neighbouring calls, without a launch of torch between them."""

    calls: tuple[Recorded, ...]

    @property
    def name(self) -> str:
        """Its operators."""
        return " > ".join(call.op.name for call in self.calls)

    def _storages(self) -> dict[int, Tensor]:
        """Contents before the chain, by address."""
        found: dict[int, Tensor] = {}
        for call in self.calls:
            found |= {start: x for start, x in call.before.items() if start not in found}
        return found

    def restore(self) -> None:
        """Bring back what memory held before the chain."""
        contents = self._storages()
        for call in self.calls:
            for tensor in call.tensors:
                start = tensor.untyped_storage().data_ptr()
                if start in contents:
                    _bytes_of(tensor).copy_(contents.pop(start))

    def apart(self) -> list[Tensor]:
        """What the calls leave one by one."""
        self.restore()
        for call in self.calls:
            _simulate((call,), {}, races=False)
        return self.left()

    def left(self) -> list[Tensor]:
        """Contents of all memory that the chain was given, in the order of its first use."""
        tensors = [tensor for call in self.calls for tensor in call.tensors]
        storages = {x.untyped_storage().data_ptr(): x for x in tensors}
        return [_bytes_of(x).clone() for x in storages.values()]

    def simulate(
        self,
        changed: Mapping[int, Any] | None = None,
        recycled: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> Report:
        """Run the chain on what memory held before it, as `simulate_chain` does.

        Args:
            changed: other functions, by the number of the call.
            recycled: what launches before it may still write; None: what it writes itself, since
                tensors come and go.
        """
        self.restore()
        return _simulate(self.calls, changed or {}, recycled, **options)

    def run(self, expected: Sequence[Tensor], **options: Any) -> Report:
        """The same; fails with what the checker finds, or where memory then holds something else
        than `expected`."""
        report = self.simulate(**options)
        assert_clean(report)
        what = ", ".join(f"{name}={value}" for name, value in options.items())
        for i, (found, wanted) in enumerate(zip(self.left(), expected, strict=True)):
            assert_same_bits(f"memory {i} of {self.name} ({what})", found, wanted)
        return report


def _simulate(
    calls: Sequence[Recorded],
    changed: Mapping[int, Any],
    recycled: Sequence[Tensor] | None = None,
    **options: Any,
) -> Report:
    from dsv4.simulator import ChainCall, simulate_chain

    given = [
        ChainCall(changed.get(i, call.compiled), call.args, guessed=call.guessed)
        for i, call in enumerate(calls)
    ]
    if recycled is None:
        recycled = [tensor for call in calls for tensor in call.written]
    return simulate_chain(given, recycled=recycled, **options)


def chains_of(calls: Sequence[Recorded], length: int | None = None) -> list[Chain]:
    """Every run of so many neighbours without a launch of torch between them; None: as long as they
    are."""
    sections: dict[int, list[Recorded]] = {}
    for call in calls:
        sections.setdefault(call.section, []).append(call)
    if length is None:
        return [Chain(tuple(section)) for section in sections.values()]
    return [
        Chain(tuple(section[i : i + length]))
        for section in sections.values()
        for i in range(len(section) - length + 1)
    ]
