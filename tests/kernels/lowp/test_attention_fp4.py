"""`quantized_attention` in FP4 for Blackwell in the simulator: torch on the same codes, every
schedule, smoothed queries, ragged and packed lengths, deleted synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel
from dsv4.kernels.lowp.sm100.fp4_plan import Fp4Plan
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.testing.harness import Simulator, missed_synchronisation
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_attention import Inputs, assert_attention
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs
from tests.kernels.lowp.test_attention_sm100 import PACKED, planned, run

pytestmark = pytest.mark.stage("lowp")

FP4 = {"qk": "nvfp4"}
SMOOTH = {**FP4, "smooth_q": True}
# More tiles of keys than stages, a diagonal in both warpgroups' tiles, work tiles of which the
# second warpgroup has few queries or none, two heads of queries to one of keys.
RAGGED = Case(1, 2, 1, 300, 1050, 64, options={**FP4, "causal": "bottom_right"})
# Tiles of keys that only the second warpgroup sees; two words of scales for a row.
WIDE = Case(1, 2, 1, 300, 400, 128, options={**FP4, "causal": "top_left"})
# Two stages.
SMOOTH_WIDE = replace(WIDE, kind="qbias", options={**SMOOTH, "causal": "top_left"})
# Work tiles that are shorter than the rings: nothing but their own edge keeps queries apart.
SHORT = Case(1, 2, 1, 600, 100, 64, options=FP4)
SMOOTH_SHORT = replace(SHORT, kind="qbias", options=SMOOTH)
MASKED = replace(RAGGED, options={**FP4, "mask": "bool", "causal": "bottom_right"})
SCHEDULED = {
    "64": RAGGED,
    "128": WIDE,
    "smooth": SMOOTH_WIDE,
    "short": SHORT,
    "short and smooth": SMOOTH_SHORT,
    "masked": MASKED,
}


def test_ragged_causal_attention(seed: int) -> None:
    run(Inputs.make(RAGGED, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
@pytest.mark.parametrize("ctas", [1, 2, 5])
def test_every_schedule(ctas: int, case: Case, seed: int) -> None:
    run(Inputs.make(case, seed), seed, None, ctas)


SIZES = {
    "128 channels": Case(2, 2, 2, 130, 700, 128, "kbias"),
    "96 channels, one query": Case(1, 3, 1, 1, 300, 96, "qbias"),
    "40 channels": Case(1, 2, 1, 65, 129, 40, "vbias"),
    "one key": Case(1, 2, 2, 3, 1, 64),
    "zeros": Case(1, 2, 1, 200, 260, 128, "zeros"),
    "outliers": Case(1, 2, 1, 64, 400, 64, "outlier"),
    "fp16": Case(1, 2, 1, 64, 200, 128, "qbias", dtype=torch.float16),
    "more queries than keys": Case(1, 2, 1, 600, 100, 64, options={"causal": "bottom_right"}),
    "causal": Case(1, 4, 2, 300, 300, 128, "qbias", options={"causal": "top_left"}),
    "keys as they are": Case(1, 2, 1, 150, 300, 64, "vbias", options={"smooth_k": False}),
    "a mask": Case(1, 2, 1, 150, 300, 128, options={"mask": "bool", "causal": "top_left"}),
    "added to scores": Case(1, 2, 1, 150, 300, 64, "qbias", options={"mask": "float"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("formats", [FP4, SMOOTH], ids=["plain", "smooth"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_kinds(name: str, formats: dict, seed: int) -> None:
    case = SIZES[name]
    run(Inputs.make(replace(case, options={**case.options, **formats}), seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [FP4, SMOOTH], ids=["plain", "smooth"])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_packed_sequences(causal: str, formats: dict, seed: int) -> None:
    """Rows behind the last sequence, too; a sequence's means are of its own queries."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    options = {**formats, "causal": causal}
    case = Case(1, 2, 1, rows + 30, keys + 9, 64, "qbias", options=options)
    run(Inputs.make(case, seed, PACKED), seed, None, 3)


@pytest.mark.slow
def test_growing_maxima(seed: int) -> None:
    """Sums are scaled before every tile, or before none but the first."""
    inputs = Inputs.make(Case(1, 1, 1, 256, 700, 128, options=FP4), seed)
    order = torch.arange(700)
    queries = torch.ones_like(inputs.queries)
    codes = dict(inputs.codes)
    levels = (order // 94).to(torch.uint8)
    for level in (levels, 7 - levels):
        # Codes of all channels are one number, which grows or falls with the key.
        codes["k_codes"] = (level | level << 4)[None, None, :, None].expand(1, 1, -1, 64)
        codes["k_codes"] = codes["k_codes"].contiguous()
        codes["k_scale"] = torch.ones_like(codes["k_scale"].float()).to(torch.float8_e4m3fn)
        run(replace(inputs, queries=queries, codes=dict(codes)), seed, None)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [FP4, SMOOTH], ids=["plain", "smooth"])
def test_keys_and_values_behind_the_last_are_never_seen(formats: dict, seed: int) -> None:
    """NaN in what belongs to no key of a packed sequence, and in queries of none."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    case = Case(1, 2, 1, rows + 30, keys + 90, 64, options=formats)
    inputs = Inputs.make(case, seed, PACKED)
    inputs.codes["k_codes"][:, :, keys:] = 0x7F
    if inputs.codes["k_smooth"] is not None:
        inputs.codes["k_smooth"][:, :, keys:] = torch.nan
    inputs.queries[:, :, rows:] = torch.nan
    run(inputs, seed, None, 3)


@pytest.mark.slow
def test_no_keys_at_all(seed: int) -> None:
    outcome = run(Inputs.make(Case(1, 2, 1, 70, 0, 64, options=FP4), seed), seed)
    assert not outcome["out"].any()


@pytest.mark.slow
@pytest.mark.parametrize("formats", [FP4, SMOOTH], ids=["plain", "smooth"])
def test_a_head_has_the_same_bits_alone_and_in_a_batch(formats: dict, seed: int) -> None:
    inputs = Inputs.make(Case(2, 4, 2, 300, 300, 64, "qbias", options=formats), seed)
    found = run(inputs, seed, section=3)
    codes = {name: None if x is None else x[1:, 1:] for name, x in inputs.codes.items()}
    # Queries that share a mean stay together.
    alone = run(Inputs(inputs.config, inputs.queries[1:, 2:, :256], codes), seed, ctas=1)
    assert torch.equal(alone["out"], found["out"][1:, 2:, :256])
    assert torch.equal(alone["lse"], found["lse"][1:, 2:, :256])


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
def test_no_synchronisation_is_left_out(case: Case, seed: int) -> None:
    cases = [replace(case, keys=keys) for keys in (case.keys, 100, 700)]
    reports = [run(Inputs.make(x, seed), seed, ctas=ctas).report for x in cases for ctas in (1, 3)]
    assert not missed_synchronisation(reports)


def config_of(dim: int, **options) -> QuantizedAttentionConfig:
    formats = {"qk": "nvfp4", "pv": "nvfp4", "qk_quant_gran": "per_16", "pv_accum_dtype": "fp32"}
    return QuantizedAttentionConfig(dim, quantizer="", **formats, **options)


def test_plan() -> None:
    for dim, stages, smooth_stages in ((64, 6, 6), (128, 6, 2)):
        plan = Fp4Plan.of(config_of(dim))
        assert plan.stages == stages and not plan.smooth
        assert plan.tmem.used_columns == 128 + 2 * dim + (20 if dim == 64 else 32)
        smooth = Fp4Plan.of(config_of(dim, smooth_q=True))
        assert smooth.stages == smooth_stages and smooth.smooth == "bf16"


def test_configurations_with_kernels() -> None:
    for options in ({}, {"smooth_q": True}, {"mask": "float"}, {"causal": "top_left"}):
        assert has_kernel(config_of(128, **options), "sm_100a"), options
        assert not has_kernel(config_of(128, **options), "sm_90a"), options
    for options in ({"geometry": "sm89"}, {"sm_scale": -1.0}, {"dtype": "float32"}):
        assert not has_kernel(config_of(64, **options), "sm_100a"), options


def test_operator_compiles_and_ships_them_for_blackwell_alone() -> None:
    op = QUANTIZED_ATTENTION
    config = config_of(128, smooth_q=True, causal="top_left", sm_scale=0.1)
    assert op.has_kernel(config) and not op.serves(config, "sm_90a")
    # The scale is given at run time, the means of queries are another kernel.
    same = op.compile_key(replace(config, sm_scale=0.2, smooth_k=False), "sm_100a")
    assert op.compile_key(config, "sm_100a") == same
    assert op.compile_key(replace(config, smooth_q=False), "sm_100a") != same
    shipped = {arch: {c.qk for c in op.aot_for(arch).values()} for arch in ("sm_90a", "sm_100a")}
    assert shipped == {"sm_90a": {"int8", "fp8"}, "sm_100a": {"int8", "fp8", "nvfp4"}}


# ---- bugs ----------------------------------------------------------------------------------------

MMA, SOFTMAX = "lowp.sm100.fp4_mma_warp:Fp4MmaWarp", "lowp.sm100.fp4_softmax_warps:Fp4SoftmaxWarps"
QUERIES = "lowp.sm100.fp4_queries:Fp4Queries"
BUGS: dict[str, Edit] = {
    "codes of queries without a fence": at(f"{QUERIES}.take")
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "means read before they are there": at(f"{QUERIES}._find_means")
    .call("cute.arch.barrier")
    .delete(),
    "scores overwritten while they are read": at(f"{MMA}._score")
    .call("scores.at().acquire")
    .delete(),
    "scores that wait for one warpgroup alone": at(f"{MMA}._score")
    .expression("cutlass.range_constexpr(GROUPS)")
    .replace("cutlass.range_constexpr(group, group + 1)"),
    "weights multiplied before they are there": at(f"{MMA}._weigh")
    .call("pipes.weights.at().wait")
    .delete(),
    "scales of weights in the other warpgroup's place": at(f"{SOFTMAX}._store_scales")
    .expression("row // GROUP_QUERIES * WEIGHT_SCALE_BYTES")
    .replace("(1 - row // GROUP_QUERIES) * WEIGHT_SCALE_BYTES"),
    "a scale that is not the block's": at(f"{SOFTMAX}._step")
    .expression("tops[block]")
    .replace("tops[block - 1]"),
    "ratios that are added without their scale": at(f"{SOFTMAX}._step")
    .expression("cute.math.fma(sums[block], scales[block], state.total[0])")
    .replace("sums[block] + state.total[0]"),
    "scores of means that are overwritten": at(f"{MMA}._score")
    .expression("step > 0 or plan.smooth != ''")
    .replace("step > 0"),
    "the mean of more queries than there are": at(f"{QUERIES}._find_means")
    .expression("Float32(count)")
    .replace("Float32(GROUP_QUERIES)"),
    "sums of the work tile before": at(f"{MMA}._weigh").expression("tile > 0").replace("True"),
    "scales of the first step of K": at(f"{MMA}._multiply")
    .expression("step * (GROUP_QUERIES // WORD_ROWS)")
    .replace("0"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_100a"))
    for inputs in [Inputs.make(case, seed) for case in (RAGGED, SMOOTH_WIDE)]:
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
