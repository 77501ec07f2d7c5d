"""How many CTAs share the keys of a token, and the partials that they leave."""

from __future__ import annotations

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.fmha_workspace import (
    JOIN_BATCHES,
    MAX_SPLITS,
    STATS,
    with_counters,
)

TILE_HEADS = 64  # heads of a CTA
BLOCK_KEYS = 64  # keys of a step

# Costs in units of one block of keys (1.3 us), fitted to measurements on an H200 of 1 to 64 tokens
# of 8 to 128 heads, so that the fastest number of splits of those measured is chosen.
WORK_COST = 3.3  # start and epilogue of a CTA's work item
JOIN_COST = 1.9  # waiting for the other splits
PARTIAL_COST = 3.8  # writing and reading 64 partial rows on every multiprocessor
ROUND_COST = 1.0  # each time that warps join another piece after their first


def key_blocks(rows: int, width: int) -> int:
    """Blocks of `rows` compressed and `width` window keys."""
    return -(-rows // BLOCK_KEYS) - (-width // BLOCK_KEYS)


def choose(config: FmhaConfig, tokens: int, rows: int, width: int, multiprocessors: int) -> int:
    """Number of splits with the shortest expected time for `tokens` tokens of `rows` compressed
    and `width` window keys."""
    tiles = tokens * -(-config.num_query_heads // TILE_HEADS)
    blocks = key_blocks(rows, width)
    most = max(1, min(blocks, multiprocessors // max(tiles, 1), MAX_SPLITS))

    def cost(splits: int) -> float:
        rounds = -(-tiles * splits // multiprocessors)
        time = rounds * (-(-blocks // splits) + WORK_COST)
        partials = tokens * splits * _tile_rows(config) / TILE_HEADS / multiprocessors
        if splits == 1:
            return time
        further_rounds = _join_rounds(config, tokens, splits, multiprocessors) - 1
        return time + JOIN_COST + PARTIAL_COST * partials + ROUND_COST * further_rounds

    return min(range(1, most + 1), key=cost)


def _join_rounds(config: FmhaConfig, tokens: int, splits: int, multiprocessors: int) -> int:
    """Pieces of a head tile that a warp of the Hopper kernel joins at most."""
    heads = config.num_query_heads
    tile_heads = min(_tile_rows(config), TILE_HEADS)
    for fewer in (32, 16):  # as the kernel does, where all these tiles run at once
        is_even = heads % fewer == 0 and (heads < TILE_HEADS or heads % TILE_HEADS == 0)
        if is_even and tokens * splits * (heads // fewer) <= multiprocessors:
            tile_heads = fewer
    groups = next(groups for groups, most in JOIN_BATCHES if splits <= most)
    column_groups = config.head_dim // 16  # of a half
    pieces = tile_heads // 16 * (column_groups // min(groups, column_groups))
    return -(-pieces // (4 * splits))


def unsplit_from(config: FmhaConfig, multiprocessors: int) -> int:
    """Number of tokens from which `choose` gives 1, whatever the keys: two splits would need more
    CTAs than there are multiprocessors."""
    return multiprocessors // 2 // -(-config.num_query_heads // TILE_HEADS) + 1


def workspace_size(config: FmhaConfig, tokens: int, num_splits: int) -> int:
    """fp32 elements of the workspace of a launch with several splits; they are 0 when new."""
    return with_counters(tokens * num_splits * _tile_rows(config) * (config.head_dim + STATS))


def _tile_rows(config: FmhaConfig) -> int:
    """Rows of a token's head tiles, which are padded to 16, or to full tiles where there are
    several."""
    granule = 16 if config.num_query_heads <= TILE_HEADS else TILE_HEADS
    return -(-config.num_query_heads // granule) * granule


def max_workspace_size(config: FmhaConfig, max_tokens: int, multiprocessors: int) -> int:
    """fp32 elements that no launch of up to `max_tokens` tokens exceeds."""
    if config.num_splits is not None:
        splits = config.num_splits
        return workspace_size(config, max_tokens, splits) if splits > 1 else 0
    # A chosen split never makes more work items than there are multiprocessors.
    rows = min(_tile_rows(config), TILE_HEADS)
    return with_counters(multiprocessors * rows * (config.head_dim + STATS)) if max_tokens else 0
