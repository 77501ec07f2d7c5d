"""Order between the lanes of one warp: what needs bar.warp.sync, and what does not."""

import pytest

from tests.simulator.helpers.ptx import kinds, run_body

pytestmark = pytest.mark.stage("simulator")

CONVERGENCE = "lanes ordered by convergence alone"
SYNC = "bar.warp.sync 0xffffffff;"
SHUFFLE = "shfl.sync.bfly.b32 %r20, %r1, 1, 31, 0xffffffff;"
ELECT = "elect.sync %r20|%p10, 0xffffffff;"

EXCHANGE = """
st.shared.b32 [%r4], %r1;
{sync}
xor.b32 %r8, %r3, 4;
add.s32 %r9, %r2, %r8;
ld.shared.b32 %r10, [%r9];
"""
REUSE = """
st.shared.b32 [%r4], %r1;
bar.warp.sync 0xffffffff;
xor.b32 %r8, %r3, 4;
add.s32 %r9, %r2, %r8;
ld.shared.b32 %r10, [%r9];
{sync}
st.shared.b32 [%r4], %r10;
"""
BROADCAST = """
@%p2 st.shared.b32 [%r2], 7;
bar.warp.sync 0xffffffff;
ld.shared.b32 %r10, [%r2];
{sync}
@%p2 st.shared.b32 [%r2], 8;
"""
GLOBAL_EXCHANGE = """
st.global.b32 [%d2], %r1;
{sync}
xor.b32 %r8, %r3, 4;
cvt.u64.u32 %d3, %r8;
add.u64 %d3, %d1, %d3;
ld.global.b32 %r10, [%d3];
"""
GLOBAL_REUSE = """
xor.b32 %r8, %r3, 4;
cvt.u64.u32 %d3, %r8;
add.u64 %d3, %d1, %d3;
ld.global.b32 %r10, [%d3];
{sync}
st.global.b32 [%d2], %r10;
"""
COPY = """
cp.async.ca.shared.global [%r4], [%d2], 4;
cp.async.commit_group;
cp.async.wait_group 0;
{sync}
xor.b32 %r8, %r3, 4;
add.s32 %r9, %r2, %r8;
ld.shared.b32 %r10, [%r9];
"""
CASES = {
    "copy": COPY,
    "exchange": EXCHANGE,
    "reuse": REUSE,
    "broadcast": BROADCAST,
    "global exchange": GLOBAL_EXCHANGE,
    "global reuse": GLOBAL_REUSE,
}


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
@pytest.mark.parametrize("sync", [SYNC, "bar.sync 0;"])
def test_barriers_order_lanes(body, sync):
    report = run_body(body.format(sync=sync), threads=32)
    assert not report.races and not report.warnings


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_lanes_race_without_one(body):
    report = run_body(body.format(sync=""), threads=32)
    assert [f.kind for f in report.races] == ["read-write race"]
    (race,) = report.races
    assert "lane" in race.message
    assert len(race.places) == 2


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
@pytest.mark.parametrize("collective", [SHUFFLE, ELECT])
def test_a_collective_between_is_tolerated(body, collective):
    report = run_body(body.format(sync=collective), threads=32)
    assert not report.races
    assert [f.kind for f in report.warnings] == [CONVERGENCE]


def test_a_collective_of_some_lanes_is_not_one_of_the_warp():
    body = f"""
    st.shared.b32 [%r4], %r1;
    setp.lt.u32 %p4, %r6, 16;
    @!%p4 bra SKIP;
    {SHUFFLE.replace("0xffffffff", "0xffff")}
    SKIP:
    xor.b32 %r8, %r3, 64;
    add.s32 %r9, %r2, %r8;
    ld.shared.b32 %r10, [%r9];
    """
    assert kinds(body, threads=32) == ["read-write race"]


def test_a_lane_reads_what_it_wrote():
    body = "st.shared.b32 [%r4], %r1; ld.shared.b32 %r10, [%r4]; st.shared.b32 [%r4], 1;"
    assert kinds(body) == []


def test_a_lane_reads_what_it_copied():
    body = COPY.format(sync="").replace("xor.b32 %r8, %r3, 4;", "mov.b32 %r8, %r3;")
    assert kinds(body) == []


def test_a_lane_copies_over_what_it_read_and_no_other_did():
    body = "st.shared.b32 [%r4], 1; bar.warp.sync 0xffffffff; ld.shared.b32 %r10, [{from}];" + (
        "cp.async.ca.shared.global [%r4], [%d2], 4; cp.async.wait_all;"
    )
    assert kinds(body.format(**{"from": "%r4"})) == []
    other = "xor.b32 %r8, %r3, 4; add.s32 %r9, %r2, %r8;" + body.format(**{"from": "%r9"})
    assert kinds(other, threads=32) == ["read-write race"]


def test_lanes_of_one_store_write_one_place():
    assert kinds("st.shared.b32 [%r2], 5;", threads=32) == []
    assert kinds("st.shared.b32 [%r2], %r1;", threads=32) == ["write-write race"]


# --- single lanes that synchronise for the others -------------------------------------------------
_BARRIERS = """
add.s32 %r30, %r2, 1024;
@!%p2 bra READY;
mbarrier.init.shared.b64 [%r30], 1;
mbarrier.init.shared.b64 [%r30+8], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
"""
_WAIT = "mbarrier.try_wait.parity.shared.b64 {p}, [%r30+{at}], 0, 1000;\n@!{p} bra {label};"


def _released(sync: str) -> str:
    """Warp 1 writes and one of its lanes arrives for all; warp 0 waits and reads."""
    return f"""{_BARRIERS}
    setp.eq.u32 %p5, %r6, 0;
    @%p1 bra CONSUME;
    st.shared.b32 [%r4], %r1;
    {sync}
    @%p5 mbarrier.arrive.shared.b64 %d5, [%r30];
    bra DONE;
    CONSUME:
    W: {_WAIT.format(p="%p6", at=0, label="W")}
    ld.shared.b32 %r10, [%r4+128];
    DONE:
    """


def test_one_lane_arrives_for_the_warp():
    assert not run_body(_released(SYNC)).warnings
    assert kinds(_released(SYNC)) == kinds(_released(ELECT)) == []
    assert [f.kind for f in run_body(_released(ELECT)).warnings] == [CONVERGENCE]
    assert kinds(_released("")) == ["read-write race"]


def _copied(sync: str, what: str = "") -> str:
    """Warp 1 copies, each lane waits for its own copies, and one lane arrives for all."""
    copy = "cp.async.ca.shared.global [%r4], [%d2], 4; cp.async.wait_all;"
    return _released(sync).replace("st.shared.b32 [%r4], %r1;", copy + what)


def test_one_lane_arrives_for_what_the_warp_copied():
    assert not run_body(_copied(SYNC)).warnings
    assert kinds(_copied(SYNC)) == kinds(_copied(ELECT)) == []
    assert [f.kind for f in run_body(_copied(ELECT)).warnings] == [CONVERGENCE]
    (race,) = run_body(_copied("")).races
    assert race.kind == "read-write race" and "lane 1" in race.message


def test_a_lane_arrives_for_what_it_copied():
    own = _copied("").replace("ld.shared.b32 %r10, [%r4+128]", "ld.shared.b32 %r10, [%r2+128]")
    assert kinds(own) == []
    assert kinds(own.replace("[%r2+128]", "[%r2+132]")) == ["read-write race"]


def test_copies_that_every_lane_has_released_stay_released():
    """All lanes arrive at one mbarrier, then one of them at the other."""
    arrivals = "mbarrier.arrive.shared.b64 %d5, [%r30+8];"
    body = _copied("", what=arrivals).replace("[%r30+8], 1;", "[%r30+8], 32;", 1)
    assert kinds(body.replace("[%r30+0]", "[%r30+8]")) == []


def test_copies_that_an_mbarrier_tells_of_need_no_more():
    """Their arrivals are waited for, whoever arrives elsewhere since."""
    arrivals = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r30+8];"
    body = _copied("", what=arrivals).replace("[%r30+8], 1;", "[%r30+8], 32;", 1)
    assert kinds(body.replace("[%r30+0]", "[%r30+8]")) == []


def test_an_arrival_of_copies_tells_of_copies_alone():
    """The system arrives when they are complete: what the thread has stored itself needs an arrival
    of its own, which releases."""
    stored = (
        _released("")
        .replace("@%p5 mbarrier.arrive.shared.b64 %d5, [%r30];", "{arrive}")
        .replace("[%r30], 1;", "[%r30], {count};", 1)
    )
    copied = stored.replace(
        "st.shared.b32 [%r4], %r1;", "cp.async.ca.shared.global [%r4], [%d2], 4;"
    )
    copies = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r30];"
    thread, relaxed = (
        f"{copies} mbarrier.arrive{semantics}.shared.b64 %d5, [%r30];"
        for semantics in ("", ".relaxed.cta")
    )
    assert kinds(copied.format(arrive=copies, count=32)) == []
    assert kinds(copied.format(arrive=relaxed, count=64)) == []
    assert kinds(stored.format(arrive=thread, count=64)) == []
    for arrive, count in ((copies, 32), (relaxed, 64)):
        assert kinds(stored.format(arrive=arrive, count=count)) == ["read-write race"]


def test_a_proxy_fence_behind_copies_is_still_only_warned_of():
    """One lane arrives behind bar.warp.sync, another before; a bulk store reads the copies."""
    body = f"""
    cp.async.ca.shared.global [%r4], [%d2], 4;
    cp.async.wait_all;
    {_BARRIERS}
    setp.eq.u32 %p5, %r6, 3;
    @%p5 mbarrier.arrive.shared.b64 %d5, [%r30];
    bar.warp.sync 0xffffffff;
    @!%p2 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    DONE:
    """.replace("bar.sync 0;", "")
    report = run_body(body, threads=32)
    assert not report.races
    assert "cp.async without proxy fence" in [f.kind for f in report.warnings]


def test_what_a_lane_released_stays_released():
    body = f"""{_BARRIERS}
    setp.eq.u32 %p5, %r6, 0;
    setp.eq.u32 %p7, %r6, 1;
    @%p1 bra CONSUME;
    @%p5 st.shared.b32 [%r2+512], 1;
    @%p5 mbarrier.arrive.shared.b64 %d5, [%r30];
    @%p7 mbarrier.arrive.shared.b64 %d5, [%r30+8];
    bra DONE;
    CONSUME:
    W: {_WAIT.format(p="%p6", at=0, label="W")}
    ld.shared.b32 %r10, [%r2+512];
    DONE:
    """
    assert kinds(body) == []


def test_one_lane_waits_for_the_warp():
    body = f"""{_BARRIERS}
    @%p1 bra CONSUME;
    st.shared.b32 [%r4], %r1;
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p5, %r6, 0;
    @%p5 mbarrier.arrive.shared.b64 %d5, [%r30];
    bra DONE;
    CONSUME:
    @!%p2 bra JOIN;
    W: {_WAIT.format(p="%p6", at=0, label="W")}
    JOIN:
    {{sync}}
    ld.shared.b32 %r10, [%r4+128];
    DONE:
    """
    assert kinds(body.format(sync=SYNC)) == []
    assert kinds(body.format(sync=SHUFFLE)) == []
    assert kinds(body.format(sync="")) == ["read-write race"]


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_one_lane_stores_what_the_warp_wrote(schedule):
    body = """
    st.shared.b32 [%r4], %r1;
    fence.proxy.async.shared::cta;
    {sync}
    @!%p2 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    DONE:
    """
    assert kinds(body.format(sync=SYNC), threads=32, schedule=schedule) == []
    assert kinds(body.format(sync=""), threads=32, schedule=schedule) == ["read-write race"]


# --- bytes ----------------------------------------------------------------------------------------
def test_bytes_of_one_word_are_told_apart():
    body = """
    add.s32 %r9, %r2, %r1;
    cvt.u16.u32 %h1, %r1;
    st.shared.b8 [%r9], %h1;
    {sync}
    {read}
    """
    own, other = "ld.shared.b8 %h2, [%r9];", "xor.b32 %r10, %r1, 1; add.s32 %r10, %r10, %r2; "
    other += "ld.shared.b8 %h2, [%r10];"
    assert kinds(body.format(sync="", read=own)) == []
    assert kinds(body.format(sync="", read=other)) == ["read-write race"]
    assert kinds(body.format(sync=SYNC, read=other)) == []


@pytest.mark.parametrize(("width", "ordered"), [(1, True), (2, True), (3, False)])
def test_halves_of_a_word_written_by_two_warps(width, ordered):
    """Warp 0 writes bytes at 0, warp 1 `width` bytes further: apart, they do not meet."""
    shift = {1: 1, 2: 2, 3: 0}[width]
    body = f"""
    mul.lo.u32 %r8, %r5, {shift};
    add.s32 %r9, %r2, %r8;
    cvt.u16.u32 %h1, %r5;
    setp.eq.u32 %p5, %r6, 0;
    @%p5 st.shared.b8 [%r9], %h1;
    """
    assert kinds(body) == ([] if ordered else ["write-write race"])


def test_a_word_read_covers_its_bytes():
    body = """
    add.s32 %r9, %r2, %r1;
    cvt.u16.u32 %h1, %r1;
    st.shared.b8 [%r9], %h1;
    {sync}
    and.b32 %r8, %r1, 0xfffffffc;
    add.s32 %r9, %r2, %r8;
    ld.shared.b32 %r10, [%r9];
    """
    assert kinds(body.format(sync="bar.sync 0;")) == []
    assert kinds(body.format(sync="")) == ["read-write race"]
    uninitialised = body.format(sync="bar.sync 0;").replace("st.shared.b8", "@%p2 st.shared.b8")
    assert kinds(uninitialised) == ["uninitialised read"]


def test_bytes_of_global_memory_are_told_apart():
    body = """
    cvt.u64.u32 %d3, %r1;
    add.u64 %d3, %d1, %d3;
    cvt.u16.u32 %h1, %r1;
    st.global.b8 [%d3], %h1;
    {sync}
    xor.b32 %r8, %r1, 1;
    cvt.u64.u32 %d3, %r8;
    add.u64 %d3, %d1, %d3;
    ld.global.b8 %h2, [%d3];
    """
    assert kinds(body.format(sync=SYNC)) == []
    assert kinds(body.format(sync="")) == ["read-write race"]
    apart = body.format(sync="").replace("xor.b32 %r8, %r1, 1", "mov.b32 %r8, %r1")
    assert kinds(apart) == []


# --- atomics --------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["bar.sync 0;", ""])
@pytest.mark.parametrize("second", ["bar.sync 0;", ""])
def test_atomics_race_with_ordinary_accesses_alone(first, second):
    body = f"""
    @%p2 st.shared.b32 [%r2], 0;
    {first}
    atom.shared.add.u32 %r10, [%r2], 1;
    red.shared.add.u32 [%r2], 1;
    {second}
    @%p2 ld.shared.b32 %r11, [%r2];
    """
    assert (kinds(body) == []) == bool(first and second)
    wide = body.replace("ld.shared.b32 %r11", "ld.shared.b64 %d3")
    wide = wide.replace("st.shared.b32 [%r2], 0", "st.shared.b64 [%r2], 0")
    assert (kinds(wide) == []) == bool(first and second)


@pytest.mark.parametrize(
    ("store", "found"),
    [
        ("st.global.b32 [%d1], %r1;", ["write-write race"]),
        ("st.global.v2.b32 [%d1], {%r7, %r1};", ["write-write race"]),
        ("st.global.b32 [%d1], %r7;", []),
        ("st.global.b32 [%d2], %r1;", []),
    ],
)
def test_lanes_of_a_store_that_write_one_place_of_global_memory(store, found):
    assert kinds(store, threads=32) == found
