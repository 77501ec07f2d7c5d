"""How many CTAs share the keys of a token, and the partials that they leave."""

from __future__ import annotations

from dsv4.kernels.attention.config import FmhaConfig

TILE_HEADS = 64  # heads of a CTA
BLOCK_KEYS = 64  # keys of a step
STATS = 4  # fp32 values beside each partial row
MAX_SPLITS = 32  # the combine kernel weighs one split per lane

# Costs in units of one block of keys (1.4 us), measured on an H200.
WORK_COST = 3.5  # start and epilogue of a CTA's work item
COMBINE_COST = 3.1  # the second launch
PARTIAL_COST = 0.024  # writing and reading one CTA's 64 partial rows


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
        heads = min(config.num_query_heads, TILE_HEADS)
        partials = tiles * splits * heads / TILE_HEADS
        return time if splits == 1 else time + COMBINE_COST + PARTIAL_COST * partials

    return min(range(1, most + 1), key=cost)


def unsplit_from(config: FmhaConfig, multiprocessors: int) -> int:
    """Number of tokens from which `choose` gives 1, whatever the keys: two splits would need more
    CTAs than there are multiprocessors."""
    return multiprocessors // 2 // -(-config.num_query_heads // TILE_HEADS) + 1


def workspace_size(config: FmhaConfig, tokens: int, num_splits: int) -> int:
    """fp32 elements of the partials of a launch with several splits."""
    return tokens * config.num_query_heads * num_splits * (config.head_dim + STATS)


def max_workspace_size(config: FmhaConfig, max_tokens: int, multiprocessors: int) -> int:
    """fp32 elements that no launch of up to `max_tokens` tokens exceeds."""
    if config.num_splits is not None:
        splits = config.num_splits
        return workspace_size(config, max_tokens, splits) if splits > 1 else 0
    # A chosen split never makes more work items than there are multiprocessors.
    heads = min(config.num_query_heads, TILE_HEADS)
    return multiprocessors * heads * (config.head_dim + STATS) if max_tokens else 0
