"""`quantized_attention` and `quantize_kv` on a GPU: torch on the same codes, bits of the
quantisers, graphs, streams, bits that a head alone decides."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel
from dsv4.ops import quantize_kv, quantized_attention
from dsv4.ops.quantized_attention import knobs
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.ops.runtime.runner import config_of
from dsv4.ops.runtime.state import warm_up
from dsv4.testing.harness import Device, run_all
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case, Metrics, expected, make_inputs
from dsv4.testing.lowp_attention import Inputs, assert_attention, make_mask
from dsv4.testing.lowp_codes import KvInputs, assert_codes

pytestmark = [pytest.mark.gpu, pytest.mark.stage("lowp")]

FP8_ROWS = {"qk": "fp8", "qk_quant_gran": "per_row"}
FP8_BLOCKS = {"qk": "fp8", "qk_quant_gran": "per_64"}
# Tiles of 64 keys, of the official functions but two.
SM89 = {"geometry": "sm89"}
SM89_BLOCKS = {
    **SM89, "qk_quant_gran": "per_block", "pv": "fp16", "pv_accum_dtype": "fp16+fp32",
}  # fmt: skip
CASES = {
    "128 channels": Case(2, 4, 4, 2048, 2048, 128, "kbias"),
    "64 channels": Case(2, 4, 2, 1000, 3001, 64, "vbias"),
    "causal": Case(1, 8, 2, 1111, 1111, 128, options={"causal": "top_left"}),
    "bottom right": Case(1, 2, 1, 300, 5000, 64, options={"causal": "bottom_right"}),
    "one query": Case(3, 4, 1, 1, 777, 128),
    "one key": Case(1, 2, 2, 100, 1, 64),
    "96 channels": Case(1, 2, 2, 500, 500, 96, "outlier"),
    "40 channels, fp16": Case(1, 2, 2, 130, 261, 40, dtype=torch.float16),
    "zeros": Case(1, 2, 1, 300, 300, 64, "zeros"),
    "per warp": Case(1, 2, 1, 200, 900, 128, options={"qk_quant_gran": "per_warp"}),
    "per block": Case(1, 2, 1, 200, 900, 64, options={"qk_quant_gran": "per_block"}),
    "FP8 scores": Case(2, 4, 2, 1000, 2001, 128, "kbias", options=FP8_ROWS),
    "FP8 scores, per 64": Case(1, 4, 2, 700, 1300, 64, options=FP8_BLOCKS),
    "FP8 scores, causal": Case(1, 8, 2, 1111, 1111, 64, options={**FP8_ROWS, "causal": "top_left"}),
    "FP8 scores, per head": Case(2, 4, 2, 1000, 2001, 128, "kbias", options={"qk": "fp8"}),
    "FP8 scores, per head, causal": Case(
        1, 8, 2, 1111, 1111, 64, "kbias", options={"qk": "fp8", "causal": "top_left"}
    ),
    "fp16 sums of 64 keys": Case(
        2, 4, 2, 500, 1001, 128, "vbias", options={"pv_accum_dtype": "fp32+fp16"}
    ),
    "fp16 sums of 64 keys, causal": Case(
        1, 4, 2, 700, 700, 64, options={"pv_accum_dtype": "fp32+fp16", "causal": "top_left"}
    ),
    "fp16 values": Case(1, 4, 2, 700, 1300, 128, "vbias", options={"pv": "fp16"}),
    "fp16 values, two levels": Case(
        1, 4, 2, 700, 1300, 128, options={"pv": "fp16", "pv_accum_dtype": "fp16+fp32"}
    ),
    "fp16 values, 64 channels": Case(
        1, 8, 2, 1111, 1111, 64, options={"pv": "fp16", "causal": "top_left"}
    ),
    "tiles of 64 keys": Case(
        2, 4, 2, 1000, 2001, 128, "vbias", options={**SM89, "pv_accum_dtype": "fp32+fp16"}
    ),
    "tiles of 64 keys, two levels": Case(
        1, 8, 2, 1111, 1111, 64, "kbias", options={**SM89, "causal": "top_left"}
    ),
    "tiles of 64 keys, per warp": Case(
        1, 4, 2, 700, 1300, 128, options={**SM89, "qk_quant_gran": "per_warp"}
    ),
    "tiles of 64 keys, fp16 values": Case(1, 4, 2, 700, 1300, 64, options={**SM89, "pv": "fp16"}),
    "tiles of 64 keys, blocks": Case(1, 4, 2, 700, 1300, 128, "vbias", options=SM89_BLOCKS),
    "tiles of 64 keys, blocks, causal": Case(
        1, 8, 2, 1111, 1111, 64, options={**SM89_BLOCKS, "causal": "top_left"}
    ),
    "tiles of 64 keys, FP8 scores": Case(2, 4, 2, 500, 901, 64, options={**SM89, "qk": "fp8"}),
    "256 channels": Case(2, 4, 4, 1000, 2048, 256, "kbias"),
    "256 channels, causal": Case(1, 8, 2, 1111, 1111, 256, "vbias", options={"causal": "top_left"}),
    "200 channels, bottom right": Case(1, 2, 1, 300, 3000, 200, options={"causal": "bottom_right"}),
    "256 channels, one level": Case(
        1, 4, 2, 500, 901, 256, "vbias", options={"pv_accum_dtype": "fp32", "smooth_v": True}
    ),
    "256 channels, FP8 scores": Case(2, 4, 2, 500, 1001, 256, "kbias", options=FP8_ROWS),
    "256 channels, FP8 scores, per 64": Case(1, 4, 2, 700, 1300, 256, options=FP8_BLOCKS),
    "192 channels, FP8 scores, per head": Case(2, 4, 2, 500, 1001, 192, options={"qk": "fp8"}),
    "256 channels, tiles of 64 keys": Case(
        2, 4, 2, 1000, 2001, 256, "vbias", options={**SM89, "pv_accum_dtype": "fp32+fp16"}
    ),
    "256 channels, tiles of 64 keys, per warp": Case(
        1,
        4,
        2,
        700,
        1300,
        256,
        dtype=torch.float16,
        options={**SM89, "qk_quant_gran": "per_warp", "causal": "bottom_right"},
    ),
    "256 channels, tiles of 64 keys, fp16 values": Case(
        1, 4, 2, 700, 1300, 256, options={**SM89, "pv": "fp16"}
    ),
    "192 channels, tiles of 64 keys, blocks": Case(
        1, 4, 2, 700, 1300, 192, "vbias", options=SM89_BLOCKS
    ),
    "256 channels, a mask": Case(1, 4, 2, 500, 1001, 256, options={"mask": "float"}),
    "a mask": Case(2, 4, 2, 500, 1001, 128, options={"mask": "bool"}),
    "added to scores": Case(
        2, 4, 2, 500, 1001, 64, options={"mask": "float", "causal": "top_left"}
    ),
}
PACKED = ((700, 3000), (0, 40), (1, 1), (130, 0), (2000, 2000), (64, 128))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def device() -> Device:
    """What compiles each configuration once."""
    return Device()


def run_codes(inputs: KvInputs, device: Device) -> None:
    """Run the quantisers twice, and compare with torch."""
    from dsv4.kernels.lowp.quantize_kv import build

    kernels = OpKernels(QUANTIZE_KV, device)
    compiled = kernels.compile(inputs.config, build)
    assert_codes(inputs, kernels.run(inputs, schedules=None, compiled=compiled))


@pytest.mark.parametrize("name", CASES)
def test_attention_is_torch_s(name: str, device: Device, seed: int) -> None:
    inputs = Inputs.make(CASES[name], seed, device="cuda")
    assert has_kernel(inputs.config)
    assert_attention(inputs, OpKernels(QUANTIZED_ATTENTION, device).run(inputs, schedules=None))


@pytest.mark.parametrize(
    "options, dim",
    [({}, 64), ({"qk": "fp8"}, 64), (SM89, 64), (SM89_BLOCKS, 64), ({}, 256), ({"qk": "fp8"}, 256)],
    ids=["int8", "fp8", "64", "64 blocks", "256", "256 fp8"],
)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_packed_sequences(causal: str, options: dict, dim: int, device: Device, seed: int) -> None:
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    case = Case(1, 4, 2, rows + 30, keys + 9, dim, options={**options, "causal": causal})
    inputs = Inputs.make(case, seed, PACKED, "cuda")
    assert_attention(inputs, OpKernels(QUANTIZED_ATTENTION, device).run(inputs, schedules=None))


@pytest.mark.parametrize("name", CASES)
def test_codes_are_torch_s(name: str, device: Device, seed: int) -> None:
    case = CASES[name]
    options = {key: x for key, x in case.options.items() if key not in ("causal", "mask")}
    run_codes(
        KvInputs.make(Case(**{**vars(case), "options": options}), seed, device="cuda"), device
    )


def test_codes_of_packed_sequences_and_of_values_without_their_mean(
    device: Device, seed: int
) -> None:
    options = {"pv_accum_dtype": "fp32", "smooth_v": True}
    case = Case(1, 2, 2, 1, 5000, 128, "vbias", options=options)
    run_codes(KvInputs.make(case, seed, (3000, 0, 1, 1900), "cuda"), device)


@pytest.mark.parametrize("dim", [64, 128])
def test_one_accumulator_loses_what_two_levels_keep(dim: int, seed: int) -> None:
    """Values with an offset, 8,192 keys: the sums of Hopper's FP8 products are narrow."""
    case = Case(1, 2, 2, 256, 8192, dim, "vbias")
    q, k, v = (x.cuda() for x in make_inputs(case, seed))
    wanted, _ = expected(case, q, k, v)
    errors = {
        mode: Metrics.of(quantized_attention(q, k, v, pv_accum_dtype=mode), wanted).l1
        for mode in ("fp32+fp32", "fp32")
    }
    assert errors["fp32+fp32"] <= 0.004
    assert errors["fp32"] >= 10 * errors["fp32+fp32"]


@pytest.mark.parametrize("dim", [64, 128])
def test_fp16_sums_of_fp16_products(dim: int, device: Device, seed: int) -> None:
    options = {"pv": "fp16", "pv_accum_dtype": "fp16", "smooth_v": True}
    inputs = Inputs.make(
        Case(1, 4, 2, 500, 1300, dim, "vbias", options=options), seed, device="cuda"
    )
    outcome = OpKernels(QUANTIZED_ATTENTION, device).run(inputs, schedules=None)
    assert_attention(inputs, outcome, tiles=2 * -(-1300 // 128))


def test_a_head_has_the_same_bits_alone_and_in_a_batch(seed: int) -> None:
    q, k, v = (x.cuda() for x in make_inputs(Case(3, 8, 2, 700, 1300, 128), seed))
    whole, lse = quantized_attention(q, k, v, return_lse=True)
    part, part_lse = quantized_attention(q[1:2, 4:, :496], k[1:2, 1:], v[1:2, 1:], return_lse=True)
    assert torch.equal(part, whole[1:2, 4:, :496])
    assert torch.equal(part_lse, lse[1:2, 4:, :496])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_sequences_have_the_bits_that_they_have_alone(dim: int, seed: int) -> None:
    """Which others are packed beside it, and where, changes no bit of a sequence."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    q, k, v = (
        x[0].transpose(0, 1).cuda() for x in make_inputs(Case(1, 4, 2, rows, keys, dim), seed)
    )
    ends = [torch.tensor([0, *(pair[i] for pair in PACKED)]).cumsum(0) for i in range(2)]
    on_gpu = [x.int().cuda() for x in ends]
    found, lse = quantized_attention(
        q, k, v, cu_seqlens_q=on_gpu[0], cu_seqlens_k=on_gpu[1], return_lse=True
    )
    for i, (of_q, of_k) in enumerate(PACKED):
        if of_q and of_k:
            at, of = int(ends[0][i]), int(ends[1][i])
            part = (
                x.transpose(0, 1)[None]
                for x in (q[at : at + of_q], k[of : of + of_k], v[of : of + of_k])
            )
            alone, alone_lse = quantized_attention(*part, return_lse=True)
            assert torch.equal(alone[0].transpose(0, 1), found[at : at + of_q]), i
            assert torch.equal(alone_lse[0], lse[:, at : at + of_q]), i


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_run_has_the_same_bits(dim: int, is_causal: bool, seed: int) -> None:
    """More work tiles than CTAs, other work on the GPU beside, memory that was overwritten."""
    q, k, v = (x.cuda() for x in make_inputs(Case(2, 32, 8, 1111, 1111, dim), seed))
    options = {"is_causal": is_causal, "return_lse": True}
    wanted, wanted_lse = quantized_attention(q, k, v, **options)
    stream, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    out = torch.empty_like(wanted)
    for _ in range(20):
        with torch.cuda.stream(stream):
            noise = (noise @ noise).clamp_(-1, 1)
        out.fill_(torch.nan)
        _, lse = quantized_attention(q, k, v, **options, out=out)
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_that_all_heads_share_is_not_copied(kind: str, seed: int) -> None:
    q, k, v = (x.cuda() for x in make_inputs(Case(2, 4, 2, 300, 501, 64), seed))
    mask = make_mask(kind, q, 501, seed)
    mask = mask != 0 if kind == "bool" else mask
    wanted = quantized_attention(q, k, v, attn_mask=mask)
    assert torch.equal(quantized_attention(q, k, v, attn_mask=mask[:, :1]), wanted)
    assert not wanted[:, :, 150].any()


def test_layouts_have_the_same_bits(seed: int) -> None:
    q, k, v = (x.cuda() for x in make_inputs(Case(2, 4, 2, 300, 500, 64), seed))
    wanted = quantized_attention(q, k, v, is_causal=True, causal_align="bottom_right")
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    found = quantized_attention(
        *rows_first, tensor_layout="NHD", is_causal=True, causal_align="bottom_right"
    )
    assert torch.equal(found.transpose(1, 2), wanted)


def test_graph_replay_reads_new_inputs(seed: int) -> None:
    q, k, v = (x.cuda() for x in make_inputs(Case(1, 4, 2, 600, 900, 64), seed))
    others = [x.cuda() for x in make_inputs(Case(1, 4, 2, 600, 900, 64), seed + 1)]
    wanted = quantized_attention(*others)
    quantized_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantized_attention(q, k, v)
    for tensor, other in zip((q, k, v), others):
        tensor.copy_(other)
    found.fill_(torch.nan)
    graph.replay()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("options", [{}, {"qk": "fp8"}], ids=["int8", "fp8"])
def test_a_warm_runner_can_be_captured(options: dict, seed: int) -> None:
    """Warmed up, but never called: the first call is the captured one."""
    q, k, v = (x.cuda() for x in make_inputs(Case(1, 2, 2, 200, 300, 64), seed))
    of_keys = quantize_kv(k.cpu(), v.cpu(), **options, smooth_k=False).config
    of_all = QuantizedAttentionConfig(**vars(of_keys), sm_scale=0.3)
    for op, one in ((QUANTIZE_KV, of_keys), (QUANTIZED_ATTENTION, of_all)):
        warm_up(op, config_of(op, op.runner_id(*vars(one).values())), 1, q.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantized_attention(q, k, v, **options, smooth_k=False, sm_scale=0.3)
    graph.replay()
    wanted = quantized_attention(q, k, v, **options, smooth_k=False, sm_scale=0.3)
    assert torch.equal(found, wanted)


def test_toggles_of_the_environment(monkeypatch, seed: int) -> None:
    """Codes made on the CPU and launches of one head give the kernel's bits; the torch code is
    close."""
    q, k, v = (x.cuda() for x in make_inputs(Case(1, 4, 2, 300, 500, 64, "vbias"), seed))
    wanted = quantized_attention(q, k, v)
    monkeypatch.setattr(knobs, "overrides", lambda: {"host_codes": True})
    assert torch.equal(quantized_attention(q, k, v), wanted)
    monkeypatch.setattr(knobs, "overrides", lambda: {"serial_heads": True})
    assert torch.equal(quantized_attention(q, k, v), wanted)
    monkeypatch.setattr(knobs, "overrides", lambda: {"torch_code": True})
    found = quantized_attention(q, k, v)
    assert not torch.equal(found, wanted) and Metrics.of(found, wanted).l1 < 0.005


def test_a_side_stream(seed: int) -> None:
    q, k, v = (x.cuda() for x in make_inputs(Case(1, 4, 2, 600, 900, 128), seed))
    wanted = quantized_attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = quantized_attention(q, k, v)
    stream.synchronize()
    assert torch.equal(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_d10_the_current_device_stays(seed: int) -> None:
    """Tensors of a device that is not current: it is not made current; the bits are the same."""
    inputs = make_inputs(Case(1, 4, 2, 600, 900, 128), seed)
    wanted = quantized_attention(*(x.to("cuda:0") for x in inputs))
    for current in (0, 1):
        with torch.cuda.device(current):
            found = quantized_attention(*(x.to("cuda:1") for x in inputs))
            assert torch.cuda.current_device() == current
        assert found.device == torch.device("cuda:1")
        assert torch.equal(found.to("cuda:0"), wanted)


def test_rows_past_the_keys_are_not_read(seed: int) -> None:
    """NaN behind the last key, and in the rows of other sequences' values."""
    q, k, v = (x.cuda() for x in make_inputs(Case(1, 2, 1, 200, 384, 64), seed))
    wide = quantize_kv(k, v)
    narrow = quantize_kv(k[:, :, :250], v[:, :, :250])
    wanted = quantized_attention(q, narrow)
    codes = torch.full_like(wide.k_codes, 127)
    codes[:, :, :250] = narrow.k_codes
    poisoned = type(narrow)(
        narrow.config, None, codes[:, :, :250], narrow.k_scale, narrow.v_codes, narrow.v_scale,
        km=narrow.km,
    )  # fmt: skip
    assert torch.equal(quantized_attention(q, poisoned), wanted)


def test_more_than_2_31_elements() -> None:
    shape = (1, 9, 2**21, 128)
    q = torch.zeros(1, 9, 128, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    v[:, -1, -1] = 2.0**21
    out = quantized_attention(q, k, v)
    assert not out[:, :-1].any()
    torch.testing.assert_close(out[0, -1].float(), torch.ones(128, 128, device="cuda"))


def test_runs_agree_on_streams_of_their_own(device: Device, seed: int) -> None:
    kernels = OpKernels(QUANTIZED_ATTENTION, device)
    cases = [Inputs.make(CASES["causal"], seed + i, device="cuda") for i in range(3)]
    compiled = kernels.compile(cases[0].config)
    alone = [run_all(device, compiled, lambda one=one: kernels.call(one)) for one in cases]
    together = device.on_streams(compiled, [kernels.call(one) for one in cases])
    for one, other in zip(alone, together):
        one.assert_same_bits(other, "alone against together")
