"""`merged_linear` on the CPU: its values, its operator, its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import fp8_linear, merged_linear, merged_linear_runner_id
from dsv4.ops.merged_linear import MERGED_LINEAR, MODEL_INPUTS
from dsv4.testing.merged_linear import Case, Inputs, assert_merged_close

pytestmark = [pytest.mark.stage("op"), pytest.mark.stage("projections")]

K = 512
WEIGHTS = (
    "136 float8_e8m0fnu bfloat16, 72 float8_e8m0fnu float32, 200 bfloat16 float32, "
    "64 bfloat16 bfloat16"
)


def run(inputs: Inputs, **options) -> dict[str, torch.Tensor]:
    """Outputs by their names in the operator's table."""
    weights = [part.weight for part in inputs.linears] + list(inputs.plain)
    scales = [part.scale for part in inputs.linears]
    if "outs" not in options:
        dtypes = [getattr(torch, weight.out_dtype) for weight in inputs.case.config.parsed]
        options = {"out_dtypes": dtypes, **options}
    ys = merged_linear(inputs.x, weights, scales, **inputs.codes, **options)
    return dict(zip(inputs.outputs, ys))


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
def test_close_to_the_reference(scale_dtype, seed) -> None:
    weights = WEIGHTS.replace("float8_e8m0fnu", scale_dtype)
    inputs = Inputs.make(Case(7, 1024, weights, is_strided=True), seed)
    found = run(inputs)
    assert_merged_close(found, inputs)
    for i, part in enumerate(inputs.linears):
        alone = fp8_linear(
            part.x, part.weight, part.scale, out_dtype=getattr(torch, part.case.out_dtype)
        )
        assert torch.equal(found[f"out_{i}"], alone)


def test_codes_give_the_bits_of_what_they_were_rounded_from(seed) -> None:
    inputs = Inputs.make(Case(5, K, WEIGHTS, has_codes=True), seed)
    here = run(Inputs.make(Case(5, K, WEIGHTS), seed))
    for name, tensor in run(inputs).items():
        assert torch.equal(tensor, here[name])


def test_outputs_are_the_given_ones(seed) -> None:
    inputs = Inputs.make(Case(3, K, WEIGHTS), seed)
    expected = run(inputs)
    outs = [torch.empty_like(tensor) for tensor in expected.values()]
    found = run(inputs, outs=outs)
    for tensor, out in zip(found.values(), outs):
        assert tensor is out
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_fp32_activations_and_weights(seed) -> None:
    inputs = Inputs.make(Case(3, K, WEIGHTS), seed)
    weights = [part.weight for part in inputs.linears] + [w.float() for w in inputs.plain]
    scales = [part.scale for part in inputs.linears]
    found = merged_linear(inputs.x.float(), weights, scales)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    for i, weight in enumerate(inputs.plain, len(scales)):
        assert torch.equal(found[i], torch.nn.functional.linear(inputs.x.float(), weight.float()))


def test_no_tokens() -> None:
    found = run(Inputs.make(Case(0, K, WEIGHTS), 0))
    assert [tuple(tensor.shape) for tensor in found.values()] == [
        (0, 136),
        (0, 72),
        (0, 200),
        (0, 64),
    ]


def test_operator_is_sound_for_torch(seed) -> None:
    inputs = Inputs.make(Case(5, K, WEIGHTS), seed)
    tensors = dict(inputs.arguments)
    for name, weight in zip(inputs.outputs, inputs.case.config.parsed):
        tensors[name] = torch.empty(5, weight.rows, dtype=getattr(torch, weight.out_dtype))
    places = [tensors.get(arg.name) for arg in MERGED_LINEAR.tensors]
    identity = merged_linear_runner_id(K, WEIGHTS)
    place = MERGED_LINEAR.num_required
    op = torch.ops.dsv4.merged_linear.default
    torch.library.opcheck(
        op,
        (*places[:place], identity, *places[place:]),
        # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    written = [arg.name for arg in op._schema.arguments if arg.alias_info is not None]
    outputs = ["out_0", "out_1", *(f"plain_out_{i}" for i in range(5)), "codes", "code_scales"]
    outputs += ["squares_0", "squares_1", "head_scales_0", "head_scales_1"]
    assert written == outputs


def test_whole_graph_compilation(seed) -> None:
    inputs = Inputs.make(Case(5, K, WEIGHTS), seed)
    weights = [part.weight for part in inputs.linears] + list(inputs.plain)
    scales = [part.scale for part in inputs.linears]

    def double(x: torch.Tensor) -> torch.Tensor:
        return merged_linear(x, weights, scales)[2] * 2

    with torch.no_grad():
        compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(inputs.x), double(inputs.x))


def test_what_is_compiled_ahead_of_time_serves_every_layer() -> None:
    keys = {MERGED_LINEAR.compile_key(c, "sm_90a") for c in MERGED_LINEAR.aot().values()}
    assert len(keys) == len(MODEL_INPUTS)


X = torch.ones(3, K, dtype=torch.bfloat16)
WEIGHT = torch.ones(136, K).to(torch.float8_e4m3fn)
SCALE = torch.ones(2, K // 128)
PLAIN = torch.ones(8, K, dtype=torch.bfloat16)
OUT = torch.empty(3, 136, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "weights", "scales", "options", "error", "message"),
    [
        (None, [WEIGHT], [SCALE], {}, TypeError, "x: got a NoneType|x: got None"),
        (X[0], [WEIGHT], [SCALE], {}, ValueError, r"x: got shape \(512,\), needs \[T, K\]"),
        (X, [None], [SCALE], {}, TypeError, r"weights\[0\]: got None"),
        (X, [WEIGHT[0]], [SCALE], {}, ValueError, r"weights\[0\]: got shape \(512,\)"),
        (X, [PLAIN, WEIGHT], [SCALE], {}, ValueError, "weights: FP8 ones must come first"),
        (X, [PLAIN], [], {}, ValueError, "weights: got 0 in FP8 and 1 others, needs 1 to 2"),
        (X, [WEIGHT] * 3, [SCALE] * 3, {}, ValueError, "weights: got 3 in FP8 and 0 others"),
        (X, [WEIGHT, *[PLAIN] * 6], [SCALE], {}, ValueError, "weights: got 1 in FP8 and 6 others"),
        (X, [WEIGHT], [], {}, ValueError, "scales: got 0, 1 FP8 weights need as many"),
        (X[:, :256], [WEIGHT], [SCALE], {}, ValueError, "in_features must be a multiple of 512"),
        (X, [WEIGHT[:, :384]], [SCALE], {}, ValueError, r"weight_0: got shape \(136, 384\)"),
        (X, [WEIGHT], [SCALE.half()], {}, ValueError, "weights: scales must be one of"),
        (X, [WEIGHT], [SCALE[:1]], {}, ValueError, r"scale_0: got shape \(1, 4\), needs \[2, 4\]"),
        (X, [WEIGHT] * 2, [SCALE, SCALE[:1]], {}, ValueError, r"scale_1: got shape \(1, 4\)"),
        (X, [WEIGHT, PLAIN.float()], [SCALE], {}, TypeError, "plain_0: got torch.float32"),
        (
            X, [WEIGHT], [SCALE], {"x_codes": WEIGHT[:3]}, ValueError,
            "x_scale: got nothing, codes and scales of x go together",
        ),
        (X, [WEIGHT], [SCALE], {"outs": OUT}, TypeError, "outs: got .*, needs a list of tensors"),
        (X, [WEIGHT], [SCALE], {"outs": []}, ValueError, "outs: got 0, 1 weights need as many"),
        (X, [WEIGHT], [SCALE], {"outs": [OUT[:2]]}, ValueError, r"out_0: got shape \(2, 136\)"),
        (
            X, [WEIGHT], [SCALE], {"out_dtypes": []}, ValueError,
            "out_dtypes: got 0, 1 weights need as many",
        ),
        (
            X, [WEIGHT], [SCALE], {"out_dtypes": [torch.float16]}, ValueError,
            "weights: outputs must be one of .* got 'float16'",
        ),
        (X, [WEIGHT, PLAIN.clone().requires_grad_()], [SCALE], {}, ValueError, "plain_0: requires"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(x, weights, scales, options, error, message) -> None:
    with pytest.raises(error, match=f"^({message})"):
        merged_linear(x, weights, scales, **options)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("", "weights: got '', needs rows, dtype of the scales or bfloat16, dtype of the output"),
        ("0 float32 bfloat16", "weights: rows must be positive, got 0"),
        ("8 bfloat16 bfloat16, 8 float32 bfloat16", "weights: FP8 ones must come first"),
        ("8 float32 bfloat16, 8 float8_e8m0fnu bfloat16", "weights: scales must share a dtype"),
        (
            "8 bfloat16 bfloat16",
            "weights: needs 1 to 2 in FP8 and up to 5 in bfloat16, got 0 and 1",
        ),
    ],
)
def test_configurations_that_are_refused(weights, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MERGED_LINEAR.config(K, weights)


def test_tensors_that_the_configuration_does_not_have_are_named() -> None:
    identity = merged_linear_runner_id(K, "136 float32 bfloat16, 8 bfloat16 float32")
    call = (X, WEIGHT, SCALE, OUT, identity)
    with pytest.raises(ValueError, match=r"^plain_0: got nothing, the weights are"):
        torch.ops.dsv4.merged_linear(*call)
    with pytest.raises(ValueError, match=r"^weight_1: got a tensor, the weights are"):
        torch.ops.dsv4.merged_linear(*call, weight_1=WEIGHT)
