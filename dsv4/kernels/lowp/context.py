"""Context of attention's kernels: what roles share while they are traced, on every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.lowp.plan import WORK_WORDS, TilePlan
from dsv4.kernels.lowp.work import Operands, WorkTiles


@dataclass(frozen=True)
class Tiles:
    """Views of shared memory that the load warp fills, and that queries are coded in."""

    queries_start: cute.Pointer  # of codes, swizzled [query, channel] by warpgroup
    rows_start: cute.Pointer  # of queries as they are, swizzled [row, channel] of 64 channels
    keys_start: cute.Pointer  # swizzled [key, channel] by stage
    values_start: cute.Pointer  # swizzled [channel, key] by stage
    maxima: cute.Tensor  # [warp]
    key_scales: cute.Tensor | None  # [scale, stage]
    value_block_scales: cute.Tensor | None  # the same
    works: cute.Tensor  # [word, parity]
    value_scales: cute.Tensor  # [channel, parity]


@dataclass(frozen=True)
class Context:
    """A CTA's part of a launch.

    Attributes:
        smem, pipes: the architecture's, with `Tiles` and the edges "queries", "keys", "values".
    """

    operands: Operands
    tiles: WorkTiles
    smem: Any
    pipes: Any


def views(plan: TilePlan, storage) -> dict[str, Any]:
    """The fields of `Tiles` in a CTA's shared memory."""
    scales = block_scales = None
    if plan.key_scales:
        layout = cute.make_layout((plan.key_scales, plan.stages))
        scales = storage.key_scales.get_tensor(layout)
    if plan.value_scale_bytes:
        layout = cute.make_layout((plan.value_scale_bytes, plan.stages))
        block_scales = storage.value_block_scales.get_tensor(layout)
    channels = cute.make_layout((plan.scaled_channels or 1, 2))
    return {
        "queries_start": storage.queries.data_ptr(),
        "rows_start": storage.rows.data_ptr(),
        "keys_start": storage.keys.data_ptr(),
        "values_start": storage.values.data_ptr(),
        "maxima": storage.maxima.get_tensor(cute.make_layout(plan.smem["maxima"].count)),
        "key_scales": scales,
        "value_block_scales": block_scales,
        "works": storage.works.get_tensor(cute.make_layout((WORK_WORDS, 2))),
        "value_scales": storage.value_scales.get_tensor(channels),
    }


def pipelines(plan: TilePlan, storage) -> dict[str, Any]:
    """The edges of a plan by name, over the mbarriers in shared memory."""
    names = [edge.name for edge in plan.barriers.edges]
    return {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
