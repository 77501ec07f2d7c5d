"""What `quantized_attention` does not take: each is refused by the name of the argument, and the
design page shows the table that says so."""

from __future__ import annotations

import warnings
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from dsv4.kernels.lowp.config import (
    ABSENT_PRODUCTS,
    ACCUMULATORS,
    GRANULARITIES,
    KERNEL_ACCUMULATORS,
    KERNEL_GEOMETRIES,
    KERNEL_HEAD_DIMS,
    SMOOTH_V_ACCUMULATOR,
    QuantizedAttentionConfig,
)
from dsv4.ops import (
    quantize_kv,
    quantize_kv_runner_id,
    quantized_attention,
    quantized_attention_runner_id,
)
from dsv4.ops.quantized_attention import backends
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.ops.runtime import backend
from dsv4.ops.runtime.backend import Device
from dsv4.testing.lowp import Case, make_inputs

pytestmark = pytest.mark.stage("lowp")
PAGE = Path(__file__).parents[3] / "docs" / "design" / "lowp.md"


def test_the_page_shows_the_table_of_formats() -> None:
    page = PAGE.read_text()
    for qk, granularities in GRANULARITIES.items():
        assert f"| {qk} | {', '.join(granularities)} |\n" in page
    for pv, modes in ACCUMULATORS.items():
        assert f"| {pv} | {', '.join(modes)} | {SMOOTH_V_ACCUMULATOR.get(pv, '-')} |\n" in page


def test_the_page_shows_what_kernels_take() -> None:
    page = PAGE.read_text()
    for product, formats, table in (
        ("qk", GRANULARITIES, KERNEL_GEOMETRIES),
        ("pv", ACCUMULATORS, KERNEL_ACCUMULATORS),
    ):
        for name in formats:
            cells = (", ".join(table[arch].get(name, ())) or "-" for arch in ("sm_90a", "sm_100a"))
            assert f"| {product} {name} | {' | '.join(cells)} |\n" in page
    for pv in ACCUMULATORS:
        most = (KERNEL_HEAD_DIMS[arch].get(pv, ()) for arch in ("sm_90a", "sm_100a"))
        cells = (", ".join(f"to {dim}" for dim in dims) or "-" for dims in most)
        assert f"| channels, pv {pv} | {' | '.join(cells)} |\n" in page


@pytest.mark.parametrize("qk", GRANULARITIES)
@pytest.mark.parametrize(
    "granularity", sorted({x for all_ in GRANULARITIES.values() for x in all_})
)
def test_granularities_are_those_of_the_table(qk, granularity, seed) -> None:
    given = make_inputs(Case(), seed)
    if granularity in GRANULARITIES[qk]:
        assert quantized_attention(*given, qk=qk, qk_quant_gran=granularity).isfinite().all()
    else:
        with pytest.raises(
            ValueError, match=f"qk_quant_gran: got '{granularity}', qk '{qk}' needs"
        ):
            quantized_attention(*given, qk=qk, qk_quant_gran=granularity)


@pytest.mark.parametrize("pv", ACCUMULATORS)
@pytest.mark.parametrize("mode", sorted({x for modes in ACCUMULATORS.values() for x in modes}))
def test_accumulations_are_those_of_the_table(pv, mode, seed) -> None:
    given, qk = make_inputs(Case(), seed), "nvfp4" if pv == "nvfp4" else "int8"
    if mode in ACCUMULATORS[pv]:
        out = quantized_attention(*given, qk=qk, pv=pv, pv_accum_dtype=mode)
        assert out.isfinite().all()
    else:
        with pytest.raises(ValueError, match="pv_accum_dtype: got"):
            quantized_attention(*given, qk=qk, pv=pv, pv_accum_dtype=mode)


ENDS = torch.tensor([0, 64], dtype=torch.int32)
REFUSED = [
    ({"tensor_layout": "BSHD"}, "tensor_layout: got 'BSHD', needs 'HND' or 'NHD'"),
    ({"qk": "int4"}, "qk: got 'int4', needs one of int8, fp8, nvfp4"),
    ({"qk": "nvfp4", "pv": "fp8"}, "pv: got 'fp8' beside qk 'nvfp4', FP4 needs 'nvfp4' for both"),
    ({"geometry": "sm80"}, "geometry: got 'sm80', needs 'sm90' or 'sm89'"),
    ({"quantizer": "cuda"}, "quantizer: got 'cuda', granularity 'per_thread' needs 'triton'"),
    ({"km_scope": "batch"}, "km_scope: got 'batch', needs"),
    ({"causal_align": "top_left"}, "causal_align: got 'top_left', is_causal is False"),
    ({"attn_mask": torch.ones(3, 3)}, r"attn_mask: got shape \(3, 3\), needs one that broadcasts"),
    ({"attn_mask": torch.ones(64, 64).int()}, "attn_mask: got torch.int32, needs torch.bool"),
    ({"sm_scale": "1"}, "sm_scale: got a str, needs a real number"),
    ({"smooth_k": 1}, "smooth_k: got a int, needs True or False"),
    ({"out": torch.zeros(1, 2, 64, 64)}, "out: got torch.float32, needs torch.bfloat16"),
    ({"cu_seqlens_k": ENDS}, "cu_seqlens_q: got None, packed sequences need it"),
    ({"cu_seqlens_q": ENDS}, r"q: got shape \(1, 2, 64, 64\), needs \[rows, heads, channels\]"),
]


@pytest.mark.parametrize("options, message", REFUSED, ids=lambda x: str(x)[:40])
def test_arguments_are_refused_by_name(options, message, seed) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        quantized_attention(*make_inputs(Case(), seed), **options)


def test_tensors_are_refused_by_name(seed) -> None:
    q, k, v = make_inputs(Case(), seed)
    wide = torch.zeros(1, 2, 64, 257, dtype=q.dtype)
    for given, message in (
        ((q, k, v[:, :, :9]), "v: got shape"),
        ((q, k, None), "v: got None, needs a torch.Tensor"),
        ((q, k.float(), v), "k: got dtype torch.float32, q has torch.bfloat16"),
        ((q[:, :1], k, v), "q: got 1 heads, needs a multiple of the 2 heads"),
        ((wide, wide, wide), "head_dim: got 257, needs 1 to 256"),
        ((q, k.transpose(2, 3), v), "k: got strides"),
        ((q.clone().requires_grad_(), k, v), "q: requires grad"),
        ((q, k.clone().requires_grad_(), v), "k: requires grad"),
        ((q, quantize_kv(k, v), v), "v: got a value, k is quantised already"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            quantized_attention(*given)


def test_causal_attention_of_unequal_lengths_needs_an_alignment(seed) -> None:
    q, k, v = make_inputs(Case(queries=32), seed)
    with pytest.raises(ValueError, match="causal_align: got None for 32 queries and 64 keys"):
        quantized_attention(q, k, v, is_causal=True)
    assert quantized_attention(q, k, v, is_causal=True, causal_align="top_left").isfinite().all()


@pytest.mark.parametrize("ends", [[0, 10, 5], [1, 64], [0, 65], []])
def test_ends_of_sequences_that_do_not_rise_are_refused(ends, seed) -> None:
    q, k, v = torch.randn(3, 64, 2, 64)
    ends = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: got"):
        quantized_attention(q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ends)


# ---- devices -------------------------------------------------------------------------------------


@pytest.fixture
def gpu_of(monkeypatch):
    """Sets which architecture GPUs are of."""

    def set_(arch: str | None) -> None:
        device = arch and Device(arch, 132)
        monkeypatch.setattr(backend, "device_of", lambda index: device)
        backends.check_once.cache_clear()

    yield set_
    backends.check_once.cache_clear()


def identity_of(**options: object) -> int:
    return quantized_attention_runner_id(*astuple(QuantizedAttentionConfig(64, **options)))


FP4 = {"qk": "nvfp4", "pv": "nvfp4", "qk_quant_gran": "per_16", "quantizer": ""}
FP4 |= {"pv_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    "arch, options, message",
    [
        ("sm_90a", FP4, "qk: got 'nvfp4', which tensor cores of sm_90a do not multiply, needs "
         "'int8' or 'fp8'; DSV4_OPS=torch"),
        ("sm_103a", {}, "qk: got 'int8', which tensor cores of sm_103a do not multiply, needs "
         "'fp8' or 'nvfp4'"),
    ],
)  # fmt: skip
def test_formats_that_a_gpu_does_not_multiply_are_refused(
    arch, options, message, gpu_of, monkeypatch
) -> None:
    device, identity = torch.device("cuda", 0), identity_of(**options)
    gpu_of(arch)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{message}"):
            backends.check_device(QUANTIZED_ATTENTION, identity, device)
    monkeypatch.setenv("DSV4_OPS", "torch")
    backends.check_device(QUANTIZED_ATTENTION, identity, device)
    monkeypatch.delenv("DSV4_OPS")
    backends.check_device(QUANTIZED_ATTENTION, identity, torch.device("cpu"))
    gpu_of(None)  # another GPU: the operator's own warning
    backends.check_device(QUANTIZED_ATTENTION, identity, device)


def test_options_without_a_kernel_run_in_torch_with_one_warning(gpu_of) -> None:
    device = torch.device("cuda", 0)
    gpu_of("sm_100a")
    sm89 = identity_of(geometry="sm89", pv_accum_dtype="fp32+fp16", sm_scale=-1.0)
    with pytest.warns(
        RuntimeWarning, match="sm_100a has pv_accum_dtype 'fp32.fp16', sm_scale -1.0;"
    ):
        backends.check_device(QUANTIZED_ATTENTION, sm89, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.check_device(QUANTIZED_ATTENTION, sm89, device)
        backends.check_device(QUANTIZED_ATTENTION, identity_of(), device)
    keys = quantize_kv_runner_id(64, "float32", False)
    with pytest.warns(
        RuntimeWarning, match="quantize_kv: no kernel of sm_100a has dtype 'float32'"
    ):
        backends.check_device(QUANTIZE_KV, keys, device)
    wide = quantize_kv_runner_id(136, "bfloat16", False)
    with pytest.warns(RuntimeWarning, match="no kernel of sm_100a has head_dim 136;"):
        backends.check_device(QUANTIZE_KV, wide, device)


@pytest.mark.slow
def test_a_call_on_a_gpu_compiles_into_one_graph(gpu_of, monkeypatch, seed) -> None:
    monkeypatch.setattr(backends, "GPU", "cpu")
    gpu_of("sm_90a")
    given = make_inputs(Case(), seed)
    torch._dynamo.reset()
    compiled = torch.compile(quantized_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given), quantized_attention(*given))


def test_the_page_shows_what_gpus_do_not_multiply() -> None:
    page = PAGE.read_text()
    for arch, formats in ABSENT_PRODUCTS.items():
        assert f"| {arch} | {', '.join(formats)} |\n" in page
