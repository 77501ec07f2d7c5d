"""The seam's kernel against the oracle: in the simulator for both architectures, with races and
schedules; its bits, which depend on the token alone; bugs put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.kernels.seam.config import (
    MAX_PARTS,
    TILE,
    SeamConfig,
    can_join,
    choose_parts,
    choose_pass,
    has_kernel,
    tiling_of,
)
from dsv4.ops.mhc_seam import MHC_SEAM
from dsv4.testing.harness import Outcome, Simulator, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.mhc_seam import EPS, Case, Inputs, assert_seam_close
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs
from tests.kernels.seam.test_guessed_comb import chain_of

pytestmark = pytest.mark.stage("mhc")

SEAM = Case(3, 256, top_k=2)
CHUNK = 32  # tiles of which a CTA of parts makes comb at a time
# Ranks without their last group, and tokens that one CTA mixes two of.
RAGGED = Case(3, 384, is_strided=True)


# The same source for both: what the second takes is its compilation.
@pytest.fixture(scope="module", params=["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return OpKernels(MHC_SEAM, simulator(request.param))


def run(
    kernels: OpKernels,
    inputs: Inputs,
    seed: int,
    clusters: int,
    size: int,
    schedules: int | None = None,
    parts: tuple[int, int] = (0, 0),
) -> Outcome:
    """Run in every schedule, or the first few, and compare with the oracle."""
    scalars = {"num_clusters": clusters, "pass_tokens": size}
    scalars |= {"parts": parts[0], "is_joined": parts[1]}
    outcome = kernels.run(inputs, seed, schedules, **scalars)
    assert_seam_close(inputs, outcome.outputs)
    return outcome


@pytest.mark.parametrize(
    "case",
    [
        SEAM,
        pytest.param(Case(3, 256), marks=pytest.mark.slow),
        pytest.param(RAGGED, marks=pytest.mark.slow),
        pytest.param(
            Case(3, 256, is_head=True, expands=False, quantizes=False), marks=pytest.mark.slow
        ),
        pytest.param(Case(3, 128, expands=False, spread=20.0), marks=pytest.mark.slow),
        pytest.param(Case(5, 1536), marks=pytest.mark.slow),
        pytest.param(Case(3, 4096), marks=pytest.mark.slow),
        pytest.param(Case(3, 7168), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_oracle(kernels, case, seed) -> None:
    run(kernels, Inputs.make(case, seed), seed, 2, 2)


@pytest.mark.slow
def test_a_cta_mixes_several_tokens_of_each_pass(kernels, seed) -> None:
    run(kernels, Inputs.make(Case(12, 128, expands=False), seed), seed, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(19, 384, top_k=3, is_strided=True, padding_rows=2),
        Case(11, 256, is_head=True, expands=False, quantizes=False),
        Case(11, 128, expands=False),
        Case(9, 4096),
        Case(9, 7168, top_k=6),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_joined", [0, 1], ids=["two launches", "one"])
def test_parts_equal_the_oracle(kernels, case, is_joined, seed) -> None:
    if is_joined and not can_join(tiling_of(case.config)):
        pytest.skip("rows of so many groups take two launches")
    run(kernels, Inputs.make(case, seed), seed, 1, 1, parts=(2, is_joined))


def test_no_bit_depends_on_the_pass(kernels, seed) -> None:
    """Nor on the other tokens, of which some are NaN, nor on the number of launches."""
    inputs = Inputs.make(Case(11, 256, padding_rows=2, top_k=2), seed)
    first = run(kernels, inputs, seed, 1, 4, schedules=1)
    ways = ((3, 1, (0, 0)), (1, 2, (0, 0)), (1, 1, (1, 0)), (1, 1, (1, 1)))
    for clusters, size, parts in ways:
        other = run(kernels, inputs, seed, clusters, size, 1, parts)
        for name, tensor in first.outputs.items():
            live = tensor[:9].view(torch.uint8), other[name][:9].view(torch.uint8)
            what = f"{clusters} clusters, {size} tokens a pass, parts {parts}"
            assert torch.equal(*live), f"{name}: {what}"
    alone = run(kernels, inputs.rows(6, 7), seed, 1, 1, schedules=1)
    for name, tensor in alone.outputs.items():
        assert torch.equal(tensor.view(torch.uint8), first[name][6:7].view(torch.uint8)), name


@pytest.mark.slow
def test_rows_of_experts_are_added_with_the_bits_of_their_sum(kernels, seed) -> None:
    inputs = Inputs.make(Case(5, 256, top_k=6, is_strided=True, padding_rows=1), seed)
    found = run(kernels, inputs, seed, 2, 2)
    other = run(kernels, inputs.with_sums(), seed, 2, 2, schedules=1)
    for name, tensor in found.outputs.items():
        assert torch.equal(tensor[:4].view(torch.uint8), other[name][:4].view(torch.uint8)), name


def test_a_warm_up_touches_only_what_it_brings(kernels) -> None:
    from dsv4.simulator import simulate

    config = SEAM.config
    calls = list(MHC_SEAM.probes(config, kernels.planned_for, torch.device("cpu")))
    assert [call[-2:] for call in calls] == [(0, 0), (1, 0), (1, 1)]
    for call in calls:
        simulate(kernels.compile(config), *call).raise_if_racy()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_kernel_runs(arch, seed) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    # A simulator of its own: coverage adds up over all launches of a compiled function.
    kernels, found = OpKernels(MHC_SEAM, Simulator(arch)), {}
    for quantizes in (True, False):
        # Of parts the tokens of a second chunk of tiles, whose comb is not guessed.
        for size, parts, tokens in ((1, 0, 11), (2, 0, 11), (4, 0, 11), (1, 1, CHUNK * TILE + 1)):
            inputs = Inputs.make(Case(tokens, 384, quantizes=quantizes), seed)
            scalars = {"num_clusters": 1, "pass_tokens": size, "parts": parts, "is_joined": 0}
            outcome = kernels.run(inputs, **scalars)
            found |= {one.kernel: one for one in outcome.report.coverage}
    for tokens in (3, 11):
        found |= covered_by_wrong_guesses(kernels.target, Case(tokens, 384), seed)
    assert len(found) == 3
    for coverage in found.values():
        assert coverage.complete, coverage.missed


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_block_of_the_joined_launch_runs(arch, seed, monkeypatch) -> None:
    """Where no other CTA runs beside it a CTA leaves its tokens to the last one; then every block
    runs, under one schedule or another."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.seam import joined

    monkeypatch.setattr(joined, "MAX_POLLS", 1)
    kernels = OpKernels(MHC_SEAM, Simulator(arch))
    for quantizes, tokens in ((True, 19), (False, CHUNK * TILE + 1)):
        inputs = Inputs.make(Case(tokens, 256, quantizes=quantizes), seed)
        run(kernels, inputs, seed, 1, 1, parts=(1, 1))
    found = covered_by_wrong_guesses(kernels.target, Case(35, 256), seed)
    (coverage,) = (one for name, one in found.items() if "Joined" in name)
    assert coverage.complete, coverage.missed


def covered_by_wrong_guesses(target: Simulator, case: Case, seed: int) -> dict:
    """Coverage of a seam whose comb is another one behind its wait, by kernel."""
    chain = chain_of(target, case, seed)
    return {
        launch.kernel: launch.coverage
        for launch in chain.simulate(races=False, overlap="all").launches
    }


def test_tilings_hold_every_group_and_fit() -> None:
    for dim in range(128, 16385, 128):
        for is_head in (False, True):
            config = SeamConfig(dim, 4, is_head, True, 20, EPS, EPS)
            if not has_kernel(config):
                continue
            tiling = tiling_of(config)
            assert tiling.ranks * tiling.rank_groups >= tiling.groups
            assert tiling.sets * tiling.set_rows >= tiling.rows
            for size in tiling.pass_sizes:
                assert tiling.ctas_per_sm * tiling.smem_bytes(size) <= 226 * 1024
            for tokens in (1, 7, 64, 8192):
                clusters, size = choose_pass(tiling, tokens, 132)
                assert size in tiling.pass_sizes
                assert clusters * tiling.ranks <= 132 * tiling.ctas_per_sm
                parts, is_joined = choose_parts(tiling, tokens, 132)
                assert (parts > 0) == (tokens > 8)
                assert parts <= MAX_PARTS
                assert is_joined == (tokens == 64 and tiling.groups <= 32)
                assert parts <= tokens and tiling.groups * max(parts, 1) <= 2 * 132
    for dim in (4096, 7168):
        assert has_kernel(SeamConfig(dim, 4, False, True, 20, EPS, EPS)), dim
    # Of Flash a cluster takes what a pass holds; of Pro each token has one while they find places.
    for dim, chosen in ((4096, {2: (1, 2), 3: (1, 4), 8: (4, 2)}), (7168, {2: (2, 1), 8: (4, 2)})):
        tiling = tiling_of(SeamConfig(dim, 4, False, True, 20, EPS, EPS))
        for tokens, launch in chosen.items():
            assert choose_pass(tiling, tokens, 132) == launch, (dim, tokens)
    assert not has_kernel(SeamConfig(4096, 3, False, True, 20, EPS, EPS))
    assert not has_kernel(SeamConfig(192, 4, False, True, 20, EPS, EPS))


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "mbarriers of other CTAs not waited for": at("Seam.kernel")
    .call("cute.arch.cluster_wait")
    .delete(),
    "fn not waited for": at("Seam.run").call("cute.arch.cp_async_wait_group").delete(),
    "sums of the cluster not waited for": at("Seam.collapse")
    .call("cute.arch.mbarrier_wait", 0)
    .delete(),
    "squares of the cluster not waited for": at("Seam.collapse")
    .call("cute.arch.mbarrier_wait", 1)
    .delete(),
    "squares sent before all warps have summed": at("Seam.collapse")
    .call("cute.arch.barrier")
    .delete(),
    "comb of a pass read before it is there": at("Seam.write_streams")
    .call("cute.arch.barrier")
    .delete(),
    "starts of comb read before they are written": at("Seam.mix")
    .call("cute.arch.sync_warp", 0)
    .delete(),
    "starts of comb of the second launch read too early": at("Collapse.mix")
    .call("cute.arch.sync_warp")
    .delete(),
    "comb of a pass written while it is read": at("Seam.mix")
    .call("cute.arch.mbarrier_wait")
    .delete(),
    "tokens read before they are loaded": at("Products.write")
    .call("cute.arch.cp_async_wait_group")
    .delete(),
    "comb of other warps read too early": at("Products.begin")
    .call("cute.arch.sync_threads")
    .delete(),
    "the first tile multiplied too early": at("Products.write_first")
    .call("cute.arch.sync_threads")
    .delete(),
    "a tile multiplied too early": at("Products.run").call("cute.arch.sync_threads", 1).delete(),
    "products read before they are written": at("Collapse.kernel")
    .call("pdl.wait_for_previous_launch")
    .delete(),
    "groups added before they are shared": at("Collapse.take")
    .call("cute.arch.sync_threads", 0)
    .delete(),
    "totals read before they are there": at("Collapse.take")
    .call("cute.arch.sync_threads", 1)
    .delete(),
    "squares of other warps read too early": at("Collapse.write_row")
    .call("cute.arch.barrier")
    .delete(),
    "products of other CTAs of a joined launch not waited for": at("Joined.meet")
    .expression("arrived < groups")
    .replace("arrived < 0"),
    "tokens of a joined launch taken before all threads know": at("Joined.kernel")
    .call("cute.arch.sync_threads")
    .delete(),
    "comb of the transposed matrix": at("expand")
    .expression("weights[k, j]")
    .replace("weights[j, k]"),
    "rows without an expert are added": at("add_rows")
    .expression("used & (1 << i) != 0")
    .replace("used & (1 << i) != -1"),
    "passes too few": at("Mixing.store_comb")
    .expression("self.config.sinkhorn_iters - self.config.passes_left - 1")
    .replace("1"),
    "no pass of those that were left": at("Combs.iterate")
    .expression("self.config.passes_left")
    .replace("0"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(MHC_SEAM, Simulator("sm_90a"))
    # By a cluster, and three tiles in two launches and in one.
    for tokens, parts, is_joined in ((3, 0, 0), (20, 1, 0), (20, 1, 1)):
        inputs = Inputs.make(replace(SEAM, tokens=tokens), seed)
        compiled = kernels.compile(inputs.config, build)
        scalars = {"num_clusters": 1, "pass_tokens": 2}
        scalars |= {"parts": parts, "is_joined": is_joined}
        outcome = kernels.run(inputs, seed, None, compiled, **scalars)
        assert_seam_close(inputs, outcome.outputs)


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.seam.seam", checked)
