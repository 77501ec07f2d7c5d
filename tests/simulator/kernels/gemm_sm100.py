"""A small sm_100a GEMM with every synchronisation spelled out, for the simulator's tests.

C[M, N] fp32 = A[M, K] B[N, K]^T, bf16 operands, K-major. Warp 0 of the leading CTA copies and
multiplies, all four warps read the accumulator. With `two_cta` a pair of CTAs shares one product;
clusters larger than the pair multicast A along n and B along m.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers as sm100

STAGES = 2
COLUMNS = 64  # TMEM columns, = tile N


@cute.struct
class Barriers:
    full: cute.struct.MemRange[cutlass.Int64, STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, STAGES]
    done: cute.struct.MemRange[cutlass.Int64, 1]
    tmem: cutlass.Int32


class GemmSm100:
    """Tile (128 or 256, 64, 64); sizes must be multiples of the tile."""

    def __init__(self, two_cta: bool = False, cluster: tuple[int, int] = (1, 1)):
        self.two_cta = two_cta
        self.group = tcgen05.CtaGroup.TWO if two_cta else tcgen05.CtaGroup.ONE
        self.cluster = (*cluster, 1)
        self.tile = (256 if two_cta else 128, COLUMNS, 64)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        op = tcgen05.MmaF16BF16Op(
            cutlass.BFloat16,
            cutlass.Float32,
            (self.tile[0], self.tile[1], 16),
            self.group,
            tcgen05.OperandSource.SMEM,
            tcgen05.OperandMajorMode.K,
            tcgen05.OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(op)
        layout_a = sm100.make_smem_layout_a(mma, self.tile, cutlass.BFloat16, STAGES)
        layout_b = sm100.make_smem_layout_b(mma, self.tile, cutlass.BFloat16, STAGES)
        ctas = cute.tiled_divide(cute.make_layout(self.cluster), (mma.thr_id.shape,))
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp(self.group)
        atom_a, tensor_a = cute.nvgpu.make_tiled_tma_atom_A(
            copy, a, cute.slice_(layout_a, (None, None, None, 0)), self.tile, mma, ctas.shape
        )
        atom_b, tensor_b = cute.nvgpu.make_tiled_tma_atom_B(
            copy, b, cute.slice_(layout_b, (None, None, None, 0)), self.tile, mma, ctas.shape
        )
        rows = self.tile[0] // (2 if self.two_cta else 1)
        grid = (c.shape[0] // rows, c.shape[1] // self.tile[1], 1)
        self.kernel(mma, atom_a, tensor_a, atom_b, tensor_b, c, layout_a, layout_b, ctas).launch(
            grid=grid, block=(128, 1, 1), cluster=self.cluster, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        tensor_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        tensor_b: cute.Tensor,
        c: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        ctas: cute.Layout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bx, by, _ = cute.arch.block_idx()
        peers = cute.size(mma.thr_id.shape)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        where = ctas.get_flat_coord(rank)
        leader = where[0] == 0

        smem = SmemAllocator()
        storage = smem.allocate(Barriers)
        smem_a = smem.allocate_tensor(
            cutlass.BFloat16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner
        )
        smem_b = smem.allocate_tensor(
            cutlass.BFloat16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner
        )
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        done = storage.done.data_ptr()

        # Every CTA whose operands this one's copies feed must release a stage.
        consumers = cute.size(ctas, mode=[1]) + cute.size(ctas, mode=[2]) - 1
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, consumers)
                cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, storage.tmem.ptr, is_two_cta=self.two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.two_cta)
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, storage.tmem.ptr)

        tile_m, tile_n = bx // peers, by
        slice_mma = mma.get_slice(where[0])
        part_a = slice_mma.partition_A(
            cute.local_tile(tensor_a, (self.tile[0], self.tile[2]), (tile_m, None))
        )
        part_b = slice_mma.partition_B(
            cute.local_tile(tensor_b, (self.tile[1], self.tile[2]), (tile_n, None))
        )
        part_c = slice_mma.partition_C(
            cute.local_tile(c, (self.tile[0], self.tile[1]), (tile_m, tile_n))
        )
        to_a, from_a = cpasync.tma_partition(
            atom_a,
            where[2],
            cute.make_layout(cute.size(ctas, mode=[2])),
            cute.group_modes(smem_a, 0, 3),
            cute.group_modes(part_a, 0, 3),
        )
        to_b, from_b = cpasync.tma_partition(
            atom_b,
            where[1],
            cute.make_layout(cute.size(ctas, mode=[1])),
            cute.group_modes(smem_b, 0, 3),
            cute.group_modes(part_b, 0, 3),
        )
        frag_a, frag_b = mma.make_fragment_A(smem_a), mma.make_fragment_B(smem_b)
        shape = mma.partition_shape_C((self.tile[0], self.tile[1]))
        acc = cute.make_tensor(tmem, mma.make_fragment_C(shape).layout)
        mask_a = cpasync.create_tma_multicast_mask(ctas, where, mcast_mode=2)
        mask_b = cpasync.create_tma_multicast_mask(ctas, where, mcast_mode=1)
        mask_empty = mask_a | mask_b
        if cutlass.const_expr(self.two_cta):
            other = (where[0] ^ 1, *where[1:])
            mask_empty = (
                mask_empty
                | cpasync.create_tma_multicast_mask(ctas, other, mcast_mode=2)
                | cpasync.create_tma_multicast_mask(ctas, other, mcast_mode=1)
            )

        size = peers * (
            cute.size_in_bytes(cutlass.BFloat16, cute.select(layout_a, mode=[0, 1, 2]))
            + cute.size_in_bytes(cutlass.BFloat16, cute.select(layout_b, mode=[0, 1, 2]))
        )
        tiles = cute.size(from_a, mode=[1])
        if warp == 0:
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for k in cutlass.range(tiles, unroll=1):
                stage = k % STAGES
                phase = (k // STAGES) % 2
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                if leader:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
                cute.copy(
                    atom_a,
                    from_a[None, k],
                    to_a[None, stage],
                    tma_bar_ptr=full + stage,
                    mcast_mask=mask_a,
                )
                cute.copy(
                    atom_b,
                    from_b[None, k],
                    to_b[None, stage],
                    tma_bar_ptr=full + stage,
                    mcast_mask=mask_b,
                )
                if leader:
                    cute.arch.mbarrier_wait(full + stage, phase)
                    for block in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
                        cute.gemm(
                            mma,
                            acc,
                            frag_a[None, None, block, stage],
                            frag_b[None, None, block, stage],
                            acc,
                        )
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        tcgen05.commit(empty + stage, mask_empty, self.group)
            if leader:
                with cute.arch.elect_one():
                    if cutlass.const_expr(self.two_cta):
                        pair = cutlass.Int16(3) << cutlass.Int16(rank)
                        tcgen05.commit(done, pair, self.group)
                    else:
                        tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)

        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32),
            acc[(None, None), 0, 0],
        )
        mine = load.get_slice(thread)
        source = mine.partition_S(acc[(None, None), 0, 0])
        target = mine.partition_D(part_c[(None, None), 0, 0])
        registers = cute.make_rmem_tensor(target.shape, cutlass.Float32)
        cute.copy(load, source, registers)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(registers, target)
        # No CTA may leave while its pair still multiplies or copies into it.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.dealloc_tmem(tmem, COLUMNS, is_two_cta=self.two_cta)
