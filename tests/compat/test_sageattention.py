"""SageAttention's functions: signatures of the originals, and what the originals get wrong."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from dsv4.compat import sageattention as sage
from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel
from dsv4.ops import quantize_kv, quantized_attention
from dsv4.ops.quantized_attention.options import FORMAT_OPTIONS, complete
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.lowp import Case, Metrics, expected, make_inputs, official_values

pytestmark = pytest.mark.stage("lowp")

# Names and defaults of SageAttention 2.2, in order.
SIGNATURES = {
    "sageattn": "q k v tensor_layout='HND' is_causal=False sm_scale=None return_lse=False",
    "sageattn_qk_int8_pv_fp16_triton": (
        "q k v tensor_layout='HND' quantization_backend='triton' is_causal=False attn_mask=None "
        "sm_scale=None smooth_k=True return_lse=False"
    ),
    "sageattn_qk_int8_pv_fp16_cuda": (
        "q k v tensor_layout='HND' is_causal=False qk_quant_gran='per_thread' sm_scale=None "
        "pv_accum_dtype='fp32' smooth_k=True smooth_v=False return_lse=False"
    ),
    "sageattn_qk_int8_pv_fp8_cuda": (
        "q k v tensor_layout='HND' is_causal=False qk_quant_gran='per_thread' sm_scale=None "
        "pv_accum_dtype='fp32+fp16' smooth_k=True smooth_v=False return_lse=False"
    ),
    "sageattn_qk_int8_pv_fp8_cuda_sm90": (
        "q k v tensor_layout='HND' is_causal=False qk_quant_gran='per_thread' sm_scale=None "
        "pv_accum_dtype='fp32+fp32' smooth_k=True return_lse=False"
    ),
    "sageattn_varlen": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal=False sm_scale=None "
        "smooth_k=True"
    ),
    "sageattn3_blackwell": "q k v attn_mask=None is_causal=False per_block_mean=True",
    "per_block_int8": "q k km=None BLKQ=128 BLKK=64 sm_scale=None tensor_layout='HND'",
    "per_warp_int8": "q k km=None BLKQ=128 WARPQ=32 BLKK=64 tensor_layout='HND'",
    "per_thread_int8": (
        "q k km=None BLKQ=128 WARPQ=32 BLKK=64 WARPK=64 sm_scale=None tensor_layout='HND'"
    ),
    "per_channel_fp8": "v tensor_layout='HND' scale_max=448.0 smooth_v=True",
    "sub_mean": "v tensor_layout='HND'",
}
FUNCTIONS = [name for name in SIGNATURES if name.startswith("sageattn") and "varlen" not in name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_the_originals(name) -> None:
    found = []
    for parameter in inspect.signature(getattr(sage, name)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        empty = parameter.default is parameter.empty
        found.append(parameter.name if empty else f"{parameter.name}={parameter.default!r}")
    assert " ".join(found) == SIGNATURES[name]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_attention(name, is_causal, seed) -> None:
    case = Case(2, 4, 2, 100, 100, 64, options={"is_causal": is_causal})
    q, k, v = make_inputs(case, seed)
    out = getattr(sage, name)(q, k, v, is_causal=is_causal)
    found = Metrics.of(out, expected(case, q, k, v)[0])
    assert found.cosine > (0.98 if "3" in name[:9] else 0.998), found
    with pytest.raises(TypeError, match="smooth_kk: got an unknown keyword"):
        getattr(sage, name)(q, k, v, smooth_kk=True)


@pytest.mark.parametrize("name", [*FUNCTIONS, "sageattn_varlen"])
def test_functions_have_a_kernel_on_hopper(name, monkeypatch) -> None:
    """But for FP4, which its tensor cores do not have."""
    config = config_of(name, monkeypatch)
    assert has_kernel(config, "sm_90a") == (name != "sageattn3_blackwell")


@pytest.mark.parametrize("name", [*FUNCTIONS, "sageattn_varlen"])
def test_functions_have_a_kernel_on_blackwell(name, monkeypatch) -> None:
    """But for those whose sums are in fp16."""
    config = config_of(name, monkeypatch)
    assert has_kernel(config, "sm_100a") == ("fp16" not in config.pv_accum_dtype)


def config_of(name: str, monkeypatch) -> QuantizedAttentionConfig:
    """What a function asks for by default."""
    calls = []
    monkeypatch.setattr(sage, "quantized_attention", lambda *_, **options: calls.append(options))
    x, ends = torch.zeros(2, 64, 64), torch.tensor([0, 2])
    getattr(sage, name)(x, x, x, *((ends, ends, 2, 2) if "varlen" in name else ()))
    formats = complete({option: calls[0].get(option) for option in FORMAT_OPTIONS})
    return QuantizedAttentionConfig(64, **formats)


def test_functions_differ_in_their_numerics(seed) -> None:
    """A wrapper that runs another one's formats would go unnoticed by accuracy alone."""
    case = Case(1, 2, 2, 200, 300, 128)
    q, k, v = make_inputs(case, seed)
    outs = [getattr(sage, name)(q, k, v) for name in FUNCTIONS if name != "sageattn"]
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])
    default = sage.sageattn_qk_int8_pv_fp8_cuda_sm90(q, k, v)
    assert torch.equal(sage.sageattn(q, k, v), default)


def test_it_stands_in_for_torch_s_attention(monkeypatch, seed) -> None:
    case = Case(1, 4, 2, 60, 90, 64)
    q, k, v = make_inputs(case, seed)
    mask = torch.rand(60, 90) < 0.8
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.1, enable_gqa=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sage.sageattn)
    options = {"attn_mask": mask, "dropout_p": 0.0, "scale": 0.1, "enable_gqa": True}
    out = F.scaled_dot_product_attention(q, k, v, **options)
    assert Metrics.of(out, wanted).cosine > 0.998
    with pytest.raises(
        TypeError, match=r"tensor_layout: got a tensor; a mask is given as attn_mask="
    ):
        F.scaled_dot_product_attention(q, k, v, mask)
    with pytest.raises(ValueError, match=r"dropout_p: got 0.1, needs 0"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
def test_one_mean_of_all_queries_of_a_head(mask, seed) -> None:
    """FP4 of queries with a bias: as accurate as means of 128, which without any is not."""
    case = Case(2, 4, 2, 130, 200, 64, "qbias")
    q, k, v = make_inputs(case, seed)
    options = {}
    if mask == "causal":
        case = Case(2, 4, 2, 130, 200, 64, options={"is_causal": True})
        options = {"is_causal": True}
    elif mask != "none":
        options["attn_mask"] = torch.rand(130, 200) < 0.8
        if mask == "float":
            options["attn_mask"] = torch.where(
                options["attn_mask"], torch.randn(130, 200), -torch.inf
            )
    wanted = expected(case, q, k, v, attn_mask=options.get("attn_mask"))[0]
    copies = [x.clone() for x in (q, k, v)]
    one = sage.sageattn3_blackwell(q, k, v, per_block_mean=False, **options)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies)), "D6"
    blocks = sage.sageattn3_blackwell(q, k, v, **options)
    assert not torch.equal(one, blocks)
    plain = quantized_attention(
        q, k, v, qk="nvfp4", causal_align="top_left" if mask == "causal" else None, **options
    )
    l1 = [Metrics.of(out, wanted).l1 for out in (one, blocks, plain)]
    assert l1[0] <= 1.05 * l1[1] and l1[0] < 0.9 * l1[2], l1


def test_packed_sequences(seed) -> None:
    q, k, v = torch.randn(3, 150, 2, 64).bfloat16()
    ends = torch.tensor([0, 70, 150], dtype=torch.int32)
    out = sage.sageattn_varlen(q, k, v, ends, ends, 80, 80, is_causal=True)
    for rows in (slice(0, 70), slice(70, 150)):
        alone = sage.sageattn_qk_int8_pv_fp16_triton(
            q[None, rows], k[None, rows], v[None, rows], "NHD", is_causal=True
        )
        assert_same_bits("sequence", out[rows], alone[0])


def test_quantisers_are_those_of_the_operators(seed) -> None:
    case = Case(2, 2, 2, 200, 200, 64)
    q, k, v = make_inputs(case, seed)
    codes = quantize_kv(k, v)
    km = codes.km.unsqueeze(2)
    found = sage.per_thread_int8(q, k, km, BLKQ=64, WARPQ=16, BLKK=128, WARPK=128)
    assert torch.equal(found[2], codes.k_codes)
    assert torch.equal(found[3], codes.k_scale.flatten(2))
    assert found[1].shape == (2, 2, 4 * 4 * 8)
    turned = [x.transpose(1, 2) for x in (q, k, km)]
    other = sage.per_thread_int8(*turned, 64, 16, 128, 128, tensor_layout="NHD")
    assert torch.equal(other[2].transpose(1, 2), found[2]) and torch.equal(other[1], found[1])
    v_codes, scale, mean = sage.per_channel_fp8(v, smooth_v=False)
    assert mean is None and v_codes.shape == (2, 2, 64, 256)
    assert torch.equal(scale, codes.v_scale)
    assert_same_bits("values", v_codes, official_values(codes.v_codes))
    warp = sage.per_warp_int8(q, k)
    assert warp[1].shape == (2, 2, 8) and warp[3].shape == (2, 2, 4)
    block = sage.per_block_int8(q, k, km)
    assert block[1].shape == (2, 2, 2) and block[3].shape == (2, 2, 4)
    off, mean = sage.sub_mean(v)
    assert off.dtype == torch.float16 and mean.shape == (2, 2, 64)
    torch.testing.assert_close(off.float() + mean.float()[:, :, None], v.float(), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("sageattn_qk_int8_pv_fp8_cuda", {"qk_quant_gran": "per_block"}, "qk_quant_gran: got"),
        ("sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp16"}, "pv_accum_dtype: got 'fp16'"),
        ("sageattn_qk_int8_pv_fp16_triton", {"quantization_backend": "x"}, "quantization_backend"),
        ("sageattn", {"tensor_layout": "BHSD"}, "tensor_layout: got 'BHSD'"),
        ("sageattn", {"sm_scale": 0.1, "scale": 0.1}, "scale: got a second value for sm_scale"),
        (
            "sageattn3_blackwell",
            {"per_block_mean": False, "attn_mask": torch.ones(3, 3)},
            "attn_mask: got shape",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(name, arguments, message, seed) -> None:
    q, k, v = make_inputs(Case(), seed)
    with pytest.raises(ValueError, match=message):
        getattr(sage, name)(q, k, v, **arguments)
