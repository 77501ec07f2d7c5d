"""Norms, keys and compression behind the projections of a layer's input, for sm_90a and sm_100a.

One launch for the tasks of a layer that need nothing of each other, each with the code of its own
kernel: a compressor's step (`kernels.compressor.compress`), an indexer's, norm and FP8 codes of the
query latents (`rms_norm_fp8`), and keys of the window (`kv_insert`). Bits are those of the separate
launches.

The grid is a row of clusters, which have the shape that the compressor needs; the CTAs of other
tasks take any place in them. The longest task comes first: a block of 128 tokens that ends reads
half a megabyte.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.compressor.compress import THREADS, Compress, Operands
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.rows.config import TEAM, WARP, RmsNormFp8Config, RowTiling
from dsv4.kernels.rows.kv_insert import KvInsert
from dsv4.kernels.rows.latent_rows_config import ARGS, LatentRowsConfig, has_kernel, values
from dsv4.kernels.rows.rms_norm_fp8 import RmsNormFp8

WARPS = THREADS // WARP
# Which bounds registers: compressors keep loads under way in more than 64.
CTAS_PER_SM, CTAS_PER_SM_ENTRIES = 4, 2
# Of short means, whose loads are one a thread: where they have more CTAs than a GPU has SMs, having
# more of them at a time is worth what they spill.
CTAS_PER_SM_SHORT, FEW_ENTRIES = 4, 132


class Grid(NamedTuple):
    """CTAs of each task, in the order of their places."""

    entries: Int32
    keys: Int32  # of the indexer
    queries: Int32
    window: Int32

    def rounded(self, cluster: int) -> Int32:
        """All of them in whole clusters, one at least."""
        total = self.entries + self.keys + self.queries + self.window
        return cutlass.max(cute.ceil_div(total, cluster), 1) * cluster


def tiling_of(config: RmsNormFp8Config) -> RowTiling:
    """Division of query latents among the threads that a compressor has."""
    teams = WARP // TEAM  # of a warp
    warps = 1
    while warps < WARPS and warps * teams < config.groups:
        warps *= 2
    is_whole = config.groups == warps * teams
    rows = WARPS // warps
    return RowTiling(config.groups, warps, rows, team=TEAM, stages=2, holds_weight=is_whole)


class LatentRows:
    """Kernel of one configuration."""

    def __init__(self, config: LatentRowsConfig):
        assert has_kernel(config), config
        self.config = config
        self.insertion = KvInsert(config.insertion, WARPS)
        self.norm = self.entries = self.keys = None
        if config.norm is not None:
            self.norm = RmsNormFp8(config.norm, tiling_of(config.norm))
            assert self.norm.tiling.threads == THREADS
        if config.compressor is not None:
            self.entries = Compress(config.compressor)
        if config.indexer is not None:
            self.keys = Compress(config.indexer)
            assert self.keys.cluster == 1, "index keys take any place in a cluster"
        self.cluster = 1 if self.entries is None else self.entries.cluster
        self.ctas_per_sm = CTAS_PER_SM if self.entries is None else CTAS_PER_SM_ENTRIES
        self.is_short = self.entries is not None and self.entries.own_terms == 1

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, d] bf16
        weight: cute.Tensor,  # [d] fp32
        rope: cute.Tensor,  # [R, 64] fp32
        positions: cute.Tensor,  # [T] int32
        slots: cute.Tensor,  # [T] int32
        pool: cute.Tensor,  # [pages, P, row] bf16 or uint8, written
        stream,
        *,
        query: cute.Tensor,  # [T, query_dim] bf16
        query_weight: cute.Tensor,  # [query_dim] fp32
        codes: cute.Tensor,  # [T, query_dim] e4m3, written
        scales: cute.Tensor,  # [T, query_dim / 128] e8m0, written
        norm_out: cute.Tensor,  # [T, query_dim] bf16, written
        state_rows: cute.Tensor,  # [B] int32
        starts: cute.Tensor,  # [B] int32
        lens: cute.Tensor,  # [B] int32
        entry_slots: cute.Tensor,  # [B, K] int32
        values: cute.Tensor,
        scores: cute.Tensor,
        ape: cute.Tensor,
        state: cute.Tensor,  # written
        entry_weight: cute.Tensor,
        entry_pool: cute.Tensor,  # written
        index_values: cute.Tensor,
        index_scores: cute.Tensor,
        index_ape: cute.Tensor,
        index_state: cute.Tensor,  # written
        index_weight: cute.Tensor,
        index_pool: cute.Tensor,  # written
        num_ctas: Int32,  # at most of norms, and of keys of the window; more are taken in turns
    ):
        """Launch all tasks of the configuration; tensors of the others have no rows."""
        requests = state_rows, starts, lens, entry_slots
        blocks = cutlass.max(entry_slots.shape[1] - 1, 1)  # tasks of a request
        tasks = state_rows.shape[0] * blocks
        queries, entries, keys, none = (), (), (), Int32(0)
        if cutlass.const_expr(self.norm is not None):
            queries = query, query_weight, codes, scales, norm_out
        if cutlass.const_expr(self.entries is not None):
            given = values, scores, ape, state, entry_weight, rope
            entries = Operands(*given, *requests, entry_pool)
        if cutlass.const_expr(self.keys is not None):
            given = index_values, index_scores, index_ape, index_state, index_weight, rope
            keys = Operands(*given, *requests, index_pool)
        grid = Grid(
            tasks * self.cluster if self.entries is not None else none,
            tasks if self.keys is not None else none,
            self.row_ctas(x, self.norm.tiling.rows, num_ctas) if self.norm is not None else none,
            self.row_ctas(x, self.insertion.rows, num_ctas),
        )
        tensors = entries, keys, queries, (x, weight, rope, positions, slots, pool)
        if cutlass.const_expr(self.is_short):
            if grid.entries > FEW_ENTRIES:
                self.launch(tensors, grid, CTAS_PER_SM_SHORT, stream)
            else:
                self.launch(tensors, grid, self.ctas_per_sm, stream)
        else:
            self.launch(tensors, grid, self.ctas_per_sm, stream)

    def launch(self, tensors: tuple, grid: Grid, ctas_per_sm: int, stream) -> None:
        """Launch all tasks with registers for so many CTAs an SM."""
        self.kernel(*tensors, grid).launch(
            grid=[grid.rounded(self.cluster), 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    def row_ctas(self, x: cute.Tensor, rows: int, most: Int32) -> Int32:
        """CTAs that take so many of the T rows at a time."""
        return Int32(cutlass.min(cute.ceil_div(x.shape[0], rows), most))

    @cute.kernel
    def kernel(self, entries: tuple, keys: tuple, queries: tuple, window: tuple, grid: Grid):
        smem = SmemAllocator()
        boards = rows = None
        if cutlass.const_expr(self.entries is not None):
            boards = self.entries.allocate(smem)
        if cutlass.const_expr(self.norm is not None):
            rows = self.norm.allocate(smem)
        pdl.launch_dependents()
        # A CTA's task follows from its place; every one waits for the launch before by itself.
        place = cute.arch.block_idx()[0]
        if cutlass.const_expr(self.entries is not None):
            if place < grid.entries:
                cluster = place // self.cluster
                self.compress(self.entries, entries, boards, cluster, place % self.cluster)
            place -= grid.entries
        if cutlass.const_expr(self.keys is not None):
            if place >= 0 and place < grid.keys:
                self.compress(self.keys, keys, boards, place, Int32(0))
            place -= grid.keys
        if cutlass.const_expr(self.norm is not None):
            if place >= 0 and place < grid.queries:
                self.norm.run(queries, rows, place, grid.queries)
            place -= grid.queries
        if place >= 0 and place < grid.window:
            self.insertion.run(window, place, grid.window)

    @cute.jit
    def compress(self, kernel: Compress, operands: Operands, smem, cluster: Int32, rank: Int32):
        """The first tasks of all requests, which append to their rings, then the second ones."""
        count = operands.state_rows.shape[0]
        kernel.run(operands, smem, cluster // count, cluster % count, rank)


def build(config: LatentRowsConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(LatentRows(config), ARGS, values(config), options)
