"""Bugs put into the experts' kernels of Blackwell, each of which the checks of their tests
notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dsv4.testing.harness import Simulator, run_all
from dsv4.testing.moe import Case, Inputs, assert_experts_close
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 2  # rings wrap, of a pair of CTAs
CASE = Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10, is_tiled=True)
FP8 = Case(3, 256, 128, 4, 2, expert_dtype="fp8", is_tiled=True)
FP32 = Case(3, 256, 256, 4, 2, expert_dtype="fp8", scale_dtype="float32", is_tiled=True)
SEVERAL = Case(19, 128, 128, 4, 2, is_tiled=True)  # tiles of the shared expert of a pair of CTAs
WIDE = Case(19, 128, 128, 4, 2, one_expert=True, is_tiled=True)  # in tiles of up to 64 tokens
# Of two tilings one: the other takes as long to compile.
TILING = at("ExpertsSm100.__init__").expression("tilings(config)")


def only(case: Case) -> Edit:
    """The tiling of a case."""
    return TILING.replace("tilings(config)[1:]" if case == WIDE else "tilings(config)[:1]")


class Bug(NamedTuple):
    """What is put in, and a case that exposes it."""

    edit: Edit
    case: Case = CASE


def load(function: str):
    return at(f"moe.sm100.load_warp:LoadWarp.{function}")


def mma(function: str):
    return at(f"moe.sm100.mma_warp:MmaWarp.{function}")


def scales(function: str):
    return at(f"moe.sm100.scales:ScaleWarp.{function}")


def epilogue(function: str):
    return at(f"moe.sm100.epilogue:{function}")


def columns(function: str):
    return at(f"kit.column_codes:{function}")


BUGS: dict[str, Bug] = {
    "an empty stage not waited for by copies": Bug(load("load").call("ring.acquire").delete()),
    "an empty stage not waited for by scales": Bug(scales("fill").call("ring.acquire").delete()),
    "scales not handed to the async proxy": Bug(
        scales("fill").call("cute.arch.fence_view_async_shared").delete()
    ),
    "a full stage not waited for": Bug(mma("_sum").call("ring.wait").delete()),
    "a stage never released": Bug(
        mma("_sum").expression("ring.empty + stage").replace("ring.full + stage")
    ),
    "sums written over while they are read": Bug(mma("multiply").call("sums.acquire").delete()),
    "sums read before they are made": Bug(
        epilogue("Epilogue.store_tiles").call("sums.wait").delete()
    ),
    "sums never released": Bug(epilogue("Epilogue.store_tiles").call("sums.release").delete()),
    "sums of single k blocks never released": Bug(
        epilogue("Epilogue._promote").call("sums.release").delete(), FP32
    ),
    "sums of up written over before they are copied": Bug(
        epilogue("SwiGlu._send").call("ctx.pipes.up.acquire").delete(),
        SEVERAL,
    ),
    "sums of up sent before they are there": Bug(
        epilogue("SwiGlu._send").call("arrive_and_wait").delete()
    ),
    "sums of up not handed to the async proxy": Bug(
        epilogue("SwiGlu._send").call("cute.arch.fence_view_async_shared").delete()
    ),
    "sums of up read before they have come": Bug(
        epilogue("SwiGlu._store").call("pipe.wait").delete()
    ),
    "sums of up never given back": Bug(
        epilogue("SwiGlu._store").call("cute.arch.mbarrier_arrive").delete()
    ),
    "one board for the largest values": Bug(
        epilogue("SwiGlu._store").assignment("chunk_turn").delete()
    ),
    "the largest values read before they are there": Bug(
        columns("column_maxima").call("arrive_and_wait").delete()
    ),
    "the largest value of one warp": Bug(
        columns("column_maxima").expression("range(WARPS)").replace("range(1)")
    ),
    "every group of FP4 weights scaled like the first": Bug(
        mma("_steps")
        .expression("scaled_product(TILE_ROWS, tile.columns, a_format, k)")
        .replace("scaled_product(TILE_ROWS, tile.columns, a_format, 0)")
    ),
    "FP4 weights taken for FP8": Bug(
        mma("_steps").expression("E2M1 if dtype == 'fp4' else E4M3").replace("E4M3")
    ),
    "scales of gate for up": Bug(
        mma("_sum").expression("own_scales + columns").replace("weight_scales + columns")
    ),
    "columns of the first eight tokens": Bug(
        at("in_chunks").expression("cutlass.max((count + (CHUNK - 1)) // CHUNK, 1)").replace("1"),
        WIDE,
    ),
    "scales of FP8 experts of the first one": Bug(
        scales("_load").expression("tile.expert").replace("0"), FP8
    ),
    "fp32 scales of the first k block": Bug(
        epilogue("Epilogue._weight_scales").expression("block", nth=2).replace("0"), FP32
    ),
    "tokens of other pairs": Bug(
        at("ProductContext.rows").expression("pair // top_k").replace("pair % top_k")
    ),
    "places of a tile that does not exist": Bug(
        at("ProductContext.places")
        .expression("cutlass.min(cutlass.max(position, 0), last)")
        .replace("position")
    ),
    "the last tile left out": Bug(
        at("moe.sm100.context:TileScheduler.count")
        .expression("shared + routed - missing")
        .replace("shared + routed - 1")
    ),
    "shared rows where routed ones are": Bug(
        epilogue("SwiGlu._store_codes").expression("pairs.shape[0]").replace("0")
    ),
    "lists read before the launch before is over": Bug(
        load("load").call("pdl.wait_for_previous_launch").delete()
    ),
}


def noticed(build: Callable, case: Case, seed: int) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    from dsv4.simulator.errors import Deadlock, KernelFault

    simulator, inputs = Simulator("sm_100a"), Inputs.make(case, seed)
    try:
        compiled = simulator.compile(build, case.config)
        tokens = 64 if case == WIDE else 8
        outcome = run_all(
            simulator, compiled, lambda: inputs.experts_call(0, FEW_SMS, tokens), seed
        )
        assert_experts_close(outcome, inputs)
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once."""
    check(only(BUGS[name].case), BUGS[name].edit)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_noticed(tmp_path: Path, name: str, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm100 import experts

    bug = BUGS[name]
    build = mutated(experts.build, tmp_path, only(bug.case), bug.edit)
    assert noticed(build, bug.case, seed), f"{name}: passes {bug}"


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({bug.case for bug in BUGS.values()}, key=str), ids=str)
def test_without_a_bug_nothing_is_noticed(tmp_path: Path, case: Case, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm100 import experts

    assert not noticed(mutated(experts.build, tmp_path, only(case)), case, seed)
