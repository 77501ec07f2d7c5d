"""The split-KV workspace: what the kernels, and those who allocate it, must agree on."""

# fp32 words beside each partial row of head_dim words, at most. A row in 16 bits takes less.
STATS = 4
MAX_SPLITS = 32  # one lane, or one bit, each
# Query heads up to which Hopper's kernel is swap-AB.
MOST_SWAP_AB_HEADS = 24
# With so many it has both: where launches are small, CTAs side by side take a head tile each.
TILED_HEADS = (32, 64, 128)
SWAP_AB_TILE_HEADS = 16
# Sizes of the sub-tiles that a warp of the heads-in-M kernel combines at a time, 8-column groups of
# 16 rows, and for how many splits: the loads of a sub-tile are all under way together, and fill the
# registers that the accumulators have left.
COMBINE_SIZES = ((8, 4), (8, 8), (4, 4), (4, 8), (4, 16), (2, 12), (2, 20), (2, 32))


def combine_sizes(column_groups: int) -> list[tuple[int, int, int]]:
    """Sizes, most and least splits of the sub-tiles of so many 8-column groups, largest first."""
    sizes: list[tuple[int, int, int]] = []
    for groups, most in COMBINE_SIZES:
        groups = min(groups, column_groups)
        least = max((m + 1 for g, m, _ in sizes if g == groups), default=2)
        if least <= most:
            sizes.append((groups, most, least))
    return sizes


def counter_words(size):
    """Words at the start of a workspace of `size` words that hold counters; they start as 0.

    Their number depends on the size alone: launches of different shapes that share a workspace
    must never take each other's partial rows for counters.
    """
    return (size // 512 + 32) // 32 * 32


def with_counters(partials: int) -> int:
    """A size that has room for `partials` words besides the counters."""
    return partials + partials // 256 + 64
