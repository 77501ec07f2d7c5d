"""Data paths of tcgen05.mma against tables of the PTX ISA, through bare PTX.

The tables here say which lane holds a row of the accumulator, in the ISA's own terms (data paths A
to G); operand images are laid out by hand from the canonical layouts.
"""

import numpy as np
import pytest
import torch

from dsv4.simulator import simulate_ptx

pytestmark = pytest.mark.stage("simulator")


# Data paths: (rows, columns) held by each quarter of the 128 lanes, as slices of D [M, N] of a CTA.
def _data_path(path: str, n: int) -> list[tuple[range, range, int]]:
    """(rows, columns, first lane) pieces of an accumulator."""
    half, quarter = n // 2, n // 4
    return {
        "A": [(range(128), range(n), 0)],
        "D": [(range(128), range(n), 0)],
        "B": [(range(64), range(half), 0), (range(64), range(half, n), 64)],
        "E": [(range(64), range(half), 0), (range(64), range(half, n), 64)],
        "F": [(range(16 * w, 16 * w + 16), range(n), 32 * w) for w in range(4)],
        "G": [(range(32), range(quarter * w, quarter * w + quarter), 32 * w) for w in range(4)],
    }[path]


def _k_major_plain(matrix: np.ndarray) -> tuple[np.ndarray, int]:
    """8 x 16-byte core matrices, K neighbours 128 bytes apart, rows of cores 256 apart (K = 16)."""
    image = np.zeros(len(matrix) * 32, np.uint8)
    raw = matrix.view(np.uint8)  # [rows, 32]
    for i in range(len(matrix)):
        for core in range(2):
            at = i // 8 * 256 + core * 128 + i % 8 * 16
            image[at : at + 16] = raw[i, 16 * core : 16 * core + 16]
    return image, (128 >> 4) << 16 | (256 >> 4) << 32


def _k_major_swizzled(matrix: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows of 128 bytes in groups of 8, 16-byte chunk c of row i at c ^ (i % 8)."""
    image = np.zeros(len(matrix) * 128, np.uint8)
    raw = matrix.view(np.uint8)
    for i in range(len(matrix)):
        for chunk in range(2):
            at = i // 8 * 1024 + i % 8 * 128 + ((chunk ^ i % 8) * 16)
            image[at : at + 16] = raw[i, 16 * chunk : 16 * chunk + 16]
    return image, 1 << 16 | (1024 >> 4) << 32 | 2 << 61


def _mn_major_swizzled(matrix: np.ndarray) -> tuple[np.ndarray, int]:
    """Runs of 64 elements along M or N, 8 K rows each; the two K groups 1024 bytes apart."""
    image = np.zeros(len(matrix) // 64 * 2048, np.uint8)
    codes = matrix.view(np.uint16)
    for i in range(len(matrix)):
        for k in range(16):
            at = i // 64 * 2048 + k // 8 * 1024 + k % 8 * 128
            at += (i % 64 // 8 ^ k % 8) * 16 + i % 8 * 2
            image[at : at + 2] = codes[i, k : k + 1].view(np.uint8)
    return image, (2048 >> 4) << 16 | (1024 >> 4) << 32 | 2 << 61


LAYOUTS = {"plain": _k_major_plain, "swizzled": _k_major_swizzled, "mn": _mn_major_swizzled}
A_BYTES = 32768


def _product_kernel(group: int, columns: int, stationary: bool) -> str:
    """Copies operand images into shared memory, multiplies twice, dumps `columns` of TMEM."""
    ws = ".ws" if stationary else ""
    cta = f"cta_group::{group}"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    commit = (
        f"tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%r12], %h1;"
        if group == 2
        else f"tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.b64 [%r12];"
    )
    dump = "\n".join(
        f"add.u32 %r16, %r15, {c};\n"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r17}, [%r16];\n"
        f"tcgen05.wait::ld.sync.aligned;\nst.global.b32 [%d6+{512 * c}], %r17;"
        for c in range(columns)
    )
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 images, .param .b64 out, .param .b64 descs, .param .b32 idesc)
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<32>; .reg .b64 %d<16>;
ld.param.b64 %d1, [images];
ld.param.b64 %d2, [out];
ld.param.b64 %d3, [descs];
ld.param.b32 %r1, [idesc];
ld.global.b64 %d4, [%d3];
ld.global.b64 %d5, [%d3+8];
mov.u32 %r2, %tid.x;
shr.u32 %r3, %r2, 5;
mov.u32 %r4, %cluster_ctarank;
mov.b32 %r5, smem;
add.u32 %r12, %r5, {2 * A_BYTES};
add.u32 %r13, %r5, {2 * A_BYTES + 8};
add.u32 %r14, %r5, {2 * A_BYTES + 16};
setp.eq.u32 %p1, %r2, 0;
setp.ne.u32 %p2, %r3, 0;
@!%p1 bra READY;
mbarrier.init.shared.b64 [%r12], 1;
mbarrier.init.shared.b64 [%r13], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r13], {2 * A_BYTES};
mul.wide.u32 %d7, %r4, {2 * A_BYTES};
add.u64 %d8, %d1, %d7;
{copy} [%r5], [%d8], {2 * A_BYTES}, [%r13];
READY:
@%p2 bra ALLOCATED;
tcgen05.alloc.{cta}.sync.aligned.shared::cta.b32 [%r14], 256;
ALLOCATED:
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
W1: mbarrier.try_wait.parity.shared.b64 %p3, [%r13], 0, 1000;
@!%p3 bra W1;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ld.shared.b32 %r6, [%r14];
// The operands start at the dynamic area: add its address to both descriptors.
and.b32 %r7, %r5, 0xffffff;
shr.u32 %r7, %r7, 4;
cvt.u64.u32 %d9, %r7;
add.u64 %d4, %d4, %d9;
add.u64 %d5, %d5, %d9;
setp.ne.u32 %p4, %r4, 0;
@%p4 bra MULTIPLIED;
@!%p1 bra MULTIPLIED;
setp.ne.u32 %p5, %r2, %r2;
tcgen05.mma{ws}.{cta}.kind::f16 [%r6], %d4, %d5, %r1, %p5;
setp.eq.u32 %p5, %r2, %r2;
tcgen05.mma{ws}.{cta}.kind::f16 [%r6], %d4, %d5, %r1, %p5;
mov.b16 %h1, 3;
{commit}
MULTIPLIED:
W2: mbarrier.try_wait.parity.shared.b64 %p6, [%r12], 0, 1000;
@!%p6 bra W2;
shl.b32 %r8, %r3, 21;
add.u32 %r15, %r6, %r8;
mul.wide.u32 %d10, %r4, {512 * columns};
mul.wide.u32 %d11, %r2, 4;
add.u64 %d6, %d2, %d10;
add.u64 %d6, %d6, %d11;
{dump}
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
@%p2 bra DONE;
tcgen05.dealloc.{cta}.sync.aligned.b32 %r6, 256;
DONE:
ret;
}}
"""


def _half_bits(matrix: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(matrix.to(torch.bfloat16).view(torch.int16).numpy())


@pytest.mark.parametrize(
    ("path", "group", "m", "stationary"),
    [("D", 1, 128, False), ("F", 1, 64, False), ("A", 2, 256, False), ("B", 2, 128, False),
     ("D", 1, 128, True), ("E", 1, 64, True), ("G", 1, 32, True)],
)  # fmt: skip
@pytest.mark.parametrize("layouts", [("plain", "swizzled"), ("swizzled", "mn"), ("mn", "plain")])
def test_products_and_their_data_paths(path, group, m, stationary, layouts, seed):
    n = 128
    if m == 32 and layouts[0] == "mn":
        pytest.skip("an MN-major swizzled A needs 64 rows")
    a, b = torch.randn(m, 16).bfloat16(), torch.randn(n, 16).bfloat16()
    rows, share = m // group, n // group
    images = np.zeros((group, 2 * A_BYTES), np.uint8)
    for rank in range(group):
        image_a, bits_a = LAYOUTS[layouts[0]](_half_bits(a[rank * rows : (rank + 1) * rows]))
        image_b, bits_b = LAYOUTS[layouts[1]](_half_bits(b[rank * share : (rank + 1) * share]))
        images[rank, : len(image_a)] = image_a
        images[rank, A_BYTES : A_BYTES + len(image_b)] = image_b
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24
    idesc |= (layouts[0] == "mn") << 15 | (layouts[1] == "mn") << 16
    bits_b |= A_BYTES >> 4
    descriptors = torch.from_numpy(np.array([bits_a, bits_b], np.uint64).view(np.int64))
    pieces = _data_path(path, n)
    columns = len(pieces[0][1])
    out = torch.full((group, columns, 128), float("nan"))
    report = simulate_ptx(
        _product_kernel(group, columns, stationary), "k", grid=(group, 1, 1),
        block=(128, 1, 1), cluster=(group, 1, 1), shared=2 * A_BYTES + 64,
        params=(torch.from_numpy(images), out, descriptors, idesc),
    )  # fmt: skip
    # The second product accumulates onto the first.
    expected = 2 * (a.float() @ b.float().T)
    for rank in range(group):
        mine = expected[rank * rows : (rank + 1) * rows]
        for held, wide, lane in pieces:
            found = out[rank, :, lane : lane + len(held)].T
            wanted = mine[held.start : held.stop, wide.start : wide.stop]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    unread = {"uninitialised read"} if path == "F" else set()  # half of the lanes are unused
    assert {f.kind for f in report.races} <= unread
