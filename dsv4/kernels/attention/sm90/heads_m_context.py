"""Context of the heads-in-M kernel: what its roles share while it is traced.

Contexts are frozen: the tracer takes a method call on any other object for a change of it, and
carries all that it holds through the loops around the call.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.sm90.heads_m_tiling import HeadsMTiling
from dsv4.kernels.attention.sm90.plan import HALVES, HEADS, KEYS, ROW_INPUTS, HeadsMPlan
from dsv4.kernels.kit import mbarrier
from dsv4.kernels.kit.scheduler import DynamicTailScheduler, StaticTileScheduler, Throttle
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.swizzle import operand_atoms

DTYPE = cutlass.BFloat16


class Operands(NamedTuple):
    """Operands of a launch, beside the TMA descriptors."""

    q: cute.Tensor
    compressed_rows: cutlass.Int32
    window_shape: tuple  # batch, W
    swa_lens: cute.Tensor
    sink_logits: cute.Tensor
    request_ids: cute.Tensor
    o: cute.Tensor
    compressed_lens: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor
    tiling: HeadsMTiling
    by_request_tokens: cute.FastDivmodDivisorV2
    tail_scheduler: DynamicTailScheduler


@dataclass(frozen=True)
class Smem:
    """Views of shared memory; `k` and `v` are one buffer."""

    q: cute.Tensor  # swizzled [head, column]
    k: cute.Tensor  # swizzled [key, column, stage]
    v: cute.Tensor  # swizzled [column of a PV product, key, stage x product]
    p: cute.Tensor  # as the threads hold it: [8, thread, K step]
    q_start: cute.Pointer
    kv_start: cute.Pointer
    rescale: cute.Tensor  # [2, thread]
    row_scale: cute.Tensor  # [row]
    span: cute.Tensor  # words of a KeySpan
    slices: cute.Tensor  # [output warpgroup]
    tile_info: cute.Tensor  # [stage], or [stage x 4] of gathered tiles
    staging: cute.Pointer | None = None  # of threads that gather FP8 entries
    row_inputs: cute.Tensor | None = None  # [input, row]


@dataclass(frozen=True)
class Pipelines:
    """The edges of `HeadsMPlan.barriers`."""

    q: mbarrier.Buffer
    span: mbarrier.Buffer
    p: mbarrier.Buffer
    pv_turn: mbarrier.Signal
    pv_next: mbarrier.Signal
    rows: mbarrier.Buffer
    kv: mbarrier.Ring
    lockstep: mbarrier.Signal | None = None
    inputs_ready: mbarrier.Signal | None = None


@dataclass(frozen=True)
class HeadsMContext:
    """A CTA's part of a launch."""

    operands: Operands
    tiling: HeadsMTiling
    scheduler: StaticTileScheduler | DynamicTailScheduler
    throttle: Throttle
    smem: Smem
    pipes: Pipelines

    def of_token(self, span: KeySpan):
        """The same for a work tile of a token, which may have its own number of splits."""
        if not self.tiling.has_pieces:
            return self
        return replace(self, tiling=self.tiling.of_token(span, KEYS))


def allocate(plan: HeadsMPlan) -> tuple:
    """Shared memory of a CTA: its views, and the mbarriers in it."""
    storage = SmemAllocator().allocate(storage_struct(plan.smem))
    k_major, mn_major = operand_atoms(DTYPE, plan.chunk_bytes)
    q = cute.tile_to_shape(k_major, (HEADS, plan.q_smem_dim), order=(0, 1))
    k = cute.tile_to_shape(k_major, (KEYS, plan.head_dim, plan.stages), order=(0, 1, 2))
    # The same bytes as K, seen as the transposed tiles that the PV products read.
    v_shape = (plan.pv_dim, KEYS, plan.stages * HALVES * plan.subtiles)
    v = cute.tile_to_shape(mn_major, v_shape, order=(1, 0, 2))
    smem = Smem(
        q=storage.q.get_tensor(q.outer, swizzle=q.inner),
        k=storage.kv.get_tensor(k.outer, swizzle=k.inner),
        v=storage.kv.get_tensor(v.outer, swizzle=v.inner),
        p=storage.p.get_tensor(cute.make_layout((8, 128, KEYS // 16))),
        q_start=storage.q.data_ptr(),
        kv_start=storage.kv.data_ptr(),
        rescale=storage.rescale.get_tensor(cute.make_layout((2, 128))),
        row_scale=storage.row_scale.get_tensor(cute.make_layout(HEADS)),
        span=storage.span.get_tensor(cute.make_layout(plan.smem["span"].count)),
        slices=storage.slices.get_tensor(cute.make_layout(2)),
        tile_info=storage.tile_info.get_tensor(cute.make_layout(plan.smem["tile_info"].count)),
    )
    if plan.row_inputs is not None:
        layout = cute.make_layout((ROW_INPUTS, HEADS), stride=(HEADS, 1))
        smem = replace(smem, row_inputs=storage.row_inputs.get_tensor(layout))
    if plan.staging is not None:
        smem = replace(smem, staging=storage.staging.data_ptr())
    names = [edge.name for edge in plan.barriers.edges if edge.name != "kv"]
    pipes = {name: mbarrier.pipeline(plan.barriers, storage, name) for name in names}
    kv = mbarrier.pipeline(plan.barriers, storage, "kv", HALVES)
    return smem, Pipelines(kv=kv, **pipes)


def init_barriers(plan: HeadsMPlan, pipes: Pipelines, column_slices, throttle: Throttle) -> None:
    """Initialise the mbarriers that a launch uses; one thread calls this.

    Args:
        column_slices: CTAs of a head tile along its columns, each with all output warps on one
            half of a stage.
    """
    names = ["q", "span", "p", "pv_turn", "pv_next", "rows", "kv"]
    if throttle is Throttle.TWO_HALF_TILES:
        names.insert(0, "inputs_ready")
    elif throttle is Throttle.CLUSTER_LOCKSTEP:
        names.append("lockstep")
    used = {name: getattr(pipes, name) for name in names}
    mbarrier.init(plan.barriers, used, column_slices=column_slices)
