"""`sample_tokens` in the simulator: the tokens of the torch implementation for both architectures,
every schedule, bits that do not depend on the batch, planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4.ops.sample_tokens import SAMPLE_TOKENS
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.mutate import Edit, at
from dsv4.testing.sample_tokens import Case, Inputs, expected
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("sampler")

ARCHS = ("sm_90a", "sm_100a")
SMALL = {truncates: Case(15, 2, 24, truncates, padding=4) for truncates in (False, True)}


def run(arch: str, inputs: Inputs, seed: int, schedules: int | None = 1) -> Outcome:
    """Run, and compare with the torch implementation, bit for bit."""
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    outcome = OpKernels(SAMPLE_TOKENS, simulator(arch)).run(inputs, seed, schedules)
    assert torch.equal(outcome["tokens"], expected(inputs))
    return outcome


def test_tokens(seed) -> None:
    run("sm_90a", Inputs.make(SMALL[False], seed).of(slice(9)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case",
    [
        *SMALL.values(),
        Case(9, 1, 5000),
        Case(12, 1, 2052, truncates=True),
        Case(9, 1, 20_000, padding=8),
    ],
    ids=str,
)
def test_every_schedule(arch, case, seed) -> None:
    run(arch, Inputs.make(case, seed), seed, None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_cuts_of_a_cluster(arch, seed) -> None:
    """Of equals on several CTAs, of a row with one candidate a CTA, of all."""
    inputs = Inputs.make(Case(9, 1, 5000, truncates=True), seed)
    top_p = torch.tensor([0.9, 1.0, 0.99, 0.5, 1.0, 0.7, 1.0, 1.0, 1.0])
    top_k = torch.tensor([0, 0, 100, 0, 0, 0, 3, 0, 0])
    changed = replace(inputs, top_p=top_p, top_k=top_k, temperature=torch.full((9,), 0.8))
    run(arch, changed.of([0, 2, 3, 5, 6]), seed)


@pytest.mark.slow
def test_a_row_is_drawn_as_it_is_alone(seed) -> None:
    inputs = Inputs.make(Case(6, 1, 2052, truncates=True), seed)
    together = run("sm_90a", inputs, seed)["tokens"]
    for row in (0, 2, 5):
        alone = run("sm_90a", inputs.of([row]), seed)["tokens"]
        assert torch.equal(alone[0], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_block_of_the_kernel_runs(arch, truncates, seed) -> None:
    """Two vectors of a thread that both have candidates; equals that only their numbers tell; of
    about one probability, whose first draw is rarely in a small share."""
    inputs = Inputs.make(Case(8, 1, 20_000, truncates), seed).of([1, 1, 5, 6, 7])
    if truncates:
        top_p, top_k = torch.tensor([1.0, 0.02, 1.0, 0.9, 1.0]), torch.tensor([0, 0, 9, 0, 0])
        inputs = replace(inputs, top_p=top_p, top_k=top_k, min_p=torch.zeros(5))
    inputs = replace(inputs, temperature=torch.tensor([0.0, 1.0, 1.0, 0.8, 1.0]))
    (coverage,) = run(arch, inputs, seed).report.coverage
    assert coverage.complete, coverage.missed


@pytest.mark.slow
def test_no_synchronisation_is_left_out(seed) -> None:
    reports = [
        run("sm_90a", Inputs.make(case, seed), seed).report
        for case in (Case(5, 1, 5000), Case(3, 1, 5000, truncates=True))
    ]
    assert not missed_synchronisation(reports)


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "largest logits read before all warps have theirs": at("SampleTokens.largest")
    .call("cute.arch.sync_threads")
    .delete(),
    "logits sent before the others have begun": at("SampleTokens.largest")
    .call("cute.arch.cluster_wait", 0)
    .delete(),
    "logits of the cluster not waited for": at("SampleTokens.largest")
    .call("cute.arch.cluster_wait", 1)
    .delete(),
    "a NaN that is no largest logit": at("SampleTokens.largest")
    .expression("cute.arch.fmax(a, b, nan=True)")
    .replace("cute.arch.fmax(a, b)"),
    "bounds read before all warps have theirs": at("SampleTokens.least_best")
    .call("cute.arch.sync_threads")
    .delete(),
    "noise of the neighbour": at("SampleTokens.compare")
    .expression("arithmetic.exponential(words[i], words[(i + 1) % VECTOR])")
    .replace("arithmetic.exponential(words[i ^ 1], words[i])"),
    "a round of noise too few": at("philox")
    .expression("numbers.PHILOX_ROUNDS")
    .replace("numbers.PHILOX_ROUNDS - 1"),
    "the best of other CTAs not waited for": at("SampleTokens.best_of_row")
    .call("cute.arch.cluster_wait")
    .delete(),
    "counts before they are 0": at("Truncation.count").call("cute.arch.sync_threads").delete(),
    "counts of others overwritten": at("Truncation.cut").call("cute.arch.cluster_wait").delete(),
    "counts read before all have counted": at("Truncation.totals")
    .call("cute.arch.cluster_wait")
    .delete(),
    "a share of the mass before a warp's is there": at("Truncation.mass")
    .call("cute.arch.sync_threads", 1)
    .delete(),
    "the mass of other CTAs not waited for": at("Truncation.mass")
    .call("cute.arch.cluster_wait")
    .delete(),
    "the draw of other CTAs not waited for": at("SampleTokens.best_of_cluster")
    .call("cute.arch.cluster_wait")
    .delete(),
    "a cut read before it is found": at("Truncation.cut").call("cute.arch.sync_threads").delete(),
    "sums of warps read before they are there": at("truncation:sums_before")
    .call("cute.arch.sync_threads")
    .delete(),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(SAMPLE_TOKENS, Simulator("sm_90a"))
    ties = Inputs.make(Case(15, 1, 20_000), seed).of([0, 2, 6, 7])
    cuts = Inputs.make(Case(15, 1, 5000, truncates=True), seed).of([0, 2, 5])
    ties = replace(ties, temperature=torch.full((4,), 0.8))
    for inputs in (Inputs.make(SMALL[True], seed), ties, cuts):
        outcome = kernels.run(inputs, seed, None, kernels.compile(inputs.config, build))
        assert torch.equal(outcome["tokens"], expected(inputs))


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.sampling.sample_tokens", checked)
