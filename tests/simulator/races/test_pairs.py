"""What one CTA of a pair does in the other: it must not have left, or freed its Tensor Memory."""

import pytest

from tests.simulator.helpers.ptx import kinds, run_body

pytestmark = pytest.mark.stage("simulator")

EXITED = "access to a CTA that may have exited"
FREED = "use of TMEM that a pair may have freed"
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
BARRIERS = f"""
add.s32 %r30, %r2, 2048;
add.s32 %r31, %r2, 2056;
@!%p2 bra READY;
mbarrier.init.shared.b64 [%r30], 1;
mbarrier.init.shared.b64 [%r31], 1;
fence.mbarrier_init.release.cluster;
READY:
{SYNC}
"""
ALLOCATE = """
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.b32 %r8, [%r2];
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r1};\ntcgen05.wait::st.sync.aligned;"
FREE = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r8, 32;"
BEFORE = "tcgen05.fence::before_thread_sync;"
AFTER = "tcgen05.fence::after_thread_sync;"


def _wait(register: str) -> str:
    label = f"WAIT_{register}"
    return (
        f"{label}: mbarrier.try_wait.parity.shared.b64 %p6, [%{register}], 0, 1000;\n"
        f"@!%p6 bra {label};"
    )


def _commit(register: str, ctas: int) -> str:
    return (
        f"mov.b16 %h1, {ctas};\n"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        f"[%{register}], %h1;"
    )


def _options(schedule: str) -> dict:
    return {"threads": 32, "grid": 2, "cluster": 2, "target": "sm_100a", "schedule": schedule}


every_schedule = pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])


@every_schedule
@pytest.mark.parametrize(
    ("last", "expected"),
    [(SYNC, []), (_wait("r30"), []), ("", [EXITED])],
    ids=["cluster barrier", "wait", "nothing"],
)
def test_a_cta_outlives_the_commits_that_arrive_in_it(schedule, last, expected):
    """Waiting for the second commit says nothing of where the first one arrives."""
    body = f"""
    {BARRIERS}
    @!%p3 bra ISSUED;
    @!%p2 bra ISSUED;
    {_commit("r30", 3)}
    {_commit("r31", 3)}
    ISSUED:
    {_wait("r31")}
    {last}
    """
    assert kinds(body, **_options(schedule)) == expected


@every_schedule
@pytest.mark.parametrize("ctas", [3, 1], ids=["told", "not told"])
def test_a_cta_outlives_copies_of_a_pair_into_it(schedule, ctas):
    """The cluster barrier tells its peer that a copy was issued, the commit that it is done."""
    body = f"""
    {ALLOCATE}
    st.shared.b32 [%r4+256], %r1;
    fence.proxy.async.shared::cta;
    {BARRIERS}
    @!%p3 bra ISSUED;
    @!%p2 bra ISSUED;
    add.u32 %r9, %r2, 256;
    shr.u32 %r9, %r9, 4;
    cvt.u64.u32 %d8, %r9;
    or.b64 %d8, %d8, {1 << 46};
    tcgen05.cp.cta_group::2.4x256b [%r8], %d8;
    {_commit("r30", ctas)}
    ISSUED:
    {SYNC}
    {"" if ctas == 3 else "@!%p3 bra DONE;"}
    {_wait("r30")}
    DONE:
    {AFTER}
    {FREE}
    """
    found = kinds(body, **_options(schedule))
    assert EXITED in found if ctas == 1 else found == []


@every_schedule
@pytest.mark.parametrize(
    ("before_free", "expected"), [(SYNC, []), ("", [FREED])], ids=["together", "each"]
)
def test_a_pair_frees_tensor_memory_when_both_are_done(schedule, before_free, expected):
    body = f"{ALLOCATE}{SYNC}\n{STORE}\n{BEFORE}\n{before_free}\n{AFTER}\n{FREE}"
    assert kinds(body, **_options(schedule)) == expected


def test_tensor_memory_that_the_peer_freed_is_not_used_again():
    """Though in order: the first CTA frees, the second one then stores."""
    body = f"""
    {ALLOCATE}
    {SYNC}
    @!%p3 bra LATER;
    {FREE}
    LATER:
    {SYNC}
    @%p3 bra DONE;
    {STORE}
    {FREE}
    DONE:
    """
    (found,) = run_body(body, **_options("eager")).races
    assert found.kind == FREED
    assert "tcgen05.st" in found.places[0] and "tcgen05.dealloc" in found.places[1]
