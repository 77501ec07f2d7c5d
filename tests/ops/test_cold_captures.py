"""Calls of linears and experts that a CUDA graph captures before they ever ran: refused by name,
and warm after one call. On a device that is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from dsv4 import ops
from dsv4.ops.runtime.registry import OPS
from dsv4.testing.fp8_linear import Case, Inputs
from dsv4.testing.moe import Case as MoeCase
from dsv4.testing.moe_layer import LayerInputs
from tests.ops.fake_cuda import FakeCuda

pytestmark = pytest.mark.stage("projections")

Call = Callable[[Inputs], object]


def experts(_: Inputs) -> object:
    case = MoeCase(3, 512, 128, 32, 3)
    layer = LayerInputs.make(case, 0)
    options = {"top_k": 3, "scaling": 1.5, "limit": case.limit, "form": case.scale_form}
    return ops.moe(layer.inputs.x, layer.gate, *layer.weights(True), **options, **layer.choice)


CALLS: dict[str, Call] = {
    "fp8_linear": lambda i: ops.fp8_linear(i.x, i.weight, i.scale),
    "grouped_linear": lambda i: ops.grouped_linear(i.x, i.weight, i.scale),
    "merged_linear": lambda i: ops.merged_linear(i.x, [i.weight], [i.scale]),
    "plain_linear": lambda i: ops.plain_linear(i.x, i.x.new_zeros(256, 512)),
    "linear_argmax": lambda i: ops.linear_argmax(i.x, i.x.new_zeros(256, 512)),
    "moe": experts,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_capture_of_what_never_ran_is_refused_by_name(
    name, fake_cuda: FakeCuda, monkeypatch, seed
) -> None:
    module = sys.modules["dsv4.ops.moe.op" if name == "moe" else f"dsv4.ops.{name}"]
    monkeypatch.setattr(module, "_op", OPS[name].cuda)
    if name == "moe":  # whose scratch lies on GPUs
        monkeypatch.setattr(module, "scratch_bytes", lambda config, tokens: 0)
    inputs = Inputs.make(Case(3, 512, 256), seed)
    with torch.no_grad():
        with fake_cuda.capture(2), pytest.raises(RuntimeError, match=rf"^{name}: .* cold .* once"):
            CALLS[name](inputs)
        assert not fake_cuda.kernel.calls
        CALLS[name](inputs)
        with fake_cuda.capture(2):
            CALLS[name](inputs)
    assert len(fake_cuda.kernel.calls) >= 2
