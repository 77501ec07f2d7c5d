"""A warp-specialised sm_90a GEMM, as fast kernels are written: what the time model is held against.

C[M, N] fp32 = A[M, K] B[N, K]^T, bf16, K-major. One warp copies a ring of stages by TMA while each
consumer warpgroup multiplies 64 rows of the tile, one k block ahead of its wait. In clusters, CTAs
of one row of the grid share A and CTAs of one column share B, by multicast.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

SMEM_CAPACITY = 227 * 1024
BARRIER_SPACE = 2048  # barriers and alignment
COPY_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # per thread, 3 warpgroups


class PipelinedGemmSm90:
    """Sizes must be multiples of the tile times the cluster.

    Args:
        tile: (M, N, K) of a CTA; M is 64 per consumer warpgroup.
        cluster: CTAs along M and N.
    """

    def __init__(
        self, tile: tuple[int, int, int] = (128, 256, 64), cluster: tuple[int, int] = (1, 1)
    ):
        self.tile, self.cluster = tile, (*cluster, 1)
        self.groups = tile[0] // 64
        self.stage_bytes = 2 * tile[2] * (tile[0] + tile[1])
        self.stages = (SMEM_CAPACITY - BARRIER_SPACE) // self.stage_bytes

        @cute.struct
        class Barriers:
            full: cute.struct.MemRange[cutlass.Int64, self.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.stages]

        self.barriers = Barriers

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        m, n, k = self.tile
        mma = sm90.make_trivial_tiled_mma(
            cutlass.BFloat16,
            cutlass.BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (self.groups, 1, 1),
            (64, n),
        )
        major = LayoutEnum.ROW_MAJOR
        layout_a = sm90.make_smem_layout_a(major, self.tile, cutlass.BFloat16, self.stages)
        layout_b = sm90.make_smem_layout_b(major, self.tile, cutlass.BFloat16, self.stages)
        atom_a, tensor_a = self._copy_atom(a, layout_a, (m, k), self.cluster[1])
        atom_b, tensor_b = self._copy_atom(b, layout_b, (n, k), self.cluster[0])
        grid = (c.shape[0] // m, c.shape[1] // n, 1)
        self.kernel(mma, atom_a, tensor_a, atom_b, tensor_b, c, layout_a, layout_b).launch(
            grid=grid, block=(128 * (self.groups + 1), 1, 1), cluster=self.cluster, stream=stream
        )

    def _copy_atom(self, tensor, layout, tile, sharers: int):
        copy = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if sharers > 1
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        stage = cute.slice_(layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(copy, tensor, stage, tile, num_multicast=sharers)

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
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        across, down, _ = self.cluster  # CTAs along M, along N; rank counts along M first
        m, n, depth = self.tile

        smem = SmemAllocator()
        storage = smem.allocate(self.barriers)
        smem_a = smem.allocate_tensor(
            cutlass.BFloat16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner
        )
        smem_b = smem.allocate_tensor(
            cutlass.BFloat16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner
        )
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + s, 1)
                    # A warp of every consumer whose tile this CTA's copies feed.
                    cute.arch.mbarrier_init(empty + s, 4 * self.groups * (across + down - 1))
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(across * down > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        tile_a = cute.local_tile(tensor_a, (m, depth), (bx, None))
        tile_b = cute.local_tile(tensor_b, (n, depth), (by, None))
        row, column = rank % across, rank // across
        to_a, from_a = cpasync.tma_partition(
            atom_a,
            column,
            cute.make_layout(down),
            cute.group_modes(smem_a, 0, 2),
            cute.group_modes(tile_a, 0, 2),
        )
        to_b, from_b = cpasync.tma_partition(
            atom_b,
            row,
            cute.make_layout(across),
            cute.group_modes(smem_b, 0, 2),
            cute.group_modes(tile_b, 0, 2),
        )
        blocks = cute.size(from_a, mode=[1])

        if warp >= 4 * self.groups:
            cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if warp == 4 * self.groups:
                # Ranks that share A lie `across` apart, those that share B side by side.
                mask_a = cutlass.Int16(sum(1 << across * j for j in range(down))) << row
                mask_b = cutlass.Int16((1 << across) - 1) << (across * column)
                for k in cutlass.range(blocks, unroll=1):
                    stage, phase = k % self.stages, (k // self.stages) % 2
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                    self._load(
                        atom_a, from_a[None, k], to_a[None, stage], full + stage, mask_a, down
                    )
                    self._load(
                        atom_b, from_b[None, k], to_b[None, stage], full + stage, mask_b, across
                    )
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            part = mma.get_slice(thread)
            target = part.partition_C(cute.local_tile(c, (m, n), (bx, by)))
            frag_a = mma.make_fragment_A(part.partition_A(smem_a))
            frag_b = mma.make_fragment_B(part.partition_B(smem_b))
            acc = cute.make_rmem_tensor(target.shape, cutlass.Float32)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(blocks, unroll=1):
                stage = k % self.stages
                cute.arch.mbarrier_wait(full + stage, (k // self.stages) % 2)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
                    step = (None, None, block, stage)
                    cute.gemm(mma, acc, frag_a[step], frag_b[step], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    self._release(empty + (k - 1) % self.stages, row, column)
            warpgroup.wait_group(0)
            cute.autovec_copy(acc, target)
        if cutlass.const_expr(across * down > 1):
            # No CTA may leave while another one's consumers still signal its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def _load(self, atom, source, target, barrier, mask, sharers: cutlass.Constexpr[int]):
        if cutlass.const_expr(sharers > 1):
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=mask)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)

    @cute.jit
    def _release(self, barrier, row, column):
        """Tell the CTAs that copied into the stage that this warp is done with it."""
        across, down, _ = self.cluster
        with cute.arch.elect_one():
            if cutlass.const_expr(across * down == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                for i in cutlass.range_constexpr(across):
                    cute.arch.mbarrier_arrive(barrier, i + across * column)
                if cutlass.const_expr(down > 1):
                    for j in cutlass.range_constexpr(down):
                        if j != column:
                            cute.arch.mbarrier_arrive(barrier, row + across * j)
