"""`quantize_kv` in the simulator: torch's bits, every schedule, packed sequences, deleted
synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4.kernels.lowp.config import QuantizeKvConfig, has_codes_kernel
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_codes import KvInputs, assert_codes
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("lowp")

RAGGED = Case(2, 2, 2, 1, 300, 64, "kbias")
ONE_LEVEL = {"pv_accum_dtype": "fp32", "smooth_v": True}
FP16_VALUES = {"pv": "fp16", "pv_accum_dtype": "fp16", "smooth_v": True}
FP8_ROWS = {"qk": "fp8", "qk_quant_gran": "per_row"}
FP8_BLOCKS = {"qk": "fp8", "qk_quant_gran": "per_64"}
FP8_HEADS = {"qk": "fp8", "qk_quant_gran": "per_head"}
SM89 = {"geometry": "sm89"}  # tiles of 64 keys


def run(inputs: KvInputs, seed: int, schedules: int | None = 1, arch: str = "sm_90a") -> Outcome:
    """Run, and compare with torch."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.lowp.quantize_kv import build

    kernels = OpKernels(QUANTIZE_KV, simulator(arch))
    compiled = kernels.compile(inputs.config, build)
    outcome = kernels.run(inputs, seed, schedules, compiled)
    assert_codes(inputs, outcome)
    return outcome


def test_ragged_rows(seed: int) -> None:
    run(KvInputs.make(RAGGED, seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_schedule(dim: int, seed: int) -> None:
    run(KvInputs.make(Case(1, 2, 1, 1, 400, dim, options=ONE_LEVEL), seed), seed, None)


FORMATS = {
    "128 channels": Case(1, 2, 2, 1, 1300, 128, "outlier"),
    "96 channels": Case(1, 2, 1, 1, 261, 96, "zeros"),
    "40 channels": Case(1, 1, 1, 1, 130, 40, "vbias"),
    "one key": Case(1, 1, 1, 1, 1, 64),
    "per warp": Case(1, 2, 1, 1, 200, 128, "zeros", options={"qk_quant_gran": "per_warp"}),
    "per block": Case(1, 2, 1, 1, 200, 64, "zeros", options={"qk_quant_gran": "per_block"}),
    "fp16": Case(1, 2, 1, 1, 200, 128, "kbias", dtype=torch.float16),
    "values without their mean": Case(1, 2, 1, 1, 1100, 64, "vbias", options=ONE_LEVEL),
    "small values": Case(1, 1, 1, 1, 200, 64, options={"pv_accum_dtype": "fp32+fp16"}),
    "keys as they are": Case(1, 1, 1, 1, 200, 64, "kbias", options={"smooth_k": False}),
    "fp16 values": Case(1, 2, 1, 1, 300, 96, "zeros", options={"pv": "fp16"}),
    "fp16 values without their mean": Case(1, 2, 1, 1, 1100, 128, "vbias", options=FP16_VALUES),
    "FP8 keys, per row": Case(1, 2, 1, 1, 300, 128, "zeros", options=FP8_ROWS),
    "FP8 keys, 64 channels": Case(1, 1, 1, 1, 200, 64, "kbias", options=FP8_ROWS),
    "FP8 keys, per 64": Case(1, 2, 1, 1, 300, 64, "zeros", options=FP8_BLOCKS),
    "FP8 keys, per head": Case(1, 2, 2, 1, 300, 96, "kbias", options=FP8_HEADS),
    "FP8 keys, per head, as they are": Case(
        1, 2, 1, 1, 300, 64, "zeros", options={**FP8_HEADS, "smooth_k": False}
    ),
    "tiles of 64 keys": Case(2, 2, 2, 1, 330, 64, "kbias", options=SM89),
    "tiles of 64 keys, 128 channels": Case(
        1, 2, 1, 1, 300, 128, "zeros", options={**SM89, **ONE_LEVEL, "qk_quant_gran": "per_warp"}
    ),
    "tiles of 64 keys, per block": Case(
        1, 2, 1, 1, 200, 64, "zeros", options={**SM89, "qk_quant_gran": "per_block", "pv": "fp16"}
    ),
    "tiles of 64 keys, FP8 keys": Case(1, 1, 1, 1, 260, 96, options={**SM89, **FP8_BLOCKS}),
    "tiles of 64 keys, FP8 keys, per row": Case(1, 1, 1, 1, 90, 64, options={**SM89, **FP8_ROWS}),
    "FP8 keys, 128 channels": Case(1, 1, 1, 1, 190, 128, "kbias", options=FP8_BLOCKS),
    "256 channels": Case(1, 2, 2, 1, 700, 256, "outlier"),
    "200 channels, values without their mean": Case(
        1, 2, 1, 1, 261, 200, "zeros", options=ONE_LEVEL
    ),
    "256 channels, per warp": Case(
        1, 2, 1, 1, 200, 256, "zeros", options={"qk_quant_gran": "per_warp"}
    ),
    "256 channels, FP8 keys, per row": Case(1, 1, 1, 1, 200, 256, "zeros", options=FP8_ROWS),
    "256 channels, FP8 keys, per 64": Case(1, 1, 1, 1, 190, 256, "kbias", options=FP8_BLOCKS),
    "256 channels, FP8 keys, per head": Case(1, 2, 2, 1, 300, 256, "kbias", options=FP8_HEADS),
    "256 channels, tiles of 64 keys": Case(2, 2, 2, 1, 330, 256, "kbias", options=SM89),
    "136 channels, tiles of 64 keys, per warp": Case(
        1, 1, 1, 1, 90, 136, options={**SM89, "qk_quant_gran": "per_warp"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, seed: int) -> None:
    run(KvInputs.make(FORMATS[name], seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, FP8_ROWS, FP8_BLOCKS, FP8_HEADS], ids=["int8", "rows", "blocks", "heads"]
)
def test_blackwell_has_the_same_codes(options: dict, seed: int) -> None:
    run(
        KvInputs.make(Case(1, 2, 1, 1, 300, 128, "kbias", options=options), seed),
        seed,
        None,
        "sm_100a",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        ONE_LEVEL,
        FP8_ROWS,
        FP8_BLOCKS,
        FP8_HEADS,
        FP16_VALUES,
        SM89,
        {**SM89, **FP8_HEADS},
        {**SM89, **FP16_VALUES, "qk_quant_gran": "per_block"},
    ],
    ids=["default", "one level", "rows", "blocks", "heads", "fp16", "64", "64 heads", "64 fp16"],
)
@pytest.mark.parametrize("dim", [64, 256])
def test_packed_sequences(dim: int, options: dict, seed: int) -> None:
    """Rows behind the last one, too, and tiles between them."""
    case = Case(1, 2, 2, 1, 720, dim, "vbias", options=options)
    run(KvInputs.make(case, seed, (300, 0, 1, 128, 271)), seed, None)


@pytest.mark.slow
def test_no_synchronisation_is_left_out(seed: int) -> None:
    cases = [
        RAGGED,
        *(Case(1, 2, 1, 1, 400, 64, options=x) for x in (ONE_LEVEL, FP8_BLOCKS, FP8_HEADS, SM89)),
        Case(1, 2, 1, 1, 400, 256, options=ONE_LEVEL),
    ]
    reports = [run(KvInputs.make(case, seed), seed).report for case in cases]
    assert not missed_synchronisation(reports)


def test_configurations_with_kernels() -> None:
    assert has_codes_kernel(QuantizeKvConfig(128))
    assert has_codes_kernel(QuantizeKvConfig(128, pv="fp16", pv_accum_dtype="fp32"))
    assert has_codes_kernel(fp8_keys(64, "per_row"))
    assert has_codes_kernel(fp8_keys(64, "per_head"))
    assert has_codes_kernel(QuantizeKvConfig(128, geometry="sm89"))
    assert has_codes_kernel(QuantizeKvConfig(256))
    for other in (
        QuantizeKvConfig(128, dtype="float32"),
        QuantizeKvConfig(33),
        QuantizeKvConfig(129),
        QuantizeKvConfig(256, pv="fp16", pv_accum_dtype="fp32"),
        QuantizeKvConfig(128, smooth_q=True),
        QuantizeKvConfig(128, km_scope="packed"),
    ):
        assert not has_codes_kernel(other), other


def fp8_keys(dim: int, granularity: str) -> QuantizeKvConfig:
    """Configuration of FP8 keys."""
    return QuantizeKvConfig(dim, qk="fp8", qk_quant_gran=granularity, quantizer="")


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "sums read before all are written": at("TileStatistics.reduce")
    .call("cute.arch.sync_threads", 0)
    .delete(),
    "sums overwritten while they are read": at("TileStatistics.reduce")
    .call("cute.arch.sync_threads", 1)
    .delete(),
    "maxima read before all are written": at("Codes.scales_of")
    .call("cute.arch.sync_threads")
    .delete(),
    "columns read before all are written": at("Codes.code_values")
    .call("cute.arch.sync_threads")
    .delete(),
    "the largest of half a group": at("Codes.scales_of")
    .expression("units // groups", 1)
    .replace("1"),
    "values in the order of keys": at("Codes.code_quads").expression("V_ORDER[i]").replace("i"),
    "zeros that fill 16 rows left out": at("TileStatistics.kernel")
    .expression("(tile.rows + V_ALIGN - 1) // V_ALIGN * V_ALIGN")
    .replace("tile.rows"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZE_KV, Simulator("sm_90a"))
    inputs = KvInputs.make(Case(1, 2, 1, 1, 401, 64, "vbias", options=ONE_LEVEL), seed)
    compiled = kernels.compile(inputs.config, build)
    assert_codes(inputs, kernels.run(inputs, seed, None, compiled))


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.lowp.quantize_kv", checked)
