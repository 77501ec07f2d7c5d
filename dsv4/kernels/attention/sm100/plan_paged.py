"""Plans of Blackwell's attention kernels over a paged cache: those of dense keys with a gather.

Rows of bf16 are gathered by TMA, one warp issues for a CTA. FP8 entries are converted by warps that
write the tiles themselves, as `Arrive.THREAD` of the edge "kv" says. Either way those warps tell
the softmax which rows of a tile are keys, over the edge "info".

Plain Python: `print(PagedPlan1Cta(512))`, `print(PagedPlan2Cta())`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.sm100.plan_1cta import Plan1Cta
from dsv4.kernels.attention.sm100.plan_2cta import Plan2Cta
from dsv4.kernels.kit.plan import Arrival, Arrive, BarrierGraph, Buffer, Edge, SmemPlan, Warps

INFO_STAGES = 8  # key tiles that the gather may be ahead of the softmax; a power of two
GATHER_WARPS = 4  # that convert FP8 entries


def _load_warps(is_fp8: bool) -> int:
    return GATHER_WARPS if is_fp8 else 1


def _with_info(graph: BarrierGraph, is_fp8: bool, ctas: int) -> BarrierGraph:
    """The barriers of dense keys; what fills a KV stage, and the edge from gather to softmax."""
    kv = graph["kv"]
    if is_fp8:
        by_threads = Arrival("load", Arrive.THREAD, ctas=ctas)
        kv = replace(kv, producers=(by_threads,), tx_bytes=0)
    info = Edge(
        "info",
        "rows that are keys",
        (Arrival("load", Arrive.WARP),),
        (Arrival("softmax", Arrive.WARP),),
        INFO_STAGES,
    )
    edges = tuple(kv if edge.name == "kv" else edge for edge in graph.edges)
    return BarrierGraph(graph.warps, (*edges, info))


def _with_tile_info(plan: SmemPlan) -> SmemPlan:
    info = Buffer("tile_info", "Int32", TILE_INFO_WORDS * INFO_STAGES, 16)
    # In front of the tiles, whose alignment leaves a gap there.
    return SmemPlan((info, *plan.buffers))


@dataclass(frozen=True)
class PagedPlan1Cta(Plan1Cta):
    """Budgets of one compiled 1-CTA kernel; every CTA gathers the keys of its heads itself."""

    is_fp8: bool = False

    @property
    def warps(self) -> Warps:
        return Warps.of(softmax=4, mma=1, load=_load_warps(self.is_fp8))

    def _barriers(self, kv_stages: int) -> BarrierGraph:
        return _with_info(super()._barriers(kv_stages), self.is_fp8, 1)

    def _smem(self, kv_stages: int) -> SmemPlan:
        return _with_tile_info(super()._smem(kv_stages))


@dataclass(frozen=True)
class PagedPlan2Cta(Plan2Cta):
    """Budgets of each CTA of the 2-CTA kernel."""

    is_fp8: bool = False

    @property
    def warps(self) -> Warps:
        return Warps.of(softmax=4, query=4, mma=1, load=_load_warps(self.is_fp8))

    @property
    def barriers(self) -> BarrierGraph:
        return _with_info(super().barriers, self.is_fp8, 2)

    @property
    def smem(self) -> SmemPlan:
        return _with_tile_info(super().smem)
