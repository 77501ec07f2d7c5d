"""Tensor maps that threads write, and copies that read them: the fences between."""

import pytest

from tests.simulator.helpers.ptx import INIT_BARRIER, holding_map, kinds, run_body

pytestmark = pytest.mark.stage("simulator")

STALE = "missing tensor map fence"
SCHEDULES = ("eager", "lazy", "random")
EDIT = "@%p2 tensormap.replace.tile.global_dim.global.b1024.b32 [%d1+256], 0, 8;"
RELEASE = "@%p2 fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d7], 128;"
SYNC = "bar.sync 0;"
LOAD = """
@!%p9 bra JOIN;
mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], 256;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r2], [%d7, {%r40, %r40}], [%r30];
JOIN:
W: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;
@!%p6 bra W;
"""
PUBLISH = """
@!%p1 bra PUBLISHED;
ld.global.b32 %r20, [%d2+256];
st.shared.b32 [%r4+1024], %r20;
bar.warp.sync -1;
@%p2 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r2+1024], 0, 8;
bar.warp.sync -1;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
    [%d7], [%r31], 128;
PUBLISHED:
"""


def body(*steps: str, thread: int = 32) -> str:
    """The steps, then a copy by one thread."""
    start = f"""{INIT_BARRIER}
    add.u64 %d7, %d1, 256;
    add.u32 %r31, %r2, 1024;
    mov.b32 %r40, 0;
    setp.eq.u32 %p9, %r1, {thread};
    """
    return start + "\n".join(steps) + LOAD


def found(*steps: str, thread: int = 32, **options) -> list[str]:
    return kinds(body(*steps, thread=thread), out=holding_map(), **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_edited_map_needs_order_and_both_fences(schedule):
    right = (EDIT, RELEASE, SYNC, ACQUIRE)
    assert found(*right, schedule=schedule) == []
    assert found(EDIT, SYNC, ACQUIRE, schedule=schedule) == [STALE]
    assert found(EDIT, RELEASE, SYNC, schedule=schedule) == [STALE]
    assert found(EDIT, RELEASE, ACQUIRE, schedule=schedule) == ["read-write race"]


def test_maps_that_nothing_writes_need_no_fence():
    assert found() == []


def test_the_release_comes_behind_the_edit_and_before_the_barrier():
    assert found(RELEASE, EDIT, SYNC, ACQUIRE) == [STALE]
    assert found(EDIT, SYNC, RELEASE, ACQUIRE) == [STALE]


def test_the_acquire_comes_behind_the_barrier():
    assert found(EDIT, RELEASE, f"@%p9 {ACQUIRE}", SYNC) == [STALE]


def test_the_acquire_is_of_one_map():
    other = ACQUIRE.replace("%d7", "%d1")
    assert found(EDIT, RELEASE, SYNC, other) == [STALE]


def test_ordinary_stores_write_a_map():
    store = "@%p2 ld.global.b32 %r20, [%d1+256];\n@%p2 st.global.b32 [%d1+256], %r20;"
    assert found(store, RELEASE, SYNC, ACQUIRE) == []
    assert found(store, SYNC) == [STALE]


def test_one_thread_needs_no_barrier():
    """It edits, releases, acquires and copies by itself."""
    acquire = f"@%p2 {ACQUIRE}"
    assert found(EDIT, RELEASE, acquire, thread=0) == []
    assert found(EDIT, thread=0) == [STALE]


def test_the_acquire_is_of_the_lane_that_copies():
    """Or of one that a bar.warp.sync tells it of."""
    other = "setp.eq.u32 %p8, %r1, 33;\n@%p8 " + ACQUIRE
    assert found(EDIT, RELEASE, SYNC, other) == [STALE]
    assert found(EDIT, RELEASE, SYNC, other, "bar.warp.sync -1;") == []


def test_another_warp_may_acquire():
    """Warp 0 edits, releases and acquires; warp 1 copies behind the barrier."""
    assert found(EDIT, RELEASE, f"@%p2 {ACQUIRE}", SYNC) == []


def test_a_published_map_is_released():
    assert found(PUBLISH, SYNC, ACQUIRE) == []
    assert found(PUBLISH, SYNC) == [STALE]
    assert found(PUBLISH, ACQUIRE) == ["read-write race"]


FLAG_SET, FLAG_WAIT = (
    "@%p2 st.release.gpu.global.b32 [%d1], 1;",
    "P: ld.acquire.gpu.global.b32 %r21, [%d1];\nsetp.ne.u32 %p7, %r21, 1;\n@%p7 bra P;",
)


@pytest.mark.parametrize(
    ("release", "acquire", "expected"),
    [("gpu", "gpu", []), ("cta", "gpu", [STALE]), ("gpu", "cluster", [STALE])],
)
def test_scopes_of_the_fences(release, acquire, expected):
    """CTA 0 edits the map, CTA 1 copies."""
    steps = f"""
    @!%p3 bra COPY;
    {EDIT}
    {RELEASE.replace("gpu", release)}
    {FLAG_SET}
    bra DONE;
    COPY:
    {FLAG_WAIT}
    {ACQUIRE.replace("gpu", acquire)}
    """
    text = body(steps) + "\nDONE:"
    assert kinds(text, out=holding_map(), grid=2) == expected


def test_an_acquire_of_another_cta_does_not_count():
    """Each CTA of a cluster reads maps through its own SM."""
    steps = f"""
    @!%p3 bra COPY;
    {EDIT}
    {RELEASE}
    @%p2 {ACQUIRE}
    COPY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    {{own}}
    @%p3 bra DONE;
    """
    end = "\nDONE:"
    options = {"grid": 2, "cluster": 2}
    assert kinds(body(steps.format(own="")) + end, out=holding_map(), **options) == [STALE]
    own = body(steps.format(own=ACQUIRE)) + end
    assert kinds(own, out=holding_map(), **options) == []


def test_the_finding_names_the_fence_and_both_places():
    (finding,) = run_body(body(EDIT, RELEASE, SYNC), out=holding_map()).races
    assert "no fence.proxy.tensormap::generic.acquire lies between" in finding.message
    edit, copy = finding.places
    assert "tensormap.replace" in edit and "cp.async.bulk.tensor" in copy


def test_a_store_reads_its_map_too():
    store = """
    st.shared.b32 [%r4], %r1;
    fence.proxy.async;
    bar.sync 0;
    @!%p9 bra STORED;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d7, {%r40, %r40}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    STORED:
    """
    assert found(EDIT, RELEASE, SYNC, ACQUIRE, store, SYNC, "@%p9 fence.proxy.async;") == []
    assert found(EDIT, store, SYNC, "@%p9 fence.proxy.async;") == [STALE]
