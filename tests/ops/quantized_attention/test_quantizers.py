"""Quantisers in torch: the reference's codes and scales group by group, and their edges."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsv4.kernels.lowp.groups import GEOMETRIES, V_ORDER, key_groups, query_groups
from dsv4.ops import quantize_kv
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.reference import lowp_quantizers as reference
from dsv4.testing.lowp import official_values, tokens_of

pytestmark = pytest.mark.stage("lowp")


def rows_of(rows: int, dim: int, kind: str) -> torch.Tensor:
    x = torch.randn(rows, dim)
    if kind == "bias":
        x += 8 * torch.randn(dim)
    if kind == "outlier":
        x[:, 3] *= 100
    if kind == "zeros":
        x[: rows // 2] = 0
    return x.bfloat16().float()


@pytest.mark.parametrize("kind", ["normal", "bias", "outlier", "zeros"])
@pytest.mark.parametrize("rows", [1, 333])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    "granularity, rule",
    [
        ("per_thread", "triton"),
        ("per_warp", "cuda"),
        ("per_block", "cuda"),
        ("per_block", "triton_block"),
        ("per_row", "fp8"),
        ("per_64", "fp8"),
        ("per_head", "fp8"),
    ],
)
def test_rows_have_the_codes_of_the_reference(
    granularity, rule, geometry, rows, kind, seed
) -> None:
    x = rows_of(rows, 64, kind)
    for maps, group_of in (
        (query_groups, reference.query_group),
        (key_groups, reference.key_group),
    ):
        groups = maps(granularity, GEOMETRIES[geometry])
        if rule == "fp8":
            codes, scale = q8.quantize_rows_fp8(x, groups, granularity == "per_head")
        else:
            codes, scale = q8.quantize_rows(x, groups, rule.replace("triton_block", "block"))
        ids = [group_of(granularity, row, geometry) for row in range(rows)]
        wanted, wanted_scale = reference.quantize_rows(x, ids, rule)
        assert torch.equal(codes.float(), wanted)
        assert torch.equal(q8.group_scales(scale, groups, rows), wanted_scale)


@pytest.mark.parametrize("largest", [448.0, 2.25])
@pytest.mark.parametrize("is_smooth", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 150])
def test_columns_have_the_codes_of_the_reference(rows, is_smooth, largest, seed) -> None:
    x = rows_of(rows, 64, "bias")
    x[:, 5] = 0
    # Sums of few small integers are exact in any order.
    x = (x * 4).round() if is_smooth else x
    codes, scale, mean = q8.quantize_columns(q8.pad_rows(x, 128), rows, largest, is_smooth)
    wanted, wanted_scale, wanted_mean = reference.quantize_values(x, largest, is_smooth)
    assert torch.equal(codes[:rows].float(), wanted)
    assert torch.equal(scale, wanted_scale)
    assert scale[5] == 0 and (codes.float()[:, 5] == 0).all(), "a channel of zeros"
    assert mean is None or torch.equal(mean, wanted_mean)


def test_fp4_has_the_codes_of_the_reference(seed) -> None:
    x = torch.randn(50, 64) * torch.exp(torch.randn(50, 1))
    x[3], x[4, :16] = 0, 0
    codes, scale = q8.quantize_fp4(x)
    wanted, wanted_scale = reference.quantize_fp4(x)
    assert torch.equal(q8.decode_e2m1(codes).abs(), wanted.abs())
    assert torch.equal(scale.float(), wanted_scale)
    packed = q8.pack_fp4(codes)
    decoded = q8.decode_fp4(packed, scale).unflatten(-1, (-1, 16))
    assert torch.equal(decoded, wanted.unflatten(-1, (-1, 16)) * wanted_scale[..., None])


def test_every_tie_of_fp4_goes_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -2.5, -torch.inf])
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -2.0, -6.0]
    assert q8.decode_e2m1(q8.round_e2m1(ties)).tolist() == wanted


@pytest.mark.parametrize("rule", ["triton", "cuda"])
def test_int4_has_seven_levels_of_a_sign(rule, seed) -> None:
    """No tensor core of either architecture multiplies them: codes of the reference alone."""
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(seed))
    x[32:64] = 0
    groups = [reference.query_group("per_thread", row, "sm90") for row in range(len(x))]
    codes, scale = reference.quantize_rows(x, groups, rule, 7)
    assert codes.abs().max() == 7 and torch.equal(codes, codes.round())
    assert not codes[32:64].any()
    assert ((codes * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()
    amax = x.abs().amax(1)
    for row in (0, 95):
        of_group = [i for i, group in enumerate(groups) if group == groups[row]]
        torch.testing.assert_close(scale[row], amax[of_group].max() / 7, rtol=1e-5, atol=2e-7)


def test_the_biased_encoding_of_zeros_is_its_middle() -> None:
    codes, scale = reference.quantize_uint8(torch.zeros(4, 8))
    assert scale == 1 and (codes == 128).all()
    x = torch.randn(100, 8)
    codes, scale = reference.quantize_uint8(x)
    back = (codes - 128) / 127 * 448 * scale
    assert (back - x).abs().max() <= x.abs().max() / 127
    zeros = q8.quantize_rows_fp8(
        torch.zeros(64, 8), key_groups("per_row", GEOMETRIES["sm90"]), True
    )
    assert (zeros[1] == 1).all() and (zeros[0].float() == 0).all()


def test_column_sums_depend_on_nothing_but_the_column(seed) -> None:
    x = torch.randn(2, 3, 1500, 64)
    together = q8.column_sums(x)
    assert torch.equal(together[1, 2], q8.column_sums(x[1, 2].contiguous()))
    torch.testing.assert_close(together, x.double().sum(2).float(), rtol=1e-4, atol=1e-4)

    def halves(terms: list[torch.Tensor]) -> torch.Tensor:
        half = len(terms) // 2
        return terms[0] if not half else halves([a + b for a, b in zip(terms[:half], terms[half:])])

    padded = torch.cat((x[0, 0], torch.zeros(36, 64)))
    tiles = [halves(list(padded[i : i + 128])) for i in range(0, 1536, 128)]
    chains = [tiles[i] + tiles[i + 8] if i < 4 else tiles[i] for i in range(8)]
    assert torch.equal(together[0, 0], halves(chains))


@pytest.mark.parametrize("keys", [1, 64, 128, 200, 256])
def test_values_are_always_transposed_and_permuted(keys, seed) -> None:
    """Also where nothing has to be padded: a shortcut there once read tokens in another order."""
    v = torch.randn(1, 2, keys, 64).bfloat16()
    codes = quantize_kv(v, v).v_codes
    assert codes.shape == (1, 2, -(-keys // 128), 64, 128)
    stored = official_values(codes).view(torch.uint8)
    tokens = tokens_of(codes)
    wanted, _, _ = reference.quantize_values(v[0, 1].float(), 448.0)
    assert torch.equal(tokens[0, 1, :keys], wanted)
    assert not tokens[0, :, keys:].any()
    for position, token in enumerate(V_ORDER):
        assert torch.equal(stored[..., position::16].view(torch.float8_e4m3fn).float(),
                           tokens[:, :, token::16].transpose(2, 3))  # fmt: skip


def test_a_tile_of_packed_sequences_is_that_of_the_sequence_alone(seed) -> None:
    lengths = [70, 0, 128, 1, 200]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    k, v = torch.randn(2, int(ends[-1]), 2, 64).bfloat16().unbind(0)
    packed = quantize_kv(k, v, cu_seqlens_k=ends)
    for number, length in enumerate(lengths):
        rows = slice(int(ends[number]), int(ends[number + 1]))
        alone = quantize_kv(k[None, rows], v[None, rows], tensor_layout="NHD")
        assert torch.equal(packed.k_codes[:, :, rows], alone.k_codes)
        first, count = int(ends[number]) // 128 + number, -(-length // 128)
        assert torch.equal(packed.k_scale[:, :, first : first + count], alone.k_scale)
        tiles = packed.v_codes[:, :, first : first + count]
        assert torch.equal(tiles.view(torch.uint8), alone.v_codes.view(torch.uint8))
        assert torch.equal(packed.km[number], alone.km[0])
        assert torch.equal(packed.v_scale[number], alone.v_scale[0])


@pytest.mark.parametrize(("rows", "blocks"), [(128, 8), (128, 4), (64, 8), (64, 4)])
def test_scales_of_fp4_lie_as_the_tensor_core_reads_them(rows: int, blocks: int) -> None:
    """A word of four for a row and 64 elements; four columns of words of 32 rows together."""
    scale = torch.arange(rows * blocks).unflatten(0, (rows, blocks)).expand(3, -1, -1)
    found = q8.in_scale_order(scale)
    together = min(4, rows // 32 * blocks // 4)
    for row, block in itertools.product((0, 1, 31, 32, rows - 1), range(blocks)):
        column = block // 4 * (rows // 32) + row // 32
        atom, place = divmod(column, together)
        word = (atom * 32 + row % 32) * together + place
        assert found[1, 4 * word + block % 4] == row * blocks + block
    assert torch.equal(q8.out_of_scale_order(found, rows), scale)
