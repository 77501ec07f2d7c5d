"""Context of Hopper's attention kernel: what its roles share while it is traced."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup.mma import MmaI8Op
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import SPAN_BYTES, operand_atoms
from dsv4.kernels.lowp.context import Context, Tiles, pipelines, views
from dsv4.kernels.lowp.plan import GROUP_QUERIES, AttentionPlan

DTYPES = {"int8": cutlass.Int8, "fp8": cutlass.Float8E4M3FN}
SCORES = {"int8": cutlass.Int32, "fp8": cutlass.Float32}
VALUES = {"fp8": cutlass.Float8E4M3FN, "fp16": cutlass.Float16}
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class Smem(Tiles):
    """Views of shared memory, with those that products read."""

    queries: cute.Tensor  # swizzled [64, channel, warpgroup]
    keys: cute.Tensor  # swizzled [key, channel, stage]
    values: cute.Tensor  # swizzled [channel, key, stage]


@dataclass(frozen=True)
class Pipelines:
    """The edges of `AttentionPlan.barriers`."""

    queries: mbarrier.Buffer
    keys: mbarrier.Ring
    values: mbarrier.Ring


@dataclass(frozen=True)
class AttentionContext(Context):
    """A CTA's part of a launch."""

    smem: Smem
    pipes: Pipelines


def allocate(plan: AttentionPlan) -> tuple[Smem, Pipelines]:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    rows, _ = operand_atoms(DTYPES[plan.qk], plan.span_of_codes)
    keys = plan.tile_keys
    span = keys if plan.pv == "fp8" else SPAN_BYTES
    columns, fp16_columns = operand_atoms(VALUES[plan.pv], span)
    q = cute.tile_to_shape(rows, (GROUP_QUERIES, plan.dim, plan.groups), order=(0, 1, 2))
    k = cute.tile_to_shape(rows, (keys, plan.dim, plan.stages), order=(0, 1, 2))
    if plan.pv == "fp8":
        v = cute.tile_to_shape(columns, (plan.dim, keys, plan.stages), order=(0, 1, 2))
    else:
        v = cute.tile_to_shape(fp16_columns, (plan.dim, keys, plan.stages), order=(1, 0, 2))
    smem = Smem(
        **views(plan, storage),
        queries=storage.queries.get_tensor(q.outer, swizzle=q.inner),
        keys=storage.keys.get_tensor(k.outer, swizzle=k.inner),
        values=storage.values.get_tensor(v.outer, swizzle=v.inner),
    )
    return smem, Pipelines(**pipelines(plan, storage))


def scores_mma(plan: AttentionPlan):
    """wgmma of a warpgroup's queries with a tile of keys, both in shared memory."""
    shape, major = (GROUP_QUERIES, plan.tile_keys, 32), K_MAJOR
    dtype, sums = DTYPES[plan.qk], SCORES[plan.qk]
    op = MmaI8Op if plan.qk == "int8" else warpgroup.MmaF8Op
    source = warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(op(dtype, dtype, sums, shape, source, major, major))


def values_mma(plan: AttentionPlan, sums=cutlass.Float32, channels: int | None = None):
    """wgmma of weights in registers with a tile of values.

    Args:
        sums: dtype of the accumulators.
        channels: of a product; all.
    """
    channels = channels or plan.dim
    dtype, source = VALUES[plan.pv], warpgroup.OperandSource.RMEM
    if plan.pv == "fp8":
        shape = (GROUP_QUERIES, channels, 32)
        op = warpgroup.MmaF8Op(dtype, dtype, sums, shape, source, K_MAJOR, K_MAJOR)
    else:
        shape = (GROUP_QUERIES, channels, 16)
        op = warpgroup.MmaF16BF16Op(dtype, sums, shape, source, K_MAJOR, MN_MAJOR)
    return cute.make_tiled_mma(op)
