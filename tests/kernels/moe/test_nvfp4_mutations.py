"""Bugs put into Blackwell's experts in NVFP4, each of which the checks of their tests notice.

What they share with other experts is the matter of `test_blackwell_mutations`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device as Planned
from dsv4.testing.harness import Simulator, run_all
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 2  # rings wrap, of a pair of CTAs
CASE = Case(
    11, 512, 384, 32, 2, expert_dtype="nvfp4", is_tiled=True, one_expert=True, live=10,
    has_special_rows=True,
)  # fmt: skip
# Of two tilings one: the other takes as long to compile.
ALONE = at("ExpertsSm100.__init__").expression("tilings(config)").replace("tilings(config)[:1]")


def load(function: str):
    return at(f"moe.sm100.load_warp:LoadWarp.{function}")


def mma(function: str):
    return at(f"moe.sm100.mma_warp:MmaWarp.{function}")


def scales(function: str):
    return at(f"moe.sm100.scales:PackedScaleWarp.{function}")


def epilogue(function: str):
    return at(f"moe.sm100.packed_epilogue:{function}")


def rows(function: str):
    return at(f"moe.packed_rows:{function}")


BUGS: dict[str, Edit] = {
    "scales of the first 64 elements for the others": mma("_steps")
    .expression("atom * SCALE_COLUMNS")
    .replace("0"),
    "scales of the first 64 elements alone": mma("_copy")
    .expression("self.plan.atoms if dtype == 'nvfp4' else 1")
    .replace("1"),
    "scales of tokens of the first 64 elements": scales("_store_tokens")
    .expression("values[w * atoms + atom]")
    .replace("values[w * atoms]"),
    "scales of tokens of the first k block": scales("_load_tokens")
    .expression("block * (4 * atoms)")
    .replace("0"),
    "half of the weights' scales": load("_load_weights")
    .expression("plan.atoms * ATOM_BYTES")
    .replace("ATOM_BYTES"),
    "e4m3 tokens for routed experts": load("_load_codes")
    .expression("cutlass.select_(tile.is_shared, address, packed)")
    .replace("address"),
    "tokens as far apart as those in e4m3": load("_load_codes")
    .expression("cutlass.select_(tile.is_shared, Int32(K_BLOCK), Int32(PACKED_BYTES))")
    .replace("Int32(K_BLOCK)"),
    "the fp32 scale of gate for up": epilogue("PackedSwiGlu.load_columns")
    .expression("scales[row, tile.expert]")
    .replace("scales[0, tile.expert]"),
    "the fp32 scale of tokens left out": epilogue("PackedSwiGlu.load_columns")
    .expression("scales[row, tile.expert] * of_x")
    .replace("scales[row, tile.expert]"),
    "the fp32 scale of another expert": epilogue("PackedDown.load_columns")
    .expression("scales[DOWN_ROW, tile.expert]")
    .replace("scales[DOWN_ROW, 0]"),
    "the fp32 scale of another expert's h": epilogue("PackedSwiGlu.load_columns")
    .expression("scales[H_ROW, tile.expert]")
    .replace("scales[H_ROW, 0]"),
    "the fp32 scale of each lane's experts": rows("scale_of_tokens")
    .expression("cute.arch.warp_redux_sync(largest, 'max')")
    .replace("largest"),
    "the largest of eight channels of h": epilogue("largest_of_block")
    .expression("NVFP4_GROUP // 2")
    .replace("NVFP4_GROUP // 4"),
    "codes of a byte changed over": epilogue("PackedSwiGlu._store_packed")
    .expression("pack_e2m1_pair(own, cute.arch.shuffle_sync_bfly(own, 1))")
    .replace("pack_e2m1_pair(cute.arch.shuffle_sync_bfly(own, 1), own)"),
    "an infinite block of the largest scale": at("kit.fp4:block_scale")
    .expression("cutlass.select_(amax.bitcast(Int32) >= _INFINITE, Int32(_NAN), ratio)")
    .replace("ratio"),
    "the largest of a lane's elements alone": rows("pack_tokens")
    .expression("LANES", 0)
    .replace("1"),
}


def noticed(build: Callable, seed: int) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    from dsv4.simulator.errors import Deadlock, KernelFault

    simulator, inputs = Simulator("sm_100a"), LayerInputs.make(CASE, seed)

    def make():
        return inputs.call_tiled(0, Planned("sm_100a", FEW_SMS))

    try:
        compiled = simulator.compile(build, MOE.compiled_config(inputs.config, "sm_100a"))
        assert_layer_close(run_all(simulator, compiled, make, seed), inputs)
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once."""
    check(ALONE, BUGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_noticed(tmp_path: Path, name: str, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm100 import layer

    assert noticed(mutated(layer.build, tmp_path, ALONE, BUGS[name]), seed), f"{name}: passes"


@pytest.mark.slow
def test_without_a_bug_nothing_is_noticed(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm100 import layer

    assert not noticed(mutated(layer.build, tmp_path, ALONE), seed)
