"""Tilings of a grouped linear, and the choice of a launch."""

from __future__ import annotations

from dataclasses import replace

from dsv4.kernels.gemm import plan as plans
from dsv4.kernels.gemm.config import num_slices
from dsv4.kernels.gemm.grouped_config import GroupedLinearConfig
from dsv4.kernels.gemm.plan import (
    FEW_TOKENS,
    MANY_TOKENS,
    MOST_TOKENS,
    RESIDENT_TOKENS,
    SHARING,
    LinearPlan,
    Tiling,
)


def linear_plan(config: GroupedLinearConfig, tiling: Tiling) -> LinearPlan:
    """Budgets of a tiling's CTA."""
    return LinearPlan(
        config.in_features, tiling, group_rows=config.group_rows, epilogues=config.epilogues
    )


def tilings(config: GroupedLinearConfig) -> tuple[Tiling, ...]:
    """Tilings of a configuration's kernels: for up to 8 tokens, quantised by its CTAs, for up to
    16, and for more, quantised by a launch before. Activations of two terms have half as many
    tokens for as many columns.

    Where outputs become codes, a tile has 128 rows, and CTAs that share its slices have groups of 8
    tokens to round: there is no tiling for up to 8 tokens alone. Nor where x are codes.
    """
    slices, ctas = num_slices(config.in_features), plans.spread(config.out_features)
    terms = config.terms
    if config.rounds_output:
        ctas = min(ctas, FEW_TOKENS // 8)
    resident = Tiling(RESIDENT_TOKENS, False, min(ctas, slices // 2), terms=terms)
    while 2 * resident.cluster < slices and not plans.leaves_ring(config.in_features, resident):
        resident = replace(resident, cluster=2 * resident.cluster)
    found = [] if config.rounds_output or not config.quantizes else [resident]
    found.append(Tiling(FEW_TOKENS, True, min(ctas, slices), terms=terms))
    found = [plans.deepened(tiling, config.out_features // tiling.rows) for tiling in found]
    clusters = [count for count in (2, 1) if count <= min(ctas, slices)]
    for columns in (MANY_TOKENS, MOST_TOKENS):
        found += [Tiling(columns // terms, True, count, terms=terms) for count in clusters]
    found[-1] = replace(found[-1], sharing=SHARING)
    return tuple(found)


def choose(config: GroupedLinearConfig, tokens: int, num_sms: int) -> int:
    """Index in `tilings(config)` of the tiling for so many tokens."""
    return plans.cheapest(
        tilings(config), tokens, lambda tiling: plans.cost(config, tiling, tokens, num_sms)
    )
