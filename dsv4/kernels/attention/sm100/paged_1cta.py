"""Attention on Blackwell over a paged cache, 1 CTA: the gather is part of the launch.

The kernel of `fmha_1cta` with another source of keys: index lists or page tables name the rows, a
row that is no key is zeros, and a bit masks its score. So any row of a tile may be none, and a tile
may have no key at all. Scores may have a factor per head, the output may be rotated back.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4.kernels.attention import mask
from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.row_codes import GROUP_PAIRS
from dsv4.kernels.attention.sm100 import fragments_1cta as fragments
from dsv4.kernels.attention.sm100.context import Context1Cta
from dsv4.kernels.attention.sm100.fmha_1cta import ONE, ONE_CTA, WARP_ROWS, Fmha1Cta
from dsv4.kernels.attention.sm100.paged_context import PagedParams
from dsv4.kernels.attention.sm100.paged_gather import TmaRows
from dsv4.kernels.attention.sm100.paged_slots import Slots, TileCount
from dsv4.kernels.attention.sm100.paged_variant import PagedVariant
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_paged import PagedPlan1Cta
from dsv4.kernels.attention.sm100.work_tile import (
    COLUMNS,
    PRODUCER,
    make_output_tma,
    tma_row_view,
)
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit import pdl


class PagedFmha1Cta(PagedVariant, Fmha1Cta):
    """Attention kernel of one CTA per token, 64 heads and split, over the pages of two pools."""

    def _make_plan(self) -> PagedPlan1Cta:
        return PagedPlan1Cta(self.config.head_dim, is_fp8=self.is_fp8)

    def _make_source(self) -> TmaRows | Fp8Rows:
        return self._gather_of(self.tiling.chunk_dim, is_pair=False)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Make the TMA descriptors and launch one CTA per token, 64 heads and split."""
        q = arguments.q
        qk_mma, _ = self._mmas()
        q_tile = (ROWS, KEYS, self.tiling.head_dim)
        q_box = cute.select(self._smem_layouts()["q"], mode=[0, 1, 2])
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        q_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, tma_row_view(q, q.iterator), q_box, q_tile, qk_mma, ONE_CTA
        )
        o_tma = make_output_tma(arguments.o, q.iterator, WARP_ROWS)
        params = PagedParams.of(arguments, q_tma, o_tma, self.head_blocks, self.rounds_rows)
        self._kernel_of(arguments, params).launch(
            grid=(params.work_tiles, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            use_pdl=True,
        )

    # ---- device --------------------------------------------------------------------------------

    def _find_keys(self, ctx: Context1Cta, has_flags: bool = False) -> KeySpan:
        return ctx.params.find_keys(self.config, ctx.work, has_flags)

    # ---- load warps ----------------------------------------------------------------------------

    @cute.jit
    def load_warps(self, ctx: Context1Cta):
        """Q once, then the keys of every tile, chunk by chunk."""
        if cutlass.const_expr(self.is_fp8):
            self._load_entries(ctx)
        else:
            self._load_rows(ctx)

    @cute.jit
    def _load_entries(self, ctx: Context1Cta):
        """Q, by the first warp, and FP8 entries, which all of them convert."""
        params, token, source = ctx.params, ctx.work.token, self.kv_source
        pdl.launch_dependents()
        warp, lane = self._gather_warp()
        if warp == 0:
            self._load_q(ctx)
        keys = self._find_keys(ctx)
        row = warp * source.warp_keys + lane % source.warp_keys
        word = params.keys.fetch(keys, token, keys.first, row, KEYS)
        units = tuple(range(self.tiling.chunks))
        start = ctx.smem.k.iterator
        slots = Slots(ctx.pipelines.kv, ctx.info, start, units, self.plan.kv_stages)
        count = TileCount(Int32(0))
        source.gather_tiles(slots, params.keys, keys, token, word, warp, lane, count)

    @cute.jit
    def _load_rows(self, ctx: Context1Cta):
        """Q, then the rows that TMA gathers."""
        params, token, kv, source = ctx.params, ctx.work.token, ctx.pipelines.kv, self.kv_source
        pdl.launch_dependents()
        self._load_q(ctx)
        keys = self._find_keys(ctx)
        words = source.fetch(params, keys, token, keys.first)
        state = pipeline.make_pipeline_state(PRODUCER, self.plan.kv_stages)
        for tile in cutlass.range(keys.first, keys.last, unroll=1):
            rows = source.coordinates(params, keys, tile, words)
            # Past the last tile there are none to fetch: the words are -1.
            words = source.fetch(params, keys, token, tile + 1)
            is_window = tile >= keys.compressed_tiles
            source.describe(ctx.info, tile - keys.first, rows, is_window)
            quad = source.quads(rows)
            for chunk in cutlass.range_constexpr(self.tiling.chunks):
                kv.producer_acquire(state)
                stage = ctx.smem.k.iterator + state.index * (KEYS * self.tiling.chunk_dim)
                barrier = kv.producer_get_barrier(state)
                source.copy(params, is_window, quad, chunk * self.tiling.chunk_dim, stage, barrier)
                state.advance()

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def _row_scale(self, ctx: Context1Cta) -> cute.Tensor:
        heads = self._rows_of_thread(ctx.work)
        scale = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            scale[row] = ctx.params.score_scale(self.config, self.scale_log2, ctx.work, heads[row])
        return scale

    def _new_largest(self) -> cute.Tensor:
        largest = cute.make_rmem_tensor(2, Float32)
        largest.fill(-Float32.inf)
        return largest

    def _keep_largest(self, largest: cute.Tensor, tile_max: cute.Tensor) -> None:
        for row in range(2):
            largest[row] = cute.arch.fmax(largest[row], tile_max[row])

    @cute.jit
    def _store_largest(self, ctx: Context1Cta, copies: fragments.Copies, largest: cute.Tensor):
        max_logits, token = ctx.params.max_logits, ctx.work.token
        if token < max_logits.shape[0] and copies.thread % 4 == 0:
            heads = self._rows_of_thread(ctx.work)
            for row in cutlass.range_constexpr(2):
                if heads[row] < self.config.num_query_heads:
                    max_logits[token, heads[row]] = largest[row] * LN_2

    @cute.jit
    def _mask(self, ctx: Context1Cta, count: Int32, valid: Int32, scores: cute.Tensor, tidx: Int32):
        lane = cute.arch.lane_idx()
        words = ctx.info.receive(count, lane)
        if words[0] & words[1] != -1:
            mask.mask_words(scores, words, lane)

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def _store_output(
        self,
        ctx: Context1Cta,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        factor: cute.Tensor,
        has_keys,
    ):
        if cutlass.const_expr(self.rounds_rows):
            heads, token = self._rows_of_thread(ctx.work), ctx.work.token
            o_columns = self._output_columns(t_o)
            words = cute.make_rmem_tensor((GROUP_PAIRS, 2), Uint32)
            for block in cutlass.range(self.tiling.head_dim // K_BLOCK, unroll=1):
                for half in cutlass.range_constexpr(K_BLOCK // COLUMNS):
                    i = block * (K_BLOCK // COLUMNS) + half
                    args = (ctx, copies, o_columns, i, factor, has_keys)
                    fragment = self._scaled_columns(*args)
                    self._pack_columns(fragments.by_rows(fragment), words, half)
                self._store_codes(ctx.params, token, heads, block, words)
        else:
            super()._store_output(ctx, copies, t_o, factor, has_keys)

    @cute.jit
    def _rotate(self, ctx: Context1Cta, fragment: cute.Tensor, i: Int32):
        if ctx.params.rope.shape[0] > 0 and i == self.tiling.head_dim // COLUMNS - 1:
            values = fragments.by_rows(fragment)
            self._rotate_rows(ctx.params, ctx.work, values, 2, cute.arch.lane_idx())
