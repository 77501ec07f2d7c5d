"""`quantized_attention` for Blackwell in the simulator: torch on the same codes, every schedule,
ragged and packed lengths, deleted synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel
from dsv4.kernels.lowp.sm100.plan import AttentionPlanSm100
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_attention import Inputs, assert_attention
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("lowp")

FP8_ROWS = {"qk": "fp8", "qk_quant_gran": "per_row"}
FP8_BLOCKS = {"qk": "fp8", "qk_quant_gran": "per_64"}
FP8_HEADS = {"qk": "fp8", "qk_quant_gran": "per_head"}
SM89 = {"geometry": "sm89"}  # tiles of 64 keys
SM89_BLOCKS = {**SM89, "qk_quant_gran": "per_block"}
# More tiles of keys than stages, a diagonal in both warpgroups' tiles, work tiles of which the
# second warpgroup has few queries or none, two heads of queries to one of keys.
RAGGED = Case(1, 2, 1, 300, 1050, 64, options={**FP8_BLOCKS, "causal": "bottom_right"})
# Tiles of keys that only the second warpgroup sees; all of Tensor Memory.
WIDE = Case(1, 2, 1, 300, 400, 128, options={**FP8_BLOCKS, "causal": "top_left"})
# Scales of keys in the ring, which the softmax reads.
ROWS = replace(RAGGED, options={**FP8_ROWS, "causal": "bottom_right"})
# Work tiles that are shorter than the rings: nothing but their own edge keeps queries apart.
SHORT = Case(1, 2, 1, 600, 100, 64, options={"qk_quant_gran": "per_block"})
MASKED = replace(RAGGED, options={"mask": "bool", "causal": "bottom_right"})
# fp16 weights, which take the place of the queries' rows; and those that have one of their own.
HALVES = Case(1, 2, 1, 600, 700, 128, options={"pv": "fp16", "causal": "top_left"})
NARROW = Case(1, 2, 1, 300, 1050, 64, options={"pv": "fp16", "causal": "bottom_right"})
# Tiles of 64 keys; with fp16 weights that do not take the place of the queries' rows, whose largest
# comes from a launch before.
TILES_OF_64 = Case(1, 2, 1, 300, 1050, 64, options={**SM89, "causal": "bottom_right"})
HALVES_OF_64 = Case(
    1, 2, 1, 300, 600, 128, options={**SM89_BLOCKS, "pv": "fp16", "causal": "top_left"}
)
SCHEDULED = {
    "64": RAGGED,
    "128": WIDE,
    "rows": ROWS,
    "short": SHORT,
    "masked": MASKED,
    "halves": HALVES,
    "narrow halves": NARROW,
    "tiles of 64": TILES_OF_64,
    "tiles of 64, halves": HALVES_OF_64,
}
PACKED = ((70, 300), (0, 40), (1, 1), (130, 0), (280, 200))


def run(
    inputs: Inputs, seed: int, schedules: int | None = 1, ctas: int = 2, **scalars: int
) -> Outcome:
    """Run, and compare with torch."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    kernels = OpKernels(QUANTIZED_ATTENTION, simulator("sm_100a"))
    outcome = kernels.run(
        inputs, seed, schedules, num_ctas=ctas, **planned(kernels, inputs, scalars)
    )
    assert_attention(inputs, outcome, has_fp32_sums=True)
    return outcome


def planned(kernels: OpKernels, inputs: Inputs, scalars: dict[str, int]) -> dict[str, int]:
    """Scalars of a launch but its CTAs."""
    call = kernels.call(inputs).options
    return {name: call[name] for name in ("factor", "section")} | scalars


def test_ragged_causal_attention(seed: int) -> None:
    run(Inputs.make(RAGGED, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
@pytest.mark.parametrize("ctas", [1, 2, 5])
def test_every_schedule(ctas: int, case: Case, seed: int) -> None:
    run(Inputs.make(case, seed), seed, None, ctas)


SIZES = {
    "128 channels": Case(2, 2, 2, 130, 700, 128, "kbias"),
    "96 channels, one query": Case(1, 3, 1, 1, 300, 96),
    "40 channels": Case(1, 2, 1, 65, 129, 40, "vbias"),
    "one key": Case(1, 2, 2, 3, 1, 64),
    "zeros": Case(1, 2, 1, 200, 260, 128, "zeros"),
    "outliers": Case(1, 2, 1, 64, 400, 64, "outlier"),
    "fp16": Case(1, 2, 1, 64, 200, 128, dtype=torch.float16),
    "more queries than keys": Case(1, 2, 1, 600, 100, 64, options={"causal": "bottom_right"}),
    "causal": Case(1, 4, 2, 300, 300, 128, options={"causal": "top_left"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("qk", [{}, FP8_ROWS, FP8_BLOCKS], ids=["int8", "rows", "blocks"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_kinds(name: str, qk: dict, seed: int) -> None:
    case = SIZES[name]
    run(Inputs.make(replace(case, options={**case.options, **qk}), seed), seed)


FORMATS = {
    "per warp": {"qk_quant_gran": "per_warp"},
    "per block": {"qk_quant_gran": "per_block"},
    "per block, CUDA": {"qk_quant_gran": "per_block", "quantizer": "cuda"},
    "FP8 scores, per head": FP8_HEADS,
    "one level": {"pv_accum_dtype": "fp32"},
    "one level, smoothed": {"pv_accum_dtype": "fp32", "smooth_v": True},
    "keys as they are": {"smooth_k": False},
    "FP8 scores, one level": {**FP8_ROWS, "pv_accum_dtype": "fp32"},
    "FP8 scores, smoothed": {**FP8_BLOCKS, "pv_accum_dtype": "fp32", "smooth_v": True},
    "fp16 values": {"pv": "fp16"},
    "fp16 values, FP8 scores": {**FP8_ROWS, "pv": "fp16", "causal": "top_left"},
    "a mask": {"mask": "bool", "causal": "top_left"},
    "a mask, FP8 scores": {"mask": "bool", **FP8_ROWS},
    "added to scores": {"mask": "float"},
    "added to scores, FP8 scores": {"mask": "float", **FP8_BLOCKS},
    "tiles of 64 keys": SM89,
    "tiles of 64 keys, per warp": {**SM89, "qk_quant_gran": "per_warp", "smooth_k": False},
    "tiles of 64 keys, per block": {**SM89_BLOCKS, "causal": "top_left"},
    "tiles of 64 keys, per block, CUDA": {**SM89_BLOCKS, "quantizer": "cuda", "pv": "fp16"},
    "tiles of 64 keys, FP8 scores, per row": {**SM89, **FP8_ROWS, "mask": "bool"},
    "tiles of 64 keys, FP8 scores, per 64": {**SM89, **FP8_BLOCKS, "pv": "fp16"},
    "tiles of 64 keys, FP8 scores, per head": {**SM89, **FP8_HEADS, "mask": "float"},
    "tiles of 64 keys, smoothed": {**SM89, "pv_accum_dtype": "fp32", "smooth_v": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [64, 128])
def test_formats(name: str, dim: int, seed: int) -> None:
    case = Case(1, 2, 1, 150, 300, dim, "vbias", options=FORMATS[name])
    run(Inputs.make(case, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, FP8_ROWS, FP8_BLOCKS, FP8_HEADS, SM89_BLOCKS],
    ids=["int8", "rows", "blocks", "heads", "tiles of 64"],
)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_packed_sequences(causal: str, options: dict, seed: int) -> None:
    """Rows behind the last sequence, too."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    case = Case(1, 2, 1, rows + 30, keys + 9, 64, options={**options, "causal": causal})
    run(Inputs.make(case, seed, PACKED), seed, None, 3)


@pytest.mark.slow
def test_growing_maxima(seed: int) -> None:
    """Sums are scaled before every tile, or before none but the first."""
    inputs = Inputs.make(Case(1, 1, 1, 256, 700, 128, options=FP8_BLOCKS), seed)
    order = inputs.codes["k_codes"].float().mean(-1).argsort(-1)
    queries = torch.ones_like(inputs.queries)
    for places in (order, order.flip(-1)):
        codes = dict(inputs.codes)
        codes["k_codes"] = codes["k_codes"][:, :, places[0, 0]].contiguous()
        codes["k_scale"] = torch.ones_like(codes["k_scale"])
        run(replace(inputs, queries=queries, codes=codes), seed, None)


@pytest.mark.slow
def test_keys_and_values_behind_the_last_are_never_seen(seed: int) -> None:
    """NaN in the codes of rows that are no keys of a packed sequence, and in queries of none."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    case = Case(1, 2, 1, rows + 30, keys + 90, 64, options=FP8_BLOCKS)
    inputs = Inputs.make(case, seed, PACKED)
    inputs.codes["k_codes"][:, :, keys:] = torch.nan
    inputs.queries[:, :, rows:] = torch.nan
    run(inputs, seed, None, 3)


@pytest.mark.slow
def test_no_keys_at_all(seed: int) -> None:
    outcome = run(Inputs.make(Case(1, 2, 1, 70, 0, 64), seed), seed)
    assert not outcome["out"].any()


@pytest.mark.slow
@pytest.mark.parametrize("qk", [{}, FP8_BLOCKS], ids=["int8", "blocks"])
def test_a_head_has_the_same_bits_alone_and_in_a_batch(qk: dict, seed: int) -> None:
    inputs = Inputs.make(Case(2, 4, 2, 300, 300, 64, options=qk), seed)
    found = run(inputs, seed, section=3)
    codes = {name: None if x is None else x[1:, 1:] for name, x in inputs.codes.items()}
    alone = run(Inputs(inputs.config, inputs.queries[1:, 2:, :192], codes), seed, ctas=1)
    assert torch.equal(alone["out"], found["out"][1:, 2:, :192])
    assert torch.equal(alone["lse"], found["lse"][1:, 2:, :192])


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
def test_no_synchronisation_is_left_out(case: Case, seed: int) -> None:
    cases = [replace(case, keys=keys) for keys in (case.keys, 100, 700)]
    reports = [run(Inputs.make(x, seed), seed, ctas=ctas).report for x in cases for ctas in (1, 3)]
    assert not missed_synchronisation(reports)


def test_plan() -> None:
    for dim, stages in ((64, 6), (128, 3)):
        plan = AttentionPlanSm100(dim)
        assert plan.stages == stages and plan.tmem.used_columns == 256 + 2 * dim
        assert "codes of weights, and scaled sums" in str(plan)
    assert AttentionPlanSm100(128, qk="fp8", key_scales=128).stages == 3
    assert AttentionPlanSm100(128, pv="fp16").stages == 2
    assert AttentionPlanSm100(64, pv="fp16").stages == 4
    for dim, pv, stages in ((64, "fp8", 12), (128, "fp8", 7), (64, "fp16", 12), (128, "fp16", 4)):
        plan = AttentionPlanSm100(dim, pv=pv, tile_keys=64)
        assert plan.stages == stages and not plan.shares_rows
        assert plan.tmem.used_columns == 128 + 2 * dim


def test_configurations_with_kernels() -> None:
    assert has_kernel(QuantizedAttentionConfig(128), "sm_100a")
    assert has_kernel(QuantizedAttentionConfig(128, mask="bool"), "sm_100a")
    for granularity in ("per_head", "per_row", "per_64"):
        fp8 = {"qk": "fp8", "qk_quant_gran": granularity, "quantizer": ""}
        assert has_kernel(QuantizedAttentionConfig(64, **fp8), "sm_100a")
    assert has_kernel(QuantizedAttentionConfig(128, pv="fp16", pv_accum_dtype="fp32"), "sm_100a")
    assert has_kernel(QuantizedAttentionConfig(128, geometry="sm89"), "sm_100a")
    for accumulation in ("fp16+fp32", "fp16"):
        other = QuantizedAttentionConfig(128, pv="fp16", pv_accum_dtype=accumulation)
        assert not has_kernel(other, "sm_100a")


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "rows of queries read before they are there": at(
        "lowp.sm100.softmax_warps:SoftmaxWarps.compute"
    )
    .call("ctx.pipes.queries.wait")
    .delete(),
    "rows of queries overwritten while they are read": at("LoadWarp._load_queries")
    .call("pipe.acquire")
    .delete(),
    "codes of queries multiplied before they are there": at("lowp.sm100.mma_warp:MmaWarp.multiply")
    .call("pipes.coded.at().wait")
    .delete(),
    "codes of queries without a fence": at("lowp.sm100.queries:Queries.take")
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "keys read before they are there": at("lowp.sm100.mma_warp:MmaWarp.multiply")
    .call("pipes.keys.wait", 1)
    .delete(),
    "values read before they are there": at("lowp.sm100.mma_warp:MmaWarp.multiply")
    .call("pipes.values.wait")
    .delete(),
    "keys overwritten while they are read": at("LoadWarp._load_keys").call("ring.acquire").delete(),
    "values overwritten while they are read": at("LoadWarp._load_values")
    .call("ring.acquire")
    .delete(),
    "scores read before they are there": at("lowp.sm100.softmax_warps:SoftmaxWarps._load_products")
    .call("ctx.pipes.scores.at().wait")
    .delete(),
    "scores used before they are loaded": at("lowp.sm100.softmax_warps:SoftmaxWarps._load_products")
    .call("cute.arch.fence_view_async_tmem_load")
    .delete(),
    "weights multiplied before they are there": at("lowp.sm100.mma_warp:MmaWarp._weigh")
    .call("pipes.weights.at().wait")
    .delete(),
    "scores overwritten while they are read": at("lowp.sm100.mma_warp:MmaWarp._score")
    .call("scores.acquire")
    .delete(),
    "scores released without a fence": at("lowp.sm100.softmax_warps:SoftmaxWarps._load_products")
    .call("fence_before_thread_sync")
    .delete(),
    "sums scaled before they are there": at("lowp.sm100.softmax_warps:SoftmaxWarps._raise_maximum")
    .call("ctx.pipes.sums.at().wait")
    .delete(),
    "sums handed over before they are written": at(
        "lowp.sm100.softmax_warps:SoftmaxWarps._signal_weights"
    )
    .call("cute.arch.fence_view_async_tmem_store")
    .delete(),
    "sums without a fence": at("lowp.sm100.softmax_warps:SoftmaxWarps._signal_weights")
    .call("fence_before_thread_sync")
    .delete(),
    "weights without a fence": at("lowp.sm100.softmax_warps:SoftmaxWarps._signal_weights")
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "sums read before they are there": at("lowp.sm100.softmax_warps:SoftmaxWarps.compute")
    .call("ctx.pipes.sums.at().wait")
    .delete(),
    "TMEM freed while it is read": at("lowp.sm100.softmax_warps:SoftmaxWarps._free")
    .call("cute.arch.barrier")
    .delete(),
    "a key too many": at("lowp.sm100.softmax:hide_unseen")
    .expression("i < limit")
    .replace("i <= limit"),
    "values in the order of keys": at("lowp.sm100.softmax:encode")
    .expression("V_ORDER[word % 4 * 4:word % 4 * 4 + 4]")
    .replace("range(word % 4 * 4, word % 4 * 4 + 4)"),
    "sums that are not scaled": at("lowp.sm100.softmax_warps:SoftmaxWarps._scale_sums")
    .expression("(decay, decay)")
    .replace("(Float32(1.0), Float32(1.0))"),
    "sums of the work tile before": at("lowp.sm100.mma_warp:MmaWarp._weigh")
    .expression("tile > 0")
    .replace("True"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_100a"))
    for inputs in [Inputs.make(case, seed) for case in (RAGGED, SHORT)]:
        compiled = kernels.compile(inputs.config, build)
        scalars = planned(kernels, inputs, {})
        # One CTA has all work tiles.
        outcome = kernels.run(inputs, seed, None, compiled, num_ctas=1, **scalars)
        assert_attention(inputs, outcome, has_fp32_sums=True)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.lowp.sm100.attention", checked)

# ---- bugs of rows that make room for weights -----------------------------------------------------

BUGS_OF_SHARED_ROWS: dict[str, Edit] = {
    "rows released before weights are read": at("lowp.sm100.queries:Queries.take")
    .expression("not self.plan.shares_rows")
    .replace("True"),
    "rows loaded over weights": at("LoadWarp._load_queries").call("pipe.acquire").delete(),
    "weights read before they are written": at(
        "lowp.sm100.softmax_warps:SoftmaxWarps._signal_weights"
    )
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "values of other channels": at("lowp.sm100.mma_warp:MmaWarp._value_operand")
    .expression("self.plan.tile_keys * SPAN_BYTES")
    .replace("SPAN_BYTES"),
}


def checked_halves(build: Callable, seed: int) -> None:
    """The same of fp16 weights of 128 channels."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_100a"))
    inputs = Inputs.make(replace(HALVES, keys=300), seed)
    compiled = kernels.compile(inputs.config, build)
    scalars = planned(kernels, inputs, {})
    outcome = kernels.run(inputs, seed, None, compiled, num_ctas=1, **scalars)
    assert_attention(inputs, outcome, has_fp32_sums=True)


(
    test_bug_of_shared_rows_has_its_place,
    test_bug_of_shared_rows_is_noticed,
    test_shared_rows_without_a_bug,
) = planted_bugs.tests_of(BUGS_OF_SHARED_ROWS, "dsv4.kernels.lowp.sm100.attention", checked_halves)
