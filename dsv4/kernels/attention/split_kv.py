"""Split-KV workspace: layout of counters, partial rows and their statistics, in words of 32 bits.

Plain Python, for kernels, which pass runtime integers, and for the code that allocates a workspace.
Every split of a row leaves accumulators that are relative to its row max, and statistics of the
row: row max, base 2, and row sum. The combine weighs the splits by them (`split_reduce`), always in
split order, so that no bit depends on the CTA that does it.

Where the layouts differ, and why:

- Hopper: counters, then a group for each output tile (`SplitKv`). The CTAs of a group combine it in
  the same launch, as soon as its semaphore says that all splits are there: they write and read the
  accumulators as their threads hold them, a fragment of 16 columns at a time, with the splits of a
  fragment behind each other.
- Blackwell (`sm100.combine`): no counters; rows [token, head][split][head_dim] in fp32, then
  [token, head][split][4] statistics. The accumulator fragments of its two kernels differ from each
  other, and a launch of its own combines them: rows are what they have in common. The third
  statistic is the gate's offset of the lse, which Hopper's CTAs still know, and the fourth makes
  them one store of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.plan import GPC_SMS

# fp32 words beside each partial row of head_dim words, at most. A row in 16 bits takes less.
STATS = 4
MAX_SPLITS = 32  # one lane, or one bit, each
SPLIT_STATS = 2  # of Hopper: row max and row sum
GROUP_COUNTER_WORDS = 4  # of Hopper: a counter of 64 bits for each half of the columns
FRAGMENT_WORDS = 128  # of a split: 16 rows and 16 columns in 16 bits, or 8 heads and 16 in fp32
LANE_WORDS = FRAGMENT_WORDS // 32
# Query heads up to which Hopper's kernel is swap-AB.
MOST_SWAP_AB_HEADS = 24
# With so many it has both: where launches are small, CTAs side by side take a head tile each.
TILED_HEADS = (32, 64, 128)
SWAP_AB_TILE_HEADS = 16
# CTAs of a cluster whose splits meet in its shared memory, at most: what a GPU allows.
MOST_CLUSTER_SPLITS = 16
# Sizes of the sub-tiles that a warp of the heads-in-M kernel combines at a time, 8-column groups of
# 16 rows, and for how many splits: the loads of a sub-tile are all under way together, and fill the
# registers that the accumulators have left.
COMBINE_SIZES = ((8, 4), (8, 8), (4, 4), (4, 8), (4, 16), (2, 12), (2, 20), (2, 32))
# 8 rows, where they become codes, whose scales are those of 128 columns.
SCALED_SIZES = ((16, 2), (16, 4), (16, 8), (16, 16), (16, 32))


def combine_sizes(column_groups: int, is_scaled: bool = False) -> list[tuple[int, int, int]]:
    """Sizes, most and least splits of the sub-tiles of so many 8-column groups, largest first.

    Args:
        is_scaled: whether rows become codes.
    """
    if is_scaled:
        least = [2, *(most + 1 for _, most in SCALED_SIZES)]
        return [(*size, first) for size, first in zip(SCALED_SIZES, least)]
    sizes: list[tuple[int, int, int]] = []
    for groups, most in COMBINE_SIZES:
        groups = min(groups, column_groups)
        least = max((m + 1 for g, m, _ in sizes if g == groups), default=2)
        if least <= most:
            sizes.append((groups, most, least))
    return sizes


@dataclass(frozen=True)
class SplitKv:
    """Layout of a Hopper group: offsets in words from its start, for Python and runtime integers.

        accumulators  [fragment][split][lane][4 words]
        statistics    [split][row][2], or [row][split][2]
        scales        [sub-tile of the columns][split][row]
        largest       [split][row], as the scales of a sub-tile more: scores of pieces

    The order of the statistics is that of the lanes that read them: for heads in M a quad reads the
    splits of a row, and its eight rows are neighbours; swap-AB has eight splits of a head side by
    side in a warp. Scales are those of accumulators in 16 bits; fp32 ones have none.

    Attributes:
        num_splits: of the group.
        tile_rows: heads of the output tile.
        row_words: of the accumulators of a row and split.
    """

    num_splits: int
    tile_rows: int
    row_words: int

    def fragment(self, index):
        """Accumulators of split 0 of a fragment, `LANE_WORDS` a lane; those of the next splits
        follow."""
        return index * (self.num_splits * FRAGMENT_WORDS)

    def statistics_by_split(self, row, split):
        """Statistics of a row of a split; those of the next rows follow."""
        accumulators = self.num_splits * self.tile_rows * self.row_words
        return accumulators + (split * self.tile_rows + row) * SPLIT_STATS

    def statistics_by_row(self, row):
        """Statistics of split 0 of a row; those of the next splits follow."""
        return self.num_splits * (self.tile_rows * self.row_words + row * SPLIT_STATS)

    def scale(self, subtile, row, split):
        """Scale of a row of a sub-tile of the columns of a split; those of the next rows follow."""
        rows = self.num_splits * self.tile_rows
        offset = rows * (self.row_words + SPLIT_STATS + subtile)
        return offset + split * self.tile_rows + row

    def split_words(self, subtiles=0):
        """Words of one split of the group.

        Args:
            subtiles: of the columns, with scales of their own.
        """
        return self.tile_rows * (self.row_words + (SPLIT_STATS + subtiles))


def meets_in_cluster(groups, num_splits, num_sms):
    """Whether the splits of so many groups are a cluster each, and meet in its shared memory: where
    all clusters find a place at once, an SM for each CTA. Of numbers known at run time, too."""
    places = num_sms // GPC_SMS * (GPC_SMS // num_splits)
    is_cluster = (num_splits > 1) & (num_splits <= MOST_CLUSTER_SPLITS)
    return is_cluster & (groups > 0) & (groups <= places)


def counter_words(size):
    """Words at the start of a workspace of `size` words that hold counters; they start as 0.

    Their number depends on the size alone: launches of different shapes that share a workspace
    must never take each other's partial rows for counters.
    """
    return (size // 512 + 32) // 32 * 32


def with_counters(partials: int) -> int:
    """A size that has room for `partials` words besides the counters."""
    return partials + partials // 256 + 64
