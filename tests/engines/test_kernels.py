"""Our kernels' contracts against vLLM's CPU kernels: two implementations without common code.

Where both do the same rounding, the bytes are equal; else the bound is that of the coarser dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4.compat.flash_mla import flash_mla_with_kvcache
from dsv4.compat.kv_entry import ENTRY_BYTES
from dsv4.ops import sparse_fmha_paged
from dsv4.ops.moe.op import moe
from dsv4.ops.moe.weights import GatedWeights
from dsv4.ops.topk import topk_stable
from dsv4.reference import indexer, mhc, rope
from dsv4.reference.cache_entry import pack_entries, unpack_entries
from dsv4.reference.compressor import compress
from dsv4.reference.moe import dense_weights, routed_experts
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import quantize_e4m3
from dsv4.reference.router import route
from dsv4.reference.weights import decode_fp4
from tests.engines import goldens, kernel_cases
from tests.engines.checkpoint import digest
from tests.engines.kernel_cases import EPS, PAGE, frequencies
from tests.engines.vllm_process import SOURCES, ask_kernels

pytestmark = pytest.mark.stage("op")
INPUTS = kernel_cases.inputs()
ATTENTION = 2e-3  # relative error; both round to bfloat16
BFLOAT16 = 4e-3

Answers = dict[str, Tensor]
Ask = Callable[[str], Answers]


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What vLLM's kernel says, recorded or asked now."""
    if request.param == "recorded":
        found = goldens.load("vllm_kernels")
    else:
        found = ask_kernels(INPUTS, tmp_path_factory.mktemp("kernels"))
    return lambda kernel: {
        key.rpartition("/")[2]: tensor
        for key, tensor in found.items()
        if key.startswith(kernel + "/")
    }


@pytest.mark.parametrize("kernel", INPUTS)
def test_recorded_for_these_inputs(kernel: str) -> None:
    assert goldens.about("vllm_kernels")[kernel] == digest(INPUTS[kernel])


def _relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _entries(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scale records of slots of pages of 64."""
    pages, entries = slots // PAGE, slots % PAGE
    data = pool[:, : PAGE * 576].unflatten(1, (PAGE, 576))[pages, entries]
    return data, pool[:, PAGE * 576 : PAGE * 584].unflatten(1, (PAGE, 8))[pages, entries]


# ---- KV entries ----------------------------------------------------------------------------------


def _rotated_kv(positions: Tensor) -> Tensor:
    return rope.rotate(INPUTS["kv_insert"]["kv"].float(), positions, frequencies())


def test_kv_insert_writes_the_same_bytes(theirs: Ask) -> None:
    case = INPUTS["kv_insert"]
    data, scales = _entries(theirs("kv_insert")["pool"], case["slots"])
    ours = pack_entries(_rotated_kv(case["positions"]))
    assert torch.equal(data, ours[0])
    assert torch.equal(scales, ours[1])
    untouched = torch.ones(3 * PAGE, dtype=torch.bool)
    untouched[case["slots"]] = False
    rest = _entries(theirs("kv_insert")["pool"], untouched.nonzero().flatten())
    assert not any(part.any() for part in rest)


def test_kv_insert_at_other_positions_shows(theirs: Ask) -> None:
    case = INPUTS["kv_insert"]
    data, _ = _entries(theirs("kv_insert")["pool"], case["slots"])
    ours, _ = pack_entries(_rotated_kv(case["positions"] + 1))
    assert (data != ours).float().mean() > 0.05


def test_query_norm_and_rotation(theirs: Ask) -> None:
    case = INPUTS["kv_insert"]
    normed = rms_norm(case["q"], None, EPS)
    ours = rope.rotate(normed, case["positions"][:, None], frequencies())
    assert _relative(theirs("kv_insert")["q"], ours) < BFLOAT16
    assert _relative(theirs("kv_insert")["q"], normed) > 10 * BFLOAT16


def test_inverse_rotation(theirs: Ask) -> None:
    case = INPUTS["inverse_rope"]
    positions = case["positions"][:, None]
    ours = rope.rotate(case["o"].float(), positions, frequencies(), inverse=True)
    assert _relative(theirs("inverse_rope")["o"], ours) < 1e-6
    forward = rope.rotate(case["o"].float(), positions, frequencies())
    assert _relative(theirs("inverse_rope")["o"], forward) > 0.01


# ---- compressed entries --------------------------------------------------------------------------


def _compressed(kernel: str, changed: str | None = None) -> Tensor:
    """Entries [3 or 4, d], rotated, in bfloat16; `changed` names an input that is set to 0."""
    case = dict(INPUTS[kernel])
    if changed is not None:
        case[changed] = torch.zeros_like(case[changed])
    columns = case["kv"].shape[1]
    both = torch.cat((case["kv"], case["score"]), 1)
    wkv, wgate = torch.eye(2 * columns).split(columns)
    pooled = compress(both, wkv, wgate, case["ape"], overlap=bool(case["blocks"] == 2))
    starts = torch.arange(len(pooled)) * len(case["ape"])
    turned = rope.rotate(rms_norm(pooled, case["norm"], EPS), starts, frequencies())
    return turned.bfloat16().float()


@pytest.mark.parametrize("kernel", ["compress, CSA", "compress, HCA"])
def test_compressed_entries(kernel: str, theirs: Ask) -> None:
    ours = pack_entries(_compressed(kernel))
    data, scales = _entries(theirs(kernel)["pool"], torch.arange(len(ours[0])))
    assert torch.equal(scales, ours[1])
    assert torch.equal(data, ours[0])
    for changed in ("ape", "score"):
        other = unpack_entries(*pack_entries(_compressed(kernel, changed)))
        assert _relative(unpack_entries(data, scales), other) > 0.05, changed


def test_index_keys(theirs: Ask) -> None:
    """In FP8 here; this package keeps them in FP4 as the official forward does."""
    ours = _compressed("compress, index")
    pool = theirs("compress, index")["pool"][0]
    codes = pool[: PAGE * 128].view(PAGE, 128)[: len(ours)].view(torch.float8_e4m3fn).float()
    scales = pool[PAGE * 128 :].view(torch.float32)[: len(ours), None]
    values, factors = quantize_e4m3(ours, 128)
    assert torch.equal(scales, factors)
    assert torch.equal(codes, values)
    assert _relative(codes * scales, ours) > 5 * BFLOAT16


# ---- indexer -------------------------------------------------------------------------------------


def test_index_queries(theirs: Ask) -> None:
    case = INPUTS["index_query"]
    turned = rope.rotate(case["q"], case["positions"][:, None], frequencies())
    values, factors = quantize_e4m3(turned.bfloat16().float(), 128)
    heads, dim = case["q"].shape[1:]
    weights = case["weights"] * (heads * dim) ** -0.5 * factors[..., 0]
    found = theirs("index_query")
    codes = found["codes"].view(torch.float8_e4m3fn).float()
    assert _relative(found["weights"], weights) < 1e-6
    assert _relative(codes, values) < BFLOAT16
    assert _relative(codes * factors, case["q"]) > 0.05


def test_index_logits(theirs: Ask) -> None:
    case = INPUTS["index_logits"]
    codes, factors = case["cache"].split((PAGE * 128, PAGE * 4), 1)
    keys = codes.unflatten(1, (PAGE, 128)).contiguous().view(torch.float8_e4m3fn).float()
    keys = keys * factors.contiguous().view(torch.float32)[..., None]
    q = case["q"].view(torch.float8_e4m3fn).float()
    for token, length in enumerate(case["lens"].tolist()):
        own = keys[case["table"][token].long()].flatten(0, 1)[:length]
        ours = indexer.index_scores(q[token, None], own, case["weights"][token, None])[0]
        found = theirs("index_logits")["logits"][token]
        assert _relative(found[:length], ours) < 1e-5
        assert not found[length:].any()
        shifted = indexer.index_scores(
            q[token, None], keys.flatten(0, 1)[:length], case["weights"][token, None]
        )[0]
        assert _relative(found[:length], shifted) > 0.1


def test_topk_sets(theirs: Ask) -> None:
    case = INPUTS["topk"]
    entries = case["scores"].shape[1]
    visible = torch.arange(entries) < case["lens"][:, None]
    chosen = theirs("topk")["chosen"]
    reference = indexer.select_top_k(case["scores"], visible, 512)
    best, count = topk_stable(case["scores"], 512, visible)
    worst, _ = topk_stable(-case["scores"], 512, visible)
    for row, found in enumerate(chosen.tolist()):
        expected = {index for index in found if index >= 0}
        assert {i for i in reference[row].tolist() if i >= 0} == expected
        assert set(best[row, : count[row]].tolist()) == expected
        if case["lens"][row] > 512:
            assert set(worst[row, : count[row]].tolist()) != expected


# ---- attention -----------------------------------------------------------------------------------

LAYERS = ["attention, CSA", "attention, HCA"]


def _paged(kernel: str, **changes: Tensor) -> Tensor:
    """Our operator on vLLM's pools and lists of rows."""
    case = INPUTS[kernel] | changes
    entries = int(case["entries"])
    return sparse_fmha_paged(
        case["q"],
        case["window"][:, : PAGE * ENTRY_BYTES].unflatten(1, (PAGE, ENTRY_BYTES)),
        case["window_slots"].int(),
        None,
        case["compressed"][:, : entries * ENTRY_BYTES].unflatten(1, (entries, ENTRY_BYTES)),
        case["compressed_slots"].int(),
        None,
        case["sink"],
        sink_mode="softmax",
    )


def _flash_mla(kernel: str, **changes: Tensor) -> Tensor:
    """FlashMLA's entry point on them."""
    case = INPUTS[kernel] | changes
    pools = {}
    for name, entries in (("window", PAGE), ("compressed", int(case["entries"]))):
        pool = case[name][:, : entries * ENTRY_BYTES]
        pools[name] = pool.unflatten(1, (entries, 1, ENTRY_BYTES))
    out, _ = flash_mla_with_kvcache(
        case["q"][:, None],
        pools["window"],
        None,
        None,
        512,
        None,
        is_fp8_kvcache=True,
        indices=case["window_slots"][:, None].int(),
        attn_sink=case["sink"],
        extra_k_cache=pools["compressed"],
        extra_indices_in_kvcache=case["compressed_slots"][:, None].int(),
    )
    return out[:, 0]


@pytest.mark.parametrize("ours", [_paged, _flash_mla])
@pytest.mark.parametrize("kernel", LAYERS)
def test_attention(kernel: str, ours: Callable[..., Tensor], theirs: Ask) -> None:
    expected = theirs(kernel)["out"]
    assert _relative(ours(kernel), expected) < ATTENTION
    case = INPUTS[kernel]
    for changes in (
        {"sink": torch.full_like(case["sink"], -30)},
        {"compressed_slots": torch.full_like(case["compressed_slots"], -1)},
        {"window_slots": torch.full_like(case["window_slots"], -1)},
        {"compressed_slots": case["compressed_slots"].clamp(min=0)},
    ):
        assert _relative(ours(kernel, **changes), expected) > 5 * ATTENTION, list(changes)


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["hash_router", "score_router"])
def test_routers(kernel: str, theirs: Ask) -> None:
    case, found = INPUTS[kernel], theirs(kernel)
    options = {"bias": case["bias"]} if "bias" in case else {
        "table": case["table"], "input_ids": case["ids"]
    }  # fmt: skip

    def weights_of(**options) -> Tensor:
        identity = torch.eye(256)
        return dense_weights(*route(case["logits"], identity, top_k=6, scaling=1.5, **options), 256)

    expected = dense_weights(found["chosen"].long(), found["weights"], 256)
    assert _relative(weights_of(**options), expected) < 1e-5
    wrong = {"bias": -case["bias"]} if "bias" in case else options | {"input_ids": case["ids"] - 1}
    assert _relative(weights_of(**wrong), expected) > 0.1


def test_experts(theirs: Ask) -> None:
    """vLLM leaves the inner activations in bfloat16: ours round them to FP8, which is coarser."""
    case, expected = INPUTS["experts"], theirs("experts")["out"]

    def weight(name: str) -> Tensor:
        return decode_fp4(case[name], case[f"{name}_scale"].view(torch.float8_e8m0fnu))

    dense = dense_weights(case["chosen"].long(), case["weights"], 8)
    w1, w2, w3 = (weight(name) for name in ("w1", "w2", "w3"))
    x = case["x"].float()
    assert _relative(routed_experts(x, w1, w2, w3, dense, 10.0), expected) < 2 * BFLOAT16
    assert _relative(routed_experts(x, w3, w2, w1, dense, 10.0), expected) > 0.5
    codes = [case[name] for name in ("w1", "w3", "w2")]
    scales = [case[f"{name}_scale"].view(torch.float8_e8m0fnu) for name in ("w1", "w3", "w2")]
    # The expert that all share adds nothing.
    hidden, inner = w2.shape[1:]
    none = [torch.zeros(shape).bfloat16() for shape in ((inner, hidden),) * 2 + ((hidden, inner),)]
    ours = moe(
        case["x"],
        case["gate"],
        GatedWeights(*codes, *scales),
        GatedWeights(*none),
        top_k=2,
        scaling=1.5,
        limit=10.0,
        table=case["table"],
        input_ids=torch.arange(len(x)),
    )
    assert _relative(ours, expected) < 0.03


def test_streams(theirs: Ask) -> None:
    case, found = INPUTS["streams"], theirs("streams")
    fields = case["fn"], case["base"], case["scale"]
    mix = mhc.mixing(case["streams"], *fields, iterations=20, eps=EPS, norm_eps=EPS)
    assert _relative(found["post"], mix.post) < 1e-5
    assert _relative(found["comb"], mix.comb) < 1e-5
    assert _relative(found["before"], mhc.contract(case["streams"], mix.pre)) < BFLOAT16
    after = mhc.expand(case["y"], case["streams"], mix.post, mix.comb)
    assert _relative(found["after"], after) < BFLOAT16
    turned = mhc.expand(case["y"], case["streams"], mix.post, mix.comb.mT)
    assert _relative(found["after"], turned) > 0.05
    fields = case["head_fn"], case["head_base"], case["head_scale"]
    last = mhc.head(case["streams"], *fields, eps=EPS, norm_eps=EPS)
    assert _relative(found["last"], last) < BFLOAT16
    assert _relative(found["last"], found["before"]) > 0.05
