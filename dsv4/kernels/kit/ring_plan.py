"""Plan of a CTA around a ring of stages, which takes the shared memory that the rest leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dsv4.arch import SM_90A, Arch
from dsv4.kernels.kit.plan import BarrierGraph, Buffer, SmemPlan

CTA_RESERVED = 1024  # bytes of shared memory that an SM keeps for each CTA


class RingPlan(ABC):
    """Shared memory and barriers of a CTA by the stages of its ring.

    A subclass says which buffers and barriers there are for a number of stages.
    """

    arch: Arch = SM_90A

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share the memory of an SM."""
        return 1

    @property
    def most_stages(self) -> int | None:
        """Stages that the ring has at most; None: as many as fit."""
        return None

    @property
    def stage_groups(self) -> int:
        """Groups of consumers that take stages by turns: their number divides that of the stages.

        A stage is then always the same group's. Else one group could wait for a stage's next phase
        while the copy of this phase, another group's, is on its way: copies end out of order, a
        parity tells a phase from the next one only, and the wait would pass at once.
        """
        return 1

    @abstractmethod
    def _buffers(self, stages: int) -> tuple[Buffer, ...]:
        """Shared memory with so many stages."""

    @abstractmethod
    def _barriers(self, stages: int) -> BarrierGraph:
        """Barriers of so many stages."""

    @property
    def stages(self) -> int:
        """As many as fit and are allowed; the fewest also where they do not fit, which `smem`
        refuses."""
        stages = step = self.stage_groups
        most = self.most_stages
        while (most is None or stages + step <= most) and self._fits(stages + step):
            stages += step
        return stages

    @property
    def capacity(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.arch.smem_per_sm // self.ctas_per_sm - CTA_RESERVED

    @property
    def smem(self) -> SmemPlan:
        return SmemPlan(self._buffers(self.stages), self.capacity)

    @property
    def barriers(self) -> BarrierGraph:
        return self._barriers(self.stages)

    def _fits(self, stages: int) -> bool:
        needed = SmemPlan(self._buffers(stages), capacity=1 << 30).total_bytes
        return needed <= self.capacity
