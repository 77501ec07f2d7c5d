"""`index_topk` in the simulator: every schedule, ragged lists, ties, deleted synchronisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.kernels.indexer.config import (
    FP4_PAGES,
    KERNEL_DIM,
    KERNEL_HEADS,
    IndexTopkConfig,
    has_kernel,
)
from dsv4.kernels.indexer.plan import (
    CLUSTERS,
    GROUPS,
    HELD_KEYS,
    LOADERS,
    ONE_LAUNCH_CLUSTERS,
    ClusterPlan,
    ScoresPlan,
    choose_launch,
    clusters_of,
)
from dsv4.kernels.kit.index_entry import INDEX_FORMATS
from dsv4.kernels.kit.plan import TMEM_COLUMNS
from dsv4.ops.index_topk import INDEX_TOPK
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.index_topk import Case, Inputs, assert_choice, longest
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

CLUSTER = CLUSTERS[-1]
ONE = {"num_ctas": 0}  # launch
TWO = {"num_ctas": 2}
LAUNCHES = [
    *({**ONE, "cluster": ctas} for ctas in ONE_LAUNCH_CLUSTERS),
    *({**TWO, "cluster": ctas} for ctas in CLUSTERS),
]
FEWEST_AND_MOST = [
    *({**ONE, "cluster": ONE_LAUNCH_CLUSTERS[i]} for i in (0, -1)),
    *({**TWO, "cluster": CLUSTERS[i]} for i in (0, -1)),
]
# Tokens that share a CTA, one that a CTA begins within, lists of all lengths.
LENS = (70, 330, 5, 64, 0, 130, 65)
RAGGED = Case(LENS, topk=64, gives_slots=True, padding_rows=1, key_format="fp4")
FP8 = replace(RAGGED, key_format="fp8")
FP32 = replace(FP8, rank="fp32")


pytestmark = pytest.mark.stage("indexer")
of_each_arch = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])


def run(inputs: Inputs, seed: int, arch: str, schedules: int | None = 1, **scalars: int) -> Outcome:
    """Run, and compare with the oracle; counts are zeros again."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    outcome = OpKernels(INDEX_TOPK, simulator(arch)).run(inputs, seed, schedules, **scalars)
    assert_choice(inputs, outcome.outputs)
    assert not outcome.scratch["workspace"].any()
    return outcome


def test_a_stage_is_always_the_same_warpgroup_s() -> None:
    """With 11 stages a warpgroup took a copy that had not landed for its own: on an H200 an illegal
    arrival, with pools so large that copies of neighbouring tiles take very different times."""
    plans = (kind(key_format=each) for kind in (ScoresPlan, ClusterPlan) for each in INDEX_FORMATS)
    for plan in plans:
        assert plan.stages % GROUPS == 0
        assert plan.stages % LOADERS == 0


@pytest.mark.parametrize(
    ("arch", "case", "launch"),
    [
        *(("sm_90a", RAGGED, launch) for launch in (FEWEST_AND_MOST[0], *FEWEST_AND_MOST[2:])),
        ("sm_100a", FP8, FEWEST_AND_MOST[2]),
        ("sm_90a", FP32, {**TWO, "cluster": 1}),
    ],
)
def test_ragged_lists(arch: str, case: Case, launch: dict[str, int], seed: int) -> None:
    run(Inputs.make(case, seed), seed, arch, **launch)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("case", [RAGGED, FP8], ids=["fp4", "fp8"])
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_every_schedule(arch: str, case: Case, launch: dict[str, int], seed: int) -> None:
    run(Inputs.make(case, seed), seed, arch, None, **launch)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("launch", [FEWEST_AND_MOST[0], FEWEST_AND_MOST[2]], ids=str)
@pytest.mark.parametrize("page", FP4_PAGES)
@pytest.mark.parametrize("far", [0, 5, 30])
def test_formats_of_keys_give_the_same_bits(
    arch: str, page: int, far: int, launch: dict[str, int], seed: int
) -> None:
    """Groups of a key that FP8 keys hold without loss, and too far apart for that."""
    found = []
    for case in (RAGGED, FP8):
        inputs = Inputs.make(replace(case, page=page, far=far), seed)
        found.append(run(inputs, seed, arch, **launch).outputs)
    first, second = found
    assert torch.equal(first["indices"], second["indices"])
    for token, count in enumerate(inputs.counts()):
        if count > RAGGED.topk:
            assert torch.equal(first["scores"][token, :count], second["scores"][token, :count])


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("case", [RAGGED, FP8], ids=["fp4", "fp8"])
@pytest.mark.parametrize("launch", [FEWEST_AND_MOST[0], *FEWEST_AND_MOST[2:]], ids=str)
def test_queries_in_codes_give_the_same_bits(
    arch: str, case: Case, launch: dict[str, int], seed: int
) -> None:
    """In every schedule; nothing but scores that are seen is compared."""
    inputs = Inputs.make(case, seed)
    wanted = run(inputs, seed, arch, **launch).outputs
    coded = replace(inputs, case=replace(case, has_codes=True))
    found = run(coded, seed, arch, None, **launch).outputs
    assert torch.equal(found["indices"], wanted["indices"])
    for token, count in enumerate(inputs.counts()):
        if count > case.topk:
            assert torch.equal(found["scores"][token, :count], wanted["scores"][token, :count])


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("key_format", INDEX_FORMATS)
@pytest.mark.parametrize("has_codes", [False, True], ids=["rows", "codes"])
def test_scores_in_fp32_round_to_those_in_bf16(
    arch: str, key_format: str, has_codes: bool, seed: int
) -> None:
    case = replace(RAGGED, key_format=key_format, has_codes=has_codes)
    inputs = Inputs.make(case, seed)
    rounded = run(inputs, seed, arch, **TWO, cluster=1).outputs["scores"]
    exact = replace(inputs, case=replace(case, rank="fp32"))
    scores = run(exact, seed, arch, None, **TWO, cluster=1).outputs["scores"]
    for token, count in enumerate(inputs.counts()):
        if count > case.topk:
            assert torch.equal(scores[token, :count].bfloat16(), rounded[token, :count])


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize(
    "case",
    [
        *(Case((700, 65), topk=64, levels=levels, rank="fp32") for levels in (1, 2, 30)),
        # Of all magnitudes, with ties on both sides of what registers hold.
        Case((3000, 900), topk=512, spread=40, rank="fp32"),
        Case((33_100,), topk=512, levels=40, rank="fp32"),
    ],
    ids=str,
)
def test_choice_by_scores_in_fp32(arch: str, case: Case, seed: int) -> None:
    run(Inputs.make(case, seed), seed, arch, num_ctas=8, cluster=1)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("num_ctas", [1, 3, 20])
def test_numbers_of_ctas(arch: str, num_ctas: int, seed: int) -> None:
    run(Inputs.make(RAGGED, seed), seed, arch, None, num_ctas=num_ctas, cluster=CLUSTER)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize(
    ("page", "key_format"),
    [*((page, "fp8") for page in (8, 16, 64, 128)), *((page, "fp4") for page in (16, 64))],
)
@pytest.mark.parametrize("tokens_per_request", [1, 2])
def test_pages(arch: str, page: int, key_format: str, tokens_per_request: int, seed: int) -> None:
    options = {"tokens_per_request": tokens_per_request, "key_format": key_format}
    case = Case((300, 290, 1000), 128, page, gives_slots=True, **options)
    inputs = Inputs.make(case, seed)
    for launch in ({"num_ctas": 3, "cluster": 1}, {**ONE, "cluster": 4}):
        run(inputs, seed, arch, **launch)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("levels", [1, 2, 30])
@pytest.mark.parametrize("launch", FEWEST_AND_MOST, ids=str)
def test_of_equal_scores_the_first_are_chosen(
    arch: str, levels: int, launch: dict[str, int], seed: int
) -> None:
    case = Case((700, 65), topk=64, levels=levels)
    run(Inputs.make(case, seed), seed, arch, **launch)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize("cluster", [1, CLUSTER])
def test_lists_that_registers_do_not_hold(arch: str, cluster: int, seed: int) -> None:
    """More than 16,384 entries of a CTA, with ties on both sides."""
    case = Case((33_100 if cluster == 1 else 140_000,), topk=512, levels=40)
    run(Inputs.make(case, seed), seed, arch, num_ctas=8, cluster=cluster)


@pytest.mark.slow
@of_each_arch
def test_lists_that_fill_a_cluster(arch: str, seed: int) -> None:
    """As many scores as its CTAs keep, and one less."""
    cluster = ONE_LAUNCH_CLUSTERS[0]
    case = Case((cluster * HELD_KEYS, cluster * HELD_KEYS - 1), topk=512, levels=40)
    run(Inputs.make(case, seed), seed, arch, **ONE, cluster=cluster)


@pytest.mark.slow
@of_each_arch
@pytest.mark.parametrize(
    ("case", "launch"),
    [(RAGGED, FEWEST_AND_MOST[0]), (RAGGED, FEWEST_AND_MOST[2]), (FP32, FEWEST_AND_MOST[2])],
    ids=str,
)
@pytest.mark.parametrize("name", ["q", "weights"])
def test_a_request_of_nan_chooses_entries_of_its_own(
    arch: str, name: str, case: Case, launch: dict[str, int], seed: int
) -> None:
    """As many as another, each once; what others choose is what it was."""
    inputs, row = Inputs.make(case, seed), 1
    wanted = run(inputs, seed, arch, **launch).outputs["indices"]
    spoilt = {**inputs.tensors, name: inputs.tensors[name].clone()}
    spoilt[name][row] = torch.nan
    kernels = OpKernels(INDEX_TOPK, simulator(arch))
    outcome = kernels.run(replace(inputs, tensors=spoilt), seed, **launch)
    found = outcome.outputs["indices"]
    others = [token for token in range(len(LENS)) if token != row]
    assert torch.equal(found[others], wanted[others])
    every = inputs.named(row, torch.arange(inputs.counts()[row]))
    assert set(found[row].tolist()) <= set(every.tolist())
    assert len(set(found[row].tolist())) == RAGGED.topk
    assert not outcome.scratch["workspace"].any()


@pytest.mark.slow
@of_each_arch
def test_scores_reach_no_further_than_their_rows(arch: str, seed: int) -> None:
    """Rows of an odd length, the last one at the end of its memory."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    inputs = Inputs.make(Case((333, 331), topk=64), seed)
    kernels = OpKernels(INDEX_TOPK, simulator(arch))
    scores = torch.empty(336 + 333, dtype=torch.bfloat16).as_strided((2, 333), (336, 1))
    call = inputs.call(kernels.planned_for, {"scores": scores}, **ONE, cluster=4)
    outcome = kernels.target.run(kernels.compile(inputs.config), call, seed=seed)
    assert_choice(inputs, outcome.outputs)


@pytest.mark.slow
@of_each_arch
def test_no_synchronisation_is_left_out(arch: str, seed: int) -> None:
    reports = [
        run(Inputs.make(case, seed), seed, arch, **launch).report
        for launch in LAUNCHES
        for case in (FP8, longest(**launch))
    ]
    assert not missed_synchronisation(reports)
    launch = {**TWO, "cluster": 1}
    cases = FP32, replace(longest(**launch), rank="fp32")
    reports = [run(Inputs.make(case, seed), seed, arch, **launch).report for case in cases]
    assert not missed_synchronisation(reports)


def test_plan_leaves_half_of_an_sm() -> None:
    formats = {"fp8": 8, "fp4": 16}
    for (keys, stages), has_tmem in itertools.product(formats.items(), (False, True)):
        plan = ScoresPlan(key_format=keys, has_tmem=has_tmem)
        assert plan.stages >= stages
        assert plan.smem.total_bytes <= 113 * 1024
        assert "tile of keys" in str(plan)
        # Two CTAs share what an SM has.
        assert plan.tmem.allocated_columns <= TMEM_COLUMNS // 2
    for keys in ({"page": 8}, {"key_format": "fp4", "page": 16}):
        cluster = ClusterPlan(cluster=16, topk=8192, **keys)
        assert cluster.stages >= 4
        assert cluster.smem.total_bytes <= 113 * 1024


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 16, 17, 64, 65, 4000])
@pytest.mark.parametrize("entries", [8, 4096, 32_768, 131_072, 131_073, 1 << 20])
def test_a_launch_fits_its_lists(tokens: int, entries: int) -> None:
    ctas, cluster = choose_launch(tokens, entries, 132)
    assert cluster in (CLUSTERS if ctas else ONE_LAUNCH_CLUSTERS)
    assert ctas or entries <= cluster * HELD_KEYS
    ctas, cluster = choose_launch(tokens, entries, 132, "fp32")
    assert ctas and cluster in clusters_of("fp32")[1]


def test_a_launch_for_each_size() -> None:
    found = {choose_launch(*sizes, 132) for sizes in itertools.product((1, 4, 16, 20, 64), (
        4096, 16_384, 32_768, 131_072
    ))}  # fmt: skip
    assert {cluster for ctas, cluster in found if not ctas} == set(ONE_LAUNCH_CLUSTERS)
    assert {cluster for ctas, cluster in found if ctas} == set(CLUSTERS)


def test_configurations_with_kernels() -> None:
    sizes = (KERNEL_HEADS, KERNEL_DIM, 64)
    assert has_kernel(IndexTopkConfig(*sizes, 512, 32, 1.0))
    assert has_kernel(IndexTopkConfig(*sizes, 512, 32, 1.0, "fp4"))
    assert has_kernel(IndexTopkConfig(*sizes, 512, 32, 1.0, rank="fp32"))
    for other in (
        IndexTopkConfig(32, KERNEL_DIM, 64, 512, 32, 1.0),
        IndexTopkConfig(*sizes, 512, 4, 1.0),
        IndexTopkConfig(*sizes, 512, 96, 1.0),
        IndexTopkConfig(*sizes, 512, 32, 1.0, "bf16"),
        IndexTopkConfig(*sizes, 512, 8, 1.0, "fp4"),
        IndexTopkConfig(*sizes, 512, 128, 1.0, "fp4"),
        IndexTopkConfig(*sizes, 512, 32, 1.0, is_rounded=False),
    ):
        assert not has_kernel(other), other


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "keys read before they are there": at("TileScores.score_tile").call("ring.wait").delete(),
    "stages of a ring taken by turns": at("ScoresPlan.stage_groups")
    .expression("GROUPS")
    .replace("1"),
    "keys overwritten while they are read": at("TileScores.load_run").call("ring.acquire").delete(),
    "queries read before all are written": at("TileScores.take_token")
    .call("sync_consumers", 1)
    .delete(),
    "queries overwritten while they are read": at("TileScores.take_token")
    .call("sync_consumers", 0)
    .delete(),
    "queries without a fence": at("TileScores.take_token")
    .call("cute.arch.fence_view_async_shared")
    .delete(),
    "counts taken before all have counted": at("Scores.add_counts").call("sync_consumers").delete(),
    "start read before it is found": at("Scores.find_work").call("cute.arch.sync_threads").delete(),
    "scores read before the launch before is over": at("Select.kernel")
    .call("pdl.wait_for_previous_launch")
    .delete(),
    "bin read before it is found": at("Selection.find_bin").call("cute.arch.sync_threads").delete(),
    "counts of the cluster not waited for": at("Selection.exchange")
    .call("cute.arch.cluster_wait", 1)
    .delete(),
    "counts exchanged before all have counted": at("Selection.exchange")
    .call("cute.arch.sync_threads", 0)
    .delete(),
    "an equal too many": at("Selection.list_chosen")
    .expression("number < equals")
    .replace("number <= equals"),
    "scales overwritten before they are used": at("TileScores.score_tile")
    .call("ring.release")
    .delete(),
    "counts sent before the others have begun": at("OneLaunch.kernel")
    .call("cute.arch.cluster_wait")
    .delete(),
    "totals read before all have counted": at("OneLaunch.add_counts")
    .call("cute.arch.cluster_wait")
    .delete(),
    "scores counted before all are there": at("OneLaunch.add_counts")
    .call("cute.arch.sync_threads")
    .delete(),
    "groups taken for near ones": at("are_near").expression("0xF0F0F0F0").replace("0"),
    "digits counted before all are cleared": at("SelectFp32.count_digits")
    .call("cute.arch.sync_threads", 1)
    .delete(),
    "digits cleared before all have read them": at("SelectFp32.count_digits")
    .call("cute.arch.sync_threads", 0)
    .delete(),
    "keys of other beginnings counted": at("SelectFp32.count_digits")
    .expression("key >> known == begins")
    .replace("key != 0"),
    "scores past the end chosen": at("SelectFp32.load")
    .expression("i < left")
    .replace("i < left + VECTOR"),
    "signs of other codes": at("put_codes").expression("word << 4").replace("word << 8"),
    "words of other banks": at("Fp4Tiles.decode").expression("lane // 8").replace("lane // 16"),
    "the transform's first stage left out": at("transformed")
    .expression("half < held")
    .replace("half < held // 2"),
}


# Of what Blackwell's has instead of wgmma.
BLACKWELL_BUGS: dict[str, Edit] = {
    "sums read before products are over": at("Products.multiply").call("wait").delete(),
    "sums overwritten while they are read": at("Products.issue").call("cute.arch.barrier").delete(),
    "products before another warp's loads": at("Products.multiply")
    .call("fence_before_thread_sync")
    .delete(),
    "products before another warp's keys": at("Fp4Products.bring")
    .call("fence_before_thread_sync")
    .delete(),
    "products of the tile before": at("Products.parity")
    .expression("cursor.stage // GROUPS")
    .replace("0"),
    "sums that are still on their way": at("Products.multiply")
    .call("cute.arch.fence_view_async_tmem_load")
    .delete(),
    "keys that are still on their way to TMEM": at("Fp4Products.bring")
    .call("cute.arch.fence_view_async_tmem_store")
    .delete(),
    "columns of the other warpgroup": at("Products.multiply")
    .expression("group * KERNEL_HEADS")
    .replace("0 * KERNEL_HEADS"),
}


def checked(build: Callable, seed: int, arch: str = "sm_90a") -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(INDEX_TOPK, Simulator(arch))
    for case in (replace(RAGGED, far=12), Case((1400, 300), topk=64, levels=3)):
        inputs = Inputs.make(case, seed)
        compiled = kernels.compile(inputs.config, build)
        for launch in ({**ONE, "cluster": 4}, {**TWO, "cluster": 1}, {**TWO, "cluster": 8}):
            outcome = kernels.run(inputs, seed, None, compiled, **launch)
            assert_choice(inputs, outcome.outputs)
    for case in (FP32, Case((1400, 300), topk=64, levels=3, rank="fp32")):
        inputs = Inputs.make(case, seed)
        compiled = kernels.compile(inputs.config, build)
        outcome = kernels.run(inputs, seed, None, compiled, **TWO, cluster=1)
        assert_choice(inputs, outcome.outputs)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.indexer.sm90.index_topk", checked)
(
    test_bug_of_blackwell_has_its_place,
    test_bug_of_blackwell_is_noticed,
    test_without_a_bug_of_blackwell_nothing_is_noticed,
) = planted_bugs.tests_of(
    BLACKWELL_BUGS, "dsv4.kernels.indexer.sm100.index_topk", partial(checked, arch="sm_100a")
)
