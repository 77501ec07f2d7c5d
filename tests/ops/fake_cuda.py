"""A CUDA device that is not there: its streams, captures and compiled kernels, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.ops.runtime import launch, state, workspace
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.ops.runtime.registry import OPS

H200 = Device("sm_90a", 132)


class Recorder:
    """Stands for a compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class FakeCuda:
    """One device, whose tensors are the CPU's.

    Attributes:
        kernel: what every configuration is compiled to.
        stream: the current stream.
        is_capturing: whether it is being captured.
        synchronised: streams that were waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = Recorder()
        self.stream = 1
        self.is_capturing = False
        self.synchronised: list[int] = []
        current = SimpleNamespace(synchronize=lambda: self.synchronised.append(self.stream))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        for name, value in (
            ("_cuda_getDevice", lambda: -1),
            ("_cuda_getCurrentRawStream", lambda index: self.stream),
        ):
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(state, "device_of", lambda index: H200)
        monkeypatch.setattr(launch, "find_kernel", lambda name, kernels, index: H200)
        monkeypatch.setattr(state, "_STATES", {})
        for name, empty in (("_EAGER", {}), ("_CAPTURE", {}), ("_CAPTURED", set())):
            monkeypatch.setattr(workspace, name, empty)
        monkeypatch.setattr(workspace, "_RETIRED", [])
        self._known: set = set()
        monkeypatch.setattr(state.RUNNERS, "get", self._get)

    def _get(self, key: Any, *, before_miss: Callable[[], None]) -> Recorder:
        if key not in self._known:
            before_miss()
            self._known.add(key)
        return self.kernel

    def state(self, op: KernelOp, config: Any) -> state.State:
        """State of a configuration on the device."""
        return state.state_of(op, config, torch.device("cpu"))

    @contextmanager
    def capture(self, stream: int):
        """Capture a stream, which is current meanwhile."""
        before, self.stream, self.is_capturing = self.stream, stream, True
        try:
            yield
        finally:
            self.stream, self.is_capturing = before, False


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device where a GPU would be, with nothing compiled, nothing bound and no workspace."""
    for op in OPS.values():
        op.launches.clear()
    yield FakeCuda(monkeypatch)
    for op in OPS.values():
        op.launches.clear()
