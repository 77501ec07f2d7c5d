"""How many CTAs share the keys of a token, and the partials that they leave."""

from __future__ import annotations

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import (
    MAX_SPLITS,
    MOST_FEW_HEADS,
    STATS,
    TILE_OF_HEADS,
    join_sizes,
    with_counters,
)
from dsv4.ops.runtime.registry import has_two_kernels

TILE_HEADS = 64  # heads of a CTA
BLOCK_KEYS = 64  # keys of a step

# Costs in microseconds, fitted to measurements on an H200 of 1 to 64 tokens of 64 and 128 heads, so
# that the number of splits that is chosen is the fastest of those measured, or nearly so.
LAUNCH_COST = 3.6  # start and end
BLOCK_COST = 1.45  # of a block of keys
SHARED_BLOCK_COST = 1.14  # where two CTAs halve the columns of the output
PARTIAL_COST = 2.52  # writing and reading 64 whole partial rows
BUSY_PARTIAL_COST = 1.9  # the same, while all multiprocessors do so
ROUND_COST = 1.37  # each time that warps join another piece after their first
BUSY_COST = 1.51  # if all multiprocessors are at work
MEMORY_COST = 1.92  # of a block of keys on all multiprocessors, at least

# The same of the kernel for few heads, of tiles of 8 to 24 of them, with 8 to 128 heads.
FEW_LAUNCH_COST = 3.28
FEW_BLOCK_COST, FEW_BLOCK_HEAD_COST = 0.89, 0.0068  # of a block of keys; the second for each head
FEW_LATE_COST = 0.33  # where CTAs of the next launch wait for a multiprocessor
FEW_JOIN_COST, FEW_PARTIAL_COST = 0.95, 0.0006  # the second for each head of each work item


def key_blocks(rows: int, width: int) -> int:
    """Blocks of `rows` compressed and `width` window keys."""
    return -(-rows // BLOCK_KEYS) - (-width // BLOCK_KEYS)


def choose(
    config: FmhaConfig,
    tokens: int,
    rows: int,
    width: int,
    multiprocessors: int,
    arch: str = "sm_90a",
) -> int:
    """Number of splits with the shortest expected time for `tokens` tokens of `rows` compressed
    and `width` window keys."""
    blocks = key_blocks(rows, width)
    tiles = tokens * -(-config.num_query_heads // TILE_HEADS)
    most = max(1, min(blocks, multiprocessors // max(tiles, 1), MAX_SPLITS))

    def cost(splits: int) -> float:
        few_heads = _few_tile_heads(config, tokens * splits, multiprocessors, arch)
        if few_heads:
            return _few_cost(config, tokens, splits, blocks, multiprocessors, few_heads)
        return _many_cost(config, tokens, splits, blocks, multiprocessors)

    return min(range(1, most + 1), key=cost)


def _many_cost(
    config: FmhaConfig, tokens: int, splits: int, blocks: int, multiprocessors: int
) -> float:
    """Microseconds of a launch of the kernel for many heads."""
    tile_heads, shares = _tile(config, tokens, splits, multiprocessors)
    works = tokens * -(-config.num_query_heads // tile_heads) * splits * shares
    load = works / multiprocessors
    block_cost = BLOCK_COST if shares == 1 else SHARED_BLOCK_COST
    block_cost = max(block_cost, _memory_cost(tokens * splits, multiprocessors))
    time = LAUNCH_COST + BUSY_COST * load
    time += -(-works // multiprocessors) * -(-blocks // splits) * block_cost
    if splits > 1:
        partials = tile_heads / TILE_HEADS / shares
        time += partials * (PARTIAL_COST + BUSY_PARTIAL_COST * load)
        time += ROUND_COST * (_join_rounds(config, splits, tile_heads, shares) - 1)
    return time


def _few_cost(
    config: FmhaConfig,
    tokens: int,
    splits: int,
    blocks: int,
    multiprocessors: int,
    tile_heads: int,
) -> float:
    """The same of the kernel for few heads, in tiles of `tile_heads` of them."""
    works = tokens * (config.num_query_heads // tile_heads) * splits
    block_cost = FEW_BLOCK_COST + FEW_BLOCK_HEAD_COST * tile_heads
    block_cost = max(block_cost, _memory_cost(tokens * splits, multiprocessors))
    time = FEW_LAUNCH_COST
    time += -(-works // multiprocessors) * -(-blocks // splits) * block_cost
    if 2 * works > multiprocessors:
        time += FEW_LATE_COST
    if splits > 1:
        time += FEW_JOIN_COST + FEW_PARTIAL_COST * tile_heads * works
    return time


def _memory_cost(readers: int, multiprocessors: int) -> float:
    """Of a block of keys, if so many splits of tokens have different ones: the tiles of a token's
    heads read the same, and memory sees them once."""
    return MEMORY_COST * min(readers / multiprocessors, 1)


def _few_tile_heads(config: FmhaConfig, token_splits: int, multiprocessors: int, arch: str) -> int:
    """Heads of a tile of the kernel for few heads, or 0 where the other kernel serves."""
    heads = config.num_query_heads
    if heads <= MOST_FEW_HEADS:
        return heads
    tiles = token_splits * (heads // TILE_OF_HEADS)
    if has_two_kernels(heads, arch) and tiles <= multiprocessors:
        return TILE_OF_HEADS
    return 0


def _tile(config: FmhaConfig, tokens: int, splits: int, multiprocessors: int) -> tuple[int, int]:
    """Heads of a tile, and how many CTAs share its columns, as in the Hopper kernel."""
    heads = config.num_query_heads
    tile_heads = min(_tile_rows(config), TILE_HEADS)
    works = tokens * -(-heads // tile_heads) * splits
    shares = 2 if config.head_dim == 512 and 2 * works <= multiprocessors else 1
    is_even = heads < TILE_HEADS or heads % TILE_HEADS == 0
    for fewer in (32, 16):
        if splits == 1 or not is_even or heads % fewer or (fewer == 16 and shares == 2):
            continue
        if tokens * splits * (heads // fewer) * shares <= multiprocessors:
            tile_heads = fewer
    return tile_heads, shares


def _join_rounds(config: FmhaConfig, splits: int, tile_heads: int, shares: int) -> int:
    """Pieces of a tile that a warp of the Hopper kernel joins at most."""
    column_groups = config.head_dim // 16  # of a half
    largest = next(size for size, most, _ in join_sizes(column_groups) if splits <= most)
    pieces = tile_heads // 16 * (column_groups // largest) // shares
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
