"""Deleting any one synchronisation instruction of the attention kernels, or weakening any one of
their qualifiers by a step, is noticed."""

import functools
import random
from dataclasses import dataclass, replace
from importlib import import_module

import pytest

from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.parser import parse_module
from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import attention_call, config_of
from tests.simulator.helpers.changes import check_deleted, check_weaker, weakenings_of
from tests.simulator.helpers.mutations import (
    Run,
    known_warnings,
    noticed,
    run_of,
    sync_instructions,
    weakened,
    without,
)
from tests.simulator.helpers.places import places
from tests.simulator.helpers.support import dump_folder

pytestmark = pytest.mark.stage("simulator")

# Two blocks of heads, more tiles than any ring has stages, maxima that grow, tokens without keys.
CASE = Case(
    heads=72, requests=((0, 2), (1, 1), (-1, 1)), top_k=600, growing=True, sink_mode="swa_gate",
    is_causal=True,
)  # fmt: skip
# Scores that spread further: a maximum rises so much that O is rescaled in the middle, too.
SINGLE_CASE = replace(CASE, softmax_scale=0.5)
# The ring goes on from token to token: fewer tiles of each turn it as far.
PAIR_CASE = replace(CASE, head_dim=512, top_k=200, window_rows=128, softmax_scale=0.125)
# CTAs have work to do after a token without keys.
HOPPER_CASE = replace(CASE, requests=((0, 2), (-1, 1), (1, 2)))
# Swap-AB: two slots a key tile, more key tiles than its ring holds.
FEW_CASE = replace(CASE, heads=24, head_dim=128)
# Up to 16 of them, a split's sums are exchanged after its accumulators have been stored.
SUMS_LAST_CASE = replace(FEW_CASE, heads=16)
# Part of Q passes through the ring; a CTA has tokens without keys first and between others.
STREAMING_CASE = replace(
    PAIR_CASE, heads=64, requests=((-1, 1), (0, 5), (-1, 1), (1, 3)), is_causal=True
)  # fmt: skip
SAMPLE = 2


@dataclass(frozen=True)
class Kernel:
    """An attention kernel, and the launches that must notice a deletion: in two schedules each."""

    module: str
    arch: str
    case: Case
    splits: tuple[int, ...]
    smallest_only: bool = False  # the launches reach the smallest of the module's entries
    num_ctas: int = 3  # fewer than there is work for: a CTA goes on to more


KERNELS = {
    "single": Kernel("sm100.fmha", "sm_100a", SINGLE_CASE, (1, 9)),
    "pair": Kernel("sm100.fmha", "sm_100a", PAIR_CASE, (1, 2)),
    # Two clusters: the speculative first tile of one is a hit, that of the other a miss.
    "hopper": Kernel("sm90.fmha", "sm_90a", HOPPER_CASE, (1, 2, 9), num_ctas=4),
    "streaming": Kernel("sm90.fmha", "sm_90a", STREAMING_CASE, (1,), smallest_only=True),
    "few": Kernel("sm90.fmha", "sm_90a", FEW_CASE, (1, 2, 9)),
    "sums_last": Kernel("sm90.fmha", "sm_90a", SUMS_LAST_CASE, (1, 2, 9)),
}

# What is not missed, by instruction and the kernel's function: how many of them, and why.
LAUNCH = "only lets the next launch start early: its griddepcontrol.wait is what orders"
LAUNCHES_IN_ORDER = (
    "orders the launch after the one before it, and each run here is one launch alone; "
    "test_launches.py has launches that overlap"
)
HANDED_OVER_WITH_P = "S: the next product into this stage waits for the P made of it, and its fence"
PV_MAY_GO = "when PV of the block before may go; a wait for all follows"
ALL_WAITED_FOR = "when P's place or the other warpgroup's turn is free; a wait for all follows"
UNSHARED = "shared columns without splits, which no launch here has"
REDUNDANT = {
    "single": {
        ("griddepcontrol.launch_dependents", "load_warps"): (1, LAUNCH),
        ("griddepcontrol.launch_dependents", "kernel"): (1, f"of the combine: {LAUNCH}"),
        ("griddepcontrol.wait", "run"): (1, LAUNCHES_IN_ORDER),
        ("mbarrier.try_wait", "_load_q"): (1, "the only stage is free when it is first acquired"),
        ("mbarrier.try_wait", "_qk"): (
            3,
            "S: its first acquisition finds it free; later ones follow the wait for P two tiles "
            "before, which the softmax made from what this stage then held",
        ),
        ("mbarrier.try_wait", "softmax_warps"): (
            1,
            "P: every O is waited for, and with it the product that read this stage of P",
        ),
        ("tcgen05.commit", "_pv"): (
            2,
            "the last tile's chunk and P: nobody fills them again",
        ),
        ("tcgen05.fence::after_thread_sync", "_qk"): (3, "S: as the wait it follows"),
        ("tcgen05.fence::before_thread_sync", "_load_scores"): (1, HANDED_OVER_WITH_P),
    },
    "pair": {
        ("fence.mbarrier_init", "run"): (2, "two in a row: either one is for all barriers"),
        ("griddepcontrol.launch_dependents", "load_warps"): (1, LAUNCH),
        ("griddepcontrol.launch_dependents", "kernel"): (1, f"of the combine: {LAUNCH}"),
        ("griddepcontrol.wait", "run"): (1, LAUNCHES_IN_ORDER),
        ("tcgen05.fence::after_thread_sync", "mma_warp"): (1, "Q: the one of S follows"),
        ("mbarrier.try_wait", "_qk"): (
            2,
            "S: its first acquisition finds it free; later ones follow the wait for P two tiles "
            "before, which the softmax made from what this stage then held",
        ),
        ("tcgen05.fence::after_thread_sync", "_qk"): (2, "S: as the wait it follows"),
        ("mbarrier.try_wait", "_end_queries"): (
            1,
            "the last Q: the softmax warps, which free TMEM, have waited for every product",
        ),
        ("tcgen05.fence::before_thread_sync", "_end_queries"): (
            1,
            "the one before the end: every Q was handed over when it was stored",
        ),
        ("tcgen05.fence::before_thread_sync", "_load_scores"): (1, HANDED_OVER_WITH_P),
        ("bar.warp", "_wait_for_stores"): (
            2,
            "before a token and after the last one: whatever the warp writes next to these places "
            "comes after a load of TMEM or a barrier that all its lanes take part in",
        ),
        ("fence.proxy", "store_units"): (
            4,
            "after half of a block: the next one is for all of it",
        ),
        ("bar.sync", "kernel"): (1, "the combine's: two splits are one group, it sums alone"),
    },
    # Two kernels: without splits, and with splits or column slices.
    "hopper": {
        ("griddepcontrol.launch_dependents", "_load"): (2, LAUNCH),
        ("griddepcontrol.wait", "load"): (2, LAUNCHES_IN_ORDER),
        ("griddepcontrol.wait", "schedule"): (2, LAUNCHES_IN_ORDER),
        ("mbarrier.test_wait", "_has_landed"): (2, "a hint when PV may go: the wait follows"),
        ("wgmma.commit_group", "_issue_scores"): (2, "with the next wait_group: when PV may go"),
        ("wgmma.wait_group", "_multiply_keys"): (
            2,
            "PV may go a little later; all is waited for after it",
        ),
        ("wgmma.commit_group", "_multiply_values"): (
            6,
            "all products are then of the last group, which is waited for; these are for the waits "
            "before it, which are not missed themselves",
        ),
        ("wgmma.wait_group", "_multiply_values"): (
            4,
            "when a part of P may take another's place: in PTX it has registers of its own, so "
            "nothing is rewritten; ptxas, which places them, goes by the waits; and when the other "
            "warpgroup may go",
        ),
        ("mbarrier.try_wait", "_multiply_tiles"): (
            6,
            "V: P of a key tile was made from its scores, whose warpgroup waited for the same "
            "rows; and the turns of PV (2), which only keep it out of the way of other products",
        ),
        ("bar.warp", "arrive_warp"): (
            20,
            "a miss: the two halves of a speculative tile are released unread; PV's turns (5) "
            "hand nothing over; what was read of Q (2) and of V (1) was read by products, which "
            "the whole warpgroup has waited for",
        ),
        ("mbarrier.try_wait", "lockstep"): (
            1,
            "the speculative tile's: more key tiles follow here, and the wait for the other CTA's "
            "next arrival is one for this, too",
        ),
        ("barrier.cluster", "cluster_sync"): (
            1,
            "the last cluster sync: all that the other CTA does to this one is to arrive, and "
            "each of its arrivals has been waited for in `lockstep`",
        ),
    },
    # The kernel without splits at 64 heads of 512: what it shares with the one above, and more.
    "streaming": {
        ("griddepcontrol.launch_dependents", "_load"): (1, LAUNCH),
        ("griddepcontrol.wait", "load"): (1, LAUNCHES_IN_ORDER),
        ("griddepcontrol.wait", "schedule"): (1, LAUNCHES_IN_ORDER),
        ("cp.async", "tma_prefetch"): (1, "a hint, which moves nothing but lines of L2"),
        ("mbarrier.try_wait", "prefetch_until_ready"): (
            1,
            "a hint when there is nothing left to gain",
        ),
        ("mbarrier.try_wait", "_load_tile"): (2, "keeps the queues in front of DRAM short"),
        ("mbarrier.test_wait", "_has_landed"): (1, PV_MAY_GO),
        ("wgmma.commit_group", "_issue_scores"): (1, PV_MAY_GO),
        ("wgmma.wait_group", "_multiply_keys"): (1, PV_MAY_GO),
        ("wgmma.commit_group", "_multiply_values"): (3, ALL_WAITED_FOR),
        ("wgmma.wait_group", "_multiply_values"): (2, ALL_WAITED_FOR),
        ("mbarrier.try_wait", "_multiply_tiles"): (3, "V, and the turns of PV (2), as above"),
        ("bar.warp", "arrive_warp"): (
            12,
            "as above, and the two halves of Q's stage: each other's sync follows the same reads, "
            "and the load warp waits for both",
        ),
        ("cp.async", "_store_staged"): (3, "all but the last: its group has their stores, too"),
    },
    "few": {
        ("griddepcontrol.launch_dependents", "load"): (1, LAUNCH),
        ("griddepcontrol.wait", "load"): (1, LAUNCHES_IN_ORDER),
        ("griddepcontrol.wait", "schedule"): (1, LAUNCHES_IN_ORDER),
        ("mbarrier.try_wait", "compute"): (1, "the first one: " + LAUNCHES_IN_ORDER),
        ("cp.async", "tma_prefetch"): (3, "a hint, which moves nothing but lines of L2"),
        ("fence.proxy", "clear_rows"): (
            2,
            "V: the fence after P, before the same barrier, follows",
        ),
        ("bar.sync", "sync"): (
            1,
            "before masked keys are cleared: products that one warp has waited for are over for "
            "all here, while PTX promises each warp its own part alone",
        ),
        ("bar.warp", "arrive_warp"): (
            6,
            "a miss: the two slots of a speculative tile are released unread, as is Q of a token "
            "without keys; Q and V were read by products, which the whole warpgroup has waited for",
        ),
    },
}
# The swap-AB kernel, but for the order of a split's last steps.
REDUNDANT["sums_last"] = {
    **REDUNDANT["few"],
    ("bar.sync", "sync"): (
        2,
        "as above; with splits, before the sums: between them and those of the work tile before "
        "lies the semaphore, with two barriers",
    ),
}
# What no launch here runs, likewise.
OF_WINDOWS = "of a speculative first tile of the window: splits begin with compressed keys here"
EARLY_START = "of CTAs that start beside the launch before: here there is more work than CTAs"
UNREACHED = {
    "hopper": {
        ("cp.async", "tma_prefetch"): (12, EARLY_START),
        ("mbarrier.try_wait", "output"): (1, UNSHARED),
        ("bar.warp", "arrive_warp"): (1, UNSHARED),
        ("mbarrier.arrive", "arrive_warp"): (1, UNSHARED),
    },
    "streaming": {("cp.async", "tma_prefetch"): (13, EARLY_START)},
    "few": {("cp.async", "tma_prefetch"): (2, OF_WINDOWS)},
    "sums_last": {("cp.async", "tma_prefetch"): (2, OF_WINDOWS)},
}


def _run(kernel: Kernel, splits: int, schedule: str, num_ctas: int) -> Run:
    inputs = make_inputs(kernel.case, 1)
    expected_o, expected_lse = inputs.expected()

    def check(positional: tuple, keywords: dict) -> None:
        assert_attention_close(positional[-1], expected_o, keywords["lse"], expected_lse)

    call = functools.partial(attention_call, kernel.arch, inputs, splits, num_ctas)
    return run_of(call, check, schedule)


@functools.cache
def kernel(name: str):
    """A compiled attention kernel, and the launches that must notice a deletion."""
    chosen = KERNELS[name]
    options = f"--keep-ptx --generate-line-info --gpu-arch {chosen.arch} --dump-dir {dump_folder()}"
    config = config_of(chosen.case, num_splits=1 if chosen.smallest_only else None)
    compiled = import_module(f"dsv4.kernels.attention.{chosen.module}").build(config, options)
    runs = [
        _run(chosen, n, schedule, chosen.num_ctas)
        for schedule in ("eager", "lazy")
        for n in chosen.splits
    ]
    return compiled, runs


def _synchronisation(name: str, ptx: str) -> list[Instruction]:
    """The instructions to delete: of all entries that the launches reach."""
    instructions = sync_instructions(ptx)
    if not KERNELS[name].smallest_only:
        return instructions
    entries = parse_module(ptx).entries.values()
    smallest = min(entries, key=lambda entry: len(entry.instructions))
    lines = {ins.ptx_line for ins in smallest.instructions}
    return [ins for ins in instructions if ins.ptx_line in lines]


@pytest.mark.parametrize(
    "name",
    [
        *("single", "few"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("pair", "hopper", "streaming", "sums_last")
        ),
    ],
)
def test_some_deletions_are_noticed(name, seed):
    compiled, runs = kernel(name)
    ptx = compiled.artifacts.PTX
    instructions = _synchronisation(name, ptx)
    where = places(instructions)
    listed = {*REDUNDANT[name], *UNREACHED.get(name, {})}
    assert not listed - set(where), "no such instruction in such a function"
    needed = [ins for ins, place in zip(instructions, where) if place not in listed]
    known = known_warnings(compiled, runs[:1])
    for ins in random.Random(seed).sample(needed, SAMPLE):
        assert noticed(compiled, without(ptx, ins), runs, known), f"seed {seed}: {ins.where()}"


# What may be weaker, by instruction, the kernel's function and the new qualifier: how many of them,
# and why.
EXPECTS = "the copies it expects complete with a release of their own, and are all it hands over"
HARMLESS = {
    "single": {
        ("mbarrier.try_wait", "_load_q", "relaxed"): (1, "as without it"),
        ("mbarrier.arrive", "_load_q", "relaxed"): (1, EXPECTS),
        ("mbarrier.arrive", "_load_tiles", "relaxed"): (2, EXPECTS),
        ("mbarrier.try_wait", "_qk", "relaxed"): (3, "S: as without it"),
        ("mbarrier.arrive", "_load_scores", "relaxed"): (1, HANDED_OVER_WITH_P),
        ("mbarrier.try_wait", "softmax_warps", "relaxed"): (
            2,
            "P: as without it; O, to keep its phases in order: the wait before the next rescale, "
            "or at the end, is the one that acquires",
        ),
    },
    "few": {
        ("mbarrier.arrive", "load", "relaxed"): (1, EXPECTS),
        ("mbarrier.arrive", "_load_slot", "relaxed"): (4, EXPECTS),
        ("mbarrier.try_wait", "compute", "relaxed"): (1, "the first one: " + LAUNCHES_IN_ORDER),
        ("fence.proxy", "clear_rows", "global"): (2, "V: as without it"),
        # Of `kit.semaphore`: for inline PTX there the compiler names no line of a function.
        ("atom.global", "", "acquire"): (
            1,
            "the counter's `or`: the arrival before it has released all that the CTA stored",
        ),
        ("atom.global", "", "cluster"): (
            1,
            "the counter's `and`: only the last to arrive makes it here, after it has acquired "
            "every other access",
        ),
    },
}
HARMLESS["streaming"] = {
    ("mbarrier.arrive", "_load_half", "relaxed"): (4, EXPECTS),
    ("mbarrier.arrive", "_load_q_smem", "relaxed"): (1, EXPECTS),
    ("mbarrier.arrive", "_send_q_registers", "relaxed"): (2, EXPECTS),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (
        8,
        "a miss: the two halves of a speculative tile are released unread; one half of Q's stage: "
        "the load warp fills it after it has waited for the other; PV's turns (5) hand nothing "
        "over",
    ),
    ("mbarrier.arrive", "load", "relaxed"): (1, "ends prefetches, and hands nothing over"),
    ("mbarrier.test_wait", "_has_landed", "relaxed"): (1, PV_MAY_GO),
    ("mbarrier.try_wait", "_load_tile", "relaxed"): (2, "as without it"),
    ("mbarrier.try_wait", "_multiply_tiles", "relaxed"): (3, "as without it"),
    ("mbarrier.try_wait", "prefetch_until_ready", "relaxed"): (1, "as without it"),
}
HARMLESS["sums_last"] = HARMLESS["few"]
HARMLESS["pair"] = {
    ("mbarrier.arrive", "_load_tiles", "relaxed"): (2, EXPECTS),
    ("mbarrier.try_wait", "_qk", "relaxed"): (2, "S: as without it"),
    ("mbarrier.try_wait", "_end_queries", "relaxed"): (1, "the last Q: as without it"),
    ("mbarrier.arrive", "_load_scores", "relaxed"): (1, HANDED_OVER_WITH_P),
    ("mbarrier.arrive", "_load_scores", "cta"): (1, HANDED_OVER_WITH_P),
    ("mbarrier.try_wait", "softmax_warps", "relaxed"): (
        1,
        "P: the arrival of S of this tile tells of all products before it, and the one that read "
        "this stage of P is among them",
    ),
    ("fence.proxy", "store_units", "global"): (4, "after half of a block: as without it"),
}
HARMLESS["hopper"] = {
    ("atom.global", "", "acquire"): HARMLESS["few"]["atom.global", "", "acquire"],
    ("mbarrier.arrive", "_load_half", "relaxed"): (8, EXPECTS),
    ("mbarrier.arrive", "_load_q_smem", "relaxed"): (2, EXPECTS),
    ("mbarrier.arrive", "arrive_warp", "relaxed"): (
        13,
        "a miss: halves of a speculative tile (3) are released unread; PV's turns (10) hand "
        "nothing over",
    ),
    **{
        (stem, "lockstep", qualifier): (
            1,
            "keeps two CTAs that load the same keys together, and hands nothing over",
        )
        for stem, qualifier in (
            ("mbarrier.arrive", "relaxed"),
            ("mbarrier.arrive", "cta"),
            ("mbarrier.try_wait", "relaxed"),
        )
    },
    ("mbarrier.test_wait", "_has_landed", "relaxed"): (2, PV_MAY_GO),
    ("mbarrier.try_wait", "_multiply_tiles", "relaxed"): (6, "as without it"),
}
UNREACHED_WEAKER = {
    "hopper": {
        ("mbarrier.try_wait", "output", "relaxed"): (1, UNSHARED),
        ("mbarrier.arrive", "arrive_warp", "relaxed"): (1, UNSHARED),
    },
}
ONE_ROUND = 132  # CTAs: all work has started, and splits wait for each other


def _weakened_runs(name: str, runs: list[Run]) -> list[Run]:
    """The launches that must notice a weaker qualifier."""
    if KERNELS[name].arch != "sm_90a":
        return runs
    if KERNELS[name].smallest_only:
        return runs
    return [_run(KERNELS[name], 2, schedule, ONE_ROUND) for schedule in ("eager", "lazy")] + runs


@pytest.mark.parametrize("name", ["single", "few"])
def test_some_weaker_qualifiers_are_noticed(name, seed):
    compiled, runs = kernel(name)
    ptx, runs = compiled.artifacts.PTX, _weakened_runs(name, runs)
    needed = [change for change in weakenings_of(ptx) if change.place not in HARMLESS[name]]
    known = known_warnings(compiled, runs[:1])
    for weakening in random.Random(seed).sample(needed, SAMPLE):
        text = weakened(ptx, weakening.ins, weakening.opcode)
        assert noticed(compiled, text, runs, known), f"seed {seed}: {weakening}"


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_all_weaker_qualifiers_are_noticed(name):
    compiled, runs = kernel(name)
    check_weaker(compiled, _weakened_runs(name, runs), HARMLESS[name], UNREACHED_WEAKER.get(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_all_deletions_are_noticed(name):
    compiled, runs = kernel(name)
    check_deleted(compiled, runs, REDUNDANT[name], UNREACHED.get(name))
