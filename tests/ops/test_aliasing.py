"""Outputs that a caller gives: those of tensors on a GPU are looked at before the launch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4 import ops
from dsv4.ops import aliasing
from dsv4.ops.plain_linear import PLAIN_LINEAR
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
