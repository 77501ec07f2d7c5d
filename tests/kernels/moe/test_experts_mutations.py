"""Bugs put into the experts' kernels, each of which the checks of their tests notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4.testing.harness import Simulator, run_all
from dsv4.testing.moe import Case, Inputs, assert_experts_close
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 1  # rings wrap
CASE = Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
RAW = Case(3, 256, 128, 4, 2, spread=20)
# What is put in, and a case that exposes it.
BUGS: dict[str, tuple[Edit, Case]] = {
    "a full stage not waited for": (at("Consumers._tile").call("ring.wait").delete(), CASE),
    "a stage never released": (at("Consumers._tile").call("ring.release").delete(), CASE),
    "an empty stage not waited for by weights": (
        at("LoadWarp._load_tile").call("ring.acquire").delete(),
        CASE,
    ),
    "an empty stage not waited for by codes": (
        at("ActivationWarps._copy").call("ctx.pipes.ring.acquire").delete(),
        CASE,
    ),
    "an empty stage not waited for by rows": (
        at("ActivationWarps._quantize").call("ctx.pipes.ring.acquire").delete(),
        CASE,
    ),
    "codes not handed to the async proxy": (
        at("ActivationWarps._fill_tile").call("cute.arch.fence_view_async_shared").delete(),
        CASE,
    ),
    "copies not handed to the async proxy": (
        at("Consumers._tile").call("cute.arch.fence_view_async_shared").delete(),
        CASE,
    ),
    "copies that do not arrive": (
        at("ActivationWarps._copy").call("cute.arch.cp_async_mbarrier_arrive_noinc").delete(),
        CASE,
    ),
    "rows read before the launch before is over": (
        at("ActivationWarps.fill").call("pdl.wait_for_previous_launch").delete(),
        CASE,
    ),
    "sums read while they are made": (
        at("Consumers._blocks").call("warpgroup.wait_group").delete(),
        CASE,
    ),
    "columns without a token never cleared": (
        at("GroupedProduct.run").call("self.activations.clear").delete(),
        CASE,
    ),
    "signs of the other half": (
        at("decode_fp4").expression("word << 4").replace("word"),
        CASE,
    ),
    "groups of raw weights scaled alike": (
        at("raw_scale").expression("8 * step").replace("0"),
        RAW,
    ),
    "experts that a token lacks are added": (
        at("Combine.kernel").expression("ids[token, place] >= 0").replace("(token >= 0)"),
        CASE,
    ),
    "a gate below the limit clamped": (
        at("SwiGlu._swiglu").expression("gate > limit").replace("gate < limit"),
        CASE,
    ),
}


def build(config, options: str):
    from dsv4.kernels.moe.sm90.experts import build

    return build(config, options)


def noticed(build: Callable, case: Case, seed: int) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    from dsv4.simulator.errors import Deadlock, KernelFault

    simulator, inputs = Simulator("sm_90a"), Inputs.make(case, seed)
    try:
        compiled = simulator.compile(build, case.config)
        outcome = run_all(simulator, compiled, lambda: inputs.experts_call(0, FEW_SMS, 8), seed)
        assert_experts_close(outcome, inputs)
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once."""
    check(BUGS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_noticed(tmp_path: Path, name: str, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm90 import experts

    edit, case = BUGS[name]
    assert noticed(mutated(experts.build, tmp_path, edit), case, seed), f"{name}: passes {case}"


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, RAW], ids=str)
def test_without_a_bug_nothing_is_noticed(case: Case, seed: int) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    assert not noticed(build, case, seed)
