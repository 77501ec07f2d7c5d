"""Rules of memory that are no races: read-only loads, mbarriers, what was never written."""

import pytest
import torch

from dsv4.simulator import KernelFault, simulate_ptx
from tests.simulator.helpers.ptx import kinds, run_body

pytestmark = pytest.mark.stage("simulator")

NC = "ld.global.nc.b32 %r8, [%d2];"
INCOHERENT = ["non-coherent read of data written in the launch"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (NC, []),
        (f"{NC}\nst.global.b32 [%d2+512], %r8;", []),
        (f"st.global.b32 [%d2], %r1;\nbar.sync 0;\n{NC}", INCOHERENT),
        (f"{NC}\nbar.sync 0;\nst.global.b32 [%d2], %r1;", INCOHERENT),
        (f"{NC}\nbar.sync 0;\nred.relaxed.gpu.global.add.u32 [%d2], 1;", INCOHERENT),
        (f"red.relaxed.gpu.global.add.u32 [%d2], 1;\nbar.sync 0;\n{NC}", INCOHERENT),
        ("st.global.b32 [%d2], %r1;\nbar.sync 0;\nld.global.b32 %r8, [%d2];", []),
    ],
)
def test_read_only_loads_are_of_what_the_launch_does_not_write(body, found):
    assert kinds(body) == found


_BARRIER = """
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
_COPY = """
@!%p2 bra SKIP;
add.s32 %r31, %r2, 1024;
mbarrier.init.shared.b64 [%r31], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %d5, [%r31], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+{offset}], [%d1], 64, [%r31];
W: mbarrier.try_wait.parity.shared.b64 %p6, [%r31], 0, 1000;
@!%p6 bra W;
SKIP:
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("@%p2 st.shared.b32 [%r30], %r1;", ["mbarrier overwritten"]),
        ("@%p2 st.shared.b32 [%r30+4], %r1;", ["mbarrier overwritten"]),
        ("@%p2 st.shared.b32 [%r30+8], %r1;", []),
        ("@%p2 st.shared.v4.b32 [%r30+-16], {%r1, %r1, %r1, %r1};", []),
        ("@%p2 mbarrier.inval.shared.b64 [%r30];\n@%p2 st.shared.b32 [%r30], %r1;", []),
        (_COPY.format(offset=2048), ["mbarrier overwritten"]),
        (_COPY.format(offset=1984), []),
        ("@%p2 mbarrier.init.shared.b64 [%r30], 2;", ["mbarrier initialised again"]),
        (
            "@%p2 mbarrier.inval.shared.b64 [%r30];\n@%p2 mbarrier.init.shared.b64 [%r30], 2;", [],
        ),
    ],
)  # fmt: skip
def test_live_mbarriers_are_left_alone(body, found):
    assert kinds(_BARRIER + body) == found


def _uninitialised(body: str, **options) -> list[str]:
    out = torch.zeros(256, dtype=torch.int32)
    return kinds(body, out=out, uninitialised=(out[64:128],), **options)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("ld.global.b32 %r8, [%d2];", []),
        ("ld.global.b32 %r8, [%d2+256];", ["uninitialised read"]),
        ("st.global.b32 [%d2+256], 1;\nld.global.b32 %r8, [%d2+256];", []),
        (_COPY.format(offset=0).replace("[%d1]", "[%d1+256]"), ["uninitialised read"]),
        (_COPY.format(offset=0), []),
    ],
)
def test_reads_of_what_holds_nothing(body, found):
    assert _uninitialised(body) == found


def test_a_block_has_at_most_1024_threads():
    run_body("", threads=1024)
    with pytest.raises(KernelFault, match="1056 threads, of 1024"):
        run_body("", threads=1056)


def test_a_cluster_has_at_most_16_ctas():
    run_body("", grid=16, cluster=16, non_portable=True)
    with pytest.raises(KernelFault, match="32 CTAs, of 16"):
        run_body("", grid=32, cluster=32, non_portable=True)


def test_more_than_8_ctas_need_the_attribute():
    run_body("", grid=8, cluster=8)
    with pytest.raises(KernelFault, match="16 CTAs; more than 8 need the attribute"):
        run_body("", grid=16, cluster=16)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("add.s32 %r8, %r9, 1;", True),
        ("mov.b32 %r8, %r9;\nadd.s32 %r10, %r8, 1;", True),
        ("@%p5 st.global.b32 [%d2], %r1;", True),
        ("st.global.b32 [%d2], %r9;", True),
        # A pack may hold what nobody needs, and a copy alone is no use.
        ("mov.b64 %d8, {%r1, %r9};\nst.global.b64 [%d1], %d8;", False),
        ("mov.b32 %r8, %r9;", False),
        ("mov.b32 %r9, 1;\nadd.s32 %r8, %r9, 1;", False),
        # Code that no warp runs.
        ("bra END;\nadd.s32 %r8, %r9, 1;\nEND:", False),
    ],
)
def test_registers_that_nothing_writes(body, found):
    kinds = [warning.kind for warning in run_body(body, threads=1).warnings]
    assert kinds == ["register never written"] * found


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block": (1, 1, 128)}, "z is 64 at most"),
        ({"grid": (1, 65536, 1)}, "y and z are 65535 at most"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of cluster"),
    ],
)
def test_sizes_that_no_launch_has(sizes, message):
    text = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{\nret;\n}\n"
    sizes = {"grid": (1, 1, 1), "block": (32, 1, 1), **sizes}
    with pytest.raises(KernelFault, match=message):
        simulate_ptx(text, "k", params=(), **sizes)


SLICE_ACCESSES = {
    "load": "ld.global.b32 %r8, [%d1+{offset}];",
    "store": "st.global.b32 [%d1+{offset}], %r1;",
    "atomic": "red.relaxed.gpu.global.add.u32 [%d1+{offset}], 1;",
    "copy": "@%p2 cp.async.ca.shared.global [%r2], [%d1+{offset}], 4;",
}


@pytest.mark.parametrize("access", SLICE_ACCESSES.values(), ids=SLICE_ACCESSES)
def test_accesses_past_a_slice_are_faults(access):
    """The storage goes on before and behind what the kernel is given."""
    storage = torch.zeros(512, dtype=torch.int32)
    part = storage[128:256]
    for offset in (0, 4 * 127):
        run_body(access.format(offset=offset), out=part)
    for offset in (-512, -64, 512, 4 * 383):
        with pytest.raises(KernelFault, match="in the storage of argument 0, but not in the slice"):
            run_body(access.format(offset=offset), out=part)


def test_gaps_between_the_rows_of_a_slice_belong_to_it():
    """A kernel may load whole vectors of rows that are padded."""
    storage = torch.arange(512, dtype=torch.int32)
    rows = storage.view(8, 64)[2:4, :60]
    run_body("ld.global.b32 %r8, [%d1+248];", out=rows)
    with pytest.raises(KernelFault, match="slice"):
        run_body("ld.global.b32 %r8, [%d1+496];", out=rows)


def test_storages_of_further_buffers_are_open_as_a_whole():
    storage = torch.zeros(512, dtype=torch.int32)
    run_body("ld.global.b32 %r8, [%d1+1024];", out=storage[128:256], buffers=(storage,))


# Warp 0 (or thread 0 of CTA 1) writes a word, warp 1 (or CTA 0) reads it.
SPACES = {
    "global": ("[%d2]", "[%d2+-128]"),
    "shared": ("[%r4]", "[%r4+-128]"),
}
_WAIT_A_WHILE = """
mov.u32 %r20, 0;
A: add.u32 %r20, %r20, 1;
setp.lt.u32 %p7, %r20, 300;
@%p7 bra A;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("read", ["volatile", "relaxed.cta", "acquire.gpu"])
@pytest.mark.parametrize("space", SPACES)
def test_an_ordinary_write_and_a_strong_read_need_order(space, read, schedule):
    """Whichever of the two comes first."""
    mine, its = SPACES[space]
    store, load = f"st.{space}.b32 {mine}, 7;", f"ld.{read}.{space}.b32 %r9, {its};"
    fill = f"st.{space}.b32 {mine}, 0;\nbar.sync 0;"
    options = {"schedule": schedule}
    for body in (
        f"{fill}\n@%p1 {store}\n@!%p1 {load}",
        f"{fill}\n@%p1 bra W;\n{load}\nbra D;\nW: {_WAIT_A_WHILE}\n{store}\nD:",
    ):
        assert kinds(body, **options) == ["read-write race"]
        assert kinds(body.replace("st." + space + ".b32 " + mine + ", 7", "nanosleep.u32 1")) == []
    ordered = f"{fill}\n@%p1 {store}\nbar.sync 0;\n@!%p1 {load}\nbar.sync 0;\n@%p1 {store}"
    assert kinds(ordered, **options) == []


@pytest.mark.parametrize(("store", "clean"), [("st.release.gpu", True), ("st", False)])
def test_a_flag_is_no_ordinary_word(store, clean):
    """It hands over nothing but itself."""
    body = f"""
    @!%p2 bra DONE;
    @%p3 bra CONSUME;
    {store}.global.b32 [%d1], 1;
    bra DONE;
    CONSUME:
    SPIN: ld.acquire.gpu.global.b32 %r12, [%d1];
    setp.eq.u32 %p5, %r12, 0;
    @%p5 bra SPIN;
    DONE:
    """
    assert kinds(body, grid=2) == ([] if clean else ["read-write race"])


def test_bytes_of_a_word_that_is_polled():
    store = "@%p2 st.global.b8 [%d1+{0}], %r1;\n@!%p1 ld.volatile.global.b16 %h1, [%d1];"
    assert kinds(store.format(1)) == ["read-write race"]
    assert kinds(store.format(2)) == []
