"""`linear_argmax` without a kernel: values, messages, tracing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.gemm.epilogues import ArgMax
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.plain_plan import TILINGS, linear_plan
from dsv4.ops.linear_argmax import FAILED
from dsv4.ops.plain_linear import MODEL_HEADS
from dsv4.testing.fp8_linear import Case
from dsv4.testing.linear_argmax import Inputs, rows_of

pytestmark = pytest.mark.stage("op")


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_rows_of_the_largest_outputs(tokens, out_dtype, seed) -> None:
    inputs = Inputs.make(Case(tokens, 512, 201, out_dtype=out_dtype, has_special_rows=True), seed)
    x, weight = inputs.plain.x, inputs.plain.weight
    out = torch.empty(tokens, 201, dtype=getattr(torch, out_dtype))
    rows = ops.linear_argmax(x, weight, out=out)
    y = ops.plain_linear(x, weight, out_dtype=out.dtype)
    assert torch.equal(out.nan_to_num(), y.nan_to_num())
    assert rows.dtype is torch.int64
    assert torch.equal(rows, rows_of(y))
    assert rows[:1].tolist() == [FAILED] * min(tokens, 1)
    if out_dtype == "float32":
        assert torch.equal(ops.linear_argmax(x, weight), rows)
        assert torch.equal(ops.linear_argmax(x.float(), weight.float()), rows)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(8, 1024).bfloat16()}, ValueError, "weight: got shape"),
        ({"weight": torch.zeros(8, 512)}, TypeError, "weight: got torch.float32"),
        ({"x": torch.zeros(2, 100).bfloat16()}, ValueError, "in_features must be"),
        ({"x": None}, TypeError, "x: got None, needs a torch.Tensor"),
        ({"out": torch.zeros(2, 9)}, ValueError, r"out: got shape \(2, 9\), needs \[2, 8\]"),
        ({"out": torch.zeros(2, 8).half()}, ValueError, "out_dtype must be one of"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message) -> None:
    given = {"x": torch.zeros(2, 512).bfloat16(), "weight": torch.zeros(8, 512).bfloat16()}
    with pytest.raises(error, match=message):
        ops.linear_argmax(**(given | change))


def test_a_weight_without_rows() -> None:
    rows = torch.empty(2, dtype=torch.int64)
    x, weight = torch.zeros(2, 512).bfloat16(), torch.zeros(0, 512).bfloat16()
    identity = ops.linear_argmax_runner_id(512, 8)
    with pytest.raises(ValueError, match="weight: got 0 rows, needs at least one"):
        torch.ops.dsv4.linear_argmax(x, weight, rows, identity)


def test_tracing(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 40), seed)
    x, weight = inputs.plain.x, inputs.plain.weight
    traced = torch.compile(ops.linear_argmax, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(x, weight), ops.linear_argmax(x, weight))
    rows = torch.empty(3, dtype=torch.int64)
    arguments = x, weight, rows, ops.linear_argmax_runner_id(512, 40), torch.empty(3, 40)
    torch.library.opcheck(torch.ops.dsv4.linear_argmax.default, arguments)


@pytest.mark.parametrize("given", [*MODEL_HEADS.values(), (512, 8), (16384, 8)], ids=str)
def test_every_tiling_fits(given) -> None:
    for tiling in TILINGS:
        plan = linear_plan(PlainLinearConfig(*given), tiling, ArgMax())
        plain = replace(plan, epilogues=())
        assert plan.stages >= plain.stages - 1
        assert plan.smem.total_bytes <= plan.capacity
