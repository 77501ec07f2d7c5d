"""Sources of KV tiles for Blackwell's load warps: where a tile's rows are, and how they get into
a stage of the ring.

A source makes the TMA descriptors on the host, and on the device one `KvBranch` for each of the two
branches of a work tile; `copy` then fills a stage. No other role depends on where keys come from.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS, Plan1Cta
from dsv4.kernels.attention.sm100.plan_2cta import HALF_DIM
from dsv4.kernels.attention.sm100.work_tile import row_layout, tma_row_view
from dsv4.kernels.kit.tcgen05 import make_mma


class KvBranch(NamedTuple):
    """TMA views of one branch of a work tile."""

    tma: cpasync.TmaInfo
    source: cute.Tensor  # boxes of the branch's rows
    ring: cute.Tensor  # (box, stage)
    batch: Int32  # index of its rows: token or request


class DenseKv1Cta:
    """Rows [batch, row, d] in chunks of columns; the CTAs of a cluster multicast them."""

    def __init__(self, plan: Plan1Cta):
        self.tiling = plan.tiling
        self.ctas = plan.multicast_ctas

    def _qk_mma(self) -> cute.TiledMma:
        return make_mma(tcgen05.CtaGroup.ONE, (ROWS, KEYS), OperandMajorMode.K)

    def descriptor(
        self, kv: cute.Tensor, fallback: cute.Pointer, box: cute.ComposedLayout
    ) -> cpasync.TmaInfo:
        """TMA descriptor of `kv`; `box` is one stage of the ring."""
        one = tcgen05.CtaGroup.ONE
        load = cpasync.CopyBulkTensorTileG2SOp(one)
        if cutlass.const_expr(self.ctas == 2):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp(one)
        tile = (ROWS, KEYS, self.tiling.chunk_dim)
        cluster = (1, self.ctas, 1, 1)
        rows = tma_row_view(kv, fallback)
        return cute.nvgpu.make_tiled_tma_atom_B(load, rows, box, tile, self._qk_mma(), cluster)

    def branch(
        self, tma: cpasync.TmaInfo, ring: cute.Tensor, first_row: Int32, batch: Int32
    ) -> KvBranch:
        """Views of a branch whose keys start at `first_row`.

        The tile is mode 2 of (box, chunk, tile, batch): slicing with (None, chunk, None, batch)
        keeps it free. Pinning it instead loads tile 0 for every tile, which no single-tile shape
        shows.

        Args:
            ring: (MMA, 1, MMA_K, stage) view of the KV ring as K.
        """
        rows = cute.domain_offset((first_row, 0, 0), tma.tma_tensor)
        tiles = cute.local_tile(rows, (KEYS, self.tiling.chunk_dim), (None, None, None))
        stages, source = cpasync.tma_partition(
            tma.atom,
            cute.arch.block_idx_in_cluster() % self.ctas,
            cute.make_layout(self.ctas),
            cute.group_modes(ring, 0, 3),
            cute.group_modes(self._qk_mma().get_slice(0).partition_B(tiles), 0, 3),
        )
        by_chunk = cute.select(source.layout, mode=[0, 2, 1, 3])
        return KvBranch(tma, cute.make_tensor(source.iterator, by_chunk), stages, batch)

    def copy(
        self,
        branch: KvBranch,
        tile: Int32,
        chunk: int,
        kv: pipeline.PipelineTmaUmma,
        state: pipeline.PipelineState,
    ) -> None:
        """Fetch a chunk of a tile into the stage that `state` of the pipeline `kv` has acquired."""
        cute.copy(
            branch.tma.atom,
            branch.source[(None, chunk, None, branch.batch)][None, tile],
            branch.ring[None, state.index],
            tma_bar_ptr=kv.producer_get_barrier(state),
            mcast_mask=Int16(0b11) if self.ctas == 2 else None,
        )


class DenseKv2Cta:
    """Rows [batch, row, 512], of which each CTA of the cluster fetches its half of the columns."""

    def descriptor(self, kv: cute.Tensor, fallback: cute.Pointer) -> cpasync.TmaInfo:
        """TMA descriptor of `kv`."""
        tile = (KEYS, HALF_DIM)
        box = cute.select(row_layout(tile, 1), mode=[0, 1])
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        return cpasync.make_tiled_tma_atom(load, tma_row_view(kv, fallback), box, tile)

    def branch(
        self, tma: cpasync.TmaInfo, ring: cute.Tensor, first_row: Int32, batch: Int32
    ) -> KvBranch:
        """Views of a branch whose keys start at `first_row`: source (box, tile, half, batch).

        Args:
            ring: (64, 256, stage) view of the KV ring.
        """
        rows = cute.domain_offset((first_row, 0, 0), tma.tma_tensor)
        tiles = cute.local_tile(rows, (KEYS, HALF_DIM), (None, None, None))
        stages, source = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return KvBranch(tma, source, stages, batch)

    def copy(
        self,
        branch: KvBranch,
        tile: Int32,
        half: Int32,
        kv: pipeline.PipelineTmaUmma,
        state: pipeline.PipelineState,
    ) -> None:
        """Fetch half of a tile's columns into the stage that `state` of `kv` has acquired."""
        cute.copy(
            branch.tma.atom,
            branch.source[None, tile, half, branch.batch],
            branch.ring[None, state.index],
            tma_bar_ptr=kv.producer_get_barrier(state),
        )
