"""Tilings of Blackwell's plain linear, and the choice of a launch."""

from __future__ import annotations

from dsv4.kernels.gemm.config import Kind
from dsv4.kernels.gemm.epilogues import Epilogue
from dsv4.kernels.gemm.plain_config import PlainLinearConfig
from dsv4.kernels.gemm.sm100.plan import (
    FEW_TOKENS,
    MANY_TOKENS,
    MOST_TOKENS,
    WIDE_TOKENS,
    LinearPlan,
    Tiling,
)

# Made for weights of very many rows, a vocabulary's: CTAs take tiles of their own.
TILINGS = tuple(Tiling(tokens, 1) for tokens in (FEW_TOKENS, MANY_TOKENS, MOST_TOKENS, WIDE_TOKENS))
SLICES = 1


def plan_of(
    config: PlainLinearConfig,
    tiling: Tiling,
    epilogue: Epilogue | None = None,
    lanes_per_warp: int = 1,
) -> LinearPlan:
    """Plan of one of the tilings."""
    epilogues = () if epilogue is None else (epilogue,)
    given = config.in_features, SLICES, tiling, lanes_per_warp
    return LinearPlan(*given, kind=Kind.BF16, epilogues=epilogues)


def choose(tokens: int) -> int:
    """Index in `TILINGS` of the smallest that takes so many tokens at once, else of the last."""
    fitting = (index for index, tiling in enumerate(TILINGS) if tokens <= tiling.tokens)
    return next(fitting, len(TILINGS) - 1)
