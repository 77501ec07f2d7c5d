"""Asynchronous copies: their shared side, their global side, and the proxy fences between."""

import pytest
import torch

from dsv4.simulator import KernelFault
from tests.simulator.helpers.ptx import kinds, run_body, tensor_map

pytestmark = pytest.mark.stage("simulator")

SCHEDULES = ("eager", "lazy", "random")
BARRIER = """
add.s32 %r30, %r2, 2048;
@!%p2 bra READY;
mbarrier.init.shared.b64 [%r30], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
"""
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30], 256;"
LOAD = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r30];"
)
WAIT = """
W: mbarrier.try_wait.parity.shared.b64 %p6, [%r30], 0, 1000;
@!%p6 bra W;
"""
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;"
COMMIT = "cp.async.bulk.commit_group;"
FENCE = "fence.proxy.async;"
WHOLE, READ = "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"


# --- global memory written by threads, read by a copy ---------------------------------------------
def _load_after_store(fence: str, sync: str) -> str:
    return f"""{BARRIER}
    st.global.b32 [%d2], %r1;
    {fence}
    {sync}
    @!%p2 bra JOIN;
    {EXPECT}
    {LOAD}
    JOIN:
    {WAIT}
    """


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_reads_what_threads_wrote(schedule):
    sync = "bar.sync 0;"
    assert kinds(_load_after_store(FENCE, sync), schedule=schedule) == []
    assert kinds(_load_after_store("", sync), schedule=schedule) == ["missing proxy fence"]
    assert kinds(_load_after_store(FENCE, ""), schedule=schedule) == ["read-write race"]


def test_the_reader_may_fence():
    body = _load_after_store("", "bar.sync 0;").replace(EXPECT, FENCE + EXPECT)
    assert kinds(body) == []


def test_a_fence_before_the_write_is_too_early():
    body = _load_after_store("", "bar.sync 0;").replace("st.global", f"{FENCE}\nst.global")
    assert kinds(body) == ["missing proxy fence"]


def test_threads_write_what_a_copy_still_reads():
    body = f"""{BARRIER}
    @!%p2 bra JOIN;
    {EXPECT}
    {LOAD}
    JOIN:
    {{wait}}
    st.global.b32 [%d2], %r1;
    """
    assert kinds(body.format(wait=WAIT)) == []
    assert "read-write race" in kinds(body.format(wait=""))


# --- global memory written by a copy, read by threads ---------------------------------------------
def _store(wait: str, sync: str, then: str) -> str:
    return f"""
    st.shared.b32 [%r4], %r1;
    {FENCE}
    bar.sync 0;
    @!%p2 bra JOIN;
    {STORE}
    {COMMIT}
    {wait}
    JOIN:
    {sync}
    {then}
    @!%p2 bra DONE;
    {WHOLE}
    DONE:
    """


@pytest.mark.parametrize("then", ["ld.global.b32 %r10, [%d2];", "st.global.b32 [%d2], 1;"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_touch_what_a_copy_wrote(then, schedule):
    kind = ["read-write race" if then.startswith("ld") else "write-write race"]
    assert kinds(_store(WHOLE, "bar.sync 0;", then), schedule=schedule) == []
    # .read waits for the source alone.
    assert kinds(_store(READ, "bar.sync 0;", then), schedule=schedule) == kind
    assert kinds(_store("", "bar.sync 0;", then), schedule=schedule) == kind
    assert kinds(_store(WHOLE, "", then), schedule=schedule) == kind


def test_a_lazy_copy_has_only_read_its_source():
    out = torch.zeros(256, dtype=torch.int32)
    then = "ld.global.b32 %r10, [%d2]; st.global.b32 [%d2+512], %r10;"
    for wait, arrived in ((WHOLE, True), (READ, False)):
        out.zero_()
        run_body(_store(wait, "bar.sync 0;", then), out=out, schedule="lazy")
        assert out[:64].tolist() == list(range(64))
        assert bool(out[128:160].any()) == arrived  # warp 0 read before it waited


def test_two_copies_to_one_place():
    again = f"{STORE} {COMMIT}"
    body = _store("{wait}", "", "").replace("{wait}", "{wait}" + again + READ)
    assert kinds(body.format(wait=WHOLE)) == []
    assert kinds(body.format(wait="")) == ["write-write race"]


def test_reductions_do_not_conflict_with_each_other():
    reduction = STORE.replace("cp.async.bulk", "cp.reduce.async.bulk").replace(
        ".bulk_group", ".bulk_group.add.u32"
    )
    body = _store(reduction + COMMIT + WHOLE, "", "").replace(STORE, reduction)
    assert kinds(body, grid=3) == []
    read = _store(WHOLE, "", "ld.global.b32 %r10, [%d2];").replace(STORE, reduction)
    assert kinds(read) == ["read-write race"]


def test_the_source_may_be_reused_after_read():
    then = "st.shared.b32 [%r4], 1;"
    assert kinds(_store(READ, "bar.sync 0;", then)) == []
    assert kinds(_store("", "bar.sync 0;", then)) == ["read-write race"]
    assert kinds(_store(READ, "", then)) == ["read-write race"]


def test_a_copy_over_what_threads_wrote_needs_a_proxy_fence():
    body = f"""{BARRIER}
    st.shared.b32 [%r4], %r1;
    {{fence}}
    bar.sync 0;
    @!%p2 bra JOIN;
    {EXPECT}
    {LOAD}
    JOIN:
    {WAIT}
    """
    assert kinds(body.format(fence=FENCE)) == []
    assert kinds(body.format(fence="")) == ["missing proxy fence"]


# --- between CTAs ---------------------------------------------------------------------------------
def _handed_over(fence: str, release: str, acquire: str) -> str:
    """CTA 0 writes and raises a flag; CTA 1 waits for it and copies."""
    return f"""{BARRIER}
    @!%p2 bra DONE;
    @!%p3 bra CONSUME;
    st.global.b32 [%d1], 7;
    {fence}
    {release} [%d1+512], 1;
    bra DONE;
    CONSUME:
    SPIN: {acquire} %r11, [%d1+512];
    setp.eq.u32 %p5, %r11, 0;
    @%p5 bra SPIN;
    {{reader}}
    {EXPECT}
    {LOAD}
    {WAIT}
    DONE:
    """


RELEASE, ACQUIRE = "st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_flag_and_a_fence_hand_over_to_another_ctas_copy(schedule):
    body = _handed_over(FENCE, RELEASE, ACQUIRE)
    assert kinds(body.format(reader=""), grid=2, schedule=schedule) == []
    body = _handed_over("", RELEASE, ACQUIRE)
    assert kinds(body.format(reader=FENCE), grid=2, schedule=schedule) == []
    assert kinds(body.format(reader=""), grid=2, schedule=schedule) == ["missing proxy fence"]
    body = _handed_over(FENCE, "st.relaxed.gpu.global.b32", ACQUIRE)
    assert kinds(body.format(reader=""), grid=2, schedule=schedule) == ["read-write race"]


def test_a_release_covers_only_what_its_thread_knows():
    """All threads of CTA 0 write, one of them raises the flag: a barrier must lie between."""
    body = f"""
    @!%p3 bra CONSUME;
    st.global.b32 [%d2], %r1;
    {{sync}}
    @!%p2 bra DONE;
    {RELEASE} [%d1+512], 1;
    bra DONE;
    CONSUME:
    SPIN: {ACQUIRE} %r11, [%d1+512];
    setp.eq.u32 %p5, %r11, 0;
    @%p5 bra SPIN;
    ld.global.b32 %r10, [%d2];
    DONE:
    """
    assert kinds(body.format(sync="bar.sync 0;"), grid=2) == []
    assert kinds(body.format(sync=""), grid=2) == ["read-write race"]
    assert kinds(body.format(sync="bar.warp.sync 0xffffffff;"), grid=2) == ["read-write race"]


def test_order_passes_through_a_third_cta():
    body = f"""
    @!%p2 bra DONE;
    setp.eq.u32 %p7, %r7, 1;
    @%p7 bra MIDDLE;
    @!%p3 bra LAST;
    st.global.b32 [%d1], 7;
    {RELEASE} [%d1+512], 1;
    bra DONE;
    MIDDLE:
    A: {ACQUIRE} %r11, [%d1+512];
    setp.eq.u32 %p5, %r11, 0;
    @%p5 bra A;
    {{release}} [%d1+516], 1;
    bra DONE;
    LAST:
    B: {ACQUIRE} %r11, [%d1+516];
    setp.eq.u32 %p5, %r11, 0;
    @%p5 bra B;
    ld.global.b32 %r10, [%d1];
    DONE:
    """
    assert kinds(body.format(release=RELEASE), grid=3) == []
    relaxed = body.format(release="st.relaxed.gpu.global.b32")
    assert kinds(relaxed, grid=3) == ["read-write race"]


# --- tensor copies --------------------------------------------------------------------------------
def _tensor(then: str, wait: str = WHOLE) -> str:
    return f"""
    mov.b64 %d6, map0;
    @!%p2 bra JOIN;
    st.shared.b32 [%r2], 1;
    {{initialise}}
    {FENCE}
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d6, {{{{0, 4}}}}], [%r2];
    {COMMIT}
    {wait}
    JOIN:
    bar.sync 0;
    {then}
    @!%p2 bra DONE;
    {WHOLE}
    DONE:
    """.format(initialise=" ".join(f"st.shared.b32 [%r2+{4 * i}], 1;" for i in range(16)))


def test_a_tensor_store_writes_its_box_and_nothing_else():
    """The map covers 8 x 8 of a 16 x 8 tensor; the box of 4 x 4 lies at (4, 0)."""
    out = torch.zeros(16, 8, dtype=torch.int32)
    options = {"out": out, "maps": (tensor_map(out[:8], (4, 4)),), "threads": 32}
    inside, beside = "ld.global.b32 %r10, [%d1+128];", "ld.global.b32 %r10, [%d1+144];"
    assert kinds(_tensor(inside), **options) == []
    assert out[4:8, :4].eq(1).all() and int(out.sum()) == 16
    assert kinds(_tensor(inside, READ), **options) == ["read-write race"]
    assert kinds(_tensor(beside, READ), **options) == []
    beyond = _tensor("ld.global.b32 %r10, [%d1+256];", READ).replace("{0, 4}", "{0, 6}")
    assert kinds(beyond, **options) == []


def test_a_tensor_store_outside_is_still_a_fault():
    out = torch.zeros(16, 8, dtype=torch.int32)
    body = _tensor("").replace("{0, 4}", "{0, -4}")
    with pytest.raises(KernelFault, match="negative coordinates"):
        run_body(body, out=out, maps=(tensor_map(out, (4, 4)),), threads=32)


# --- copies between CTAs of a cluster -------------------------------------------------------------
def test_the_source_of_a_copy_to_another_cta():
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    body = f"""{BARRIER}
    st.shared.b32 [%r4], %r1;
    {{fence}}
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %r31, %r30, 1;
    add.s32 %r32, %r2, 1024;
    mapa.shared::cluster.u32 %r32, %r32, 1;
    @!%p3 bra TARGET;
    @!%p2 bra DONE;
    {copy} [%r32], [%r2], 256, [%r31];
    bra DONE;
    TARGET:
    @%p2 {EXPECT}
    {WAIT}
    ld.shared.b32 %r10, [%r4+1024];
    DONE:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    """
    options = {"grid": 2, "cluster": 2}
    assert kinds(body.format(fence=FENCE), **options) == []
    assert kinds(body.format(fence=""), **options) == ["missing proxy fence"]


def test_cp_async_reads_global_memory():
    body = """
    st.global.b32 [%d2], %r1;
    {sync}
    xor.b32 %r8, %r3, 128;
    cvt.u64.u32 %d3, %r8;
    add.u64 %d3, %d1, %d3;
    cp.async.ca.shared.global [%r4], [%d3], 4;
    cp.async.wait_all;
    """
    assert kinds(body.format(sync="bar.sync 0;")) == []
    assert kinds(body.format(sync="")) == ["read-write race"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("before", "after", "clean"),
    [
        (FENCE, "", True),
        ("", FENCE, True),
        ("", "", False),
        ("", "fence.proxy.async.global;", False),
    ],
)
def test_what_cp_async_wrote_is_fenced_for_other_copies(before, after, clean, schedule):
    """PTX has products and bulk copies see what cp.async wrote behind a proxy fence. NVIDIA's own
    main loops go without: a warning."""
    body = f"""
    cp.async.ca.shared.global [%r4], [%d2], 4;
    cp.async.wait_all;
    {before}
    bar.sync 0;
    {after}
    @%p2 cp.async.bulk.global.shared::cta.bulk_group [%d1+512], [%r2], 256;
    @%p2 cp.async.bulk.commit_group;
    @%p2 cp.async.bulk.wait_group 0;
    """
    report = run_body(body, schedule=schedule)
    found = {warning.kind for warning in report.warnings}
    assert not report.races and found == (set() if clean else {"cp.async without proxy fence"})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("fence", "clean"), [(FENCE, True), ("", False), ("fence.proxy.async.global;", False)]
)
def test_what_st_async_wrote_is_fenced_for_other_copies(fence, clean, schedule):
    """PTX does not say through which proxy it writes: a warning, too. Threads need no fence."""
    body = f"""{BARRIER}
    @%p2 {EXPECT}
    bar.sync 0;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r1, [%r30];
    {WAIT}
    ld.shared.b32 %r10, [%r4];
    {fence}
    bar.sync 0;
    @%p2 {STORE}
    @%p2 {COMMIT}
    @%p2 {WHOLE}
    """
    report = run_body(body, schedule=schedule)
    found = {warning.kind for warning in report.warnings}
    assert not report.races and found == (set() if clean else {"st.async without proxy fence"})


# --- matrices and tensor maps in shared memory ----------------------------------------------------
@pytest.mark.parametrize(
    "load",
    [
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r20, %r21}",
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.b6x16_p32 {%r20, %r21, %r22, %r23}",
        "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {%r20, %r21}",
    ],
)
def test_matrices_are_read_behind_a_barrier(load):
    """Warp 1 loads what warp 0 stores."""
    body = f"""
    shl.b32 %r8, %r6, 4;
    add.u32 %r9, %r2, %r8;
    @%p1 st.shared.v4.b32 [%r9], {{%r1, %r1, %r1, %r1}};
    SYNC
    @%p1 bra END;
    {load}, [%r9];
    add.u32 %r24, %r20, %r21;
    END:
    """
    assert kinds(body.replace("SYNC", ""), target="sm_100a") == ["read-write race"]
    assert kinds(body.replace("SYNC", "bar.sync 0;"), target="sm_100a") == []


@pytest.mark.parametrize(
    ("space", "place", "word"), [("shared::cta", "%r2", "%r4"), ("global", "%d1", "%d2")]
)
def test_an_edited_tensor_map_is_written_as_a_whole(space, place, word):
    body = f"""
    st.{space}.b32 [{word}], %r1;
    {{sync}}
    @%p2 tensormap.replace.tile.global_dim.{space}.b1024.b32 [{place}+128], 1, 64;
    """
    assert kinds(body.format(sync="")) == ["write-write race"]
    assert kinds(body.format(sync="bar.sync 0;")) == []


def test_a_published_tensor_map_is_read_and_written():
    """Warp 0 edits a map in shared memory and copies it to global memory; warp 1 reads it."""
    body = """
    @%p1 st.shared.b32 [%r4], %r1;
    bar.sync 0;
    @%p2 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r2], 1, 64;
    {warp}
    @%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%d1], [%r2], 128;
    {cta}
    @!%p1 ld.global.b32 %r9, [%d2+-128];
    """
    warp, cta = "bar.warp.sync -1;", "bar.sync 0;"
    assert kinds(body.format(warp=warp, cta=cta)) == []
    assert kinds(body.format(warp=warp, cta="")) == ["read-write race"]
    warnings = run_body(body.format(warp="", cta=cta)).warnings
    assert [found.kind for found in warnings] == ["lanes ordered by convergence alone"]
