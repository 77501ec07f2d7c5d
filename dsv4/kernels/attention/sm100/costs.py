"""Expected time of a launch of Blackwell's attention by its number of KV splits.

No Blackwell has been measured. The costs are fitted to what the simulator's time model of a B200
says of 105 launches of head_dim 512: 16, 64 and 128 heads, 1 to 64 tokens, 640 and 1,152 keys, 1 to
18 splits (`scripts/tools/simulator_split_costs.py` models and fits them). Their mean error is below
3 %, and the splits that they choose take at most 5 % longer than the fastest (`test_costs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.attention.sm100.plan_1cta import ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HEAD_DIM, HEADS
from dsv4.kernels.attention.sm100.plan_combine import PlanCombine


@dataclass(frozen=True)
class VariantCosts:
    """Microseconds of a variant of the kernel.

    Attributes:
        launch: start and end of the attention.
        tile: a step of 64 keys.
        busy: on top, if all SMs are at work.
        combine: launch of the combine, and partial rows in any case.
        partial: on top, for the partial rows of 64 heads of a CTA.
    """

    launch: float
    tile: float
    busy: float
    combine: float
    partial: float


COSTS = {
    "1cta": VariantCosts(launch=2.65, tile=1.41, busy=2.70, combine=0.68, partial=2.07),
    "2cta": VariantCosts(launch=4.19, tile=0.68, busy=1.63, combine=2.73, partial=0.0),
}
# The combine takes longer from this part of the blocks on that run at a time, by so much for all of
# them: partial rows no longer come from L2, and blocks wait for others to end.
COMBINE_FREE, COMBINE_BUSY = 0.53, 4.75


def variant_of(head_dim: int, heads: int) -> tuple[str, int, int]:
    """Variant of the kernel, heads of its work tile, and CTAs that compute one."""
    if head_dim == HEAD_DIM and heads > ROWS:
        return "2cta", HEADS, 2
    return "1cta", ROWS, 1


def microseconds(
    head_dim: int, heads: int, tokens: int, splits: int, key_tiles: int, num_sms: int
) -> float:
    """Time of a launch, with the combine if there are several splits.

    Args:
        key_tiles: of 64 keys, of each token.
    """
    variant, tile_heads, cluster = variant_of(head_dim, heads)
    costs = COSTS[variant]
    ctas = tokens * splits * -(-heads // tile_heads) * cluster
    rounds = -(-ctas // num_sms)
    time = costs.launch + costs.busy * ctas / num_sms
    time += rounds * -(-key_tiles // splits) * costs.tile
    if splits > 1:
        time += costs.combine + costs.partial * min(heads, ROWS) / ROWS
        combine = PlanCombine(head_dim)
        blocks = tokens * heads / combine.rows_per_block
        load = blocks / (num_sms * combine.blocks_per_sm(splits))
        time += COMBINE_BUSY * max(0.0, load - COMBINE_FREE)
    return time
