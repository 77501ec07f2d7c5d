"""Shared memory of the Hopper kernel for few heads: what is in it, and how its roles see it."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from dsv4.kernels.attention.sm90.device import data_pointers, frozen
from dsv4.kernels.attention.sm90.key_span import WORK_WORDS
from dsv4.kernels.attention.sm90.swap_ab_softmax import PAIR, WARPS

BARRIERS = (
    "q_full", "q_empty", "work_full", "work_empty",
    "kv_full", "kv_empty",
)  # fmt: skip


def storage_type(kernel):
    """The struct of everything that a kernel of this configuration keeps in shared memory."""
    heads, keys = kernel.heads, kernel.keys
    kv_ring = kernel.slots * keys * kernel.part_dim

    @cute.struct
    class Storage:
        kv: cute.struct.Align[cute.struct.MemRange[kernel.dtype, kv_ring], 1024]
        q: cute.struct.Align[cute.struct.MemRange[kernel.dtype, heads * kernel.head_dim], 1024]
        # Of two blocks in turn.
        p: cute.struct.Align[cute.struct.MemRange[kernel.dtype, 2 * heads * keys], 1024]
        # What the warps tell each other of each head, of a block and in the end.
        board: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, heads * 4], 16]
        totals: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, heads * 4], 16]
        sinks: cute.struct.MemRange[cutlass.Float32, heads * kernel.head_tiles]
        # Where the keys of the work item are.
        work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, WORK_WORDS], 16]
        shares: cute.struct.MemRange[cutlass.Int32, 1]
        q_full: cute.struct.MemRange[cutlass.Int64, 1]
        q_empty: cute.struct.MemRange[cutlass.Int64, 1]
        work_full: cute.struct.MemRange[cutlass.Int64, 1]
        work_empty: cute.struct.MemRange[cutlass.Int64, 1]
        # The ring holds parts of the columns: the products with V free one after the other.
        kv_full: cute.struct.MemRange[cutlass.Int64, kernel.slots]
        kv_empty: cute.struct.MemRange[cutlass.Int64, kernel.slots]

    return Storage


def shared_views(kernel):
    """Allocate the storage; its tensors, as the roles see them, and its barriers."""
    storage = SmemAllocator().allocate(kernel.storage)
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, kernel.dtype)
    mn_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, kernel.dtype)
    parts, part_dim = kernel.parts, kernel.part_dim
    q = cute.tile_to_shape(k_major, (kernel.heads, part_dim, parts), order=(0, 1, 2))
    k = cute.tile_to_shape(k_major, (kernel.keys, part_dim, kernel.slots), order=(0, 1, 2))
    # The same bytes as K, seen as the transposed tiles that the PV products read.
    v_shape = (kernel.tile, kernel.keys, kernel.slots * kernel.part_tiles)
    v = cute.tile_to_shape(mn_major, v_shape, order=(1, 0, 2))
    p = cute.tile_to_shape(k_major, (kernel.heads, kernel.keys, 2), order=(0, 1, 2))
    board = cute.make_layout((PAIR, kernel.heads // PAIR, WARPS), stride=(1, PAIR * WARPS, PAIR))
    return frozen(
        q=storage.q.get_tensor(q.outer, swizzle=q.inner),
        k=storage.kv.get_tensor(k.outer, swizzle=k.inner),
        v=storage.kv.get_tensor(v.outer, swizzle=v.inner),
        p=storage.p.get_tensor(p.outer, swizzle=p.inner),
        p_raw=storage.p.data_ptr(),
        q_raw=storage.q.data_ptr(),
        kv_raw=storage.kv.data_ptr(),
        board=storage.board.get_tensor(board),
        totals=storage.totals.get_tensor(board),
        sinks=storage.sinks.get_tensor(cute.make_layout(kernel.heads * kernel.head_tiles)),
        work=storage.work.get_tensor(cute.make_layout(WORK_WORDS)),
        shares=storage.shares.get_tensor(cute.make_layout(1)),
        **data_pointers(storage, *BARRIERS),
    )
