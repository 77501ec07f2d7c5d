"""Plan of the gate of many tokens: tiles of 128 experts x 64 tokens, a ring of parts of K.

Plain Python. Nothing here changes a bit of a logit.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, Registers, Warps
from dsv4.kernels.kit.ring_plan import RingPlan
from dsv4.kernels.moe.routing import PART, SLICE_PARTS, RoutingConfig

WARP_EXPERTS, WARP_TOKENS = 32, 32
EXPERT_WARPS, TOKEN_WARPS = 4, 2
CHUNK = 32  # elements of K of a row that lie together: a quad of lanes reads them
CHUNKS = PART // CHUNK
BF16 = 2


@dataclass(frozen=True)
class GatePlan(RingPlan):
    """Every budget of a CTA; a stage is a part of K.

    Attributes:
        hidden: K.
        sharing: CTAs of a cluster, which have tokens of their own and load the same weights once.
        lanes_per_warp: lanes that arrive for their warp; 32 for a checker that follows threads.
    """

    hidden: int
    sharing: int = 2
    lanes_per_warp: int = 1

    @classmethod
    def of(cls, config: RoutingConfig) -> GatePlan:
        return cls(config.hidden)

    @property
    def experts(self) -> int:
        """Of a tile."""
        return WARP_EXPERTS * EXPERT_WARPS

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return WARP_TOKENS * TOKEN_WARPS

    @property
    def part_experts(self) -> int:
        """Rows of weights that a CTA of a cluster loads for all."""
        return self.experts // self.sharing

    @property
    def slices(self) -> int:
        return self.hidden // (PART * SLICE_PARTS)

    # ---- budgets ----

    @property
    def warps(self) -> Warps:
        return Warps.of(consumers=EXPERT_WARPS * TOKEN_WARPS, load=1, idle=3)

    @property
    def registers(self) -> Registers:
        """Most of them for three sets of sums."""
        return Registers.of(self.warps, consumers=232, load=40, idle=40)

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.experts * PART * BF16

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.tokens * PART * BF16

    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        return (
            # [stage, CTA that loads, chunk, row, 32 elements]
            Buffer("weight", "Uint8", stages * self.weight_bytes, 128),
            # [stage, chunk, token, 32 elements]
            Buffer("x", "Uint8", stages * self.x_bytes, 128),
            *self._barriers(stages).split_buffers,
        )

    def _barriers(self, stages: int) -> BarrierGraph:
        edge = Edge(
            "ring", "a part of K of weights and tokens",
            (Arrival("load", Arrive.TMA),),
            (Arrival("consumers", Arrive.WARP, ctas=self.sharing),),
            stages,
            self.weight_bytes + self.x_bytes,
        )  # fmt: skip
        return BarrierGraph(self.warps, (edge,), self.lanes_per_warp)

    def __post_init__(self) -> None:
        assert self.part_experts % WARP_EXPERTS == 0, self.sharing
