"""Asynchronous reductions and stores into a peer, masked copies, 16-byte atomics."""

import numpy as np
import pytest
import torch

from dsv4.simulator import KernelFault, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

SCHEDULES = ["eager", "lazy", "random"]
_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
WORDS = 64


def _kernel(body: str, expected_bytes: int) -> str:
    """Two CTAs; each copies 256 bytes of `in` to %smem + 1024 and of `in` + 512 to %smem + 1280.

    `body` may write to the peer's first area (%remote) and complete bytes on its barrier
    (%remotebar); then each CTA waits for `expected_bytes` and stores its first area to `out`.
    """
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry k(.param .b64 in, .param .b64 out)
{{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .b32 %smem, %bar, %remote, %remotebar;
ld.param.b64 %d1, [in];
ld.param.b64 %d2, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctarank;
mov.b32 %bar, smem;
add.u32 %smem, %bar, 1024;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %remote, %smem, %r3;
mapa.shared::cluster.u32 %remotebar, %bar, %r3;
mul.wide.u32 %d3, %r2, 256;
add.u64 %d1, %d1, %d3;
add.u64 %d2, %d2, %d3;
mul.wide.u32 %d4, %r1, 4;
add.u64 %d5, %d1, %d4;
add.u64 %d6, %d2, %d4;
shl.b32 %r4, %r1, 2;
add.u32 %r5, %smem, %r4;
ld.global.b32 %r6, [%d5];
ld.global.b32 %r7, [%d5+512];
st.shared.b32 [%r5], %r6;
st.shared.b32 [%r5+256], %r7;
setp.eq.u32 %p1, %r1, 0;
@!%p1 bra READY;
mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {expected_bytes};
READY:
fence.proxy.async.shared::cta;
{_SYNC}
add.u32 %r8, %remote, %r4;
add.u32 %r9, %smem, 256;
{body}
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%bar], 0, 1000;
@!%p3 bra W;
ld.shared.b32 %r10, [%r5];
st.global.b32 [%d6], %r10;
{_SYNC}
ret;
}}
"""


def _run(body: str, expected_bytes: int, before: np.ndarray, schedule: str) -> np.ndarray:
    """`before` [2 areas, 2 CTAs, 64 words] of u32; the first area of each CTA afterwards."""
    out = torch.zeros((2, WORDS), dtype=torch.int32)
    report = simulate_ptx(
        _kernel(body, expected_bytes), "k", grid=(2, 1, 1), block=(WORDS, 1, 1), cluster=(2, 1, 1),
        shared=2048, params=(torch.from_numpy(before.view(np.int32)), out), schedule=schedule,
    )  # fmt: skip
    report.raise_if_racy()
    return out.numpy().view(np.uint32)


def _reduced(op: str, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    a, b = old.view(kind), new.view(kind)
    one = a.dtype.type(1)
    with np.errstate(over="ignore"):
        out = {
            "add": lambda: a + b, "min": lambda: np.minimum(a, b), "max": lambda: np.maximum(a, b),
            "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
            "inc": lambda: np.where(a >= b, 0, a + one),
            "dec": lambda: np.where((a == 0) | (a > b), b, a - one),
        }[op]()  # fmt: skip
    return out.astype(a.dtype).view(np.uint32)


REDUCTIONS = [
    *(("add", kind) for kind in ("u32", "s32", "u64")),
    *((op, "b32") for op in ("and", "or", "xor")),
    ("min", "s32"), ("max", "u32"), ("inc", "u32"), ("dec", "u32"),
]  # fmt: skip
NUMPY = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64}


def _inputs(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, (2, 2, WORDS), np.uint32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("op", "kind"), REDUCTIONS)
def test_red_async(op, kind, schedule, seed):
    """Each CTA combines its second area into the peer's first."""
    before = _inputs(seed)
    line = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op}.{kind} "
    if kind == "u64":
        body = (
            "and.b32 %r11, %r1, 1;\nsetp.ne.u32 %p4, %r11, 0;\n@%p4 bra W;\n"
            f"ld.shared.b64 %d7, [%r5+256];\n{line}[%r8], %d7, [%remotebar];"
        )
    else:
        body = f"{line}[%r8], %r7, [%remotebar];"
    found = _run(body, 4 * WORDS, before, schedule)
    for cta in range(2):
        wanted = _reduced(op, NUMPY[kind], before[0, cta], before[1, 1 - cta])
        np.testing.assert_array_equal(found[cta], wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("op", "kind"), REDUCTIONS)
def test_bulk_reduction_to_a_peer(op, kind, schedule, seed):
    before = _inputs(seed)
    found = _run(
        "@%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        f".{op}.{kind} [%remote], [%r9], 256, [%remotebar];",
        256, before, schedule,
    )  # fmt: skip
    for cta in range(2):
        wanted = _reduced(op, NUMPY[kind], before[0, cta], before[1, 1 - cta])
        np.testing.assert_array_equal(found[cta], wanted)


def test_bulk_zeros(seed):
    before = _inputs(seed)
    found = _run(
        "mov.b64 %d7, 96;\nadd.u32 %r11, %smem, 32;\n"
        "@%p1 st.bulk.weak.shared::cta [%r11], %d7, 0;\n"
        "@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 16;\nbar.sync 0;",
        16, before, "eager",
    )  # fmt: skip
    expected = before[0].copy()
    expected[:, 8:32] = 0
    np.testing.assert_array_equal(found, expected)


def test_bulk_zeros_stay_inside():
    with pytest.raises(KernelFault, match=r"st\.bulk of 4096 bytes"):
        _run(
            "mov.b64 %d7, 4096;\n@%p1 st.bulk.weak.shared::cta [%smem], %d7, 0;", 0, _inputs(0),
            "eager",
        )  # fmt: skip


@pytest.mark.parametrize("written", [0xFFFF, 0x0001, 0xA5C3, 0])
def test_masked_bulk_store(written, seed):
    """Bit i of the mask lets byte i of every 16 through."""
    before = _inputs(seed)
    target = torch.from_numpy(_inputs(seed + 1)[0].view(np.uint8).copy())
    initial = target.numpy().copy()
    text = _kernel(
        f".reg .b16 %h1;\nmov.b16 %h1, {written};\n"
        "@!%p1 bra STORED;\n"
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d2], [%smem], 256, %h1;\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nSTORED:\nbra LAST;",
        0,
    ).replace("ret;", "LAST:\nret;")
    simulate_ptx(
        text, "k", grid=(2, 1, 1), block=(WORDS, 1, 1), cluster=(2, 1, 1), shared=2048,
        params=(torch.from_numpy(before.view(np.int32)), target), races=False,
    )  # fmt: skip
    open_byte = [bool(written >> i & 1) for i in range(16)] * 16
    source = before[0].view(np.uint8)
    np.testing.assert_array_equal(target.numpy(), np.where(open_byte, source, initial))


@pytest.mark.parametrize("op", ["exch", "cas"])
def test_atomics_of_16_bytes(op, seed):
    """One after the other lanes exchange, or replace what equals their expectation."""
    generator = np.random.default_rng(seed)
    memory = generator.integers(0, 1 << 63, (2, 2), np.int64)  # two cells of 16 bytes
    start = memory.copy()
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 cells, .param .b64 out)
{{
.reg .b32 %r<4>; .reg .b64 %d<16>; .reg .b128 %q<4>; .reg .pred %p1;
ld.param.b64 %d1, [cells];
ld.param.b64 %d2, [out];
mov.u32 %r1, %tid.x;
cvt.u64.u32 %d3, %r1;
mov.b64 %d4, 77;
mov.b128 %q0, {{%d3, %d4}};
ld.global.v2.b64 {{%d5, %d6}}, [%d1+16];
mov.b128 %q1, {{%d5, %d6}};
{
        "atom.relaxed.gpu.global.exch.b128 %q2, [%d1], %q0;"
        if op == "exch"
        else "atom.relaxed.gpu.global.cas.b128 %q2, [%d1+16], %q1, %q0;"
    }
mov.b128 {{%d7, %d8}}, %q2;
mul.wide.u32 %d9, %r1, 16;
add.u64 %d9, %d2, %d9;
st.global.v2.b64 [%d9], {{%d7, %d8}};
ret;
}}
"""
    cells, out = torch.from_numpy(memory), torch.zeros((32, 2), dtype=torch.int64)
    simulate_ptx(text, "k", grid=(1, 1, 1), block=(32, 1, 1), params=(cells, out), races=False)
    found = out.numpy()
    if op == "exch":
        assert (found[0] == start[0]).all()
        np.testing.assert_array_equal(found[1:], [[lane, 77] for lane in range(31)])
        np.testing.assert_array_equal(cells.numpy(), [[31, 77], start[1]])
    else:  # the first lane finds what it expects
        assert (found[0] == start[1]).all()
        np.testing.assert_array_equal(found[1:], [[0, 77]] * 31)
        np.testing.assert_array_equal(cells.numpy(), [start[0], [0, 77]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_arrival_of_copies_does_not_repeat_those_of_the_one_before(schedule) -> None:
    """What has been stored over a complete copy stays, when later copies of the thread arrive."""
    wait = "WAIT{0}:\nmbarrier.try_wait.parity.shared.b64 %p1, [%bar], {0};\n@!%p1 bra WAIT{0};"
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%bar];"
    text = f"""
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry k(.param .b64 in, .param .b64 out)
{{
.reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .b32 %bar, %smem;
ld.param.b64 %d1, [in];
ld.param.b64 %d2, [out];
mov.u32 %r1, %tid.x;
mov.b32 %bar, smem;
shl.b32 %r2, %r1, 2;
add.u32 %smem, %bar, %r2;
mul.wide.u32 %d3, %r1, 4;
add.u64 %d1, %d1, %d3;
add.u64 %d2, %d2, %d3;
setp.eq.u32 %p2, %r1, 0;
@%p2 mbarrier.init.shared.b64 [%bar], 32;
bar.sync 0;
cp.async.ca.shared.global [%smem+1024], [%d1], 4;
{arrive}
{wait.format(0)}
mov.b32 %r3, 7;
st.shared.b32 [%smem+1024], %r3;
cp.async.ca.shared.global [%smem+2048], [%d1], 4;
{arrive}
{wait.format(1)}
ld.shared.b32 %r4, [%smem+1024];
ld.shared.b32 %r5, [%smem+2048];
st.global.b32 [%d2], %r4;
st.global.b32 [%d2+128], %r5;
ret;
}}
"""
    source = torch.arange(100, 132, dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    simulate_ptx(
        text,
        "k",
        grid=(1, 1, 1),
        block=(32, 1, 1),
        shared=4096,
        params=(source, out),
        schedule=schedule,
    )
    assert (out[:32] == 7).all()
    assert torch.equal(out[32:], source)
