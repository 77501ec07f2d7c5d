"""Context of Blackwell's attention kernel: what its roles share while it is traced."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.lowp.context import Context, Tiles, pipelines, views
from dsv4.kernels.lowp.sm100.plan import AttentionPlanSm100


@dataclass(frozen=True)
class Smem(Tiles):
    """Views of shared memory."""

    weights_start: cute.Pointer  # of codes, swizzled [query, key] of 64 or 128 bytes of keys
    # Of FP4, by warpgroup, as the tensor core reads them.
    query_scales: cute.Pointer | None = None
    weight_scales: cute.Pointer | None = None
    # Of smoothed queries: their means by warpgroup, and keys as they are by stage, swizzled [row,
    # channel] of 64 channels.
    means: cute.Pointer | None = None
    smooth_keys: cute.Pointer | None = None


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
class AttentionContext(Context):
    """A CTA's part of a launch."""

    smem: Smem
    pipes: Pipelines
    tmem: cute.Pointer  # first column


def allocate(plan: AttentionPlanSm100) -> tuple[Smem, Pipelines, cute.Pointer]:
    """Shared memory of a CTA: its views, the mbarriers in it, and what holds the address of its
    Tensor Memory."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    # A thread reads its row of queries before it writes its weights over it.
    weights = storage.rows if plan.shares_rows else storage.weights
    own = {name: getattr(storage, name).data_ptr() for name in plan.own_buffers}
    smem = Smem(**views(plan, storage), weights_start=weights.data_ptr(), **own)
    return smem, Pipelines(**pipelines(plan, storage)), storage.tmem_address.data_ptr()


def tmem_start(holder: cute.Pointer) -> cute.Pointer:
    """Address of the first column, once a warp has allocated."""
    return cute.arch.retrieve_tmem_ptr(Float32, 16, holder)


def columns_of(ctx: AttentionContext, plan: AttentionPlanSm100, name: str, group) -> cute.Pointer:
    """First column of a warpgroup's scores or sums."""
    first, second = plan.columns(name)
    return ctx.tmem + (first + Int32(group) * (second - first))
