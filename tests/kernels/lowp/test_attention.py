"""`quantized_attention` for Hopper in the simulator: torch on the same codes, every schedule,
ragged and packed lengths, deleted synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.kit.args import optional_of, required_of, scalars_of
from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel, most_channels
from dsv4.kernels.lowp.plan import AttentionPlan, choose_launch, work_queries
from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.reference.lowp_sums import hopper_sum
from dsv4.testing.harness import Call, Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case, make_inputs, oracle
from dsv4.testing.lowp_attention import Inputs, assert_attention
from dsv4.testing.lowp_codes import KvInputs
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("lowp")

# More tiles of keys than stages, both kinds of tiles, several work tiles of a CTA, two heads of
# queries to one of keys.
RAGGED = Case(1, 2, 1, 200, 810, 64, options={"causal": "bottom_right"})
# Scores and weighted values in the same registers, and turns.
WIDE = replace(RAGGED, dim=128)
# Work tiles that are shorter than the rings: nothing but their own edge keeps queries apart.
SHORT = Case(1, 2, 1, 400, 100, 64)
FP8_ROWS = {"qk": "fp8", "qk_quant_gran": "per_row"}
FP8_BLOCKS = {"qk": "fp8", "qk_quant_gran": "per_64"}
FP8_HEADS = {"qk": "fp8", "qk_quant_gran": "per_head"}
# Scales of keys in the ring, too.
ROWS = Case(1, 2, 1, 200, 810, 64, options={**FP8_ROWS, "causal": "bottom_right"})
HALVES = replace(RAGGED, dim=128, options={"pv": "fp16", "pv_accum_dtype": "fp16+fp32"})
# Maxima of queries from a launch before.
HEADS = Case(1, 4, 2, 300, 400, 64, options={**FP8_HEADS, "causal": "top_left"})
# Tiles of 64 keys: the official kernels' in another geometry. Two warps share scales of queries.
SM89 = {"geometry": "sm89"}
TILES64 = Case(1, 2, 1, 200, 810, 64, options={**SM89, "causal": "bottom_right"})
# Sums of a tile take more registers than its scores.
WIDE64 = replace(WIDE, options={**SM89, "causal": "bottom_right", "qk_quant_gran": "per_warp"})
# Maxima of 128 queries from a launch before, of which a work tile has a part.
BLOCKS64 = {
    **SM89, "pv": "fp16", "pv_accum_dtype": "fp16+fp32", "qk_quant_gran": "per_block",
}  # fmt: skip
HALVES64 = Case(1, 4, 2, 300, 400, 128, options={**BLOCKS64, "causal": "top_left"})
# Weights in blocks.
BLOCKS = replace(RAGGED, options={})
# Two warpgroups, rows of codes in two spans, sums of a tile in two parts.
WIDEST = replace(RAGGED, dim=256, keys=750)
WIDEST64 = replace(TILES64, dim=200, options={**TILES64.options, "pv_accum_dtype": "fp32+fp16"})
WIDEST_ROWS = replace(ROWS, dim=256, keys=750)
WIDEST_HALVES = replace(HALVES64, dim=256)
SCHEDULED = {
    "64": RAGGED,
    "blocks": BLOCKS,
    "128": WIDE,
    "rows": ROWS,
    "halves": HALVES,
    "heads": HEADS,
    "tiles of 64": TILES64,
    "wide tiles of 64": WIDE64,
    "halves, tiles of 64": HALVES64,
    "256": WIDEST,
    "256, tiles of 64": WIDEST64,
    "256, rows": WIDEST_ROWS,
    "256, halves, tiles of 64": WIDEST_HALVES,
}
PACKED = ((70, 300), (0, 40), (1, 1), (130, 0), (200, 200))


def run(
    inputs: Inputs, seed: int, schedules: int | None = 1, ctas: int = 2, **scalars: int
) -> Outcome:
    """Run, and compare with torch."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    kernels = OpKernels(QUANTIZED_ATTENTION, simulator("sm_90a"))
    call = kernels.call(inputs).options
    scalars = {name: call[name] for name in ("factor", "section")} | scalars
    outcome = kernels.run(inputs, seed, schedules, num_ctas=ctas, **scalars)
    assert_attention(inputs, outcome, tiles=inputs.summed_tiles)
    return outcome


def test_ragged_causal_attention(seed: int) -> None:
    run(Inputs.make(RAGGED, seed), seed)


def test_tiles_of_64_keys(seed: int) -> None:
    run(Inputs.make(Case(1, 2, 1, 100, 150, 64, options=SM89), seed), seed)


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
    "zeros": Case(1, 2, 1, 100, 260, 128, "zeros"),
    "outliers": Case(1, 2, 1, 64, 400, 64, "outlier"),
    "fp16": Case(1, 2, 1, 64, 200, 128, dtype=torch.float16),
    "more queries than keys": Case(1, 2, 1, 300, 100, 64, options={"causal": "bottom_right"}),
    "causal": Case(1, 4, 2, 300, 300, 128, options={"causal": "top_left"}),
    "256 channels": Case(2, 2, 2, 130, 700, 256, "kbias"),
    "136 channels, one query": Case(1, 3, 1, 1, 300, 136),
    "256 channels, zeros": Case(1, 2, 1, 100, 260, 256, "zeros", dtype=torch.float16),
    "192 channels, causal": Case(1, 4, 2, 300, 300, 192, options={"causal": "top_left"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_kinds(name: str, seed: int) -> None:
    run(Inputs.make(SIZES[name], seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "qk, dim",
    [({}, 64), (FP8_ROWS, 64), (FP8_BLOCKS, 64), ({}, 256), (FP8_BLOCKS, 256)],
    ids=["int8", "rows", "blocks", "256", "256 blocks"],
)
@pytest.mark.parametrize("mode", ["fp32+fp32", "fp32"])
def test_sums_are_those_of_hopper_s_accumulator(mode: str, qk: dict, dim: int, seed: int) -> None:
    """Bit for bit with the reference, but for rows with a weight beside a tie of e4m3, whose scores
    are rounded otherwise here."""
    case = Case(1, 2, 1, 150, 600, dim, "vbias", options={**qk, "pv_accum_dtype": mode})
    outcome = run(Inputs.make(case, seed), seed)
    config = Inputs.make(case, seed).config
    wanted, _ = oracle(config, *make_inputs(case, seed), hopper_sum)
    off = (outcome["out"] != wanted.bfloat16()).float().mean()
    assert off <= 0.02, f"{off:.2%} of the outputs differ"


FORMATS = {
    "per warp": {"qk_quant_gran": "per_warp"},
    "per block": {"qk_quant_gran": "per_block"},
    "per block, CUDA": {"qk_quant_gran": "per_block", "quantizer": "cuda"},
    "FP8 scores, per head": FP8_HEADS,
    "one level": {"pv_accum_dtype": "fp32"},
    "one level, smoothed": {"pv_accum_dtype": "fp32", "smooth_v": True},
    "fp16 sums of 64 keys": {"pv_accum_dtype": "fp32+fp16"},
    "fp16 sums of 64 keys, FP8 scores": {**FP8_BLOCKS, "pv_accum_dtype": "fp32+fp16"},
    "keys as they are": {"smooth_k": False},
    "FP8 scores, per row": FP8_ROWS,
    "FP8 scores, per 64": FP8_BLOCKS,
    "FP8 scores, one level": {**FP8_ROWS, "pv_accum_dtype": "fp32"},
    "fp16 values": {"pv": "fp16"},
    "fp16 values, two levels": {"pv": "fp16", "pv_accum_dtype": "fp16+fp32"},
    "fp16 values and sums": {"pv": "fp16", "pv_accum_dtype": "fp16", "smooth_v": True},
    "FP8 scores, fp16 values": {**FP8_BLOCKS, "pv": "fp16", "causal": "top_left"},
    "tiles of 64 keys": SM89,
    "tiles of 64 keys, one level": {**SM89, "pv_accum_dtype": "fp32", "smooth_v": True},
    "tiles of 64 keys, fp16 sums": {**SM89, "pv_accum_dtype": "fp32+fp16"},
    "tiles of 64 keys, per block": BLOCKS64,
    "tiles of 64 keys, per block, CUDA": {**BLOCKS64, "quantizer": "cuda"},
    "tiles of 64 keys, fp16 values": {**SM89, "pv": "fp16"},
    "tiles of 64 keys, fp16 values, two levels": {
        **SM89,
        "pv": "fp16",
        "pv_accum_dtype": "fp16+fp32",
    },
    "tiles of 64 keys, fp16 values and sums": {
        **SM89,
        "pv": "fp16",
        "pv_accum_dtype": "fp16",
        "smooth_v": True,
        "qk_quant_gran": "per_warp",
    },
    "tiles of 64 keys, FP8 scores, per row": {**SM89, **FP8_ROWS},
    "tiles of 64 keys, FP8 scores, per 64": {**SM89, **FP8_BLOCKS},
    "tiles of 64 keys, FP8 scores, per head": {**SM89, **FP8_HEADS},
    "tiles of 64 keys, a mask": {**BLOCKS64, "mask": "float"},
    "a mask": {"mask": "bool", "causal": "top_left"},
    "a mask, FP8 scores": {"mask": "bool", **FP8_ROWS},
    "added to scores": {"mask": "float"},
    "added to scores, fp16 values": {"mask": "float", "pv": "fp16", **FP8_BLOCKS},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dim, name",
    [
        (dim, name)
        for dim in (64, 128, 256)
        for name, options in FORMATS.items()
        if dim <= most_channels("sm_90a", options.get("pv", "fp8"), options.get("geometry", "sm90"))
    ],
)
def test_formats(name: str, dim: int, seed: int) -> None:
    case = Case(1, 2, 1, 150, 300, dim, "vbias", options=FORMATS[name])
    run(Inputs.make(case, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, dim",
    [
        *((options, 64) for options in ({}, FP8_ROWS, FP8_BLOCKS, FP8_HEADS, SM89, BLOCKS64)),
        ({}, 256),
        (FP8_HEADS, 256),
    ],
    ids=["int8", "rows", "blocks", "heads", "64", "64 blocks", "256", "256 heads"],
)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_packed_sequences(causal: str, options: dict, dim: int, seed: int) -> None:
    """Rows behind the last sequence, too."""
    rows, keys = (sum(pair[i] for pair in PACKED) for i in range(2))
    case = Case(1, 2, 1, rows + 30, keys + 9, dim, options={**options, "causal": causal})
    run(Inputs.make(case, seed, PACKED), seed, None, 3)


@pytest.mark.slow
def test_no_keys_at_all(seed: int) -> None:
    outcome = run(Inputs.make(Case(1, 2, 1, 70, 0, 64), seed), seed)
    assert not outcome["out"].any()


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256])
def test_a_head_has_the_same_bits_alone_and_in_a_batch(dim: int, seed: int) -> None:
    inputs = Inputs.make(Case(2, 4, 2, 150, 300, dim), seed)
    found = run(inputs, seed, section=3)
    codes = {name: None if x is None else x[1:, 1:] for name, x in inputs.codes.items()}
    alone = run(Inputs(inputs.config, inputs.queries[1:, 2:, :96], codes), seed, ctas=1)
    assert torch.equal(alone["out"], found["out"][1:, 2:, :96])
    assert torch.equal(alone["lse"], found["lse"][1:, 2:, :96])


@pytest.mark.slow
@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
def test_no_synchronisation_is_left_out(case: Case, seed: int) -> None:
    reports = [run(Inputs.make(case, seed), seed, ctas=ctas).report for ctas in (1, 3)]
    assert not missed_synchronisation(reports)


@pytest.mark.slow
def test_the_call_that_warms_up_runs(seed: int) -> None:
    """With all tensors that its configuration reads and writes."""
    for op, inputs in (
        (QUANTIZED_ATTENTION, Inputs.make(RAGGED, seed)),
        (QUANTIZED_ATTENTION, Inputs.make(replace(SHORT, options={"mask": "bool"}), seed)),
        (QUANTIZE_KV, KvInputs.make(SHORT, seed)),
    ):
        kernels = OpKernels(op, simulator("sm_90a"))
        probe = next(op.probes(inputs.config, kernels.planned_for, torch.device("cpu")))
        count = len(required_of(op.args))
        names = (arg.name for arg in (*optional_of(op.args), *scalars_of(op.args)))
        call = Call(probe[:count], dict(zip(names, probe[count:], strict=True)), {}, {})
        kernels.target.run(kernels.compile(inputs.config), call)


def test_plan() -> None:
    for dim in (64, 128, 256):
        plan = AttentionPlan(dim)
        assert plan.stages == {64: 5, 128: 4, 256: 2}[dim]
        assert plan.registers["consumers"] == (240 if dim == 256 else 160)
        assert plan.tile_queries == work_queries(QuantizedAttentionConfig(dim), "sm_90a")
        assert "tile of codes of values" in str(plan)
    causal = QuantizedAttentionConfig(128, causal="top_left", sm_scale=1.0)
    assert choose_launch(causal, 128, 128, 8192, 8192, 132)[1:] == (12, 132)
    assert choose_launch(causal, 128, 32, 8192, 8192, 132)[1:] == (44, 132)
    assert AttentionPlan(128, qk="fp8", key_scales=128).stages == 4
    assert AttentionPlan(128, pv="fp16").stages == 3
    assert AttentionPlan(256, qk="fp8", key_scales=128).stages == 2
    assert AttentionPlan(256, pv="fp16", tile_keys=64).stages == 2
    assert choose_launch(QuantizedAttentionConfig(128), 2, 2, 200, 200, 132)[1:] == (1, 4)


def test_configurations_with_kernels() -> None:
    assert has_kernel(QuantizedAttentionConfig(128))
    assert has_kernel(QuantizedAttentionConfig(40, dtype="float16"))
    assert has_kernel(QuantizedAttentionConfig(128, pv="fp16", pv_accum_dtype="fp32"))
    assert has_kernel(QuantizedAttentionConfig(128, pv_accum_dtype="fp32+fp16"))
    assert has_kernel(QuantizedAttentionConfig(128, mask="bool"))
    assert has_kernel(QuantizedAttentionConfig(128, geometry="sm89"))
    assert has_kernel(QuantizedAttentionConfig(256, causal="top_left"))
    assert has_kernel(QuantizedAttentionConfig(256, **SM89, pv="fp16", pv_accum_dtype="fp32"))
    for granularity in ("per_head", "per_row", "per_64"):
        fp8 = {"qk": "fp8", "qk_quant_gran": granularity, "quantizer": ""}
        assert has_kernel(QuantizedAttentionConfig(64, **fp8))
    for other in (
        QuantizedAttentionConfig(128, dtype="float32"),
        QuantizedAttentionConfig(33),
        QuantizedAttentionConfig(
            128, pv="nvfp4", qk="nvfp4", qk_quant_gran="per_16", quantizer="", pv_accum_dtype="fp32"
        ),
        QuantizedAttentionConfig(128, smooth_q=True),
        QuantizedAttentionConfig(128, sm_scale=-1.0),
        QuantizedAttentionConfig(129),
        QuantizedAttentionConfig(256, pv="fp16", pv_accum_dtype="fp32"),
    ):
        assert not has_kernel(other), other


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "rows of queries read before they are there": at("Consumers.compute")
    .call("ctx.pipes.queries.wait")
    .delete(),
    "rows of queries overwritten while they are read": at("LoadWarp._load_queries")
    .call("pipe.acquire")
    .delete(),
    "keys read before they are there": at("Consumers._step").call("ctx.pipes.keys.wait").delete(),
    "values read before they are there": at("Consumers._step")
    .call("ctx.pipes.values.wait", 0)
    .delete(),
    "keys overwritten while they are read": at("LoadWarp._load_keys").call("ring.acquire").delete(),
    "values overwritten while they are read": at("LoadWarp._load_values")
    .call("ring.acquire")
    .delete(),
    "queries read before all are written": at("lowp.sm90.queries:Queries.take")
    .call("sync", 1)
    .delete(),
    "queries without a fence": at("lowp.sm90.queries:Queries.take")
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "sums read before they are there": at("Consumers._step")
    .call("warpgroup.wait_group", 0)
    .delete(),
    "scores read before they are there": at("Consumers._step")
    .call("warpgroup.wait_group", 1)
    .delete(),
    "a key too many": at("hide_unseen")
    .expression("8 * j + c < limit")
    .replace("8 * j + c <= limit"),
    "sums that are not scaled": at("Consumers._add_tile").expression("decay[r]").replace("1.0"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_90a"))
    several = [Inputs.make(case, seed) for case in (RAGGED, SHORT)]
    for inputs in several:
        compiled = kernels.compile(inputs.config, build)
        scalars = kernels.call(inputs).options
        scalars = {name: scalars[name] for name in ("factor", "section")}
        # One CTA has all work tiles.
        outcome = kernels.run(inputs, seed, None, compiled, num_ctas=1, **scalars)
        assert_attention(inputs, outcome)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.lowp.sm90.attention", checked)

# Of 256 channels.
BUGS256: dict[str, Edit] = {
    "sums of a part read before they are there": at("Consumers._add_values")
    .call("warpgroup.wait_group")
    .delete(),
    "values released before the last part has read them": at("Consumers._add_values")
    .expression("part + 1 == self.parts")
    .replace("part == 0"),
    "the first part's values for all": at("Consumers._channels_of")
    .expression("part, 0, None")
    .replace("0, 0, None"),
    "the first span of keys for both": at("LoadWarp._load_keys")
    .expression("i * span")
    .replace("0 * span"),
    "a warpgroup's spans over the other's": at("lowp.sm90.queries:Queries._store")
    .expression("spans - 1")
    .replace("0"),
    "sums of the first part in place of the second": at("Consumers._add_tile")
    .expression("part * (self.channels // 8)")
    .replace("0"),
}


def checked256(build: Callable, seed: int) -> None:
    """The same of 256 channels."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_90a"))
    inputs = Inputs.make(Case(1, 2, 1, 200, 530, 256), seed)
    compiled = kernels.compile(inputs.config, build)
    scalars = kernels.call(inputs).options
    scalars = {name: scalars[name] for name in ("factor", "section")}
    outcome = kernels.run(inputs, seed, None, compiled, num_ctas=1, **scalars)
    assert_attention(inputs, outcome)


(
    test_bug_of_256_channels_has_its_place,
    test_bug_of_256_channels_is_noticed,
    test_without_a_bug_256_channels_are_right,
) = planted_bugs.tests_of(BUGS256, "dsv4.kernels.lowp.sm90.attention", checked256)

# Of weights in blocks, of groups of queries that two warps have, and of blocks that two work tiles
# have.
BUGS64: dict[str, Edit] = {
    "the first tile's values read before they are there": at("Consumers._pass_seen")
    .call("ctx.pipes.values.wait", 0)
    .delete(),
    "weights of the last block left out": at("Weights.finish").call("self.take").delete(),
    "maxima read before both warps' are written": at("lowp.sm90.queries:Queries._of_group")
    .call("sync", 0)
    .delete(),
    "the largest of one warp's queries": at("lowp.sm90.queries:Queries._of_group")
    .expression("warp ^ 1")
    .replace("warp"),
    "the largest of another block": at("QueryMaxima.of_block")
    .expression("place // MAXIMA_ROWS")
    .replace("place // (2 * MAXIMA_ROWS)"),
    "sums of half a tile": at("Consumers._issue_values")
    .expression("(i + 1) * count")
    .replace("i * count + 1"),
}


def checked64(build: Callable, seed: int) -> None:
    """The same of weights in blocks, and of tiles of 64 keys."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_90a"))
    blocks = {**BLOCKS64, "causal": "top_left"}
    for options in ({}, SM89, blocks):
        inputs = Inputs.make(Case(1, 2, 1, 300, 330, 64, options=options), seed)
        compiled = kernels.compile(inputs.config, build)
        scalars = kernels.call(inputs).options
        scalars = {name: scalars[name] for name in ("factor", "section")}
        outcome = kernels.run(inputs, seed, None, compiled, num_ctas=1, **scalars)
        assert_attention(inputs, outcome)


(
    test_bug_of_tiles_of_64_keys_has_its_place,
    test_bug_of_tiles_of_64_keys_is_noticed,
    test_without_a_bug_tiles_of_64_keys_are_right,
) = planted_bugs.tests_of(BUGS64, "dsv4.kernels.lowp.sm90.attention", checked64)
