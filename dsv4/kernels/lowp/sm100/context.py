"""Context of Blackwell's attention kernel: what its roles share while it is traced."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.lowp.plan import WORK_WORDS
from dsv4.kernels.lowp.sm100.plan import AttentionPlanSm100
from dsv4.kernels.lowp.work import Operands, WorkTiles


@dataclass(frozen=True)
class Smem:
    """Views of shared memory."""

    queries_start: cute.Pointer  # of codes, swizzled [query, channel] by warpgroup
    rows_start: cute.Pointer  # of queries as they are, swizzled [row, channel] of 64 channels
    keys_start: cute.Pointer  # swizzled [key, channel] by stage
    values_start: cute.Pointer  # swizzled [channel, key] by stage
    weights_start: cute.Pointer  # of codes, swizzled [query, key] by warpgroup
    maxima: cute.Tensor  # [warp]
    key_scales: cute.Tensor | None  # [key, stage]
    works: cute.Tensor  # [word, parity]
    value_scales: cute.Tensor  # [channel, parity]


@dataclass(frozen=True)
class Pipelines:
    """The edges of `AttentionPlanSm100.barriers`."""

    queries: mbarrier.Buffer
    keys: mbarrier.Ring
    values: mbarrier.Ring
    coded: mbarrier.Signal  # these have a stage for each warpgroup
    scores: mbarrier.Ring
    weights: mbarrier.Signal
    sums: mbarrier.Signal


@dataclass(frozen=True)
class AttentionContext:
    """A CTA's part of a launch."""

    operands: Operands
    tiles: WorkTiles
    smem: Smem
    pipes: Pipelines
    tmem: cute.Pointer  # first column


def allocate(plan: AttentionPlanSm100) -> tuple[Smem, Pipelines, cute.Pointer]:
    """Shared memory of a CTA: its views, the mbarriers in it, and what holds the address of its
    Tensor Memory."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    scales = None
    if plan.key_scales:
        layout = cute.make_layout((plan.key_scales, plan.stages))
        scales = storage.key_scales.get_tensor(layout)
    channels = cute.make_layout((plan.scaled_channels or 1, 2))
    smem = Smem(
        queries_start=storage.queries.data_ptr(),
        rows_start=storage.rows.data_ptr(),
        keys_start=storage.keys.data_ptr(),
        values_start=storage.values.data_ptr(),
        weights_start=storage.weights.data_ptr(),
        maxima=storage.maxima.get_tensor(cute.make_layout(plan.smem["maxima"].count)),
        key_scales=scales,
        works=storage.works.get_tensor(cute.make_layout((WORK_WORDS, 2))),
        value_scales=storage.value_scales.get_tensor(channels),
    )
    names = [edge.name for edge in plan.barriers.edges]
    pipes = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    return smem, Pipelines(**pipes), storage.tmem_address.data_ptr()


def tmem_start(holder: cute.Pointer) -> cute.Pointer:
    """Address of the first column, once a warp has allocated."""
    return cute.arch.retrieve_tmem_ptr(Float32, 16, holder)


def columns_of(ctx: AttentionContext, plan: AttentionPlanSm100, name: str, group) -> cute.Pointer:
    """First column of a warpgroup's scores or sums."""
    first, second = plan.tmem.column(f"{name}0"), plan.tmem.column(f"{name}1")
    return ctx.tmem + (first + Int32(group) * (second - first))
