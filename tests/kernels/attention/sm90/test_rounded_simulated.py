"""The paged Hopper kernels whose output is codes, simulated: they are those of the rows that the
kernel without rounding gives, bit for bit, however they come about.

Launches of heads in M round rows on their way, but of pieces; others leave them to a launch
behind. Synchronisation of the first ones is that of the kernels in
`tests/simulator/races/test_paged_changes.py`, without what staged stores of rows need.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dsv4.testing.harness import Simulator, simulator
from dsv4.testing.paged_attention import Case, make_inputs
from dsv4.testing.paged_kernel import check_rounded, compiled_kernel
from tests.simulator.helpers.changes import deletions_of

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

SIMULATOR = simulator("sm_90a")
OPTIONS = {"ragged": True, "padded": True, "has_rope": True, "rounds_output": True}
CODES = {"rounds_output": True}


@pytest.mark.slow
def test_codes_of_rows(seed) -> None:
    """Head tiles of 40 heads, three key tiles and more; twelve tokens leave half a group of rows
    of codes to no token."""
    case = Case(12, 1, 40, 512, "bf16", 40, 150, wild=True, has_squares=True, **OPTIONS)
    check_rounded(SIMULATOR, case, seed, schedules=("lazy", "random"))


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [64, 72, 128])
def test_codes_of_latents(heads, kv_format, seed) -> None:
    """Two head tiles are neighbours; the second of 72 has 8 heads. A token without keys, and
    maxima that grow."""
    case = Case(4, 1, heads, 512, kv_format, 40, 150, 64, 2, growing=True, wild=True, **OPTIONS)
    inputs = make_inputs(case, seed)
    inputs.window_lens[2] = inputs.compressed_lens[2] = 0
    check_rounded(SIMULATOR, case, seed, ctas=2, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_tables_and_the_gate(kv_format, seed) -> None:
    case = Case(3, 2, 64, 512, kv_format, 70, 150, 61, 64, "table", "swa_gate", **OPTIONS)
    check_rounded(SIMULATOR, case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "tokens", "splits", "ctas"),
    [
        (64, 3, 2, 5),
        (64, 2, 3, 12),
        (128, 2, 2, 9),
        (72, 2, 5, 9),
        (40, 1, 16, 20),
        (40, 1, 20, 20),
    ],
)
def test_codes_of_splits(heads, tokens, splits, ctas, kv_format, seed) -> None:
    """One turn of loads, and several; maxima that grow from split to split, splits without keys,
    and a token without any. Two CTAs halve the columns of 64 heads in three splits."""
    case = Case(tokens, 1, heads, 512, kv_format, 70, 600, growing=True, wild=True, **OPTIONS)
    inputs = make_inputs(case, seed)
    inputs.window_lens[0] = 3
    inputs.compressed_lens[0] = 0 if tokens > 1 else 600
    if tokens == 3:
        inputs.window_lens[2] = inputs.compressed_lens[2] = 0
    check_rounded(SIMULATOR, case, seed, splits, ctas, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(("num_splits", "ctas"), [(None, 7), (3, 12), (5, 24)])
def test_codes_of_slices(num_splits, ctas, kv_format, seed) -> None:
    """Two CTAs halve the columns, without splits and with them; of a fixed number of splits, which
    leaves no choice of swap-AB, head tiles have 32 heads."""
    splits = num_splits or 1
    options = {"num_splits": num_splits, **OPTIONS}
    tokens = 2 if splits < 5 else 1
    case = Case(tokens, 1, 64, 512, kv_format, 70, 300, 64, 2, "table", "swa_gate", **options)
    check_rounded(SIMULATOR, case, seed, splits, ctas)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "splits", "ctas"), [(64, 1, 12), (16, 1, 3), (32, 2, 12)])
def test_what_a_launch_behind_rounds(heads, splits, ctas, kv_format, seed) -> None:
    """Those of swap-AB."""
    case = Case(2, 1, heads, 512, kv_format, 70, 200, wild=True, has_factor=True, **OPTIONS)
    check_rounded(SIMULATOR, case, seed, splits, ctas, ("lazy", "random"))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_pieces(splits, seed) -> None:
    """Of launches that may have several, tokens with one are bf16 rows, too."""
    case = Case(4, 1, 64, 512, "bf16", 40, 1200, batch_invariant=True, has_rope=True, **CODES)
    lens = torch.tensor([1200, 30, 0, 1180], dtype=torch.int32)
    inputs = replace(make_inputs(case, seed), compressed_lens=lens)
    check_rounded(SIMULATOR, case, seed, splits, 3, ("lazy",), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
def test_products_of_codes(compute, seed) -> None:
    case = Case(3, 1, 64, 512, "fp8", 40, 150, uniform=True, compute=compute, **OPTIONS)
    check_rounded(SIMULATOR, case, seed, schedules=("lazy",))


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_synchronisation_has_the_same_places(kv_format) -> None:
    """Rows that are rounded pass through no shared memory: nothing is added, and the stores of
    staged rows are left out. The launch behind has its own, which `fp8_linear` has, too."""
    target = Simulator("sm_90a", has_lines=True)
    case = Case(3, 1, 72, 512, kv_format)
    exact = compiled_kernel(target, case).artifacts.PTX
    rounded = compiled_kernel(target, replace(case, rounds_output=True)).artifacts.PTX
    before, after = (Counter(c.place for c in deletions_of(ptx)) for ptx in (exact, rounded))
    assert {place[1] for place in before - after} == {"_store_staged"}
    assert after - before == Counter({
        ("griddepcontrol.launch_dependents", "kernel"): 1,
        ("griddepcontrol.wait", "kernel"): 1,
    })  # fmt: skip
