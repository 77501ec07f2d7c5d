"""The paged Blackwell kernels whose output is codes, simulated: they are those of the rows that the
kernel without rounding gives, bit for bit, in epilogues and where splits are combined.

Products of codes, and pairs of CTAs with several tokens, leave rows to a launch behind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dsv4.simulator.ptx.parser import parse_module
from dsv4.testing.harness import Simulator, simulator
from dsv4.testing.paged_attention import Case, make_inputs
from dsv4.testing.paged_kernel import check_rounded, compiled_kernel
from tests.simulator.helpers.changes import NEVER, deletions_of, in_entries, tried
from tests.simulator.helpers.mutations import Run

pytestmark = pytest.mark.stage("E")

cutlass = pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_100a")
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "rounds_output": True}
FORMATS = ("bf16", "fp8")


def test_codes_of_rows(seed) -> None:
    """Three tokens of 8 heads, the last one without keys; half a group of rows of codes, and more,
    is of no token."""
    case = Case(3, 1, 8, 128, "bf16", 40, 100, wild=True, has_squares=True, **OPTIONS)
    inputs = make_inputs(case, seed)
    inputs.window_lens[2] = inputs.compressed_lens[2] = 0
    check_rounded(SIMULATOR, case, seed, schedules=("lazy",), inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [64, 72, 128])
@pytest.mark.parametrize(("splits", "ctas"), [(1, 8), (1, 4), (3, 4)])
def test_codes_of_latents(splits, ctas, heads, kv_format, seed) -> None:
    """One CTA and two, also with more tokens than pairs, whose rows a launch behind rounds; the
    second half of 72 heads has 8. Maxima that grow, also from split to split, splits without keys,
    and a token without any."""
    case = Case(4, 1, heads, 512, kv_format, 40, 250, 64, 2, growing=True, wild=True, **OPTIONS)
    inputs = make_inputs(case, seed)
    inputs.window_lens[2] = inputs.compressed_lens[2] = 0
    inputs.window_lens[0], inputs.compressed_lens[0] = 3, 0
    check_rounded(SIMULATOR, case, seed, splits, ctas, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("heads", "splits"), [(64, 1), (128, 1), (128, 9)])
def test_tables_and_the_gate(heads, splits, kv_format, seed) -> None:
    """Nine splits are three groups of threads of the combine."""
    case = Case(3, 2, heads, 512, kv_format, 70, 600, 61, 64, "table", "swa_gate", **OPTIONS)
    check_rounded(SIMULATOR, case, seed, splits, 12, ("lazy", "random"))


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
def test_products_of_codes(compute, seed) -> None:
    case = Case(3, 1, 64, 512, "fp8", 40, 150, uniform=True, compute=compute, **OPTIONS)
    check_rounded(SIMULATOR, case, seed, schedules=("lazy",))


WAIT = "tcgen05.wait::ld"
STAGED = {"_store_output", "store_rows", "store_units", "_wait_for_stores"}


def kernels_of(ptx: str) -> list[tuple[str, Counter]]:
    """Names of a module's attention kernels, and the places of their synchronisation."""
    names = [name for name in parse_module(ptx).entries if "PagedFmha" in name]
    changes = deletions_of(ptx)
    return [(name, Counter(c.place for c in in_entries(ptx, (name,), changes))) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [64, 128])
def test_synchronisation(heads, kv_format, seed) -> None:
    """Rows that are rounded pass through no shared memory: what staged rows need is left out, and
    nothing is added but waits for loads of O, each of which is missed."""
    target = Simulator("sm_100a", has_lines=True)
    case = Case(3, 1, heads, 512, kv_format, 40, 100, rounds_output=True)
    exact = compiled_kernel(target, replace(case, rounds_output=False)).artifacts.PTX
    compiled = compiled_kernel(target, case)
    ptx = compiled.artifacts.PTX
    ((_, before),) = kernels_of(exact)
    # Of pairs there is the kernel that rounds no rows, too.
    ((name, after),) = (found for found in kernels_of(ptx) if found[1] != before)
    assert {place[0] for place in after - before} == {WAIT}
    assert {place[1] for place in before - after} <= STAGED

    def prepare() -> tuple[tuple, dict]:
        call = make_inputs(case, seed).call((1, 8, 0, 0)).poisoned()
        return call.args, call.options

    changes = in_entries(ptx, (name,), deletions_of(ptx))
    waits = [change for change in changes if change.place[0] == WAIT]
    found = Counter(how for _, how in tried(compiled, [Run(prepare)], waits))
    # Where O is rescaled, or splits are stored, none is run: those are of rows, too.
    assert not found[""] and len(waits) - found[NEVER] >= (after - before).total()
