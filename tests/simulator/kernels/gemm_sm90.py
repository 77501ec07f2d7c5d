"""A small sm_90a GEMM with every synchronisation spelled out, for the simulator's tests.

C[M, N] fp32 = A[M, K] B[N, K]^T on one warpgroup per 64 x 128 tile: warp 0 copies two stages by
TMA, all four warps multiply. The major modes follow the tensors' strides.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

STAGES = 2


@cute.struct
class Barriers:
    full: cute.struct.MemRange[cutlass.Int64, STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, STAGES]


class GemmSm90:
    """Sizes must be multiples of the tile. `dtype` of A and B: BFloat16 or Float16."""

    def __init__(self, dtype=cutlass.BFloat16, tile: tuple[int, int, int] = (64, 128, 64)):
        self.dtype, self.tile = dtype, tile

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        m, n, k = self.tile
        major_a, major_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major_a.sm90_mma_major_mode(),
            major_b.sm90_mma_major_mode(),
            cutlass.Float32,
            (1, 1, 1),
            (64, n),
        )
        layout_a = sm90.make_smem_layout_a(major_a, self.tile, self.dtype, STAGES)
        layout_b = sm90.make_smem_layout_b(major_b, self.tile, self.dtype, STAGES)
        copy = cpasync.CopyBulkTensorTileG2SOp()
        atom_a, tensor_a = cpasync.make_tiled_tma_atom(
            copy, a, cute.slice_(layout_a, (None, None, 0)), (m, k)
        )
        atom_b, tensor_b = cpasync.make_tiled_tma_atom(
            copy, b, cute.slice_(layout_b, (None, None, 0)), (n, k)
        )
        grid = (c.shape[0] // m, c.shape[1] // n, 1)
        self.kernel(mma, atom_a, tensor_a, atom_b, tensor_b, c, layout_a, layout_b).launch(
            grid=grid, block=(128, 1, 1), stream=stream
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
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bx, by, _ = cute.arch.block_idx()
        m, n, depth = self.tile

        smem = SmemAllocator()
        storage = smem.allocate(Barriers)
        smem_a = smem.allocate_tensor(
            self.dtype, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner
        )
        smem_b = smem.allocate_tensor(
            self.dtype, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner
        )
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + s, 1)
                    cute.arch.mbarrier_init(empty + s, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        part = mma.get_slice(thread)
        target = part.partition_C(cute.local_tile(c, (m, n), (bx, by)))
        to_a, from_a = cpasync.tma_partition(
            atom_a,
            0,
            cute.make_layout(1),
            cute.group_modes(smem_a, 0, 2),
            cute.group_modes(cute.local_tile(tensor_a, (m, depth), (bx, None)), 0, 2),
        )
        to_b, from_b = cpasync.tma_partition(
            atom_b,
            0,
            cute.make_layout(1),
            cute.group_modes(smem_b, 0, 2),
            cute.group_modes(cute.local_tile(tensor_b, (n, depth), (by, None)), 0, 2),
        )
        frag_a = mma.make_fragment_A(part.partition_A(smem_a))
        frag_b = mma.make_fragment_B(part.partition_B(smem_b))
        acc = cute.make_rmem_tensor(target.shape, cutlass.Float32)
        size = cute.size_in_bytes(
            self.dtype, cute.slice_(layout_a, (None, None, 0))
        ) + cute.size_in_bytes(self.dtype, cute.slice_(layout_b, (None, None, 0)))
        tiles = cute.size(from_a, mode=[1])

        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(tiles, unroll=1):
            stage = k % STAGES
            phase = (k // STAGES) % 2
            if warp == 0:
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
                cute.copy(atom_a, from_a[None, k], to_a[None, stage], tma_bar_ptr=full + stage)
                cute.copy(atom_b, from_b[None, k], to_b[None, stage], tma_bar_ptr=full + stage)
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
                cute.gemm(
                    mma,
                    acc,
                    frag_a[None, None, block, stage],
                    frag_b[None, None, block, stage],
                    acc,
                )
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
        cute.autovec_copy(acc, target)
