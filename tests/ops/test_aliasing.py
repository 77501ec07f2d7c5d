"""Outputs that a caller gives: those of tensors on a GPU are looked at before the launch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import ops
from dsv4.ops import aliasing
from dsv4.ops.plain_linear import PLAIN_LINEAR
from dsv4.ops.runtime import dispatch
from dsv4.testing.fp8_linear import Case, Inputs

pytestmark = pytest.mark.stage("projections")


class OnGpu(Tensor):
    """Tensor that says that it is on one."""

    is_cuda = True


def test_memory_of_an_input_is_refused() -> None:
    memory = torch.zeros(8, 512, dtype=torch.bfloat16).as_subclass(OnGpu)
    weight = torch.zeros(512, 512, dtype=torch.bfloat16)
    aliasing.check_given(PLAIN_LINEAR, memory[:4], weight, memory[4:])
    with pytest.raises(ValueError, match=r"out: shares memory with x"):
        aliasing.check_given(PLAIN_LINEAR, memory[:4], weight, memory[3:7])


def of_fp8(name: str) -> Callable[[Inputs, Tensor], object]:
    def call(inputs: Inputs, out: Tensor) -> object:
        return getattr(ops, name)(inputs.x, inputs.weight, inputs.scale, out=out)

    return call


def merged(inputs: Inputs, out: Tensor) -> object:
    return ops.merged_linear(inputs.x, [inputs.weight], [inputs.scale], outs=[out])


def plain(inputs: Inputs, out: Tensor) -> object:
    return ops.plain_linear(inputs.x, inputs.x.new_zeros(256, 512), out=out)


def best(inputs: Inputs, out: Tensor) -> object:
    return ops.linear_argmax(inputs.x, inputs.x.new_zeros(256, 512), out=out)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("fp8_linear", of_fp8("fp8_linear")),
        ("grouped_linear", of_fp8("grouped_linear")),
        ("merged_linear", merged),
        ("plain_linear", plain),
        ("linear_argmax", best),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_every_linear_looks_at_its_output(module, call, monkeypatch, seed) -> None:
    seen: list[tuple] = []
    family = sys.modules[f"dsv4.ops.{module}"]
    monkeypatch.setattr(family, "check_given", lambda op, *tensors: seen.append((op.name, tensors)))
    inputs = Inputs.make(Case(3, 512, 256), seed, "cpu")
    out = torch.empty(3, 256, dtype=torch.bfloat16)
    call(inputs, out)
    ((name, tensors),) = seen
    assert name == module
    assert any(tensor is out for tensor in tensors)


def rotation(squares: Tensor) -> ops.HeadRotation:
    positions = torch.zeros(3, dtype=torch.int32)
    return ops.HeadRotation(torch.zeros(8, 64), positions, 256, squares)


@pytest.mark.parametrize("target", ["x", "out", None])
@pytest.mark.parametrize("name", ["fp8_linear", "merged_linear"])
def test_squares_of_heads_have_memory_of_their_own(name, target, monkeypatch, seed) -> None:
    """As on a GPU, where an operator's launch does not look; None: y is new."""
    monkeypatch.setattr(dispatch.checks, "check_aliasing", lambda *given: None)
    inputs = Inputs.make(Case(3, 512, 256), seed, "cpu")
    x = inputs.x.as_subclass(OnGpu)
    out = None if target is None else torch.empty(3, 256, dtype=torch.bfloat16)
    memory = out if target == "out" else inputs.x
    squares = memory.view(torch.float32).view(-1)[:48].view(3, 1, 16)

    def call(epilogue: ops.HeadRotation) -> None:
        if name == "fp8_linear":
            ops.fp8_linear(x, inputs.weight, inputs.scale, out=out, epilogue=epilogue)
        else:
            options = {"outs": None if out is None else [out], "epilogues": [epilogue]}
            ops.merged_linear(x, [inputs.weight], [inputs.scale], **options)

    call(rotation(torch.empty(3, 1, 16)))
    with pytest.raises(ValueError, match=f"squares.*: shares memory with {target or 'x'}"):
        call(rotation(squares))


def test_tensors_without_memory_share_none() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 512, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(256, 512, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.empty(2, 4, device="cuda")
        out = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda")
        assert ops.fp8_linear(x, weight, scale, out=out) is out
        positions = torch.zeros(3, dtype=torch.int32, device="cuda")
        squares = torch.empty(3, 1, 16, device="cuda")
        heads = ops.HeadRotation(torch.empty(8, 64, device="cuda"), positions, 256, squares)
        assert ops.fp8_linear(x, weight, scale, epilogue=heads).shape == (3, 256)
