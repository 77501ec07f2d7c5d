"""Tilings of a plain linear, and the choice of a launch."""

from __future__ import annotations

from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.epilogues import Epilogue
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.plan import (
    FEW_TOKENS,
    MANY_TOKENS,
    MOST_TOKENS,
    RESIDENT_TOKENS,
    SHARING,
    LinearPlan,
    Tiling,
)

# Made for weights of very many rows, a vocabulary's: CTAs take tiles of their own.
TILINGS = (
    Tiling(RESIDENT_TOKENS, False, 1),
    Tiling(FEW_TOKENS, True, 1),
    Tiling(MANY_TOKENS, True, 1),
    Tiling(MOST_TOKENS, True, 1, SHARING),
)


def linear_plan(
    config: PlainLinearConfig, tiling: Tiling, epilogue: Epilogue | None = None
) -> LinearPlan:
    """Budgets of a tiling's CTA."""
    epilogues = () if epilogue is None else (epilogue,)
    return LinearPlan(config.in_features, tiling, kind=Kind.BF16, epilogues=epilogues)


def choose(tokens: int) -> int:
    """Index in `TILINGS` of the smallest that takes so many tokens at once, else of the last."""
    fitting = (index for index, tiling in enumerate(TILINGS) if tokens <= tiling.tokens)
    return next(fitting, len(TILINGS) - 1)
