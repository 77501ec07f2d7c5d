"""Shared memory of the Hopper kernel: what is in it, and how its roles see it."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.sm90.device import data_pointers, frozen
from dsv4.kernels.attention.sm90.key_span import WORK_WORDS
from dsv4.kernels.attention.sm90.throttle import Pace

BARRIERS = (
    "q_full", "q_empty", "work_full", "work_empty",
    "p_full", "p_empty", "pv_turn", "pv_next",
    "rows_full", "rows_empty", "kv_full", "kv_empty", "inputs_ready", "in_step",
)  # fmt: skip


def storage_type(kernel):
    """The struct of everything that a kernel of this configuration keeps in shared memory."""
    q_tile = kernel.heads * kernel.q_smem_dim
    kv_ring = kernel.stages * kernel.keys * kernel.head_dim
    p_tile = kernel.heads * kernel.keys
    rows, barriers = kernel.heads, 2 * kernel.stages

    @cute.struct
    class Storage:
        kv: cute.struct.Align[cute.struct.MemRange[kernel.dtype, kv_ring], 1024]
        q: cute.struct.Align[cute.struct.MemRange[kernel.dtype, q_tile], 1024]
        p: cute.struct.Align[cute.struct.MemRange[kernel.dtype, p_tile], 1024]
        # Factors of a thread's older accumulators that go with P; final scale of each row, or
        # with splits the gate's offset of its lse.
        rescale: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, 2 * 128], 8]
        row_scale: cute.struct.MemRange[cutlass.Float32, rows]
        # Where the keys of the work item are.
        work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, WORK_WORDS], 16]
        # Shares of the split tile that each output warpgroup joins.
        shares: cute.struct.MemRange[cutlass.Int32, 2]
        # Valid keys of the block in each stage, plus WINDOW_FLAG in the window.
        block: cute.struct.MemRange[cutlass.Int32, kernel.stages]
        q_full: cute.struct.MemRange[cutlass.Int64, 1]
        q_empty: cute.struct.MemRange[cutlass.Int64, 1]
        work_full: cute.struct.MemRange[cutlass.Int64, 1]
        work_empty: cute.struct.MemRange[cutlass.Int64, 1]
        p_full: cute.struct.MemRange[cutlass.Int64, 1]
        p_empty: cute.struct.MemRange[cutlass.Int64, 1]
        # PV may take the tensor cores: with even and with odd blocks.
        pv_turn: cute.struct.MemRange[cutlass.Int64, 2]
        # PV over the first half of the columns may follow that over the second half.
        pv_next: cute.struct.MemRange[cutlass.Int64, 1]
        rows_full: cute.struct.MemRange[cutlass.Int64, 1]
        rows_empty: cute.struct.MemRange[cutlass.Int64, 1]
        # One barrier per half block: the PV products of the two output warpgroups free theirs.
        kv_full: cute.struct.MemRange[cutlass.Int64, barriers]
        kv_empty: cute.struct.MemRange[cutlass.Int64, barriers]
        # What the launch before writes may be read.
        inputs_ready: cute.struct.MemRange[cutlass.Int64, 1]
        # The neighbour's load warp is about to fill the same stage.
        in_step: cute.struct.MemRange[cutlass.Int64, kernel.stages]

    return Storage


def shared_views(kernel):
    """Allocate the storage; its tensors, as the roles see them, and its barriers."""
    storage = SmemAllocator().allocate(kernel.storage)
    span = {32: "SW64", 64: "SW128"}[kernel.chunk]
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = warpgroup.make_smem_layout_atom(getattr(kinds, f"K_{span}"), kernel.dtype)
    mn_major = warpgroup.make_smem_layout_atom(getattr(kinds, f"MN_{span}"), kernel.dtype)
    q = cute.tile_to_shape(k_major, (kernel.heads, kernel.q_smem_dim), order=(0, 1))
    k = cute.tile_to_shape(k_major, (kernel.keys, kernel.head_dim, kernel.stages), order=(0, 1, 2))
    # The same bytes as K, seen as the transposed tiles that the PV products read.
    v_shape = (kernel.pv_dim, kernel.keys, kernel.stages * 2 * kernel.pieces)
    v = cute.tile_to_shape(mn_major, v_shape, order=(1, 0, 2))
    # As the threads hold it: [8, thread, K step].
    p = cute.make_layout((8, 128, kernel.keys // 16))
    row = cute.make_layout(kernel.heads)
    return frozen(
        q=storage.q.get_tensor(q.outer, swizzle=q.inner),
        k=storage.kv.get_tensor(k.outer, swizzle=k.inner),
        v=storage.kv.get_tensor(v.outer, swizzle=v.inner),
        p=storage.p.get_tensor(p),
        q_raw=storage.q.data_ptr(),
        kv_raw=storage.kv.data_ptr(),
        rescale=storage.rescale.get_tensor(cute.make_layout((2, 128))),
        row_scale=storage.row_scale.get_tensor(row),
        work=storage.work.get_tensor(cute.make_layout(WORK_WORDS)),
        shares=storage.shares.get_tensor(cute.make_layout(2)),
        block=storage.block.get_tensor(cute.make_layout(kernel.stages)),
        **data_pointers(storage, *BARRIERS),
    )


def init_barriers(kernel, smem, column_shares, pace: Pace) -> None:
    """Give every barrier its number of arrivals; one thread calls this.

    Args:
        column_shares: CTAs that share a tile's columns, each with all warps on a half of a stage.
    """
    init, arrivals = cute.arch.mbarrier_init, kernel.warp_arrivals
    if pace is Pace.TWO_HALVES:
        init(smem.inputs_ready, 1)
    init(smem.q_full, 1)
    init(smem.q_empty, 4 * arrivals)
    init(smem.work_full, 1)
    init(smem.work_empty, 13 * arrivals)
    init(smem.p_full, 4 * arrivals)
    init(smem.p_empty, 8 * arrivals)
    for i in range(2):
        init(smem.pv_turn + i, 4 * arrivals)
    init(smem.pv_next, 4 * arrivals)
    init(smem.rows_full, 4 * arrivals)
    init(smem.rows_empty, 8 * arrivals)
    for i in range(2 * kernel.stages):
        init(smem.kv_full + i, 1)
        init(smem.kv_empty + i, 4 * column_shares * arrivals)
    if pace is Pace.IN_STEP:
        for i in range(kernel.stages):
            init(smem.in_step + i, 1)
