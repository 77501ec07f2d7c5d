"""Bugs put into experts that are multiplied in bf16, each of which the checks of their tests
notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dsv4.kernels.moe import plan
from dsv4.ops.moe.op import MOE
from dsv4.ops.runtime.backend import Device as Planned
from dsv4.testing.harness import Simulator, run_all
from dsv4.testing.moe import Case
from dsv4.testing.moe_layer import LayerInputs, assert_layer_close
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 1  # rings wrap
NVFP4 = Case(11, 512, 384, 32, 2, expert_dtype="nvfp4", one_expert=True, live=10)
BF16 = Case(5, 512, 384, 32, 2, expert_dtype="bfloat16", shared_dtype="bfloat16", live=4)


class Bug(NamedTuple):
    """What is put in, a case and a tiling that expose it."""

    edit: Edit
    case: Case = NVFP4
    tiling: int = 0

    @property
    def edits(self) -> tuple[Edit, Edit]:
        """With the tiling in question: others take as long to compile."""
        return alone(self.tiling), self.edit


APART = 2  # the tiling whose products are a launch each


def alone(tiling: int) -> Edit:
    place = at("Bf16Experts.__init__").expression("tilings(config)")
    return place.replace(f"tilings(config)[{tiling}:{tiling + 1}]")


BUGS: dict[str, Bug] = {
    "a full stage not waited for": Bug(at("Bf16Consumers._bf16_tile").call("ring.wait").delete()),
    "a stage never released": Bug(at("Bf16Consumers._bf16_tile").call("ring.release").delete()),
    "an empty stage not waited for by rows": Bug(
        at("Bf16Activations._copy_rows").call("ctx.pipes.ring.acquire").delete(),
    ),
    "copies that do not arrive": Bug(
        at("Bf16Activations._copy_rows").call("cute.arch.cp_async_mbarrier_arrive_noinc").delete(),
    ),
    "a stage of rows not handed over": Bug(
        at("Bf16Activations._fill_stages")
        .expression("ring.at(cursor.stage).commit(lane)")
        .replace("None"),
    ),
    "sums read while they are made": Bug(
        at("Bf16Consumers._add_blocks").call("warpgroup.wait_group", 1).delete(),
    ),
    "signs in the place of others": Bug(
        at("spread_e2m1")
        .expression("shifted(word, by_sign) & Uint32(SIGNS)")
        .replace("shifted(word, by_magnitude) & Uint32(SIGNS)"),
    ),
    "scales of the group before": Bug(
        at("RowWords._decode").expression("step % 4").replace("0"),
    ),
    "up with the scale of gate": Bug(
        at("Bf16Consumers._factors").expression("(GATE, UP)").replace("(GATE, GATE)"),
    ),
    "the scale of another expert": Bug(
        at("Bf16Consumers._factors").expression("tile.expert").replace("0"),
    ),
    "columns of the other span": Bug(
        at("Bf16Activations._vector_address")
        .expression("vector // SPAN_VECTORS")
        .replace("1 - vector // SPAN_VECTORS"),
    ),
    "bf16: halves of a step changed over": Bug(
        at("RowWords._load").expression("2 * i + 1").replace("2 * i"), BF16
    ),
    "bf16: a vector of the step before": Bug(
        at("RowWords._load").expression("part * PART_STEPS + first").replace("first"), BF16
    ),
    "apart: rows of h copied before the launch before is over": Bug(
        at("activations:ActivationWarps.fill").call("pdl.wait_for_previous_launch").delete(),
        tiling=APART,
    ),
    "apart: columns without a token never cleared": Bug(
        at("GroupedProduct.initialise").call("self.activations.clear").delete(), tiling=APART
    ),
}


def noticed(build: Callable, case: Case, seed: int, tiling: int) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    from dsv4.simulator.errors import Deadlock, KernelFault

    simulator, inputs = Simulator("sm_90a"), LayerInputs.make(case, seed)

    def make():
        call = inputs.call_tiled(tiling, Planned("sm_90a", FEW_SMS))
        # The tiling is the only one that is compiled.
        call.options["tiling"] = 0
        return call

    try:
        compiled = simulator.compile(build, MOE.compiled_config(inputs.config, "sm_90a"))
        assert_layer_close(run_all(simulator, compiled, make, seed), inputs)
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once."""
    check(*BUGS[name].edits)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_noticed(tmp_path: Path, name: str, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm90 import layer

    bug = BUGS[name]
    build = mutated(layer.build, tmp_path, *bug.edits)
    assert noticed(build, bug.case, seed, bug.tiling), f"{name}: passes {bug}"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "tiling"), [(NVFP4, 0), (NVFP4, APART), (BF16, 0)], ids=str)
def test_without_a_bug_nothing_is_noticed(
    tmp_path: Path, case: Case, tiling: int, seed: int
) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm90 import layer

    assert len(plan.tilings(case.config)) == APART + 1
    assert not noticed(mutated(layer.build, tmp_path, alone(tiling)), case, seed, tiling)
