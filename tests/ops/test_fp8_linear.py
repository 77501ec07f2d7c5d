"""`fp8_linear` on the CPU: its values, its operator, its errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dsv4.ops import fp8_linear, fp8_linear_runner_id
from dsv4.ops.fp8_linear import FP8_LINEAR, MODEL_LAYERS, PLANS
from dsv4.ops.quantize import dequantize_e4m3_blocks, qdq_e4m3, quantize_e4m3
from dsv4.ops.runtime.registry import ahead_of_time
from dsv4.simulator.arithmetic.fp8_sums import fp8_sum
from dsv4.testing.fp8_linear import TRUNCATION, Case, Inputs, assert_linear_close

pytestmark = [pytest.mark.stage("op"), pytest.mark.stage("projections")]

K, M = 512, 136


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_close_to_the_reference(x_dtype, scale_dtype, out_dtype, seed) -> None:
    inputs = Inputs.make(Case(7, 1024, M, x_dtype, scale_dtype, out_dtype, is_strided=True), seed)
    y = fp8_linear(
        inputs.x,
        inputs.weight,
        inputs.scale,
        x_scale=inputs.optional_x_scale,
        out_dtype=getattr(torch, out_dtype),
    )
    assert y.dtype == getattr(torch, out_dtype)
    assert_linear_close(y, inputs)


def sums_of_hopper(inputs: Inputs, block: int) -> torch.Tensor:
    """y of unit scales, the tensor core's sums of so many elements of K added in fp32."""
    x, weight = inputs.x.float().numpy(), inputs.weight.float().numpy()
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, x.shape[1], block):
        part = np.zeros_like(total)
        for k in range(begin, begin + block, 32):
            step = slice(k, k + 32)
            part = fp8_sum(x[:, step], weight[:, step], ("e4m3", "e4m3"), part, keep_all=False)
        total += part
    return torch.from_numpy(total)


def test_sums_that_are_never_promoted_are_noticed(seed) -> None:
    """The accumulator's own error, as its bits make it, passes; that of a whole K in it does not.
    Before they are rounded to bf16, at least."""
    case = Case(8, 4096, 64, "float8_e4m3fn", out_dtype="float32")
    inputs = Inputs.make(case, seed)
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(seed)).bfloat16()
    codes = x.to(torch.float8_e4m3fn)
    ones = (torch.full_like(s.view(torch.uint8), 127) for s in (inputs.scale, inputs.x_scale))
    scale, x_scale = (s.view(torch.float8_e8m0fnu) for s in ones)
    inputs = replace(inputs, x=codes, x_scale=x_scale, scale=scale, wide=codes.bfloat16())
    promoted = sums_of_hopper(inputs, 128)
    assert_linear_close(promoted, inputs)
    in_bfloat16 = replace(inputs, case=replace(case, out_dtype="bfloat16"))
    assert_linear_close(promoted.bfloat16(), in_bfloat16)
    exact = inputs.expected()
    assert 8e-5 < (promoted - exact).norm() / exact.norm() < TRUNCATION
    with pytest.raises(AssertionError, match=r"y\[.*\]: got"):
        assert_linear_close(sums_of_hopper(inputs, 4096), inputs)


def test_codes_give_the_bits_of_what_they_were_rounded_from(seed) -> None:
    inputs = Inputs.make(Case(5, K, M), seed)
    codes, scales = quantize_e4m3(inputs.x, 128)
    from_codes = fp8_linear(codes, inputs.weight, inputs.scale, x_scale=scales)
    assert torch.equal(from_codes, fp8_linear(inputs.x, inputs.weight, inputs.scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_decoded_weight(dtype, seed) -> None:
    inputs = Inputs.make(Case(5, K, M), seed)
    x = inputs.x.to(dtype) * 1.001
    dense = dequantize_e4m3_blocks(inputs.weight, inputs.scale, dtype=dtype)
    expected = F.linear(qdq_e4m3(x, 128), dense)
    assert torch.equal(fp8_linear(x, inputs.weight, inputs.scale), expected)


def test_the_output_is_the_given_one(seed) -> None:
    inputs = Inputs.make(Case(3, K, M), seed)
    out = torch.empty(3, M + 8)[:, :M]
    assert fp8_linear(inputs.x, inputs.weight, inputs.scale, out=out) is out
    wide = fp8_linear(inputs.x, inputs.weight, inputs.scale, out_dtype=torch.float32)
    assert torch.equal(out, wide)


def test_no_tokens() -> None:
    inputs = Inputs.make(Case(0, K, M), 0)
    assert fp8_linear(inputs.x, inputs.weight, inputs.scale).shape == (0, M)


def operator_arguments(inputs: Inputs) -> tuple:
    out = torch.empty(len(inputs.x), inputs.case.out_features, dtype=torch.bfloat16)
    identity = fp8_linear_runner_id(inputs.case.in_features, inputs.case.out_features)
    return inputs.x, inputs.weight, inputs.scale, inputs.x_scale, out, identity


def test_operator_is_sound_for_torch(seed) -> None:
    arguments = operator_arguments(Inputs.make(Case(5, K, M), seed))
    op = torch.ops.dsv4.fp8_linear.default
    torch.library.opcheck(
        op,
        arguments,
        # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    written = [arg.name for arg in op._schema.arguments if arg.alias_info is not None]
    assert written == ["out", "codes", "code_scales", "squares", "head_scales"]


def test_whole_graph_compilation(seed) -> None:
    inputs = Inputs.make(Case(5, K, M), seed)

    def double(x: torch.Tensor) -> torch.Tensor:
        return fp8_linear(x, inputs.weight, inputs.scale) * 2

    with torch.no_grad():
        compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(inputs.x), double(inputs.x))


def test_fake_tensors_are_checked(seed) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = Inputs.make(Case(5, K, M), seed)
    with FakeTensorMode() as mode:
        x, weight, scale = (mode.from_tensor(t) for t in (inputs.x, inputs.weight, inputs.scale))
        assert fp8_linear(x, weight, scale).shape == (5, M)
        with pytest.raises(ValueError, match=r"^scale: got 1 rows"):
            fp8_linear(x, weight, scale[:1])


@pytest.mark.parametrize("arch", PLANS)
def test_what_is_compiled_ahead_of_time_serves_every_layer(arch) -> None:
    keys = [key for label, key in ahead_of_time(arch) if "fp8_linear:" in label]
    for rows, width in MODEL_LAYERS.values():
        config, plans = FP8_LINEAR.config(width, rows), PLANS[arch]
        assert FP8_LINEAR.compile_key(config, arch) in keys
        assert plans.tilings(plans.representative(config)) == plans.tilings(config)
    assert len(keys) == len(set(keys))


X = torch.ones(3, K, dtype=torch.bfloat16)
WEIGHT = torch.ones(M, K).to(torch.float8_e4m3fn)
SCALE = torch.ones(2, K // 128)
CODES = torch.ones(3, K).to(torch.float8_e4m3fn)
X_SCALE = torch.full((3, K // 128), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("x", "weight", "scale", "options", "error", "message"),
    [
        (None, WEIGHT, SCALE, {}, TypeError, "x: got None"),
        (X[0], WEIGHT, SCALE, {}, ValueError, r"x: got shape \(512,\), needs \[T, K\]"),
        (X, WEIGHT[0], SCALE, {}, ValueError, r"weight: got shape \(512,\), needs \[M, K\]"),
        (X[:, :256], WEIGHT, SCALE, {}, ValueError, "in_features must be a multiple of 512"),
        (X, WEIGHT[:, :384], SCALE, {}, ValueError, r"weight: got shape \(136, 384\), needs"),
        (X, WEIGHT.float(), SCALE, {}, TypeError, "weight: got torch.float32, needs"),
        (X.half(), WEIGHT, SCALE, {}, ValueError, "out_dtype must be one of .* got 'float16'"),
        (X, WEIGHT, SCALE.half(), {}, ValueError, "scale_dtype must be one of .* got 'float16'"),
        (X, WEIGHT, SCALE[:1], {}, ValueError, "scale: got 1 rows, a weight of 136 rows needs 2"),
        (X, WEIGHT, SCALE[:, :3], {}, ValueError, r"scale: got shape \(2, 3\), needs"),
        (X, WEIGHT, SCALE, {"x_scale": X_SCALE}, ValueError, "x_scale: got 3 rows, x that is not"),
        (CODES, WEIGHT, SCALE, {}, ValueError, "x_scale: got 0 rows, float8_e4m3fn codes of 3"),
        (
            CODES,
            WEIGHT,
            SCALE,
            {"x_scale": X_SCALE.float()},
            TypeError,
            "x_scale: got torch.float32, needs torch.float8_e8m0fnu",
        ),
        (X, WEIGHT, SCALE, {"out": X}, ValueError, r"out: got shape \(3, 512\), needs \[3, 136\]"),
        (X, WEIGHT.mT.contiguous().mT, SCALE, {}, ValueError, "weight: got strides"),
        (X.float().requires_grad_(), WEIGHT, SCALE, {}, ValueError, "x: requires grad"),
    ],
)
def test_wrong_arguments_are_named(x, weight, scale, options, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        fp8_linear(x, weight, scale, **options)
