"""Tilings of Blackwell's grouped linear, and the choice of a launch."""

from __future__ import annotations

from dsv4.kernels.gemm.grouped_config import GroupedLinearConfig
from dsv4.kernels.gemm.sm100 import plan as plans
from dsv4.kernels.gemm.sm100.plan import LinearPlan, Tiling


def tilings(config: GroupedLinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels, by tokens."""
    slices, promoted = plans.num_slices(config), plans.is_promoted(config)
    return plans.tilings_of(slices, config.quantizes, promoted, config.terms)


def plan_of(config: GroupedLinearConfig, tiling: Tiling, lanes_per_warp: int = 1) -> LinearPlan:
    """Plan of one of a configuration's tilings."""
    return LinearPlan(
        config.in_features,
        plans.num_slices(config),
        tiling,
        lanes_per_warp,
        plans.is_promoted(config),
        group_rows=config.group_rows,
        epilogues=config.epilogues,
    )


def choose(config: GroupedLinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return plans.cheapest(
        tilings(config), tokens, lambda tiling: plans.cost(config, tiling, tokens, num_sms)
    )
