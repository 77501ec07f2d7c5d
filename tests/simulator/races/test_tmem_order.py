"""TMEM handed from warp to warp: waits, barriers and the tcgen05 fences around them."""

import pytest

from dsv4.simulator.instructions.operands.tensor_core import Multiplication
from dsv4.simulator.races.cells.granules import TMEM_GROUPS, tmem_operand_granules
from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")

BEFORE = "tcgen05.fence::before_thread_sync;"
AFTER = "tcgen05.fence::after_thread_sync;"
WAIT = "tcgen05.wait::st.sync.aligned;"
SYNC = "bar.sync 0;"


def _handed(before: str, sync: str, after: str, wait: str = WAIT) -> str:
    """Warp 0 stores to TMEM, warp 4 (of the same lanes) loads; warp 0 allocates and frees."""
    return f"""
    setp.eq.u32 %p4, %r5, 4;
    @!%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r8, [%r2];
    @!%p1 bra STORED;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {{%r1}};
    {wait}
    {before}
    STORED:
    {sync}
    @!%p4 bra LOADED;
    {after}
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    {BEFORE}
    LOADED:
    bar.sync 0;
    @!%p1 bra DONE;
    {AFTER}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
    DONE:
    """


def _run(body: str):
    report = run_body(body, threads=160, target="sm_100a")
    return [f.kind for f in report.races], [f.kind for f in report.warnings]


def test_both_fences_and_the_barrier():
    assert _run(_handed(BEFORE, SYNC, AFTER)) == ([], [])


@pytest.mark.parametrize(
    ("before", "after"), [("", AFTER), (BEFORE, "")], ids=["no before", "no after"]
)
def test_a_missing_fence_is_warned_of(before, after):
    assert _run(_handed(before, SYNC, after)) == ([], ["missing tcgen05.fence"])


def test_fences_do_not_replace_the_barrier_or_the_wait():
    assert "read-write race" in _run(_handed(BEFORE, "", AFTER))[0]
    assert "read-write race" in _run(_handed(BEFORE, SYNC, AFTER, wait=""))[0]


def test_a_kernel_without_any_fence_is_told_once():
    body = _handed("", SYNC, "").replace(BEFORE, "").replace(AFTER, "")
    assert _run(body) == ([], ["missing tcgen05.fence"])


@pytest.mark.parametrize(
    ("rows", "lane", "groups"), [(128, 0, range(8)), (64, 0, (0, 2, 4, 6)), (64, 16, (1, 3, 5, 7))]
)
def test_a_factor_in_tmem_is_read_where_its_rows_lie(rows, lane, groups):
    """Of 64 rows half of the lanes: the others need not have been written."""
    column = 96
    bits = 1 << 4 | 8 >> 3 << 17 | rows >> 4 << 24
    product = Multiplication("f8f6f4", 1, 0, lane << 16 | column, True, 0, bits, False)
    found = tmem_operand_granules(product)
    columns = range(column, column + 32 // 4)
    assert sorted(found) == [c * TMEM_GROUPS + group for c in columns for group in groups]
