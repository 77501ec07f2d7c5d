"""The split-KV workspace: what the kernels, and those who allocate it, must agree on."""

STATS = 4  # fp32 words beside each partial row, at most
MAX_SPLITS = 32  # one lane, or one bit, each


def counter_words(size):
    """Words at the start of a workspace of `size` words that hold counters; they start as 0.

    Their number depends on the size alone: launches of different shapes that share a workspace
    must never take each other's partial rows for counters.
    """
    return (size // 512 + 32) // 32 * 32


def with_counters(partials: int) -> int:
    """A size that has room for `partials` words besides the counters."""
    return partials + partials // 256 + 64
