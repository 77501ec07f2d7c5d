"""What the paged kernels serve, which launches multiply FP8 codes, pieces of a token's keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsv4.kernels.attention import launch_plan, paged_plan
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.attention.pieces import PIECE_TILES, most_pieces
from dsv4.kernels.attention.split_kv import (
    GROUP_COUNTER_WORDS,
    MAX_SPLITS,
    MOST_SWAP_AB_HEADS,
    SWAP_AB_TILE_HEADS,
    SplitKv,
    counter_words,
    meets_in_cluster,
)
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED

pytestmark = pytest.mark.stage("H")

SMS = 132
CODES = PagedFmhaConfig(512, 128, "fp8", compute="fp8x2")


def splits(config: PagedFmhaConfig, tokens: int, arch: str = "sm_90a") -> int:
    sizes = {"T": tokens, "k_w": 128, "k_c": 1024}
    return paged_plan.scalars(config, sizes, SMS, arch)[0]


@pytest.mark.parametrize("compute", ["fp8", "fp8x2"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_architecture_has_products_of_codes(arch, compute) -> None:
    config = replace(CODES, compute=compute)
    assert paged_plan.has_kernel(config)
    assert SPARSE_FMHA_PAGED.serves(config, arch)
    assert SPARSE_FMHA_PAGED.compiled_config(config, arch).compute == compute
    labels = [
        label
        for label, found in SPARSE_FMHA_PAGED.aot_for(arch).items()
        if found.compute == compute
    ]
    assert len(labels) == 4
    values = replace(config, compute="bf16")
    assert splits(config, 1, arch) == splits(values, 1, arch) > 1
    assert splits(config, 128, arch) == 1


def test_few_heads_share_the_kernel_of_values() -> None:
    for heads, compute in ((32, "bf16"), (40, "fp8x2")):
        config = replace(CODES, num_query_heads=heads)
        assert SPARSE_FMHA_PAGED.compiled_config(config, "sm_90a").compute == compute


@pytest.mark.parametrize("heads", [64, 128])
def test_launches_for_half_of_the_machine_multiply_codes(heads) -> None:
    """Smaller ones have splits, as those of values have, or one where that is asked for."""
    config = replace(CODES, num_query_heads=heads)
    enough = SMS // 2 * 64 // heads + 1
    assert splits(config, enough) == 1
    assert splits(config, 1) == splits(replace(config, compute="bf16"), 1) > 1
    assert splits(replace(config, batch_invariant=True), 1) == 1
    assert splits(replace(config, num_splits=3), 1024) == 3


# ---- splits in a step ----------------------------------------------------------------------------
FLASH = PagedFmhaConfig(512, 64, "fp8")


def step_splits(config: PagedFmhaConfig, tokens: int, entries: int) -> int:
    return paged_plan.scalars(config, {"T": tokens, "k_w": 128, "k_c": entries}, SMS, "sm_90a")[0]


@pytest.mark.parametrize("tokens, entries, expected", [
    (1, 512, 10), (2, 512, 5), (4, 512, 5), (8, 512, 3), (4, 256, 6), (8, 256, 3),
])  # fmt: skip
def test_few_tokens_of_flash_meet_in_clusters(tokens, entries, expected) -> None:
    """By themselves 4 and 8 tokens would take 10 splits of heads in M."""
    assert step_splits(FLASH, tokens, entries) == expected
    head_tiles = tokens * FLASH.num_query_heads // SWAP_AB_TILE_HEADS
    assert meets_in_cluster(head_tiles, expected, SMS)


def test_codes_of_many_tokens_come_of_few_splits() -> None:
    """A step of more than four splits, combined into codes, is slower; and swap-AB makes none."""
    config = replace(FLASH, rounds_output=True)
    assert [step_splits(config, 16, entries) for entries in (512, 256)] == [4, 3]
    assert bool(paged_plan.rounds_rows(config, 16, 4, SMS, "sm_90a"))
    assert step_splits(FLASH, 16, 512) == 5


def test_rows_of_bf16_have_the_splits_that_are_fastest_by_themselves() -> None:
    config = replace(FLASH, kv_format="bf16")
    assert [step_splits(config, tokens, 512) for tokens in (1, 2, 4, 16)] == [10, 10, 5, 4]


# ---- pieces --------------------------------------------------------------------------------------
INVARIANT = PagedFmhaConfig(512, 64, "fp8", batch_invariant=True)


def test_pieces_follow_from_key_tiles() -> None:
    assert [most_pieces(n) for n in (0, 1, PIECE_TILES)] == [1, 1, 1]
    assert most_pieces(PIECE_TILES + 1) == 2
    assert most_pieces(130) == 8
    assert most_pieces(10**6) == MAX_SPLITS
    found = [most_pieces(n) for n in range(2000)]
    assert found == sorted(found), "a launch has room for the pieces of shorter keys"
    longest = [-(-n // k) for n, k in enumerate(found)]
    assert max(longest[: MAX_SPLITS * PIECE_TILES + 1]) == PIECE_TILES


def test_the_keys_of_models_are_one_piece() -> None:
    for tokens in (1, 64, 8192):
        assert splits(INVARIANT, tokens) == 1
        sizes = {"T": tokens, "k_w": 128, "k_c": 8192}
        assert paged_plan.scalars(INVARIANT, sizes, SMS, "sm_90a")[0] == 8


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_where_nothing_is_split(arch) -> None:
    """On Blackwell, and where products are of codes, which are those without splits."""
    sizes = {"T": 4, "k_w": 128, "k_c": 8192}
    assert paged_plan.scalars(INVARIANT, sizes, SMS, arch)[0] == 1
    codes = replace(CODES, batch_invariant=True)
    for other in (arch, "sm_90a"):
        assert paged_plan.scalars(codes, sizes, SMS, other)[0] == 1
        assert paged_plan.max_workspace_size(codes, 100, SMS, other) == 0


@pytest.mark.parametrize("sms", [132, 114, 78, 3])
@pytest.mark.parametrize("heads", [8, 16, 32, 40, 64, 72, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_a_workspace_has_room_for_every_tiling(head_dim, heads, sms) -> None:
    """And a CTA for the bits of its work tiles."""
    config = replace(INVARIANT, head_dim=head_dim, num_query_heads=heads, kv_format="bf16")
    is_few = heads <= MOST_SWAP_AB_HEADS
    fixed = replace(config, batch_invariant=False, num_splits=2)
    for pieces in (2, 3, 8, 9, MAX_SPLITS):
        most = paged_plan.most_tokens(config, (pieces, sms))
        for tokens in {1, 2, 5, 16, most - 1, most, most + 1} - {0}:
            size = paged_plan.workspace_size(config, {"T": tokens}, (pieces, sms))
            tokens = min(tokens, most)
            tile_heads, slices, row_words = heads, 1, head_dim
            if not is_few:
                dense = paged_plan._dense(fixed)
                tile_heads, slices = launch_plan._heads_m_tile(dense, tokens, pieces, sms)
                row_words = head_dim // 2 // slices
            subtiles = 1 if is_few else head_dim // min(128, head_dim // 2) + 1
            groups = tokens * -(-heads // tile_heads) * slices
            words = pieces * SplitKv(pieces, tile_heads, row_words).split_words(subtiles)
            assert counter_words(size) >= groups * GROUP_COUNTER_WORDS
            assert counter_words(size) + groups * words <= size
            assert groups * pieces <= 32 * max(sms // 2 * 2, 1)
            assert size <= paged_plan.max_workspace_size(config, tokens, sms, "sm_90a")
