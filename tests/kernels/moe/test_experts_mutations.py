"""Bugs put into the experts' kernels, each of which the checks of their tests notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from dsv4.kernels.moe.plan import tilings
from dsv4.testing.harness import Simulator, run_all
from dsv4.testing.moe import Case, Inputs, assert_experts_close
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("moe")

FEW_SMS = 1  # rings wrap
CASE = Case(11, 256, 384, 4, 2, one_expert=True, has_missing=True, live=10)
RAW = Case(3, 256, 128, 4, 2, spread=20)
BY_ROW = Case(3, 256, 384, 4, 2, is_row_packed=True)
# Tiles of more than one kind.
MANY = Case(41, 256, 384, 4, 2, one_expert=True, live=40)
# A group that begins at an odd place, whatever is drawn.
ODD = Case(40, 256, 384, 4, 2, is_graded=True, live=39)
MANY_BY_ROW = replace(MANY, is_row_packed=True)
# Tall tiles have long stages, of which a tile has several.
TALL = replace(MANY, hidden=512)


class Bug(NamedTuple):
    """What is put in, and a case and a tiling that expose it."""

    edit: Edit
    case: Case = CASE
    tiling: int = 0

    @property
    def edits(self) -> tuple[Edit, Edit]:
        """With the tilings in question: others take as long to compile."""
        return ALONE.get(self.tiling, FIRST), self.edit


JOINT = 1  # the tiling whose products are one launch
ROUNDED = 3  # the one whose first product leaves codes of h
WIDE = -1  # the tiling of many tokens
FIRST = at("ExpertsSm90.__init__").expression("tilings(config)").replace("tilings(config)[:2]")
ALONE = {
    tiling: at("ExpertsSm90.__init__")
    .expression("tilings(config)")
    .replace(f"tilings(config){part}")
    for tiling, part in ((ROUNDED, "[3:4]"), (WIDE, "[-1:]"))
}
BUGS: dict[str, Bug] = {
    "a full stage not waited for": Bug(at("Consumers._tile").call("ring.wait").delete()),
    "a stage never released": Bug(at("Consumers._tile").call("ring.release").delete()),
    "an empty stage not waited for by weights": Bug(
        at("LoadWarp.load_tile").call("ring.acquire").delete(),
    ),
    "an empty stage not waited for by codes": Bug(
        at("activations:ActivationWarps._copy").call("ctx.pipes.ring.acquire").delete(),
    ),
    "an empty stage not waited for by rows": Bug(
        at("activations:ActivationWarps._quantize").call("ctx.pipes.ring.acquire").delete(),
    ),
    "codes not handed to the async proxy": Bug(
        at("activations:ActivationWarps._fill_stages")
        .call("cute.arch.fence_view_async_shared")
        .delete(),
    ),
    "rows not handed to the async proxy by who reads them": Bug(
        at("Consumers._tile").call("cute.arch.fence_view_async_shared").delete(),
        tiling=JOINT,
    ),
    "copies that do not arrive": Bug(
        at("activations:ActivationWarps._copy")
        .call("cute.arch.cp_async_mbarrier_arrive_noinc")
        .delete(),
    ),
    "rows read before the launch before is over": Bug(
        at("activations:ActivationWarps.fill").call("pdl.wait_for_previous_launch").delete(),
    ),
    "sums read while they are made": Bug(
        at("Consumers._blocks").call("warpgroup.wait_group").delete(),
    ),
    "columns without a token never cleared": Bug(
        at("GroupedProduct.initialise").call("self.activations.clear").delete(),
    ),
    "columns of joint products never cleared": Bug(
        at("JointProducts.kernel").call("self.down.activations.clear").delete(),
        tiling=JOINT,
    ),
    "a tile read before it is shown": Bug(
        at("JointProducts._read").call("board.wait").delete(),
        tiling=JOINT,
    ),
    "h multiplied before it is there": Bug(
        at("JointProducts._wait_for_h")
        .expression("found < self.up.plan.row_tiles")
        .replace("found < self.up.plan.row_tiles - 1"),
        tiling=JOINT,
    ),
    "h read by warps that did not wait": Bug(
        at("JointProducts._wait_for_h").call("cute.arch.barrier").delete(),
        tiling=JOINT,
    ),
    "h counted before all of it is stored": Bug(
        at("JointProducts._publish_h").call("cute.arch.barrier").delete(),
        tiling=JOINT,
    ),
    "h counted without a release": Bug(
        at("JointProducts._publish_h").expression('"release"').replace('"relaxed"'),
        tiling=JOINT,
    ),
    "h there without an acquire": Bug(
        at("JointProducts._wait_for_h").expression('"acquire"').replace('"relaxed"'),
        tiling=JOINT,
    ),
    "a tile of the second product taken first": Bug(
        at("TileList.find").expression("ticket < up_tiles").replace("ticket >= 2 * up_tiles"),
        tiling=JOINT,
    ),
    "the magnitude of half of a group's channels": Bug(
        at("RoundedSwiGlu._amax").expression("(1, 2)").replace("(1,)"),
        TALL,
        ROUNDED,
    ),
    "the magnitudes of some warps alone": Bug(
        at("RoundedSwiGlu._amax").expression("quad * count").replace("0"),
        TALL,
        ROUNDED,
    ),
    "the scale of another column stored": Bug(
        at("RoundedSwiGlu.store").expression("Uint8(scale[n])").replace("Uint8(scale[0])"),
        TALL,
        ROUNDED,
    ),
    "codes of another pair of channels": Bug(
        at("RoundedSwiGlu.store").expression("2 * quad").replace("2 * (quad ^ 1)"),
        TALL,
        ROUNDED,
    ),
    "the shared expert's rows rounded from another one on": Bug(
        at("rows_from").expression("Int64(first)").replace("Int64(first + 1)"),
        TALL,
        ROUNDED,
    ),
    "signs of the other half": Bug(
        at("decode_fp4").expression("word << 4").replace("word"),
    ),
    "groups of raw weights scaled alike": Bug(
        at("raw_scale").expression("8 * step").replace("0"),
        RAW,
    ),
    "a row's exponent of one k block": Bug(
        at("row_scale").expression("odd << 3").replace("even << 3"),
        BY_ROW,
    ),
    "every group as far above its row as the first": Bug(
        at("fragments:_above").expression("8 * group").replace("0"),
        BY_ROW,
    ),
    "every group as far above its block as the first": Bug(
        at("fragments:_above").expression("4 * group").replace("0"),
    ),
    "words of codes in their order": Bug(
        at("activations:ActivationWarps._copy_words")
        .expression("interleaved_word(lane)")
        .replace("lane"),
    ),
    "words of rounded rows in their order": Bug(
        at("activations:ActivationWarps._store_codes")
        .expression("interleaved_place(2 * member + i)")
        .replace("(2 * member + i)"),
    ),
    "a stage's k blocks of a token in one place": Bug(
        at("activations:ActivationWarps._copy_words")
        .expression("block * block_bytes")
        .replace("0"),
    ),
    "a row's exponent left out": Bug(
        at("Consumers._tile")
        .expression("row_scale(*(row_words[p, odd] for odd in range(2)))")
        .replace("Float32(1.0)"),
        BY_ROW,
    ),
    "the factor of a row's codes left out": Bug(
        at("Consumers._tile").expression("[LIFT] * 2").replace("[1.0] * 2"),
        BY_ROW,
    ),
    "many tokens: a row's exponent left out": Bug(
        at("WideTileConsumers._sum").call("scale_rows").delete(),
        MANY_BY_ROW,
        WIDE,
    ),
    "many tokens: the second copy of scales in the place of the first": Bug(
        at("store_scale").expression("row + i").replace("row"),
        ODD,
        WIDE,
    ),
    "experts that a token lacks are added": Bug(
        at("Combine.kernel").expression("experts[place] >= 0").replace("(token >= 0)"),
    ),
    "a gate below the limit clamped": Bug(
        at("swiglu").expression("gate > bound").replace("gate < bound"),
    ),
    **{
        f"many tokens: {name}": Bug(edit, MANY, WIDE)
        for name, edit in {
            "a full stage not waited for": at("WideTileConsumers._fill_next")
            .call("ctx.pipes.ring.wait")
            .delete(),
            "a first full stage not waited for": at("WideTileConsumers._sum")
            .call("ctx.pipes.ring.wait")
            .delete(),
            "a stage never released": at("WideTileConsumers._multiply")
            .call("ring.release_to")
            .delete(),
            "a tile's last stage never released": at("WideTileConsumers._sum")
            .call("ring.release_to")
            .delete(),
            "a stage released to its own CTA alone": at("WideTileConsumers._multiply")
            .expression("self.plan.sharing")
            .replace("1"),
            "an empty stage not waited for": at("WideTileLoadWarp._load")
            .call("ring.acquire")
            .delete(),
            "sums read while they are made": at("WideTileConsumers._add")
            .call("warpgroup.wait_group")
            .delete(),
            "barriers of the other CTA not waited for": at("WideProduct.kernel")
            .call("cute.arch.cluster_wait", 0)
            .delete(),
            "outputs read before all are staged": at("WideRows.store")
            .call("self._sync", 1)
            .delete(),
            "lists read before the launch before is over": at("WideTileLoadWarp.load")
            .call("pdl.wait_for_previous_launch")
            .delete(),
            "tokens of the wrong part": at("WideTileLoadWarp._load")
            .expression("row + ctx.rank * part")
            .replace("row"),
            "weights of another column": at("WideSwiGlu._weights")
            .expression("first + c")
            .replace("first"),
            "scales of the shared expert lifted": at("GatherTokens.kernel")
            .expression("Float32(1.0)")
            .replace("Float32(LIFT)"),
            "words of gathered codes in their order": at("GatherTokens._load_interleaved")
            .expression("interleaved_word(first + i)")
            .replace("(first + i)"),
            "words of h in their order": at("QuantizeOrdered._store")
            .expression("interleaved_place(word)")
            .replace("word"),
            "words of the shared expert's h interleaved": at("QuantizeOrdered._store")
            .expression("cutlass.select_(is_routed, interleaved_place(word), word)")
            .replace("interleaved_place(word)"),
        }.items()
    },
}


def noticed(build: Callable, case: Case, seed: int, tiling: int = 0) -> bool:
    """Whether the checks that every test makes fail on what `build` compiles."""
    from dsv4.simulator.errors import Deadlock, KernelFault

    simulator, inputs = Simulator("sm_90a"), Inputs.make(case, seed)
    try:
        compiled = simulator.compile(build, case.config)
        chosen = tilings(case.config)[tiling]
        group_tokens = chosen.tokens
        # Alone, a tiling is the first. CTAs of that of many tokens come in pairs.
        number, sms = 0 if tiling in ALONE else tiling, 2 if chosen.is_wide else FEW_SMS
        outcome = run_all(
            simulator, compiled, lambda: inputs.experts_call(number, sms, group_tokens), seed
        )
        assert_experts_close(outcome, inputs)
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
    from dsv4.kernels.moe.sm90 import experts

    bug = BUGS[name]
    build = mutated(experts.build, tmp_path, *bug.edits)
    assert noticed(build, bug.case, seed, bug.tiling), f"{name}: passes {bug}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiling", "case"),
    [
        *((tiling, case) for tiling in (0, JOINT) for case in (CASE, RAW, BY_ROW)),
        (ROUNDED, TALL),
        *((WIDE, case) for case in (MANY, MANY_BY_ROW)),
    ],
    ids=str,
)
def test_without_a_bug_nothing_is_noticed(
    tmp_path: Path, case: Case, tiling: int, seed: int
) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.moe.sm90 import experts

    tilings_alone = Bug(FIRST, case, tiling).edits[0]
    assert not noticed(mutated(experts.build, tmp_path, tilings_alone), case, seed, tiling)
