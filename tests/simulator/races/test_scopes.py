"""Scopes and semantics: what a release is visible to, and what fences and arrivals count for."""

import pytest

from tests.simulator.helpers.ptx import kinds

pytestmark = pytest.mark.stage("simulator")

RACE = ["read-write race"]

# Thread 0 of CTA 0 writes a word and sets a flag; thread 0 of the last CTA reads the word.
_HANDOVER = """
mov.u32 %r10, %ctaid.x;
mov.u32 %r11, %nctaid.x;
sub.u32 %r11, %r11, 1;
setp.eq.u32 %p4, %r10, %r11;
@!%p2 bra DONE;
@%p4 bra CONSUME;
@!%p3 bra DONE;
st.global.b32 [%d1+64], 7;
{before}
{store} [%d1], 1;
bra DONE;
CONSUME:
SPIN: {load} %r12, [%d1];
setp.eq.u32 %p5, %r12, 0;
@%p5 bra SPIN;
{after}
ld.global.b32 %r13, [%d1+64];
DONE:
"""


def _handover(store: str, load: str, *, before: str = "", after: str = "", **options) -> list[str]:
    body = _HANDOVER.format(
        store=f"st.{store}.global.b32", load=f"ld.{load}.global.b32", before=before, after=after
    )
    return kinds(body, **{"grid": 2, **options})


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("load", ["cta", "cluster", "gpu", "sys"])
@pytest.mark.parametrize("store", ["cta", "cluster", "gpu", "sys"])
def test_both_scopes_must_include_the_other_cta(store, load, cluster):
    wide = ("cluster", "gpu", "sys") if cluster == 2 else ("gpu", "sys")
    found = _handover(f"release.{store}", f"acquire.{load}", cluster=cluster)
    if store in wide and load in wide:
        assert found == []
    else:
        assert "read-write race" in found


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_scope_cta_is_enough_within_a_cta(scope):
    body = f"""
    @!%p1 bra CONSUME;
    @!%p2 bra DONE;
    st.global.b32 [%d1+64], 7;
    st.release.{scope}.global.b32 [%d1], 1;
    bra DONE;
    CONSUME:
    SPIN: ld.acquire.{scope}.global.b32 %r12, [%d1];
    setp.eq.u32 %p5, %r12, 0;
    @%p5 bra SPIN;
    ld.global.b32 %r13, [%d1+64];
    DONE:
    """
    assert kinds(body) == []


@pytest.mark.parametrize("after", ["cta", "cluster", "gpu"])
@pytest.mark.parametrize("before", ["cta", "cluster", "gpu"])
def test_fences_have_scopes(before, after):
    found = _handover(
        "relaxed.gpu", "relaxed.gpu", before=f"fence.acq_rel.{before};",
        after=f"fence.acq_rel.{after};",
    )  # fmt: skip
    assert found == ([] if before == after == "gpu" else RACE)


@pytest.mark.parametrize(("name", "wide"), [("cta", False), ("gl", True), ("sys", True)])
def test_membar_is_a_fence_of_its_level(name, wide):
    fence = f"membar.{name};"
    found = _handover("relaxed.gpu", "relaxed.gpu", before=fence, after=fence)
    assert found == ([] if wide else RACE)


@pytest.mark.parametrize(
    ("before", "after", "clean"),
    [
        ("fence.release.gpu;", "fence.acquire.gpu;", True),
        ("fence.acquire.gpu;", "fence.acquire.gpu;", False),
        ("fence.release.gpu;", "fence.release.gpu;", False),
        ("fence.sc.gpu;", "fence.sc.gpu;", True),
        # None of these is a fence between threads.
        ("fence.mbarrier_init.release.cluster;", "fence.acq_rel.gpu;", False),
        ("fence.proxy.alias;", "fence.acq_rel.gpu;", False),
        ("fence.proxy.async;", "fence.acq_rel.gpu;", False),
        ("fence.proxy.tensormap::generic.release.gpu;", "fence.acq_rel.gpu;", False),
        ("fence.acq_rel.gpu;", "fence.proxy.async;", False),
        ("fence.acq_rel.gpu;", "fence.proxy.alias;", False),
    ],
)
def test_a_fence_counts_for_what_it_is(before, after, clean):
    found = _handover("relaxed.gpu", "relaxed.gpu", before=before, after=after)
    assert found == ([] if clean else RACE)


@pytest.mark.parametrize(
    ("store", "load", "after", "clean"),
    [
        ("release.sys", "volatile", "", False),
        ("volatile", "acquire.sys", "", False),
        ("release.sys", "volatile", "fence.acq_rel.sys;", True),
    ],
)
def test_volatile_is_relaxed(store, load, after, clean):
    assert _handover(store, load, after=after) == ([] if clean else RACE)


def test_a_relaxed_read_acquires_only_what_it_saw():
    """The fence comes after the release, but the read before the fence did not see it."""
    body = """
    mov.u32 %r10, %ctaid.x;
    setp.eq.u32 %p4, %r10, 1;
    @!%p2 bra DONE;
    @%p4 bra CONSUME;
    st.global.b32 [%d1+64], 7;
    st.release.gpu.global.b32 [%d1], 1;
    st.relaxed.gpu.global.b32 [%d1+8], 1;
    bra DONE;
    CONSUME:
    ld.relaxed.gpu.global.b32 %r12, [%d1{offset}];
    SPIN: ld.relaxed.gpu.global.b32 %r12, [%d1+8];
    setp.eq.u32 %p5, %r12, 0;
    @%p5 bra SPIN;
    {again}
    fence.acq_rel.gpu;
    ld.global.b32 %r13, [%d1+64];
    DONE:
    """
    again = "ld.relaxed.gpu.global.b32 %r12, [%d1];"
    for schedule in ("eager", "lazy"):
        # CTA 1 is started first only if CTA 0 waits for it: let it look at the flag early.
        early = body.replace("CONSUME:\n", "CONSUME:\nst.relaxed.gpu.global.b32 [%d1+16], 1;\n")
        early = early.replace(
            "    st.global.b32 [%d1+64], 7;",
            "    WAIT: ld.relaxed.gpu.global.b32 %r14, [%d1+24];\n"
            "    setp.eq.u32 %p6, %r14, 0;\n    @%p6 bra WAIT;\n    st.global.b32 [%d1+64], 7;",
        ).replace(
            "    SPIN:", "    st.relaxed.gpu.global.b32 [%d1+24], 1;\n    SPIN:"
        )  # fmt: skip
        options = {"grid": 2, "schedule": schedule}
        assert kinds(early.format(offset="", again=""), **options) == RACE
        assert kinds(early.format(offset="", again=again), **options) == []


_CHAIN = """
mov.u32 %r10, %ctaid.x;
setp.eq.u32 %p4, %r10, 1;
setp.eq.u32 %p6, %r10, 2;
@!%p2 bra DONE;
@%p4 bra MIDDLE;
@%p6 bra CONSUME;
st.global.b32 [%d1+64], 7;
st.release.gpu.global.b32 [%d1], 1;
bra DONE;
MIDDLE:
LOOK: ld.relaxed.gpu.global.b32 %r12, [%d1];
setp.eq.u32 %p5, %r12, 0;
@%p5 bra LOOK;
{middle}
bra DONE;
CONSUME:
SPIN: ld.acquire.gpu.global.b32 %r12, [%d1];
setp.lt.u32 %p5, %r12, 2;
@%p5 bra SPIN;
ld.global.b32 %r13, [%d1+64];
DONE:
"""


@pytest.mark.parametrize(
    ("middle", "clean"),
    [
        ("atom.relaxed.gpu.global.add.u32 %r13, [%d1], 1;", True),
        ("red.relaxed.gpu.global.add.u32 [%d1], 1;", True),
        ("atom.relaxed.cta.global.add.u32 %r13, [%d1], 1;", False),
        ("st.relaxed.gpu.global.b32 [%d1], 2;", False),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%d1], 2;", True),
    ],
)
def test_a_release_goes_on_through_atomics_alone(middle, clean):
    found = kinds(_CHAIN.format(middle=middle), grid=3)
    assert ("read-write race" in found) == (not clean)


@pytest.mark.parametrize(("scope", "clean"), [("cta", False), ("cluster", False), ("gpu", True)])
def test_atomics_of_several_ctas_need_a_scope_that_includes_them(scope, clean):
    body = f"@%p2 red.relaxed.{scope}.global.add.u32 [%d1], 1;"
    assert kinds(body, grid=2) == ([] if clean else ["scope too narrow"])
    assert kinds(body, grid=2, cluster=2) == (["scope too narrow"] if scope == "cta" else [])


# Both CTAs of a cluster count in a word of CTA 0.
_COUNTS = """
@%p2 st.shared.b32 [%r2], 0;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r10, %r2, 0;
@%p2 {first}.shared::cluster{operation} [%r10], 1;
{between}
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize(
    ("operation", "scope", "clean"),
    [
        ("red.relaxed", "cta", False),
        ("red.relaxed", "cluster", True),
        ("red.relaxed", "gpu", True),
        ("st.relaxed", "cta", False),
        ("st.relaxed", "cluster", True),
    ],
)
def test_atomics_on_shared_memory_of_several_ctas(operation, scope, clean):
    kind = ".add.u32" if operation.startswith("red") else ".b32"
    body = _COUNTS.format(first=f"{operation}.{scope}", operation=kind, between="")
    assert kinds(body, grid=2, cluster=2) == ([] if clean else ["scope too narrow"])


def test_a_narrow_scope_is_enough_within_a_cta_and_behind_a_barrier():
    barrier = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    own = "mov.u32 %r11, %cluster_ctarank; setp.eq.u32 %p4, %r11, 0;"
    alone = f"{own} @%p4 red.relaxed.cta.shared::cluster.add.u32 [%r10], 1;"
    body = _COUNTS.format(
        first="red.relaxed.cluster", operation=".add.u32", between=barrier + alone
    )
    assert kinds(body, grid=2, cluster=2) == []


# A warp of CTA 0 writes to its shared memory, CTA 1 reads it after the cluster barrier.
_CLUSTER = """
st.shared.b32 [%r4], %r1;
{before}
barrier.cluster.arrive.{arrive}.aligned;
barrier.cluster.wait.acquire.aligned;
xor.b32 %r10, %r7, 1;
mapa.shared::cluster.u32 %r8, %r4, %r10;
ld.shared::cluster.b32 %r9, [%r8];
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize(
    ("before", "arrive", "clean"),
    [
        ("", "release", True),
        ("", "relaxed", False),
        ("fence.acq_rel.cluster;", "relaxed", True),
        ("fence.acq_rel.gpu;", "relaxed", True),
        ("fence.acq_rel.cta;", "relaxed", False),
        ("fence.mbarrier_init.release.cluster;", "relaxed", False),
        ("fence.proxy.async;", "relaxed", False),
    ],
)
def test_relaxed_arrivals_at_the_cluster_barrier(before, arrive, clean):
    found = kinds(_CLUSTER.format(before=before, arrive=arrive), grid=2, cluster=2)
    assert found == ([] if clean else RACE)


def test_a_relaxed_arrival_tells_of_initialised_mbarriers_alone():
    body = """
    add.s32 %r30, %r2, 2048;
    @%p2 mbarrier.init.shared.b64 [%r30], 64;
    {fence}
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r10, %r7, 1;
    mapa.shared::cluster.u32 %r8, %r30, %r10;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
    W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p6, [%r30], 0, 1000;
    @!%p6 bra W;
    """
    fence = "@%p2 fence.mbarrier_init.release.cluster;"
    options = {"grid": 2, "cluster": 2}
    assert kinds(body.format(fence=fence), **options) == []
    assert "barrier used before its init is visible" in kinds(body.format(fence=""), **options)


# Warp 1 writes, arrives at an mbarrier of its own CTA or of CTA 1; a warp there waits and reads.
_LOCAL = """
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 32;
bar.sync 0;
@%p1 bra CONSUME;
st.shared.b32 [%r4], %r1;
{before}
mbarrier.arrive{arrive}.shared::cta.b64 %d2, [%r30];
bra DONE;
CONSUME:
W: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p6, [%r30], 0, 1000;
@!%p6 bra W;
{after}
ld.shared.b32 %r8, [%r4+128];
DONE:
"""


@pytest.mark.parametrize(
    ("before", "arrive", "wait", "after", "clean"),
    [
        ("", "", "", "", True),
        ("", ".release.cta", ".acquire.cta", "", True),
        ("", ".relaxed.cta", "", "", False),
        ("fence.acq_rel.cta;", ".relaxed.cta", "", "", True),
        ("", "", ".relaxed.cta", "", False),
        ("", "", ".relaxed.cta", "fence.acq_rel.cta;", True),
        (
            "fence.release.sync_restrict::shared::cta.cluster;", ".relaxed.cta",
            ".relaxed.cta", "fence.acquire.sync_restrict::shared::cluster.cluster;", True,
        ),
        ("fence.proxy.async;", ".relaxed.cta", "", "", False),
    ],
)  # fmt: skip
def test_semantics_of_mbarriers(before, arrive, wait, after, clean):
    body = _LOCAL.format(before=before, arrive=arrive, wait=wait, after=after)
    assert kinds(body) == ([] if clean else RACE)


_REMOTE = """
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 64;
@%p2 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
@!%p3 bra CONSUME;
mapa.shared::cluster.u32 %r8, %r4, 1;
mapa.shared::cluster.u32 %r9, %r30, 1;
st.shared::cluster.b32 [%r8], %r1;
mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r9];
bra DONE;
CONSUME:
W: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p6, [%r30], 0, 1000;
@!%p6 bra W;
ld.shared.b32 %r8, [%r4];
DONE:
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize(
    ("arrive", "wait", "clean"),
    [
        (".release.cluster", ".acquire.cluster", True),
        (".release.cta", ".acquire.cluster", False),
        (".release.cluster", ".acquire.cta", False),
        (".relaxed.cluster", ".acquire.cluster", False),
        ("", "", True),  # what every CuTeDSL pipeline emits: the space says who is meant
    ],
)
def test_scopes_of_mbarriers_of_other_ctas(arrive, wait, clean):
    found = kinds(_REMOTE.format(arrive=arrive, wait=wait), grid=2, cluster=2)
    assert found == ([] if clean else RACE)


_STORE = """
st.{space}.b32 [{word}], %r1;
fence.proxy.async{fenced};
bar.sync 0;
@!%p2 bra DONE;
{copy}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize(
    ("space", "fenced", "clean"),
    [
        ("shared", "", True),
        ("shared", ".shared::cta", True),
        ("shared", ".shared::cluster", True),
        ("shared", ".global", False),
        ("global", "", True),
        ("global", ".global", True),
        ("global", ".shared::cta", False),
    ],
)
def test_a_proxy_fence_is_for_its_space(space, fenced, clean):
    word = {"shared": "%r4", "global": "%d2"}[space]
    copy = {
        "shared": "cp.async.bulk.global.shared::cta.bulk_group [%d1+512], [%r2], 256;",
        # The copy overwrites words that the threads wrote.
        "global": "st.bulk.weak.shared::cta [%r2], 256, 0;\nfence.proxy.async.shared::cta;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;",
    }[space]
    body = _STORE.format(space=space, word=word, fenced=fenced, copy=copy)
    assert kinds(body, target="sm_100a") == ([] if clean else ["missing proxy fence"])


@pytest.mark.parametrize(("sem", "clean"), [("release", True), ("relaxed", False)])
def test_flags_in_shared_memory(sem, clean):
    body = f"""
    @%p2 st.shared.b32 [%r2+1024], 0;
    bar.sync 0;
    @%p1 bra CONSUME;
    st.shared.b32 [%r4], %r1;
    bar.warp.sync -1;
    setp.eq.u32 %p4, %r6, 0;
    @%p4 st.{sem}.cta.shared.b32 [%r2+1024], 1;
    bra DONE;
    CONSUME:
    SPIN: ld.acquire.cta.shared.b32 %r12, [%r2+1024];
    setp.eq.u32 %p5, %r12, 0;
    @%p5 bra SPIN;
    ld.shared.b32 %r8, [%r4+128];
    DONE:
    """
    assert kinds(body) == ([] if clean else RACE)


# --- atomics of several CTAs ----------------------------------------------------------------------
_LAST_CLEARS = """
@!%p2 bra DONE;
red.relaxed.gpu.global.add.u32 [%d1], 1;
atom.{order}.global.add.u32 %r12, [%d1+64], 1;
setp.ne.u32 %p4, %r12, 1;
@%p4 bra DONE;
{access}
DONE:
"""


@pytest.mark.parametrize("access", ["st.global.b32 [%d1], 0;", "ld.global.b32 %r13, [%d1];"])
def test_an_own_atomic_hides_none_of_another_cta(access):
    """The last of two CTAs to count touches, in an ordinary way, what both have added to."""
    body = _LAST_CLEARS.format(order="acq_rel.gpu", access=access)
    assert kinds(body, grid=2) == []
    for order in ("acquire.gpu", "release.gpu", "relaxed.gpu"):
        assert kinds(_LAST_CLEARS.format(order=order, access=access), grid=2) != [], order


def test_an_own_atomic_hides_no_scope_that_is_too_narrow():
    """The last of two CTAs to count reads what both have added to."""
    access = "ld.relaxed.{}.global.b32 %r13, [%d1];"
    body = _LAST_CLEARS.format(order="relaxed.gpu", access=access)
    assert kinds(body.format("gpu"), grid=2) == []
    assert kinds(body.format("cta"), grid=2) == ["scope too narrow"]
