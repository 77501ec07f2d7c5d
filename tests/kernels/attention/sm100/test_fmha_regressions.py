"""Each bug of the kernel's history, put back: the tests must see it, and only they.

Every row is one edit of the source, a case that exposes it, and where it matters a case that does
not: single tiles and square shapes hid these bugs for days.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")

from dsv4.kernels.attention.sm100 import fmha
from dsv4.simulator import Deadlock, KernelFault
from dsv4.testing.attention import Case, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of
from dsv4.testing.mutate import Edit, at, check, mutated

pytestmark = pytest.mark.stage("E")

SMALL = {"heads": 64, "head_dim": 64, "requests": ((0, 1),), "ragged": False}
ONE_TILE = Case(**SMALL, top_k=64, window_rows=0, batch=1)
THREE_TILES = Case(**SMALL, top_k=192, window_rows=0, batch=1)
# Scores rise by more than the threshold below which O is left alone, in steps so small that what is
# rescaled still counts.
GROWING = Case(**SMALL, top_k=640, window_rows=0, batch=1, growing=True)
WIDE_TWO_TILES = Case(**{**SMALL, "head_dim": 512}, top_k=128, window_rows=0, batch=1)
WIDE_THREE_TILES = Case(**{**SMALL, "head_dim": 512}, top_k=192, window_rows=0, batch=1)
# Request 1 has 3 window rows; the others hold NaN.
PARTIAL = Case(heads=64, head_dim=64, requests=((1, 1),), top_k=100, window_rows=100)
PADDING = Case(heads=64, head_dim=64, top_k=64, requests=((0, 1), (-1, 1)), ragged=False)


@dataclass(frozen=True)
class Bug:
    """One edit of one function: what it breaks, and a case that is too small to notice."""

    edit: Edit
    exposed_by: Case
    hidden_from: Case | None = None
    is_slow: bool = False


SOFTMAX_WARPS = at("Fmha1Cta.softmax_warps")
PV = at("Fmha1Cta._pv")
PV_ACCUMULATE = PV.call("pv_mma.set", nth=0).argument(1)
BUGS = {
    # TMA reads tile 0 for every tile: the tile mode is pinned, the chunk mode left free.
    "tile mode pinned": Bug(
        at("DenseKv1Cta.copy")
        .call("cute.copy")
        .argument(1)
        .replace("branch.source[(None, None, 0, branch.batch)][None, chunk]"),
        exposed_by=THREE_TILES,
        hidden_from=ONE_TILE,
        is_slow=True,
    ),
    # P is read where the first P was written.
    "P offset missing": Bug(
        PV.assignment("p_block").expression("p_state.index").replace("0"),
        exposed_by=THREE_TILES,
        hidden_from=ONE_TILE,
        is_slow=True,
    ),
    # S and O share TMEM columns.
    "S offset missing": Bug(
        at("Fmha1Cta._tmem_views").expression('address + self.tmem.column("s")').replace("address"),
        exposed_by=THREE_TILES,
        is_slow=True,
    ),
    # The first product adds what TMEM happened to hold.
    "first PV accumulates": Bug(PV_ACCUMULATE.replace("True"), exposed_by=ONE_TILE, is_slow=True),
    # Only the first chunk of O is overwritten by the first product.
    "second chunk accumulates": Bug(
        PV_ACCUMULATE.replace("{} if chunk == 0 else True"),
        exposed_by=WIDE_TWO_TILES,
        hidden_from=ONE_TILE,
        is_slow=True,
    ),
    # O goes back into TMEM through an atom of another shape.
    "TMEM round trip by hand": Bug(
        at("store_columns")
        .call("cute.copy")
        .replace(
            "atom = cute.make_copy_atom(tcgen05.St16x128bOp(tcgen05.Repetition(16)), Float32)\n"
            "store = tcgen05.make_tmem_copy(atom, columns).get_slice(copies.thread)\n"
            "target = store.partition_D(columns)\n"
            "source = store.partition_S(cute.make_identity_tensor((ROWS, COLUMNS)))\n"
            "layout = cute.make_layout(source.shape)\n"
            "cute.copy(store, cute.make_tensor(fragment.iterator, layout), target)"
        ),
        exposed_by=GROWING,
        is_slow=True,
    ),
    # The ring of KV chunks does not turn: the third tile of head_dim 512 finds no free stage.
    "KV stage does not wrap": Bug(
        PV.call("kv.consumer_release").delete(),
        exposed_by=WIDE_THREE_TILES,
        hidden_from=WIDE_TWO_TILES,
        is_slow=True,
    ),
    # V is taken as it lies in memory: on a square tile that compiles, and transposes it.
    "layout of V trusted": Bug(
        at("Fmha1Cta._mmas").call("make_mma", nth=1).argument(2).replace("k_major"),
        exposed_by=ONE_TILE,
        is_slow=True,
    ),
    # The maximum is in base 2: it counts ln 2 a unit.
    "lse in mixed bases": Bug(
        at("row_lse")
        .assignment("value")
        .value.replace("row_max + cute.math.log2(row_sum, fastmath=True) * LN_2 + offset"),
        exposed_by=ONE_TILE,
        is_slow=True,
    ),
    # A wait that skips phases returns at once: the output is read before the last product.
    "O not waited for in order": Bug(
        SOFTMAX_WARPS.branch("tile > keys.first").call("consumer_wait").delete(),
        exposed_by=THREE_TILES,
        hidden_from=ONE_TILE,
        is_slow=True,
    ),
    # TMEM is given back while other warps still read O from it.
    "TMEM freed too early": Bug(
        SOFTMAX_WARPS.call("NamedBarrier().arrive_and_wait").delete(),
        exposed_by=ONE_TILE,
        is_slow=True,
    ),
    # 0 * NaN: masked rows of the tile reach O through P V.
    "masked rows kept": Bug(
        at("Fmha1Cta._mask").call("self._zero_rows").delete(),
        exposed_by=PARTIAL,
        hidden_from=THREE_TILES,
    ),
    # The tensor core reads P before the fence makes it visible.
    "P without a proxy fence": Bug(
        at("store_rows").call("fence_view_async_shared").delete(),
        exposed_by=ONE_TILE,
        is_slow=True,
    ),
    # The tensor core may start on S before its scores have been read out.
    "S released without a TMEM fence": Bug(
        at("fence_before_thread_sync").call("inline_ptx").delete(),
        exposed_by=THREE_TILES,
    ),
    # The output of a token without keys is staged over a Q that is still arriving.
    "output over an unfinished Q": Bug(
        SOFTMAX_WARPS.call("q_pipe.consumer_wait").delete(),
        exposed_by=PADDING,
        hidden_from=ONE_TILE,
        is_slow=True,
    ),
}


def noticed(backend: AttentionKernels, build: Callable, case: Case, seed: int) -> bool:
    """Whether the checks that every stage makes fail on what `build` compiles."""
    inputs = make_inputs(case, seed)
    expected = inputs.expected()
    try:
        result = backend.run_all(backend.compile(config_of(case), build), inputs, seed=seed)
        assert_attention_close(result.o, expected[0], result.lse, expected[1])
    except (AssertionError, Deadlock, KernelFault):
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_bug_has_its_place(name: str) -> None:
    """What is renamed in a kernel is found here at once, in the slow rows too."""
    check(BUGS[name].edit)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * bug.is_slow) for n, bug in BUGS.items()],
)
def test_bug_is_noticed(backend: AttentionKernels, tmp_path: Path, name: str, seed: int) -> None:
    if backend.device != "cpu":
        pytest.skip("a broken kernel may hang a GPU")
    bug = BUGS[name]
    build = mutated(fmha.build, tmp_path, bug.edit)
    assert noticed(backend, build, bug.exposed_by, seed), f"{name}: passes {bug.exposed_by}"
    if bug.hidden_from is not None:
        assert not noticed(backend, build, bug.hidden_from, seed), (
            f"{name}: {bug.hidden_from} sees it too; the note is out of date"
        )


def test_unchanged_source_passes(backend: AttentionKernels, tmp_path: Path, seed: int) -> None:
    """The copy itself is not what fails."""
    build = mutated(fmha.build, tmp_path)
    for case in (ONE_TILE, PARTIAL, PADDING):
        assert not noticed(backend, build, case, seed), str(case)
