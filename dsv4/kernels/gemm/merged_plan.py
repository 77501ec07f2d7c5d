"""Tilings of a merged linear, and the choice of a launch."""

from __future__ import annotations

from dataclasses import replace

from dsv4.arch import SM_90A
from dsv4.kernels.gemm.config import K_BLOCK, Kind, num_slices
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.plan import (
    EXCHANGE_COST,
    FEW_TOKENS,
    M_TILE,
    MANY_TOKENS,
    MOST_TOKENS,
    RESIDENT_TOKENS,
    SHARING,
    USABLE_BY_CLUSTERS,
    WIDE_COST,
    LinearPlan,
    Tiling,
)


def row_tiles(config: MergedLinearConfig, kind: Kind, rows: int) -> int:
    """Row tiles of all weights of a kind: none holds rows of two."""
    return sum(-(-weight.rows // rows) for weight in config.of_kind(kind))


def plans(config: MergedLinearConfig, tiling: Tiling) -> tuple[LinearPlan, ...]:
    """Plan of each kind."""
    return tuple(
        LinearPlan(config.in_features, tiling, kind=kind, is_merged=True) for kind in config.kinds
    )


def tilings(config: MergedLinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels. For up to 16 tokens with codes, else for up to 8 and
    up to 16, quantised by the CTAs of the FP8 weights; for up to 64 and for more, quantised by a
    launch before."""
    slices = num_slices(config.in_features)
    wide = sum(row_tiles(config, kind, 2 * M_TILE) for kind in config.kinds)
    # ---- few tokens: two CTAs an SM ----
    found = []
    if config.has_codes:
        fitting = [c for c in (4, 2) if c <= slices and c * wide <= 2 * SM_90A.num_sms]
        found.append(Tiling(FEW_TOKENS, True, max(fitting, default=1)))
    else:
        found += [_resident(config, tokens) for tokens in (RESIDENT_TOKENS, FEW_TOKENS)]
    # ---- many ----
    clusters = [c for c in (4, 2, 1) if c <= slices and (c == 1 or c * wide <= SM_90A.num_sms)]
    found += [Tiling(MANY_TOKENS, True, c, is_light=c == slices) for c in clusters]
    found += [Tiling(MOST_TOKENS, True, c) for c in clusters if c > 1]
    found.append(Tiling(MOST_TOKENS, True, 1, SHARING))
    return tuple(found)


def _resident(config: MergedLinearConfig, tokens: int) -> Tiling:
    """Clusters for two CTAs an SM, at least those that leave room for a ring."""
    slices = num_slices(config.in_features)
    row_tile_count = sum(row_tiles(config, kind, M_TILE) for kind in config.kinds)
    tiling = Tiling(tokens, False, 1)
    while 4 * tiling.cluster <= slices and (
        2 * tiling.cluster * row_tile_count <= 2 * SM_90A.num_sms or not _has_ring(config, tiling)
    ):
        tiling = replace(tiling, cluster=2 * tiling.cluster)
    return tiling


def _has_ring(config: MergedLinearConfig, tiling: Tiling) -> bool:
    """Whether the resident activations leave room for a ring of three stages."""
    blocks = config.k_blocks // tiling.cluster
    left = SM_90A.smem_per_sm // tiling.ctas_per_sm - blocks * K_BLOCK * tiling.tokens
    return left >= 3 * 2 * M_TILE * K_BLOCK


def choose(config: MergedLinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens: the smallest that takes them at
    once where there is one of few tokens, else the one with the least `cost`."""
    found = tilings(config)
    for index, tiling in enumerate(found):
        if tokens <= tiling.tokens <= FEW_TOKENS:
            return index
    many = [index for index, tiling in enumerate(found) if tiling.tokens > FEW_TOKENS]
    return min(many, key=lambda index: cost(config, found[index], tokens, num_sms))


def cost(config: MergedLinearConfig, tiling: Tiling, tokens: int, num_sms: int) -> float:
    """Time of a launch in k blocks of a tile of MANY_TOKENS: the kinds share the clusters out by
    their blocks, as `streaming` does it."""
    usable = num_sms if tiling.ctas <= 2 else int(num_sms * USABLE_BY_CLUSTERS)
    token_tiles, total, longest = -(-tokens // tiling.tokens), 0, 0
    for plan in plans(config, tiling):
        groups = -(-row_tiles(config, plan.kind, tiling.rows) // tiling.sharing)
        blocks = plan.row_blocks // tiling.cluster
        total += groups * token_tiles * tiling.ctas * blocks
        longest = max(longest, blocks)
    blocks = max(longest, -(-total // usable))
    exchange = EXCHANGE_COST * (tiling.cluster.bit_length() - 1)
    return WIDE_COST * blocks + 3 * exchange if tiling.is_wide else blocks + exchange
