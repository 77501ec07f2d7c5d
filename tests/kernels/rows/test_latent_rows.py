"""`latent_rows` in the simulator, for both architectures: layers of every kind, with the bits of
the separate kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4.kernels.rows.latent_rows_config import LatentRowsConfig, has_kernel
from dsv4.ops.latent_rows import LATENT_ROWS
from dsv4.testing.harness import Outcome, Simulator, missed_synchronisation, simulator
from dsv4.testing.kernel_call import OpKernels
from dsv4.testing.latent_rows import (
    EPS,
    KINDS,
    Case,
    Inputs,
    assert_same_as_separate,
    assert_tasks,
)
from dsv4.testing.mutate import Edit, at
from tests.kernels import planted_bugs

pytestmark = pytest.mark.stage("rows")


def decode(kind: str, **fields) -> Case:
    """Ends of blocks, the first block, the middle of one, and padding."""
    ratio = KINDS[kind].get("ratio", 4) or 4
    starts = (ratio - 1, 2 * ratio - 1, 2, 0, 9)
    return Case(starts, (1, 1, 1, 1, -1), **{**KINDS[kind], **fields})


def chunk(kind: str, **fields) -> Case:
    """Several blocks of a request, and more rows than a CTA takes at a time."""
    ratio = KINDS[kind].get("ratio", 4) or 4
    return Case((5, 2 * ratio - 2, 0), (13, 9, -1), 13, **{**KINDS[kind], **fields})


def run(kernels: OpKernels, case: Case, seed: int, schedules: int | None, **scalars) -> Outcome:
    """Run, and compare with the torch implementations and with the separate kernels."""
    inputs = Inputs.make(case, seed)
    outcome = kernels.run(inputs, seed, schedules, **scalars)
    outputs = {**outcome.outputs, **outcome.scratch}
    assert_tasks(inputs, outputs)
    assert_same_as_separate(kernels.target, inputs, outputs, seed)
    return outcome


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def kernels(request: pytest.FixtureRequest) -> OpKernels:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    return OpKernels(LATENT_ROWS, simulator(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_kind(kernels, kind, seed) -> None:
    run(kernels, decode(kind), seed, None)
    # One CTA for each task of rows: it takes them in turns.
    run(kernels, chunk(kind), seed, None, num_ctas=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"kv_format": "bf16", "query_dim": 1536},
        {"query_dim": 0},
        {"dim": 128, "query_dim": 128},
        {"dim": 128, "ratio": 128, "overlap": False, "index_dim": 0},
    ],
    ids=str,
)
def test_other_sizes(kernels, fields, seed) -> None:
    run(kernels, decode("CSA", **fields), seed, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "few"), [*((kind, 10_000) for kind in KINDS), ("CSA", 0)], ids=str
)
def test_no_synchronisation_is_left_out(kind, few, seed, monkeypatch) -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.kernels.rows import latent_rows

    # What many entries launch has code of its own.
    monkeypatch.setattr(latent_rows, "FEW_ENTRIES", few)
    kernels = OpKernels(LATENT_ROWS, Simulator("sm_90a"))
    reports = [run(kernels, decode(kind), seed, 1).report]
    reports.append(run(kernels, chunk(kind), seed, 1, num_ctas=1).report)
    assert not missed_synchronisation(reports)


def test_configurations_with_kernels() -> None:
    for config in LATENT_ROWS.aot().values():
        assert has_kernel(config), config
    for other in (
        LatentRowsConfig(512, EPS, "fp32", latent="fp32"),
        LatentRowsConfig(256, EPS, "bf16"),
        LatentRowsConfig(512, EPS, uniform_scale=True, ratio=4, overlap=True),
        LatentRowsConfig(512, EPS, "bf16", ratio=4, overlap=True, index_dim=64),
    ):
        assert not has_kernel(other), other
    assert has_kernel(LatentRowsConfig(512, EPS, uniform_scale=True))


# ---- bugs ----------------------------------------------------------------------------------------

BUGS: dict[str, Edit] = {
    "requests and their tasks swapped": at("LatentRows.compress")
    .expression("cluster // count")
    .replace("cluster % count"),
    "index keys by a part of their CTAs": at("LatentRows.kernel")
    .expression("place < grid.keys")
    .replace("place * 4 < grid.keys"),
    "norms by a CTA too few": at("LatentRows.kernel")
    .expression("place < grid.queries")
    .replace("place + 1 < grid.queries"),
}


def checked(build: Callable, seed: int) -> None:
    """The checks that every test makes, of what `build` compiles."""
    kernels = OpKernels(LATENT_ROWS, Simulator("sm_90a"))
    inputs = Inputs.make(chunk("CSA"), seed)
    compiled = kernels.compile(inputs.config, build)
    outcome = kernels.run(inputs, seed, None, compiled)
    assert_tasks(inputs, {**outcome.outputs, **outcome.scratch})


(
    test_bug_has_its_place,
    test_bug_is_noticed,
    test_without_a_bug_nothing_is_noticed,
) = planted_bugs.tests_of(BUGS, "dsv4.kernels.rows.latent_rows", checked)
