"""`quantized_attention` on the CPU: masks, layouts, sequences, edges; what the official package got
wrong (D1 to D14 of docs/design/lowp.md) is right here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dsv4.ops import quantize_kv, quantized_attention
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.lowp import Case, Metrics, expected, make_inputs, run

pytestmark = pytest.mark.stage("lowp")
FORMATS = ({}, {"pv": "fp16"}, {"qk": "fp8"}, {"qk": "nvfp4"}, {"qk_quant_gran": "per_warp"})


def bits(result: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]):
    for name, got, want in zip(("out", "lse"), result, wanted, strict=True):
        assert_same_bits(name, got, want)


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_channels_of_zeros_are_zeros(options, seed) -> None:
    """D2: 448 / 0 * 0 makes every code of the official kernel NaN."""
    case = Case(1, 2, 1, 70, 100, 64, "zeros", options=options)
    q, k, v = make_inputs(case, seed)
    out = run(case, q, k, v)[0]
    assert out.isfinite().all() and not out[..., 1::3].any()
    for tensor in (q, k, v):
        zeros = [torch.zeros_like(x) if x is tensor else x for x in (q, k, v)]
        assert all(x.isfinite().all() for x in run(case, *zeros))


@pytest.mark.parametrize("dim", [64, 200])
def test_float_masks_are_in_the_units_of_scores(dim, seed) -> None:
    """D4: added to scores in units of log2, the official mask is off by a factor of ln 2."""
    case = Case(2, 2, 1, 40, 150, dim, options={"pv": "fp16"})
    q, k, v = make_inputs(case, seed)
    mask = 3 * torch.randn(2, 1, 40, 150)
    out, lse = run(case, q, k, v, attn_mask=mask)
    wanted, wanted_lse = expected(case, q, k, v, attn_mask=mask)
    assert Metrics.of(out, wanted).l1 < 0.02
    assert (lse - wanted_lse).abs().max() < 0.04
    off = expected(case, q, k, v, attn_mask=mask / 0.6931)[0]
    assert Metrics.of(out, off).l1 > 0.1


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_rows_without_keys_are_zero(options, seed) -> None:
    """D5: the official kernel gives the mean of the values."""
    case = Case(1, 2, 2, 50, 140, 64, options=options)
    q, k, v = make_inputs(case, seed)
    mask = torch.rand(1, 1, 50, 140) < 0.5
    mask[..., 7, :] = False
    mask[..., 9, :128] = False  # no key in the first tile
    out, lse = run(case, q, k, v, attn_mask=mask)
    assert not out[:, :, 7].any() and (lse[:, :, 7] == -torch.inf).all()
    wanted, wanted_lse = expected(case, q, k, v, attn_mask=mask)
    assert Metrics.of(out, wanted).cosine > (0.98 if options.get("qk") == "nvfp4" else 0.998)
    rest = torch.arange(50) != 7
    assert (lse - wanted_lse)[:, :, rest].abs().max() < 0.5
    empty_k = k[:, :, :0]
    out, lse = run(case, q, empty_k, empty_k)
    assert not out.any() and (lse == -torch.inf).all()
    causal = {"is_causal": True, "causal_align": "bottom_right"}
    out, lse = run(case, q, k[:, :, :20], v[:, :, :20], **causal)
    assert not out[:, :, :30].any() and (lse[:, :, :30] == -torch.inf).all()
    assert out[:, :, 30:].any(-1).all()


def test_no_argument_is_changed(seed) -> None:
    """D6: the official FP4 function subtracts the mean from the caller's keys."""
    case = Case(1, 2, 1, 40, 90, 64)
    for options in (*FORMATS, {"qk": "nvfp4", "smooth_q": True}):
        given = make_inputs(case, seed)
        copies = [x.clone() for x in given]
        quantized_attention(*given, **options)
        assert all(torch.equal(a, b) for a, b in zip(given, copies))


@pytest.mark.parametrize("sizes", [(150, 150), (300, 300), (64, 300)])
@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_causal_rows_are_those_of_shorter_calls(options, sizes, seed) -> None:
    """D7: the official FP4 kernel drops the first tile that the diagonal cuts. Of 80 seeds the
    least cosines are 0.979 of FP4 and 0.998 of FP8 scores."""
    queries, keys = sizes
    causal = {"is_causal": True, "causal_align": "bottom_right"}
    case = Case(1, 2, 1, queries, keys, 64, options=options | causal)
    q, k, v = make_inputs(case, seed)
    wanted = expected(case, q, k, v)[0]
    found = Metrics.of(run(case, q, k, v)[0], wanted)
    bars = {"nvfp4": 0.975, "fp8": 0.997}
    assert found.cosine > bars.get(options.get("qk"), 0.9985), found


def test_sequences_are_smoothed_by_means_of_their_own(seed) -> None:
    """D8: one mean over all sequences does nothing for two with opposite ones."""
    q, k, v = torch.randn(3, 400, 2, 64)
    k[:200] += 20 * torch.randn(64)
    k[200:] -= 20 * torch.randn(64)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    ends = torch.tensor([0, 200, 400], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    case = Case(2, 2, 2, 200, 200, 64)
    batch = [x.view(2, 200, 2, 64).transpose(1, 2) for x in (q, k, v)]
    wanted = expected(case, *batch)[0].transpose(1, 2).reshape(400, 2, 64)
    own = Metrics.of(quantized_attention(q, k, v, **options), wanted)
    packed = Metrics.of(quantized_attention(q, k, v, km_scope="packed", **options), wanted)
    assert packed.l1 > 1.3 * own.l1, (own, packed)


def test_the_lse_of_smoothed_keys_is_corrected_in_float32(seed) -> None:
    """D9: a correction in bf16 is off by more than the scores are."""
    case = Case(1, 2, 1, 64, 200, 64, "kbias", options={"qk": "fp8", "qk_quant_gran": "per_row"})
    q, k, v = make_inputs(case, seed)
    q, k = q.float(), k.float()
    v = v.float()
    smooth, plain = (run(case, q, k, v, smooth_k=x)[1] for x in (True, False))
    wanted = expected(case, q, k, v)[1]
    assert (smooth - wanted).abs().max() < 0.05
    assert (smooth - wanted).abs().mean() < (plain - wanted).abs().mean()


@pytest.mark.slow
def test_checks_survive_python_without_asserts() -> None:
    """D11: the official checks are asserts."""
    code = (
        "import torch; from dsv4.ops import quantized_attention as f\n"
        "q = torch.zeros(1, 2, 4, 64)\n"
        "try: f(q, q[:, :, :, :32], q)\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "k: got head_dim 32, q has 64", done.stderr


def test_one_level_on_hopper_s_geometry_is_no_error(seed) -> None:
    """D13: documented, and not implemented, by the official function."""
    case = Case(options={"pv_accum_dtype": "fp32", "geometry": "sm90"})
    assert run(case, *make_inputs(case, seed))[0].isfinite().all()


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_layouts_are_views(options, seed) -> None:
    case = Case(2, 4, 2, 33, 140, 64, options=options)
    q, k, v = make_inputs(case, seed)
    out, lse = run(case, q, k, v)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    other, other_lse = run(case, *turned, tensor_layout="NHD")
    bits((other.transpose(1, 2), other_lse), (out, lse))
    assert other.is_contiguous()


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_request_does_not_depend_on_its_batch(options, seed) -> None:
    case = Case(3, 4, 2, 70, 260, 64, "vbias", options=options)
    q, k, v = make_inputs(case, seed)
    out, lse = run(case, q, k, v)
    bits(run(case, q, k, v), (out, lse))
    for one in range(3):
        part = slice(one, one + 1)
        bits(run(case, q[part], k[part], v[part]), (out[part], lse[part]))


@pytest.mark.parametrize("causal", [{}, {"is_causal": True, "causal_align": "bottom_right"}])
@pytest.mark.parametrize(
    "options, dim", [*((options, 64) for options in FORMATS), ({}, 256)], ids=str
)
def test_packed_sequences_are_those_of_calls_alone(options, dim, causal, seed) -> None:
    lengths = ((5, 70), (64, 0), (0, 30), (130, 200), (1, 1))
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
            for x in zip(*lengths)]  # fmt: skip
    # A row of NaN behind each end: nothing may read over it.
    q = torch.full((int(ends[0][-1]) + 3, 4, dim), torch.nan)
    k, v = torch.full((2, int(ends[1][-1]) + 2, 2, dim), torch.nan).unbind(0)
    q[:-3], k[:-2], v[:-2] = (torch.randn_like(x) for x in (q[:-3], k[:-2], v[:-2]))
    packed = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    out, lse = quantized_attention(q, k, v, return_lse=True, **packed, **options, **causal)
    assert not out[-3:].any() and (lse[:, -3:] == -torch.inf).all()
    for number in range(len(lengths)):
        of_q, of_k = (slice(int(x[number]), int(x[number + 1])) for x in ends)
        given = {"tensor_layout": "NHD", "return_lse": True, **options, **causal}
        alone = quantized_attention(q[None, of_q], k[None, of_k], v[None, of_k], **given)
        bits((out[of_q], lse[:, of_q]), (alone[0][0], alone[1][0]))


@pytest.mark.parametrize("options", [*FORMATS, {"smooth_q": True}], ids=str)
def test_quantised_keys_stand_for_keys(options, seed) -> None:
    case = Case(2, 4, 2, 33, 140, 40, options=options)
    q, k, v = make_inputs(case, seed)
    wanted = run(case, q, k, v)
    bits(quantized_attention(q, quantize_kv(k, v, **options), return_lse=True), wanted)


@pytest.mark.parametrize("dim", [1, 40, 64, 72, 96, 128, 129, 192, 256])
def test_any_head_dimension(dim, seed) -> None:
    case = Case(1, 2, 1, 30, 150, dim, dtype=torch.float16)
    q, k, v = make_inputs(case, seed)
    found = Metrics.of(run(case, q, k, v)[0], expected(case, q, k, v)[0])
    assert found.cosine > 0.998, found


@pytest.mark.parametrize("sizes", [(1, 1), (1, 500), (200, 1), (129, 257), (0, 10)])
def test_any_length(sizes, seed) -> None:
    case = Case(1, 2, 2, *sizes, 64)
    q, k, v = make_inputs(case, seed)
    out, lse = run(case, q, k, v)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if sizes[0]:
        assert Metrics.of(out, expected(case, q, k, v)[0]).cosine > 0.997


@pytest.mark.parametrize("dim", [64, 256])
def test_halves_of_the_keys_merge_by_their_lse(dim, seed) -> None:
    case = Case(1, 2, 2, 40, 512, dim)
    q, k, v = make_inputs(case, seed)
    parts = [run(case, q, k[:, :, x], v[:, :, x]) for x in (slice(0, 200), slice(200, 512))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out.float() * torch.exp(x - lse)[..., None] for out, x in parts)
    wanted, wanted_lse = expected(case, q, k, v)
    assert Metrics.of(merged, wanted).cosine > 0.9985
    assert (lse - wanted_lse).abs().max() < 0.01


def test_outputs_are_written_where_the_caller_says(seed) -> None:
    case = Case(2, 2, 1, 30, 60, 64)
    q, k, v = make_inputs(case, seed)
    wanted = run(case, q, k, v)[0]
    wide = torch.full((2, 2, 30, 80), torch.nan, dtype=q.dtype)
    assert quantized_attention(q, k, v, out=wide[..., :64]) is not None
    assert_same_bits("out", wide[..., :64], wanted)
    assert wide[..., 64:].isnan().all()


def test_nan_stays_in_its_row(seed) -> None:
    case = Case(1, 1, 1, 40, 100, 64, options={"qk": "fp8", "qk_quant_gran": "per_row"})
    q, k, v = make_inputs(case, seed)
    wanted = run(case, q, k, v)[0]
    q[0, 0, 11] = torch.nan
    out = run(case, q, k, v)[0]
    assert out[0, 0, 11].isnan().all()
    rest = torch.arange(40) != 11
    assert_same_bits("other rows", out[:, :, rest], wanted[:, :, rest])


def test_the_operator_keeps_torch_s_rules(seed) -> None:
    case = Case(1, 2, 1, 20, 40, 64)
    q, k, v = make_inputs(case, seed)
    codes = quantize_kv(k, v)
    kv = codes.config
    fields = [getattr(kv, x) for x in kv.__dataclass_fields__]
    tensors = list(codes.codes.values())
    identity = QUANTIZED_ATTENTION.runner_id(*fields, "none", "none", 0.125)
    given = (q, *tensors[:3], torch.empty_like(q), identity, *tensors[3:])
    # test_schema compares with allclose, which torch does not have for float8.
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(QUANTIZED_ATTENTION.overload, given, test_utils=utilities)
    given = (k, v, *tensors[:3], QUANTIZE_KV.runner_id(*fields), *tensors[3:], None)
    torch.library.opcheck(QUANTIZE_KV.overload, given, test_utils=utilities)


def test_a_call_compiles_into_one_graph(seed) -> None:
    case = Case(1, 2, 1, 20, 40, 64)
    q, k, v = make_inputs(case, seed)
    call = torch.compile(
        lambda q, k, v: quantized_attention(q, k, v, is_causal=True, causal_align="top_left") + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    wanted = quantized_attention(q, k, v, is_causal=True, causal_align="top_left") + 1
    assert_same_bits("compiled", call(q, k, v), wanted)
