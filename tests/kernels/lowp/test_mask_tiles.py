"""Tiles of keys that a mask hides: attention passes none of them, on both architectures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4.ops.quantized_attention.op import QUANTIZED_ATTENTION
from dsv4.testing.harness import Device, Simulator, Target, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.lowp import Case
from dsv4.testing.lowp_attention import Inputs, assert_attention, with_hidden_tiles
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = [pytest.mark.stage("lowp"), pytest.mark.slow]

FP8_ROWS = {"qk": "fp8", "qk_quant_gran": "per_row"}
FP8_HEADS = {"qk": "fp8", "qk_quant_gran": "per_head"}
HALVES = {"pv": "fp16", "geometry": "sm89", "qk_quant_gran": "per_block"}
# More work tiles than CTAs, the first of which see nothing.
SIZES = (1, 2, 1, 460, 650, 64)
CASES = {
    "bool": Case(*SIZES, options={"mask": "bool"}),
    "bool, causal": Case(*SIZES, options={"mask": "bool", "causal": "bottom_right"}),
    # Behind the maxima of queries.
    "float, per head": Case(2, 2, 1, 300, 400, 128, options={"mask": "float", **FP8_HEADS}),
    "bool, per row": Case(*SIZES, options={"mask": "bool", **FP8_ROWS}),
    "float, fp16 values": Case(*SIZES, options={"mask": "float", **HALVES}),
}
OTHERS = {
    "sm_90a": {"256 channels": Case(1, 2, 1, 300, 400, 256, options={"mask": "bool"})},
    "sm_100a": {"FP4": Case(*SIZES, options={"qk": "nvfp4", "mask": "bool"})},
    "cuda": {"256 channels": Case(1, 2, 1, 300, 400, 256, options={"mask": "bool"})},
}
ALL = [
    pytest.param(arch, case, id=f"{arch}, {name}", marks=[pytest.mark.gpu] * (arch == "cuda"))
    for arch in OTHERS
    for name, case in {**CASES, **OTHERS[arch]}.items()
]


def check(arch: str, case: Case, seed: int, schedules: int | None, is_shared: bool) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    target: Target = Device() if arch == "cuda" else simulator(arch)
    device = "cuda" if arch == "cuda" else "cpu"
    inputs = Inputs.make(case, seed, device=device)
    clean, poisoned = with_hidden_tiles(inputs, seed, is_shared)
    kernels = OpKernels(QUANTIZED_ATTENTION, target)
    call = kernels.call(poisoned).options
    scalars = {name: call[name] for name in ("factor", "section", "num_ctas")}
    scalars["num_ctas"] = min(scalars["num_ctas"], 2)
    outcome = kernels.run(poisoned, seed, schedules, **scalars)
    is_blackwell = arch == "sm_100a"
    assert_attention(clean, outcome, tiles=inputs.summed_tiles, has_fp32_sums=is_blackwell)
    assert not outcome["out"][:, :, :256].any(), "queries of tiles that see nothing"


@pytest.mark.parametrize("arch, case", ALL)
def test_hidden_tiles_are_not_read(arch: str, case: Case, seed: int) -> None:
    check(arch, case, seed, 1, is_shared=False)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_schedule(arch: str, seed: int) -> None:
    """Lists that all heads share, which one head's work tiles write."""
    check(arch, CASES["bool, causal"], seed, None, is_shared=True)


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "words read before they are written": at("MaskTiles.write")
    .call("cute.arch.sync_threads")
    .delete(),
    "the list of another work tile": at("WorkTiles.list_of")
    .expression("work.first_row // self.queries")
    .replace("0"),
    "tiles in place of those of the list": at("LoadWarp._load_values")
    .call("ctx.tiles.number")
    .replace("tile"),
    "a tile left out": at("MaskTiles.write").expression("1 + place").replace("place"),
}


def checked(build: Callable, seed: int) -> None:
    """The check that every test makes, of what `build` compiles."""
    kernels = OpKernels(QUANTIZED_ATTENTION, Simulator("sm_90a"))
    clean, poisoned = with_hidden_tiles(Inputs.make(CASES["bool"], seed), seed)
    compiled = kernels.compile(clean.config, build)
    call = kernels.call(poisoned).options
    scalars = {name: call[name] for name in ("factor", "section")}
    outcome = kernels.run(poisoned, seed, 1, compiled, num_ctas=1, **scalars)
    assert_attention(clean, outcome)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.lowp.sm90.attention", checked)
