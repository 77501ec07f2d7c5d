"""`grouped_linear` without a kernel: values, options, messages, tracing."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.gemm.config import num_code_rows
from dsv4.kernels.gemm.grouped_config import CODES, GroupedLinearConfig
from dsv4.kernels.gemm.grouped_plan import choose, linear_plan, tilings
from dsv4.ops.grouped_linear import MODEL_GROUPS
from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.grouped_linear import Case, Inputs, assert_grouped_close

pytestmark = pytest.mark.stage("op")

CASE = Case(5, 512, 256, 3)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case(3, 512, 256, 2, "fp8", is_strided=True),
        Case(4, 512, 256, 2, scale_dtype="float32", out_dtype="float32"),
        Case(0, 512, 256, 2),
    ],
    ids=str,
)
def test_values(case, seed) -> None:
    inputs = Inputs.make(case, seed)
    dtype = getattr(torch, case.out_dtype)
    y = ops.grouped_linear(inputs.x, inputs.weight, inputs.scale, act=case.act, out_dtype=dtype)
    assert y.dtype is dtype
    assert y.shape == (case.tokens, case.groups * case.group_rows)
    if case.tokens:
        assert_grouped_close(y, inputs)


def assert_same_codes(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for tensor, other in zip(found, wanted, strict=True):
        assert tensor.dtype is other.dtype
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case(3, 512, 256, 2, "fp8", "float32", has_special_rows=True, is_strided=True),
        Case(0, 512, 256, 2),
    ],
    ids=str,
)
def test_codes_are_those_of_the_outputs(case, seed) -> None:
    inputs = Inputs.make(case, seed)
    tensors = inputs.x, inputs.weight, inputs.scale
    y = ops.grouped_linear(*tensors, act=case.act)
    assert_same_codes(ops.grouped_linear_fp8(*tensors, act=case.act), quantize_e4m3(y, 128))


def test_codes_of_float32_are_those_of_bfloat16(seed) -> None:
    inputs = Inputs.make(CASE, seed)
    x = inputs.x.float()
    y = ops.grouped_linear(x, inputs.weight, inputs.scale)
    found = ops.grouped_linear_fp8(x, inputs.weight, inputs.scale)
    assert_same_codes(found, quantize_e4m3(y.bfloat16(), 128))


def test_float32_and_out(seed) -> None:
    inputs = Inputs.make(CASE, seed)
    wide = ops.grouped_linear(inputs.x.float(), inputs.weight, inputs.scale)
    assert wide.dtype is torch.float32
    out = torch.empty_like(wide, dtype=torch.bfloat16)
    assert ops.grouped_linear(inputs.x, inputs.weight, inputs.scale, out=out) is out
    torch.testing.assert_close(out.float(), wide, rtol=2**-7, atol=1e-4 * wide.abs().max().item())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 1100).bfloat16()}, ValueError, "x: got 1100 columns, needs"),
        ({"x": torch.zeros(2, 512)[None].bfloat16()}, ValueError, r"x: got shape .* needs"),
        ({"weight": torch.zeros(768, 512)}, TypeError, "weight: got torch.float32, needs"),
        ({"scale": torch.ones(3, 4)}, ValueError, r"scale: got shape \(3, 4\), needs \[6, 4\]"),
        ({"act": "int8"}, ValueError, "act must be one of .* got 'int8'"),
        ({"x": torch.zeros(2, 100).bfloat16()}, ValueError, "x: got 100 columns, needs"),
        ({"out_dtype": "bf16"}, TypeError, "out_dtype: got 'bf16', needs a torch.dtype"),
        ({"out_dtype": torch.float8_e4m3fn}, ValueError, "which `grouped_linear_fp8` makes"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message, seed) -> None:
    inputs = Inputs.make(CASE, seed)
    arguments = {"x": inputs.x, "weight": inputs.weight, "scale": inputs.scale, **change}
    with pytest.raises(error, match=message):
        ops.grouped_linear(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 1100).bfloat16()}, ValueError, "x: got 1100 columns, needs"),
        ({"x": torch.zeros(1536).bfloat16()}, ValueError, r"x: got shape .* needs"),
        ({"weight": None}, TypeError, "weight: got None, needs a torch.Tensor"),
        ({"act": "int8"}, ValueError, "act must be one of .* got 'int8'"),
    ],
)
def test_arguments_for_codes_that_do_not_fit(change, error, message, seed) -> None:
    inputs = Inputs.make(CASE, seed)
    arguments = {"x": inputs.x, "weight": inputs.weight, "scale": inputs.scale, **change}
    with pytest.raises(error, match=message):
        ops.grouped_linear_fp8(**arguments)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case(9, 512, 256, 2, scale_dtype="float32", out_dtype="float32"),
        Case(3, 512, 256, 2, "fp8", has_special_rows=True),
        Case(0, 512, 256, 2),
    ],
    ids=str,
)
def test_inputs_may_be_codes(case, seed) -> None:
    """Rows of codes of no token may hold anything."""
    inputs = Inputs.make(case, seed)
    given, weight = inputs.of_codes.arguments, (inputs.weight, inputs.scale)
    options = {"act": case.act, "out_dtype": getattr(torch, case.out_dtype)}
    wanted = ops.grouped_linear(inputs.x, *weight, **options)
    found = ops.grouped_linear(given["x"], *weight, x_scale=given["x_scale"], **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    out = torch.empty_like(wanted)
    ops.grouped_linear(given["x"], *weight, x_scale=given["x_scale"], act=case.act, out=out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    assert_same_codes(
        ops.grouped_linear_fp8(given["x"], *weight, x_scale=given["x_scale"], act=case.act),
        ops.grouped_linear_fp8(inputs.x, *weight, act=case.act),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x_scale": None}, ValueError, "x_scale: got nothing, x is float8_e4m3fn"),
        ({"x": torch.zeros(5, 1536).bfloat16()}, ValueError, "x_scale: got a tensor, x is bfloat"),
        (
            {"x": torch.zeros(5, 1536).to(torch.float8_e4m3fn)},
            ValueError,
            "x: got 5 rows, codes of",
        ),
        ({"x_scale": torch.zeros(5, 12)}, TypeError, "x_scale: got torch.float32, needs"),
        ({"x_scale": 1.0}, TypeError, "x_scale: got a float, needs a torch.Tensor"),
        ({"act": "fp8"}, ValueError, "x: got 16 rows, codes of 5 tokens need 5"),
    ],
)
@pytest.mark.parametrize("function", [ops.grouped_linear, ops.grouped_linear_fp8])
def test_codes_that_do_not_fit(function, change, error, message, seed) -> None:
    inputs = Inputs.make(CASE, seed)
    given = inputs.of_codes.arguments
    arguments = {name: given[name] for name in ("x", "weight", "scale", "x_scale")}
    with pytest.raises(error, match=message):
        function(**{**arguments, **change})


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float8_e4m3fn"])
def test_scales_of_outputs_belong_to_codes(out_dtype, seed) -> None:
    inputs = Inputs.make(CASE, seed)
    out = torch.empty(CASE.tokens, 768, dtype=getattr(torch, out_dtype))
    scales = torch.empty(CASE.tokens, 6, dtype=torch.float8_e8m0fnu)
    identity = ops.grouped_linear_runner_id(512, 256, 3, out_dtype=out_dtype)
    needs_none = out_dtype == "bfloat16"
    call = inputs.x, inputs.weight, inputs.scale, out, identity, None, None
    with pytest.raises(ValueError, match=f"out_scale: got .*, out is {out_dtype}"):
        torch.ops.dsv4.grouped_linear(*call, scales if needs_none else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((768, 256, 2), "in_features must be a multiple of 512 up to 8192, got 768"),
        ((512, 128, 2), "group_rows must be a positive multiple of 256, got 128"),
        ((512, 256, 0), "groups must be positive, got 0"),
        ((512, 256, 2, "int8"), "act must be one of .* got 'int8'"),
        ((512, 256, 2, "bf16", "int8"), "scale_dtype must be one of .* got 'int8'"),
    ],
)
def test_configurations_that_are_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedLinearConfig(*fields)


def test_tracing(seed) -> None:
    inputs = Inputs.make(CASE, seed)
    tensors = inputs.x, inputs.weight, inputs.scale
    traced = torch.compile(ops.grouped_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(*tensors), ops.grouped_linear(*tensors))
    both = torch.compile(ops.grouped_linear_fp8, fullgraph=True, backend="aot_eager")
    assert_same_codes(both(*tensors), ops.grouped_linear_fp8(*tensors))
    identity = ops.grouped_linear_runner_id(512, 256, 3)
    out = torch.empty(CASE.tokens, 768, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.dsv4.grouped_linear.default,
        (*tensors, out, identity),
        # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
        test_utils=("test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("out_dtype", ["bfloat16", CODES])
@pytest.mark.parametrize("act", ["bf16", "fp8"])
@pytest.mark.parametrize("given", [*MODEL_GROUPS.values(), (512, 256, 1), (8192, 256, 64)], ids=str)
def test_every_tiling_fits(given, act, out_dtype) -> None:
    config = GroupedLinearConfig(*given, act, out_dtype=out_dtype)
    for tiling in tilings(config):
        plan = linear_plan(config, tiling)
        assert plan.columns == plan.tokens * config.terms
        assert plan.stages >= 2
        assert plan.smem.total_bytes <= plan.capacity
    for tokens in (1, 8, 9, 64, 65, 4096, 100_000):
        assert 0 <= choose(config, tokens, 132) < len(tilings(config))


def test_code_rows() -> None:
    assert [num_code_rows(tokens, 2) for tokens in (0, 1, 8, 9)] == [0, 16, 16, 32]
    assert num_code_rows(9, 1) == 9
