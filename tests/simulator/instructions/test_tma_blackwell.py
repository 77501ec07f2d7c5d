"""Tensor copies: what only Blackwell has (swizzle atomicities, 4- and 6-bit elements, gather and
scatter), and interleaved tensors.

Expected layouts are the ISA's tables of 16-byte cells, written out.
"""

import struct

import numpy as np
import pytest
import torch

from dsv4.simulator import KernelFault, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

# Where the 16-byte cells of one 128-byte line come from, line by line; the pattern repeats.
ATOMICITY = {
    "16": (0, [[c ^ line for c in range(8)] for line in range(8)]),
    "32": (1, [[0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 0, 1, 6, 7, 4, 5],
               [4, 5, 6, 7, 0, 1, 2, 3], [6, 7, 4, 5, 2, 3, 0, 1]]),
    "64": (3, [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]]),
}  # fmt: skip
BYTES, B4, B4_PADDED, B6_PADDED = 0, 11, 12, 13  # element codes of the map


def _map(address: int, code: int, dims, stride: int, box, swizzle: int = 0, atomicity: int = 0):
    """The 128 bytes of a 2-D tensor map."""
    form = 1 << 4 | code << 7 | swizzle << 13 | atomicity << 19
    words = [address, form | (stride >> 4) << 32, 0, 0, dims[0] - 1 | dims[1] - 1 << 32, 0,
             (box[0] - 1) << 56, box[1] - 1]  # fmt: skip
    return struct.pack("<16Q", *words, *[0] * 8)


def _kernel(statement: str, size: int, transferred: int) -> str:
    """One warp: fills shared memory from `fill`, runs `statement`, stores shared memory to out."""
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 tensor[128], .param .b64 fill, .param .b64 out)
{{
.reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .b32 %smem, %bar;
ld.param.b64 %d1, [fill];
ld.param.b64 %d2, [out];
mov.b64 %d0, tensor;
mov.u32 %r1, %tid.x;
mov.b32 %smem, smem;
add.u32 %bar, %smem, {size};
setp.eq.u32 %p1, %r1, 0;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, %r2;
F: cvt.u64.u32 %d3, %r3;
add.u64 %d4, %d1, %d3;
ld.global.b32 %r4, [%d4];
add.u32 %r5, %smem, %r3;
st.shared.b32 [%r5], %r4;
add.u32 %r3, %r3, 128;
setp.lt.u32 %p2, %r3, {size};
@%p2 bra F;
@!%p1 bra READY;
mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%bar], {transferred};
READY:
fence.proxy.async.shared::cta;
bar.warp.sync -1;
@!%p1 bra WAIT;
{statement}
WAIT:
W: mbarrier.try_wait.parity.shared.b64 %p3, [%bar], 0, 1000;
@!%p3 bra W;
mov.u32 %r3, %r2;
S: cvt.u64.u32 %d3, %r3;
add.u64 %d4, %d2, %d3;
add.u32 %r5, %smem, %r3;
ld.shared.b32 %r4, [%r5];
st.global.b32 [%d4], %r4;
add.u32 %r3, %r3, 128;
setp.lt.u32 %p2, %r3, {size};
@%p2 bra S;
ret;
}}
"""


_FILL = 0xEE
_LOAD = (
    "cp.async.bulk.tensor.{rank}d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes "
    "[%smem], [%d0, {{{at}}}], [%bar];"
)


def _load(tensor: torch.Tensor, raw: bytes, at, size: int, transferred: int, mode="tile"):
    """Shared memory [size] after a load of the box at `at`."""
    fill = torch.full((size,), _FILL, dtype=torch.uint8)
    out = torch.zeros(size, dtype=torch.uint8)
    rank = len(at) if mode == "tile" else 2
    statement = _LOAD.format(rank=rank, mode=mode, at=", ".join(map(str, at)))
    report = simulate_ptx(
        _kernel(statement, size, transferred), "k", grid=(1, 1, 1), block=(32, 1, 1),
        shared=size + 64, params=(raw, fill, out), buffers=(tensor,),
    )  # fmt: skip
    report.raise_if_racy()
    return out.numpy()


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("atom", ATOMICITY)
def test_swizzle_atomicity(atom, seed):
    tensor = _noise(seed, 40, 256)
    code, pattern = ATOMICITY[atom]
    raw = _map(tensor.data_ptr(), BYTES, (256, 40), 256, (128, 16), 3, code)
    found = _load(tensor, raw, (128, 20), 2048, 2048).reshape(16, 8, 16)
    source = tensor.numpy()[20:36, 128:].reshape(16, 8, 16)
    for line in range(16):
        np.testing.assert_array_equal(found[line], source[line][pattern[line % len(pattern)]])


def test_swizzle_with_flipped_halves(seed):
    """32 bytes together, and the 8-byte halves of every 16 exchanged in every other line."""
    tensor = _noise(seed, 16, 128)
    raw = _map(tensor.data_ptr(), BYTES, (128, 16), 128, (128, 16), 3, 2)
    found = _load(tensor, raw, (0, 0), 2048, 2048).reshape(16, 8, 2, 8)
    source = tensor.numpy().reshape(16, 8, 2, 8)
    pattern = ATOMICITY["32"][1]
    for line in range(16):
        wanted = source[line][pattern[line % 4]]
        np.testing.assert_array_equal(found[line], wanted[:, ::-1] if line % 2 else wanted)


@pytest.mark.parametrize("atomicity", [0, 1, 2, 3])
def test_stores_undo_what_loads_do(atomicity, seed):
    tensor, target = _noise(seed, 16, 128), torch.zeros((16, 128), dtype=torch.uint8)
    raw = _map(tensor.data_ptr(), BYTES, (128, 16), 128, (128, 16), 3, atomicity)
    image = torch.from_numpy(_load(tensor, raw, (0, 0), 2048, 2048).copy())
    back = _map(target.data_ptr(), BYTES, (128, 16), 128, (128, 16), 3, atomicity)
    statement = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {0, 0}], [%smem];\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"
    )
    simulate_ptx(
        _kernel(statement, 2048, 0), "k", grid=(1, 1, 1), block=(32, 1, 1), shared=2112,
        params=(back, image, torch.zeros(2048, dtype=torch.uint8)), buffers=(target,),
    )  # fmt: skip
    np.testing.assert_array_equal(target.numpy(), tensor.numpy())


AHEAD = 1 << 30  # rows of a ragged tensor that come before memory


@pytest.mark.parametrize("row", [0, 3])
def test_ragged_tensors(row, seed):
    """A map whose address lies far ahead of memory, and whose end cuts boxes: the box that is
    copied has to lie in memory, not the whole."""
    tensor, target = _noise(seed, 10, 128), torch.zeros((10, 128), dtype=torch.uint8)
    size = (128, AHEAD + 10)
    raw = _map(tensor.data_ptr() - AHEAD * 128, BYTES, size, 128, (128, 16))
    found = _load(tensor, raw, (0, AHEAD + row), 2048, 2048).reshape(16, 128)
    np.testing.assert_array_equal(found[: 10 - row], tensor.numpy()[row:])
    assert not found[10 - row :].any()
    back = _map(target.data_ptr() - AHEAD * 128, BYTES, size, 128, (128, 16))
    statement = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
        f"[%d0, {{0, {AHEAD + row}}}], [%smem];\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"
    )
    simulate_ptx(
        _kernel(statement, 2048, 0), "k", grid=(1, 1, 1), block=(32, 1, 1), shared=2112,
        params=(back, torch.from_numpy(found.reshape(-1).copy()),
                torch.zeros(2048, dtype=torch.uint8)), buffers=(target,),
    )  # fmt: skip
    np.testing.assert_array_equal(target.numpy()[row:], tensor.numpy()[row:])
    with pytest.raises(KernelFault, match="outside every argument"):
        _load(tensor, raw, (0, 5), 2048, 2048)


@pytest.mark.parametrize(("code", "bits", "padded"), [(B4, 4, False), (B4_PADDED, 4, True),
                                                      (B6_PADDED, 6, True)])  # fmt: skip
@pytest.mark.parametrize("swizzle", [0, 3])
def test_elements_of_4_and_6_bits(code, bits, padded, swizzle, seed):
    """16 elements fill 16 bytes of shared memory, packed and then padded with zeros, or 8 bytes.

    The barrier counts the packed bytes. Elements outside the tensor are zeros.
    """
    rows, elements = 12, 192
    tensor = _noise(seed, rows, elements * bits // 8)
    raw = _map(tensor.data_ptr(), code, (elements, rows), elements * bits // 8, (128, 8), swizzle)
    line = 128 if padded else 64
    if swizzle and not padded:
        line = 128  # rows shorter than the swizzle lie its span apart
    transferred = 8 * 128 * bits // 8
    found = _load(tensor, raw, (128, 8), 1024, transferred)[: 8 * line].reshape(8, line)
    source = np.zeros((8, 128 * bits // 8), np.uint8)
    source[:4, : 64 * bits // 8] = tensor.numpy()[8:, 128 * bits // 8 :]
    cells = np.full((8, 8, 16), _FILL, np.uint8)
    for r in range(8):
        for c in range(8 if padded else 4):
            cell = np.zeros(16, np.uint8)
            if padded:
                cell[: 2 * bits] = source[r, 2 * bits * c : 2 * bits * (c + 1)]
            else:
                cell[:] = source[r, 16 * c : 16 * c + 16]
            cells[r, c ^ r if swizzle else c] = cell
    expected = cells.reshape(8, 128)[:, :line]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [(3, 0, 39, 17), (5, 5, -1, 40)])
def test_gather_four_rows(rows, seed):
    """Rows may repeat; those outside the tensor give zeros."""
    tensor = _noise(seed, 40, 256)
    raw = _map(tensor.data_ptr(), BYTES, (256, 40), 256, (128, 1), 3)
    found = _load(tensor, raw, (64, *rows), 1024, 512, "tile::gather4")
    source = tensor.numpy()
    for i, row in enumerate(rows):
        inside = 0 <= row < 40
        wanted = source[row, 64:192] if inside else np.zeros(128, np.uint8)
        cells = wanted.reshape(8, 16)[[c ^ i for c in range(8)]]
        np.testing.assert_array_equal(found[128 * i : 128 * i + 128].reshape(8, 16), cells)
    assert (found[512:] == _FILL).all()


def test_scatter_four_rows(seed):
    target, data = torch.zeros((40, 256), dtype=torch.uint8), _noise(seed, 512)
    raw = _map(target.data_ptr(), BYTES, (256, 40), 256, (128, 1), 0)
    statement = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
        "[%d0, {128, 7, 31, 0, 12}], [%smem];\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"
    )
    simulate_ptx(
        _kernel(statement, 512, 0), "k", grid=(1, 1, 1), block=(32, 1, 1), shared=576,
        params=(raw, data, torch.zeros(512, dtype=torch.uint8)), buffers=(target,),
    )  # fmt: skip
    expected = np.zeros((40, 256), np.uint8)
    expected[[7, 31, 0, 12], 128:] = data.numpy().reshape(4, 128)
    np.testing.assert_array_equal(target.numpy(), expected)


@pytest.mark.parametrize("kind", [1, 2], ids=["16", "32"])
def test_interleaved_boxes(seed, kind):
    size = 16 * kind
    tensor = _noise(seed, 2, 3, 6, 5, size)  # [N, slices of channels, H, W, bytes of channels]
    n, slices, h, w, _ = tensor.shape
    strides = [stride >> 4 for stride in tensor.stride()[2::-1]]
    form = 3 << 4 | BYTES << 7 | kind << 11
    words = [
        tensor.data_ptr(), form | strides[0] << 32, strides[1] | strides[2] << 32, 0,
        w - 1 | h - 1 << 32, slices - 1 | n - 1 << 32, (16 - 1) << 56, 2 | 0 << 8 | 1 << 16,
    ]  # fmt: skip
    raw = struct.pack("<16Q", *words, *[0] * 8)
    count = 2 * 3 * 16 * size
    got = _load(tensor, raw, (-1, 4, 2, 0), count, count).reshape(2, 3, 16, size)
    expected = np.zeros((2, 3, 16, size), np.uint8)
    expected[:, :2, 1:6] = tensor[:, 2, 4:]
    np.testing.assert_array_equal(got, expected)


def test_a_fourth_kind_of_interleave_is_refused(seed):
    tensor = _noise(seed, 16, 128)
    raw = bytearray(_map(tensor.data_ptr(), BYTES, (128, 16), 128, (128, 16)))
    raw[9] |= 3 << 3  # the field of the interleave
    with pytest.raises(KernelFault, match="not valid"):
        _load(tensor, bytes(raw), (0, 0), 2048, 2048)
