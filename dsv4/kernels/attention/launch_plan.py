"""Launch plan of sparse attention: kernel, KV splits, head tiles, column slices.

Plain Python for the host that launches; decided by the launch's size and the GPU, never by values.
On Hopper the compiled host function makes the same of the number of splits that it is given
(`sm90/fmha.py` the kernel, `make_tiling` the tile): its grid is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.key_tiles import TILE_KEYS
from dsv4.kernels.attention.sm100 import costs as sm100_costs
from dsv4.kernels.attention.split_kv import (
    MAX_SPLITS,
    MOST_SWAP_AB_HEADS,
    STATS,
    SWAP_AB_TILE_HEADS,
    TILED_HEADS,
    combine_sizes,
    meets_in_cluster,
    with_counters,
)

TILE_HEADS = 64  # heads of a CTA, where heads are the M of the products
SLICED_HEAD_DIM = 512  # whose columns two CTAs can halve
FEW_CODED_SPLITS = 4  # up to which steps of Flash lose nothing where splits are combined into codes


@dataclass(frozen=True)
class LaunchPlan:
    """Division of a launch into work tiles.

    Attributes:
        kernel: "swap_ab" or "heads_m" on Hopper, "1cta" or "2cta" on Blackwell.
        num_splits: parts that the keys of a token are split into.
        tile_heads: query heads of a work tile.
        column_slices: CTAs that share the output columns of a head tile.
        work_tiles: CTAs' worth of work, of all tokens.
    """

    kernel: str
    num_splits: int
    tile_heads: int
    column_slices: int
    work_tiles: int


@dataclass(frozen=True)
class HeadsMCosts:
    """Microseconds of a launch with heads as the M of the products.

    Attributes:
        launch: start and end.
        tile: a step of 64 keys.
        sliced_tile: the same where two CTAs halve the columns of the output.
        memory_tile: a step of 64 keys on all SMs, at least: what DRAM takes.
        partial: writing and reading 64 whole partial rows.
        busy_partial: the same, on top, while all SMs do so.
        round: each time that warps combine another fragment after their first.
        busy: on top, if all SMs are at work.
    """

    launch: float
    tile: float
    sliced_tile: float
    memory_tile: float
    partial: float
    busy_partial: float
    round: float
    busy: float


@dataclass(frozen=True)
class SwapAbCosts:
    """Microseconds of a launch with keys as the M of the products, in tiles of few heads.

    Attributes:
        launch: start and end.
        tile, tile_head: a step of 64 keys; the second for each head.
        memory_tile: a step of 64 keys on all SMs, at least: what DRAM takes.
        late: where CTAs of the next launch wait for an SM.
        combine, combine_head: combining splits; the second for each head of each work tile.
    """

    launch: float
    tile: float
    tile_head: float
    memory_tile: float
    late: float
    combine: float
    combine_head: float


@dataclass(frozen=True)
class StepCosts:
    """Microseconds that launches lose in a model's step beyond what they take by themselves: where
    other launches have the SMs, memory and L2 before and behind them.

    Attributes:
        heads_m: a launch with heads as the M of the products.
        apart: one of swap-AB whose splits meet in memory, not in a cluster.
        rows: one of swap-AB whose rows are to become codes, by a launch of their own.
        wide: a combination of more splits than `FEW_CODED_SPLITS` into codes.
    """

    heads_m: float = 0.0
    apart: float = 0.0
    rows: float = 0.0
    wide: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Costs of the Hopper kernels; Blackwell's are in `sm100.costs`."""

    heads_m: HeadsMCosts
    swap_ab: SwapAbCosts
    step: StepCosts = StepCosts()


# Fitted to measurements on an H200 of 1 to 64 tokens of 8 to 128 heads, so that the number of
# splits that is chosen is the fastest of those measured, or nearly so.
H200 = Costs(
    HeadsMCosts(
        launch=3.6,
        tile=1.45,
        sliced_tile=1.14,
        memory_tile=1.92,
        partial=2.52,
        busy_partial=1.9,
        round=1.37,
        busy=1.51,
    ),
    SwapAbCosts(
        launch=3.28,
        tile=0.89,
        tile_head=0.0068,
        memory_tile=1.92,
        late=0.33,
        combine=0.95,
        combine_head=0.0006,
    ),
)


def has_two_kernels(heads: int, arch: str) -> bool:
    """Whether the size of a launch decides which kernel serves so many heads."""
    return arch == "sm_90a" and heads in TILED_HEADS


def check_splits(config: FmhaConfig) -> None:
    """Refuse a fixed number of splits that no kernel has: ValueError."""
    if config.num_splits is not None and config.num_splits > MAX_SPLITS:
        raise ValueError(f"num_splits: got {config.num_splits}, at most {MAX_SPLITS} on a GPU")


def key_tiles(rows: int, width: int) -> int:
    """Tiles of `rows` compressed and `width` window keys."""
    return -(-rows // TILE_KEYS) - (-width // TILE_KEYS)


def make_plan(
    config: FmhaConfig,
    tokens: int,
    rows: int,
    width: int,
    num_sms: int,
    arch: str = "sm_90a",
    costs: Costs = H200,
) -> LaunchPlan:
    """Plan of a launch of `tokens` tokens of `rows` compressed and `width` window keys.

    The number of splits is the configuration's, else the one with the shortest expected time, on
    Hopper by `costs`.
    """
    if config.num_splits is None:
        splits = _choose_splits(config, tokens, key_tiles(rows, width), num_sms, arch, costs)
    else:
        splits = config.num_splits
    if arch == "sm_90a":
        return _arrange(config, tokens, splits, num_sms, arch)
    heads = config.num_query_heads
    kernel, tile_heads, cluster = sm100_costs.variant_of(config.head_dim, heads)
    tiles = tokens * -(-heads // tile_heads) * splits * cluster
    return LaunchPlan(kernel, splits, tile_heads, 1, tiles)


def num_splits(
    config: FmhaConfig,
    tokens: int,
    rows: int,
    width: int,
    num_sms: int,
    arch: str = "sm_90a",
    costs: Costs = H200,
) -> int:
    """KV splits of a launch: `num_splits` of the compiled function's call."""
    return make_plan(config, tokens, rows, width, num_sms, arch, costs).num_splits


def _choose_splits(
    config: FmhaConfig, tokens: int, tiles: int, num_sms: int, arch: str, costs: Costs
) -> int:
    head_tiles = tokens * -(-config.num_query_heads // TILE_HEADS)
    most = max(1, min(tiles, num_sms // max(head_tiles, 1), MAX_SPLITS))

    def cost(splits: int) -> float:
        if arch != "sm_90a":
            size = (config.head_dim, config.num_query_heads, tokens)
            return sm100_costs.microseconds(*size, splits, tiles, num_sms)
        plan = _arrange(config, tokens, splits, num_sms, arch)
        in_step = _step_cost(costs.step, plan, num_sms)
        if plan.kernel == "swap_ab":
            return in_step + _swap_ab_cost(costs.swap_ab, plan, tokens, tiles, num_sms)
        return in_step + _heads_m_cost(costs.heads_m, plan, config, tokens, tiles, num_sms)

    return min(range(1, most + 1), key=cost)


def _arrange(config: FmhaConfig, tokens: int, splits: int, num_sms: int, arch: str) -> LaunchPlan:
    """Kernel and tile of a launch of so many splits, as the Hopper kernels choose them."""
    heads = config.num_query_heads
    few = _swap_ab_heads(config, tokens * splits, num_sms, arch)
    if few:
        return LaunchPlan("swap_ab", splits, few, 1, tokens * (heads // few) * splits)
    tile_heads, slices = _heads_m_tile(config, tokens, splits, num_sms)
    tiles = tokens * -(-heads // tile_heads) * splits * slices
    return LaunchPlan("heads_m", splits, tile_heads, slices, tiles)


def _swap_ab_heads(config: FmhaConfig, token_splits: int, num_sms: int, arch: str) -> int:
    """Heads of a tile of the swap-AB kernel, or 0 where the other one serves.

    It serves few heads, which would leave most of a 64-row product empty; and small launches, whose
    CTAs take tiles of 16 heads side by side while there is an SM for each. A fixed number of splits
    promises that a token's bits do not depend on the batch: it has one kernel.
    """
    heads = config.num_query_heads
    if heads <= MOST_SWAP_AB_HEADS:
        return heads
    has_both = has_two_kernels(heads, arch) and config.num_splits is None
    is_small = token_splits * (heads // SWAP_AB_TILE_HEADS) <= num_sms
    return SWAP_AB_TILE_HEADS if has_both and is_small else 0


def _heads_m_tile(config: FmhaConfig, tokens: int, splits: int, num_sms: int) -> tuple[int, int]:
    """Heads of a tile and slices of its columns of the heads-in-M kernel.

    Few tokens leave SMs idle. Then two CTAs share a tile, each half of the output's columns. With
    splits, tiles may also have fewer heads, at the price of reading the keys more often.
    """
    heads = config.num_query_heads
    tile_heads = min(_padded_heads(config), TILE_HEADS)
    tiles = tokens * -(-heads // tile_heads) * splits
    slices = 2 if config.head_dim == SLICED_HEAD_DIM and 2 * tiles <= num_sms else 1
    is_even = heads < TILE_HEADS or heads % TILE_HEADS == 0
    for fewer in (32, 16):
        if splits == 1 or not is_even or heads % fewer or (fewer == 16 and slices == 2):
            continue
        if tokens * splits * (heads // fewer) * slices <= num_sms:
            tile_heads = fewer
    return tile_heads, slices


def _heads_m_cost(
    costs: HeadsMCosts, plan: LaunchPlan, config: FmhaConfig, tokens: int, tiles: int, num_sms: int
) -> float:
    """Microseconds of a launch of the heads-in-M kernel over so many key tiles."""
    load = plan.work_tiles / num_sms
    tile_cost = costs.tile if plan.column_slices == 1 else costs.sliced_tile
    tile_cost = max(tile_cost, _memory_cost(costs.memory_tile, plan, tokens, num_sms))
    time = costs.launch + costs.busy * load
    time += -(-plan.work_tiles // num_sms) * -(-tiles // plan.num_splits) * tile_cost
    if plan.num_splits > 1:
        partials = plan.tile_heads / TILE_HEADS / plan.column_slices
        time += partials * (costs.partial + costs.busy_partial * load)
        time += costs.round * (_combine_rounds(config, plan) - 1)
    return time


def _swap_ab_cost(
    costs: SwapAbCosts, plan: LaunchPlan, tokens: int, tiles: int, num_sms: int
) -> float:
    """The same of the swap-AB kernel."""
    tile_cost = costs.tile + costs.tile_head * plan.tile_heads
    tile_cost = max(tile_cost, _memory_cost(costs.memory_tile, plan, tokens, num_sms))
    time = costs.launch
    time += -(-plan.work_tiles // num_sms) * -(-tiles // plan.num_splits) * tile_cost
    if 2 * plan.work_tiles > num_sms:
        time += costs.late
    if plan.num_splits > 1:
        time += costs.combine + costs.combine_head * plan.tile_heads * plan.work_tiles
    return time


def _step_cost(costs: StepCosts, plan: LaunchPlan, num_sms: int) -> float:
    """What a launch loses in a step."""
    splits = plan.num_splits
    if plan.kernel == "heads_m":
        return costs.heads_m + (costs.wide if splits > FEW_CODED_SPLITS else 0.0)
    meets = splits == 1 or meets_in_cluster(plan.work_tiles // splits, splits, num_sms)
    return costs.rows + (0.0 if meets else costs.apart)


def _memory_cost(memory_tile: float, plan: LaunchPlan, tokens: int, num_sms: int) -> float:
    """Of a tile of keys, if so many splits of tokens have different ones: the tiles of a token's
    heads read the same, and memory sees them once."""
    return memory_tile * min(tokens * plan.num_splits / num_sms, 1)


def _combine_rounds(config: FmhaConfig, plan: LaunchPlan) -> int:
    """Fragments of a tile that a warp of the Hopper kernel combines at most."""
    column_groups = config.head_dim // 16  # of a half
    sizes = combine_sizes(column_groups)
    largest = next(size for size, most, _ in sizes if plan.num_splits <= most)
    fragments = plan.tile_heads // 16 * (column_groups // largest) // plan.column_slices
    return -(-fragments // (4 * plan.num_splits))


# ---- workspace ----


def unsplit_from(config: FmhaConfig, num_sms: int) -> int:
    """Number of tokens from which nothing is split, whatever the keys, unless the number of splits
    is fixed: two splits would need more CTAs than there are SMs."""
    return num_sms // 2 // -(-config.num_query_heads // TILE_HEADS) + 1


def workspace_size(config: FmhaConfig, tokens: int, num_splits: int) -> int:
    """fp32 elements of the workspace of a launch with several splits; they are 0 when new."""
    return with_counters(tokens * num_splits * _padded_heads(config) * (config.head_dim + STATS))


def max_workspace_size(config: FmhaConfig, max_tokens: int, num_sms: int) -> int:
    """fp32 elements that no launch of up to `max_tokens` tokens exceeds."""
    if config.num_splits is not None:
        splits = config.num_splits
        return workspace_size(config, max_tokens, splits) if splits > 1 else 0
    # A chosen split never makes more work tiles than there are SMs.
    rows = min(_padded_heads(config), TILE_HEADS)
    return with_counters(num_sms * rows * (config.head_dim + STATS)) if max_tokens else 0


def _padded_heads(config: FmhaConfig) -> int:
    """Rows of a token's head tiles, which are padded to 16, or to full tiles where there are
    several."""
    granule = 16 if config.num_query_heads <= TILE_HEADS else TILE_HEADS
    return -(-config.num_query_heads // granule) * granule
