"""Tilings of Blackwell's merged linear, and the choice of a launch."""

from __future__ import annotations

from dsv4.arch import SM_100A
from dsv4.kernels.gemm.config import STEP_BYTES, Kind
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.merged_plan import row_tiles
from dsv4.kernels.gemm.sm100.plan import (
    EXCHANGE_CYCLES,
    L2_BYTES,
    ROWS,
    LinearPlan,
    Tiling,
    cheapest,
    slices_of,
    tilings_of,
)


def num_slices(config: MergedLinearConfig) -> int:
    """Slices of K of every weight, as many as the row tiles of all leave SMs for: see
    `plan.num_slices`."""
    return slices_of(_row_tiles(config), config.k_blocks, SM_100A.num_sms)


def is_promoted(config: MergedLinearConfig) -> bool:
    """Of FP8 weights, as in `LinearPlan`."""
    return config.fp8[0].stored == "float32"


def plans(
    config: MergedLinearConfig, tiling: Tiling, lanes_per_warp: int = 1
) -> tuple[LinearPlan, ...]:
    """Plan of each kind."""
    slices, found = num_slices(config), []
    for kind in config.kinds:
        has_scales = kind is Kind.FP8
        promoted = has_scales and is_promoted(config)
        epilogues = config.head_epilogues if has_scales else ()
        given = config.in_features, slices, tiling, lanes_per_warp, promoted, kind
        found.append(LinearPlan(*given, epilogues=epilogues))
    return tuple(found)


def tilings(config: MergedLinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels, by tokens."""
    return tilings_of(num_slices(config), not config.has_codes, is_promoted(config))


def choose(config: MergedLinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return cheapest(tilings(config), tokens, lambda tiling: cost(config, tiling, tokens, num_sms))


def cost(config: MergedLinearConfig, tiling: Tiling, tokens: int, num_sms: int) -> float:
    """Cycles of a launch by what its CTAs read and exchange, the kinds sharing the SMs out by their
    bytes; no B200 has timed one."""
    token_tiles, steps, longest = -(-tokens // tiling.tokens), 0, 0
    for kind in config.kinds:
        blocks = config.in_features // kind.step
        steps += row_tiles(config, kind, ROWS) * token_tiles * blocks
        longest = max(longest, blocks // tiling.cluster)
    exchange = EXCHANGE_CYCLES * tiling.tokens if tiling.cluster > 1 else 0
    waves = max(longest, -(-steps // num_sms)) / longest
    return waves * (longest * (ROWS + tiling.tokens) * STEP_BYTES / L2_BYTES + exchange)


def _row_tiles(config: MergedLinearConfig) -> int:
    return sum(row_tiles(config, kind, ROWS) for kind in config.kinds)
