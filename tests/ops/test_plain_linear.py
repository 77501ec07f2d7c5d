"""`plain_linear` without a kernel: values, messages, tracing, tilings."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.plain_plan import TILINGS, choose, linear_plan
from dsv4.ops.plain_linear import MODEL_HEADS
from dsv4.testing.fp8_linear import Case
from dsv4.testing.plain_linear import Inputs, assert_plain_close

pytestmark = pytest.mark.stage("op")


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_values(tokens, out_dtype, seed) -> None:
    inputs = Inputs.make(Case(tokens, 512, 200, out_dtype=out_dtype), seed)
    y = ops.plain_linear(inputs.x, inputs.weight, out_dtype=getattr(torch, out_dtype))
    assert y.shape == (tokens, 200)
    if tokens:
        assert_plain_close(y, inputs)


def test_the_default_is_float32(seed) -> None:
    inputs = Inputs.make(Case(2, 512, 8), seed)
    y = ops.plain_linear(inputs.x, inputs.weight)
    assert y.dtype is torch.float32
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    assert ops.plain_linear(inputs.x, inputs.weight, out=out) is out
    assert torch.equal(ops.plain_linear(inputs.x.float(), inputs.weight.float()), y)


@pytest.mark.parametrize(
    ("x", "weight", "error", "message"),
    [
        ((2, 512, torch.bfloat16), (8, 1024, torch.bfloat16), ValueError, "weight: got shape"),
        ((2, 100, torch.bfloat16), (8, 100, torch.bfloat16), ValueError, "in_features must be"),
        ((2, 512, torch.bfloat16), (8, 512, torch.int8), TypeError, "weight: got torch.int8"),
    ],
)
def test_arguments_that_do_not_fit(x, weight, error, message) -> None:
    tensors = [torch.zeros(rows, width, dtype=dtype) for rows, width, dtype in (x, weight)]
    with pytest.raises(error, match=message):
        ops.plain_linear(*tensors)


def test_configurations_that_are_refused() -> None:
    with pytest.raises(ValueError, match="out_features must be positive, got 0"):
        PlainLinearConfig(512, 0)
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        PlainLinearConfig(512, 8, "float16")


def test_tracing(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 40), seed)
    traced = torch.compile(ops.plain_linear, fullgraph=True, backend="aot_eager")
    wanted = ops.plain_linear(inputs.x, inputs.weight)
    assert torch.equal(traced(inputs.x, inputs.weight), wanted)
    identity = ops.plain_linear_runner_id(512, 40)
    arguments = inputs.x, inputs.weight, torch.empty(3, 40), identity
    torch.library.opcheck(torch.ops.dsv4.plain_linear.default, arguments)


@pytest.mark.parametrize("given", [*MODEL_HEADS.values(), (512, 8), (16384, 8)], ids=str)
def test_every_tiling_fits(given) -> None:
    for tiling in TILINGS:
        plan = linear_plan(PlainLinearConfig(*given), tiling)
        assert plan.stages >= 2
        assert plan.smem.total_bytes <= plan.capacity


def test_choice() -> None:
    assert [choose(tokens) for tokens in (0, 1, 8, 9, 16, 17, 64, 65, 5000)] == [
        0, 0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip
