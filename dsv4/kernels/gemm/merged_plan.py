"""Tilings of a merged linear, and the choice of a launch."""

from __future__ import annotations

from dataclasses import replace

from dsv4.arch import SM_90A
from dsv4.kernels.gemm.config import K_BLOCK, Kind, num_slices
from dsv4.kernels.gemm.epilogues import IndexRounding
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.plan import (
    FEW_TOKENS,
    M_TILE,
    MANY_TOKENS,
    MOST_TOKENS,
    RESIDENT_TOKENS,
    SHARING,
    LinearPlan,
    Share,
    Tiling,
    cheapest,
    deepened,
    launch_time,
    leaves_ring,
)


def row_tiles(config: MergedLinearConfig, kind: Kind, rows: int) -> int:
    """Row tiles of all weights of a kind: none holds rows of two."""
    return sum(-(-weight.rows // rows) for weight in config.of_kind(kind))


def plans(config: MergedLinearConfig, tiling: Tiling) -> tuple[LinearPlan, ...]:
    """Plan of each kind."""
    return tuple(LinearPlan(config.in_features, tiling, kind=kind) for kind in config.kinds)


def tilings(config: MergedLinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels: for up to 8 tokens, quantised by the CTAs of the FP8
    weights unless their codes are given; for up to 16, up to 64 and more, quantised by a launch
    before.

    Measured on an H200 with the layers of Flash and Pro, 1 to 256 tokens.
    """
    slices = num_slices(config.in_features)
    wide = sum(row_tiles(config, kind, 2 * M_TILE) for kind in config.kinds)
    # CTAs exchange the sums of a tile by tokens where one is rounded, and by rows where none is.
    rounds_some = any(isinstance(e, IndexRounding) for e in config.head_epilogues)

    def clusters(ctas_per_sm: int) -> list[int]:
        """CTAs that may share the slices of a tile, most first."""
        if rounds_some:
            return [1]
        most = ctas_per_sm * SM_90A.num_sms
        return [c for c in (4, 2, 1) if c <= slices and (c == 1 or c * wide <= most)]

    found = [] if config.has_codes else [_resident(config, RESIDENT_TOKENS)]
    found.append(Tiling(FEW_TOKENS, True, clusters(2)[0]))
    found = [deepened(tiling, _long_tiles(config, tiling.rows)) for tiling in found]
    found.append(Tiling(MANY_TOKENS, True, min(clusters(1)[0], 2)))
    if clusters(1)[0] > 1:
        found.append(Tiling(MOST_TOKENS, True, 2))
    found.append(Tiling(MOST_TOKENS, True, 1, SHARING))
    return tuple(found)


def _long_tiles(config: MergedLinearConfig, rows: int) -> int:
    """Row tiles, those of shorter rows counted by their bytes: a cluster takes several of them."""
    read = sum(kind.value * row_tiles(config, kind, rows) for kind in config.kinds)
    return -(-read // max(kind.value for kind in config.kinds))


def _resident(config: MergedLinearConfig, tokens: int) -> Tiling:
    """Clusters for two CTAs an SM, at least those that leave room for a ring."""
    slices = num_slices(config.in_features)
    row_tile_count = sum(row_tiles(config, kind, M_TILE) for kind in config.kinds)
    tiling = Tiling(tokens, False, 1)
    while 4 * tiling.cluster <= slices and (
        2 * tiling.cluster * row_tile_count <= 2 * SM_90A.num_sms
        or not leaves_ring(config.k_blocks * K_BLOCK, tiling)
    ):
        tiling = replace(tiling, cluster=2 * tiling.cluster)
    return tiling


def choose(config: MergedLinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return cheapest(tilings(config), tokens, lambda tiling: cost(config, tiling, tokens, num_sms))


def cost(config: MergedLinearConfig, tiling: Tiling, tokens: int, num_sms: int) -> float:
    """Microseconds of a launch."""
    shares = [
        Share(
            -(-row_tiles(config, plan.kind, tiling.rows) // tiling.sharing),
            plan.row_blocks // tiling.cluster,
        )
        for plan in plans(config, tiling)
    ]
    return launch_time(tiling, shares, tokens, num_sms)
