"""The split-KV workspace: what the kernels, and those who allocate it, must agree on."""

STATS = 4  # fp32 words beside each partial row, at most
MAX_SPLITS = 32  # one lane, or one bit, each
# 8-column groups of 16 rows that a warp of the Hopper kernel joins at a time, for up to so many
# splits: their loads are all under way together, and fill the registers that the accumulators have
# left.
JOIN_BATCHES = ((8, 4), (4, 8), (2, 12), (1, 20), (1, 32))


def counter_words(size):
    """Words at the start of a workspace of `size` words that hold counters; they start as 0.

    Their number depends on the size alone: launches of different shapes that share a workspace
    must never take each other's partial rows for counters.
    """
    return (size // 512 + 32) // 32 * 32


def with_counters(partials: int) -> int:
    """A size that has room for `partials` words besides the counters."""
    return partials + partials // 256 + 64
