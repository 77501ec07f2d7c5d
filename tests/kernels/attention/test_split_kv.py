"""Layout of the split-KV workspace: every word of a group belongs to one value."""

from __future__ import annotations

import itertools

import pytest

from dsv4.kernels.attention.split_kv import (
    FRAGMENT_WORDS,
    SPLIT_STATS,
    SplitKv,
    combine_sizes,
    counter_words,
    meets_in_cluster,
    with_counters,
)

pytestmark = pytest.mark.stage("H")


def assert_cover(layout: SplitKv, words: list[int], subtiles: int) -> None:
    """No word twice, none missing."""
    assert sorted(words) == list(range(layout.split_words(subtiles) * layout.num_splits))


@pytest.mark.parametrize("num_splits", [2, 5, 32])
@pytest.mark.parametrize(("tile_rows", "head_dim"), [(16, 64), (64, 128), (32, 256)])
def test_heads_m_group_is_covered_once(tile_rows, head_dim, num_splits) -> None:
    """Two values a word; statistics by split; a scale a row and sub-tile of the columns."""
    subtiles = max(2, head_dim // 128)
    layout = SplitKv(num_splits, tile_rows, head_dim // 2)
    fragments = tile_rows // 16 * head_dim // 16
    words = [
        layout.fragment(i) + split * FRAGMENT_WORDS + word
        for i, split, word in itertools.product(
            range(fragments), range(num_splits), range(FRAGMENT_WORDS)
        )
    ]
    rows = list(itertools.product(range(tile_rows), range(num_splits)))
    words += [
        layout.statistics_by_split(row, split) + i
        for (row, split), i in itertools.product(rows, range(SPLIT_STATS))
    ]
    words += [
        layout.scale(subtile, row, split)
        for subtile, (row, split) in itertools.product(range(subtiles), rows)
    ]
    assert_cover(layout, words, subtiles)


@pytest.mark.parametrize("num_splits", [2, 5, 32])
@pytest.mark.parametrize(("tile_heads", "head_dim"), [(8, 64), (16, 512), (24, 128)])
def test_swap_ab_group_is_covered_once(tile_heads, head_dim, num_splits) -> None:
    """A value a word; statistics by row."""
    layout = SplitKv(num_splits, tile_heads, head_dim)
    fragments = tile_heads // 8 * head_dim // 16
    words = [
        layout.fragment(i) + split * FRAGMENT_WORDS + word
        for i, split, word in itertools.product(
            range(fragments), range(num_splits), range(FRAGMENT_WORDS)
        )
    ]
    words += [
        layout.statistics_by_row(row) + split * SPLIT_STATS + i
        for row, split, i in itertools.product(
            range(tile_heads), range(num_splits), range(SPLIT_STATS)
        )
    ]
    assert_cover(layout, words, 0)


@pytest.mark.parametrize(
    ("groups", "num_splits", "meets"),
    [
        (4, 10, True),  # a token of 64 heads and 640 keys
        (8, 10, False),  # two of them: seven GPCs have 18 SMs
        (16, 5, True),
        (14, 8, True),
        (16, 8, False),
        (63, 2, True),
        (64, 2, False),
        (1, 16, True),
        (1, 17, False),
        (4, 1, False),
        (0, 4, False),
    ],
)
def test_splits_meet_in_clusters_that_all_find_a_place(groups, num_splits, meets) -> None:
    assert meets_in_cluster(groups, num_splits, 132) == meets
    assert not meets_in_cluster(groups, num_splits, 17)


@pytest.mark.parametrize("partials", [0, 1, 1000, 10**6, 2**31])
def test_counters_fit_beside_the_partials(partials) -> None:
    size = with_counters(partials)
    assert counter_words(size) + partials <= size
    # A counter of 64 bits is aligned, and so is what follows.
    assert counter_words(size) % 32 == 0


@pytest.mark.parametrize(
    ("column_groups", "is_scaled"), [(4, False), (8, False), (16, False), (32, False), (32, True)]
)
def test_every_number_of_splits_has_a_size_to_combine_by(column_groups, is_scaled) -> None:
    sizes = combine_sizes(column_groups, is_scaled)
    for splits in range(2, 33):
        groups = [groups for groups, most, least in sizes if least <= splits <= most]
        assert groups == [16] if is_scaled else groups, splits  # 128 columns, which have a scale
    assert all(groups <= column_groups for groups, _, _ in sizes)
