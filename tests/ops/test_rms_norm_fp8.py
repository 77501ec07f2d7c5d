"""`rms_norm_fp8` on the CPU: its bits, its relatives in the model, its operator, its errors."""

from __future__ import annotations

import pytest
import torch

from dsv4.layers.norm import rms_normalize
from dsv4.ops import rms_norm_fp8, rms_norm_fp8_runner_id
from dsv4.ops.quantize import qdq_e4m3, quantize_e4m3
from dsv4.ops.rms_norm_fp8 import sum_in_order
from dsv4.reference.norm import rms_norm_fp8 as oracle
from dsv4.testing.rms_norm_fp8 import EPS, KINDS, Case, Inputs, assert_same_codes

pytestmark = [pytest.mark.stage("rows"), pytest.mark.stage("projections")]


def inputs_of(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    inputs = Inputs.make(case, seed)
    return inputs.x, inputs.optional_weight


@pytest.mark.parametrize("dim", [128, 1536, 7168, 16384])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", None])
def test_exact_sums_give_the_bits_of_oracle_and_model(dim, weight_dtype, seed) -> None:
    x, weight = inputs_of(Case(20, dim, weight_dtype, "integers"), seed)
    codes, scales, norm = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    values, wanted_scales, wanted_norm = oracle(x, weight, EPS)
    assert torch.equal(codes.float(), values)
    assert torch.equal(scales.float(), wanted_scales)
    assert torch.equal(norm, wanted_norm)
    wide = None if weight is None else weight.float()
    assert torch.equal(norm, rms_normalize(x, EPS, wide))
    dequantised = codes.float() * scales.float().repeat_interleave(128, 1)
    assert torch.equal(dequantised, qdq_e4m3(norm, 128).float())


@pytest.mark.parametrize("kind", ["normal", "growing"])
def test_other_orders_of_the_sum_move_few_roundings(kind, seed) -> None:
    """Against the oracle, whose sum has another order: one step of bf16, in few elements."""
    x, weight = inputs_of(Case(50, 4096, kind=kind), seed)
    codes, scales, norm = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    _, wanted_scales, wanted = oracle(x, weight, EPS)
    assert (norm != wanted).float().mean() < 1e-3
    torch.testing.assert_close(norm.float(), wanted.float(), rtol=2**-7, atol=0)
    assert (scales.float() != wanted_scales).float().mean() < 1e-2
    expected_codes, expected_scales = quantize_e4m3(norm, 128)
    assert_same_codes("codes", codes, expected_codes)
    assert_same_codes("scales", scales, expected_scales)


def test_the_sum_is_the_tree_that_is_promised(seed) -> None:
    x = torch.randn(3, 384)

    def tree(terms: list[torch.Tensor]) -> torch.Tensor:
        if len(terms) == 1:
            return terms[0]
        half = len(terms) // 2
        # The halves meet element by element before their own elements do.
        return tree([a + b for a, b in zip(terms[:half], terms[half:])])

    for row, got in zip(x, sum_in_order(x), strict=True):
        groups = [
            tree([tree(list(vector)) for vector in group.view(16, 8)]) for group in row.view(3, 128)
        ]
        assert got == tree([*groups, torch.zeros(())])
    torch.testing.assert_close(sum_in_order(x), x.sum(1))


def test_a_row_does_not_depend_on_the_batch(seed) -> None:
    x, weight = inputs_of(Case(33, 1024), seed)
    together = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    for row in (0, 16, 32):
        alone = rms_norm_fp8(x[row : row + 1], weight, eps=EPS, return_norm=True)
        for one, all_rows in zip(alone, together, strict=True):
            assert_same_codes("row", one, all_rows[row : row + 1])


def test_what_is_not_finite_stays_in_its_row(seed) -> None:
    x, weight = inputs_of(Case(7, 512, None, "special"), seed)
    codes, scales, norm = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    nan = codes.float().isnan()
    assert nan[:2].all(), "a NaN anywhere makes the mean, and so the row, NaN"
    assert nan[2].tolist() == [False] * 511 + [True]
    assert not nan[3:].any()
    assert (scales[:2].view(torch.uint8) == 255).all()
    assert scales[2].view(torch.uint8).tolist() == [105, 105, 105, 255]
    assert (codes[2:5, :511].float() == 0).all()
    alone = rms_norm_fp8(x[6:], weight, eps=EPS, return_norm=True)
    for one, all_rows in zip(alone, (codes, scales, norm), strict=True):
        assert_same_codes("row", one, all_rows[6:])


def test_float32_rows_are_not_rounded_to_bf16(seed) -> None:
    x = torch.randn(4, 256)
    weight = torch.randn(256)
    codes, scales, norm = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, rms_normalize(x, EPS, weight))
    for got, wanted in zip((codes, scales), quantize_e4m3(norm, 128), strict=True):
        assert_same_codes("fp32", got, wanted)


def test_outputs_are_the_given_ones(seed) -> None:
    x, weight = inputs_of(Case(6, 256, is_strided=True), seed)
    out = torch.empty(6, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :256]
    scale_out = torch.empty(6, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    norm_out = torch.empty(6, 256, dtype=torch.bfloat16)
    given = (out, scale_out, norm_out)
    found = rms_norm_fp8(
        x, weight, eps=EPS, out=out, scale_out=scale_out, norm_out=norm_out, return_norm=True
    )
    assert all(a is b for a, b in zip(found, given, strict=True))
    new = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    for one, other in zip(given, new, strict=True):
        assert_same_codes("given", one, other)
    assert len(rms_norm_fp8(x, weight, eps=EPS)) == 2


@pytest.mark.parametrize("weight_dtype", ["float32", None])
def test_no_rows(weight_dtype) -> None:
    x, weight = inputs_of(Case(0, 512, weight_dtype), 0)
    codes, scales, norm = rms_norm_fp8(x, weight, eps=EPS, return_norm=True)
    assert (codes.shape, scales.shape, norm.shape) == ((0, 512), (0, 4), (0, 512))


@pytest.mark.parametrize("wants_norm", [True, False])
def test_operator_is_sound_for_torch(wants_norm, seed) -> None:
    x, weight = inputs_of(Case(5, 256), seed)
    out = torch.empty(5, 256, dtype=torch.float8_e4m3fn)
    scale_out = torch.empty(5, 2, dtype=torch.float8_e8m0fnu)
    norm_out = torch.empty_like(x) if wants_norm else None
    identity = rms_norm_fp8_runner_id(256, EPS)
    op = torch.ops.dsv4.rms_norm_fp8.default
    torch.library.opcheck(
        op,
        (x, weight, out, scale_out, identity, norm_out),
        # Not test_schema: it compares float8 tensors with what torch cannot compute in float8.
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    written = [arg.name for arg in op._schema.arguments if arg.alias_info is not None]
    assert written == ["out", "scale_out", "norm_out"]
    before = x.clone(), weight.clone()
    op(x, weight, out, scale_out, identity, norm_out)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


def test_every_kind_of_values_is_what_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    found = {name: kind(14, 512, generator) for name, kind in KINDS.items()}
    squares = found["integers"].double().square().sum(1)
    assert torch.equal(squares, found["integers"].square().sum(1).double())
    amax = found["growing"].unflatten(1, (4, 128)).abs().amax(-1)
    assert (amax[:, 1:] > amax[:, :-1]).float().mean() > 0.9
    assert not found["special"].isfinite().all()


X, WEIGHT = torch.ones(3, 256, dtype=torch.bfloat16), torch.ones(256)


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (None, WEIGHT, {}, TypeError, "x: got None"),
        (X[0], WEIGHT, {}, ValueError, r"x: got shape \(256,\), needs \[T, d\]"),
        (X.double(), WEIGHT, {}, TypeError, "x: got torch.float64, needs torch.bfloat16 or"),
        (X.mT.contiguous().mT, WEIGHT, {}, ValueError, "x: got strides .* must be contiguous"),
        (X[:, :200], WEIGHT, {}, ValueError, "dim must be a multiple of 128 up to 16384, got 200"),
        (X, WEIGHT[:128], {}, ValueError, r"weight: got shape \(128,\), needs \[256\]"),
        (X, WEIGHT.half(), {}, TypeError, "weight: got torch.float16, needs torch.float32"),
        (X, [1.0], {}, TypeError, "weight: got a list"),
        (X, WEIGHT, {"eps": 0.0}, ValueError, "eps must be at least 1e-18, got 0.0"),
        (X, WEIGHT, {"out": X}, TypeError, "out: got torch.bfloat16, needs torch.float8_e4m3fn"),
        (X, WEIGHT, {"norm_out": X}, ValueError, "norm_out: shares memory with x"),
        (X, WEIGHT, {"norm_out": X.float()}, TypeError, "norm_out: got torch.float32, needs"),
        (
            X,
            WEIGHT,
            {"scale_out": torch.empty(3, 4, dtype=torch.float8_e8m0fnu)},
            ValueError,
            r"scale_out: got shape \(3, 4\), needs \[3, 2\]",
        ),
        (X, WEIGHT.clone().requires_grad_(), {}, ValueError, "weight: requires grad"),
        (X.float().requires_grad_(), WEIGHT, {}, ValueError, "x: requires grad"),
    ],
)
def test_wrong_arguments_are_named(x, weight, options, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        rms_norm_fp8(x, weight, **{"eps": EPS, **options})
