"""`quantize_kv` in FP4 for Blackwell in the simulator: torch's bits, every schedule, packed
sequences, deleted synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv4.kernels.lowp.config import QuantizeKvConfig, has_codes_kernel
from dsv4.kernels.lowp.fp4 import scale_place
from dsv4.ops.quantized_attention.quantize_kv import QUANTIZE_KV
from dsv4.ops.quantized_attention.quantizers import in_scale_order
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_codes import KvInputs, assert_codes
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs
from tests.kernels.lowp.test_quantize_kv import run

pytestmark = pytest.mark.stage("lowp")

FP4 = {"qk": "nvfp4"}
SMOOTH = {**FP4, "smooth_q": True}
AS_THEY_ARE = {**FP4, "smooth_k": False}
SM89 = {"geometry": "sm89"}  # tiles of 64 keys
SMALL = Case(1, 1, 1, 1, 300, 64, "kbias", options=SMOOTH)
RAGGED = Case(2, 2, 2, 1, 300, 64, "kbias", options=SMOOTH)
WIDE = Case(1, 2, 1, 1, 420, 128, "zeros", options=FP4)


def test_ragged_rows(seed: int) -> None:
    run(KvInputs.make(SMALL, seed), seed, arch="sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("case", [RAGGED, WIDE], ids=["64", "128"])
def test_every_schedule(case: Case, seed: int) -> None:
    run(KvInputs.make(case, seed), seed, None, "sm_100a")


FORMATS = {
    "128 channels": Case(1, 2, 2, 1, 1300, 128, "outlier", options=SMOOTH),
    "96 channels": Case(1, 2, 1, 1, 261, 96, "zeros", options=SMOOTH),
    "40 channels": Case(1, 1, 1, 1, 130, 40, "vbias", options=FP4),
    "one key": Case(1, 1, 1, 1, 1, 64, options=SMOOTH),
    "fp16": Case(1, 2, 1, 1, 200, 128, "kbias", dtype=torch.float16, options=SMOOTH),
    "keys as they are": Case(1, 2, 1, 1, 200, 64, "kbias", options=AS_THEY_ARE),
    "keys as they are, twice": Case(
        1, 2, 1, 1, 200, 128, "zeros", options={**SMOOTH, "smooth_k": False}
    ),
    "tiles of 64 keys": Case(2, 2, 2, 1, 330, 64, "kbias", options={**FP4, **SM89}),
    "tiles of 64 keys, 128 channels": Case(
        1, 2, 1, 1, 300, 128, "outlier", options={**SMOOTH, **SM89}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, seed: int) -> None:
    run(KvInputs.make(FORMATS[name], seed), seed, arch="sm_100a")


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, of which blocks of 16 have a few: scales that are rounded to zero,
    small ones, those at the end; zeros of both signs; quotients that are ties."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, 256, 128)
    magnitude = torch.rand((1, 1, 256, 8, 1), generator=generator) * 30 - 16
    exponents = magnitude - torch.rand((1, 1, 256, 8, 16), generator=generator) * 4
    found = torch.exp2(exponents).reshape(shape)
    # Of a scale of 1 and of 2.
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    found[..., :32, :] = ties.repeat(16) * (1 + torch.arange(32)[:, None] % 2)
    found[..., 40:44, :] = 0
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    return (found * sign).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_all_magnitudes(dtype: torch.dtype, seed: int) -> None:
    """Rows and columns: those of values are the keys'."""
    case = Case(1, 1, 1, 1, 256, 128, dtype=dtype, options=AS_THEY_ARE)
    found = KvInputs.make(case, seed)
    keys = numbers(dtype, seed)
    values = keys.transpose(-1, -2).reshape(1, 1, 2, 128, 128).transpose(-1, -2)
    values = values.transpose(2, 3).reshape(1, 1, 256, 128)
    run(KvInputs(found.config, keys, values.contiguous()), seed, arch="sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [FP4, SMOOTH, {**SMOOTH, **SM89}, AS_THEY_ARE],
    ids=["plain", "smooth", "64", "as they are"],
)
def test_packed_sequences(options: dict, seed: int) -> None:
    """Rows behind the last one, NaN here, too, and tiles between them."""
    case = Case(1, 2, 2, 1, 720, 64, "vbias", options=options)
    inputs = KvInputs.make(case, seed, (300, 0, 1, 128, 271))
    for tensor in (inputs.keys, inputs.values):
        tensor[:, :, 700:] = torch.nan
    run(inputs, seed, None, "sm_100a")


@pytest.mark.slow
def test_rows_of_a_batch_have_the_same_bits_alone(seed: int) -> None:
    inputs = KvInputs.make(RAGGED, seed)
    found = run(inputs, seed, arch="sm_100a")
    one = KvInputs(inputs.config, inputs.keys[1:, 1:], inputs.values[1:, 1:])
    alone = run(one, seed, arch="sm_100a")
    for name in ("k_codes", "k_scale", "v_codes", "v_block_scale", "km", "k_smooth"):
        both = (x.view(torch.uint8) for x in (alone[name], found[name][1:, 1:].contiguous()))
        assert torch.equal(*both), name


@pytest.mark.slow
def test_no_synchronisation_is_left_out(seed: int) -> None:
    reports = [run(KvInputs.make(x, seed), seed, arch="sm_100a").report for x in (RAGGED, WIDE)]
    assert not missed_synchronisation(reports)


@pytest.mark.parametrize(("rows", "words"), [(128, 2), (128, 1), (64, 1), (64, 2)])
def test_scales_lie_as_the_tensor_core_reads_them(rows: int, words: int) -> None:
    number = torch.arange(rows * words * 4).view(rows, words * 4)
    found = in_scale_order(number).view(-1, 4)
    for row in range(rows):
        for word in range(words):
            place = scale_place(row, word, rows, words)
            assert found[place].tolist() == number[row, 4 * word : 4 * word + 4].tolist()


def config_of(dim: int, **options) -> QuantizeKvConfig:
    formats = {"qk": "nvfp4", "pv": "nvfp4", "qk_quant_gran": "per_16", "pv_accum_dtype": "fp32"}
    return QuantizeKvConfig(dim, quantizer="", **formats, **options)


def test_configurations_with_kernels() -> None:
    for options in ({}, {"smooth_q": True}, {"smooth_k": False}, SM89, {"is_varlen": True}):
        assert has_codes_kernel(config_of(128, **options), "sm_100a"), options
        # No conversion to e2m1, and no product that takes it.
        assert not has_codes_kernel(config_of(128, **options), "sm_90a"), options
    for options in ({"dtype": "float32"}, {"km_scope": "packed"}):
        assert not has_codes_kernel(config_of(64, **options), "sm_100a"), options
    assert not has_codes_kernel(config_of(33), "sm_100a")
    assert not has_codes_kernel(QuantizeKvConfig(128, smooth_q=True), "sm_100a")


def test_operator_takes_and_ships_them_for_blackwell_alone() -> None:
    config = config_of(128, smooth_q=True)
    assert QUANTIZE_KV.has_kernel(config)
    assert QUANTIZE_KV.serves(config, "sm_100a") and not QUANTIZE_KV.serves(config, "sm_90a")
    shipped = {
        arch: {c.qk for c in QUANTIZE_KV.aot_for(arch).values()} for arch in ("sm_90a", "sm_100a")
    }
    assert shipped == {"sm_90a": {"int8", "fp8"}, "sm_100a": {"int8", "fp8", "nvfp4"}}


# ---- bugs ----------------------------------------------------------------------------------------

CODES = "lowp.kv_fp4:Fp4Codes"
BUGS: dict[str, Edit] = {
    "columns read before all are written": at(f"{CODES}.code_values")
    .call("cute.arch.sync_threads")
    .delete(),
    "the largest of half a key's block": at(f"{CODES}.code_keys")
    .expression("BLOCK // VECTOR")
    .replace("1"),
    "the largest of half a channel's block": at(f"{CODES}.code_octet")
    .expression("fmax_nan(amax, other)")
    .replace("amax"),
    "scales of a row in the order of rows": at(f"{CODES}.store_scales")
    .expression("scale_place(row, channel // word_channels, self.tile, words)")
    .replace("row * words + channel // word_channels"),
    "a tile's rows that are not there": at(f"{CODES}.code_keys")
    .expression("self.largest_of(x, means, i, rows[i] < tile.rows)")
    .replace("self.largest_of(x, means, i, rows[i] < 128)"),
    "keys with their mean": at(f"{CODES}.code_keys")
    .expression("self.smoothed(x[j, i], means[j])")
    .replace("x[j, i].to(cutlass.Float32)"),
    "scales of the first block": at(f"{CODES}.code_octet")
    .expression("block % WORD_BLOCKS")
    .replace("0"),
    "columns of the next vector": at(f"{CODES}.store_values")
    .expression("line % self.vectors * VECTOR + line // self.vectors")
    .replace("line"),
}


def checked(build: Callable, seed: int) -> Outcome:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZE_KV, Simulator("sm_100a"))
    inputs = KvInputs.make(SMALL, seed)
    outcome = kernels.run(inputs, seed, None, kernels.compile(inputs.config, build))
    assert_codes(inputs, outcome)
    return outcome


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.lowp.quantize_kv", checked)
