"""Attention on Blackwell over a paged cache, 2 CTAs: `fmha_2cta` with the gather of `paged_1cta`.

Each CTA gathers its half of the columns of every key, and so knows which rows are keys by itself:
its softmax asks no other CTA.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, pipeline

from dsv4.kernels.attention import mask
from dsv4.kernels.attention.gather_fp8 import Fp8Rows
from dsv4.kernels.attention.inverse_rope import rope_row, rotate_back, rotation
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.row_codes import GROUP_PAIRS
from dsv4.kernels.attention.sm100 import fragments_2cta as fragments
from dsv4.kernels.attention.sm100.context import Context2Cta, WorkTile
from dsv4.kernels.attention.sm100.fmha_2cta import COLUMN_BLOCKS, FRAGMENT_COLUMNS, Fmha2Cta
from dsv4.kernels.attention.sm100.fragments_2cta import LOADED_ROWS, WARP_ROWS, Thread
from dsv4.kernels.attention.sm100.paged_context import PagedParams
from dsv4.kernels.attention.sm100.paged_gather import TmaRows
from dsv4.kernels.attention.sm100.paged_slots import Slots, TileCount
from dsv4.kernels.attention.sm100.paged_variant import PagedVariant
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HALF_DIM
from dsv4.kernels.attention.sm100.plan_paged import PagedPlan2Cta
from dsv4.kernels.attention.sm100.work_tile import COLUMNS, PRODUCER, make_output_tma
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit import pdl

ROUNDED_ROWS = 2  # of a thread at a time: codes of all that it loads would be spilled


class PagedFmha2Cta(PagedVariant, Fmha2Cta):
    """Attention kernel of two CTAs per token, 128 heads and split, over the pages of two pools."""

    min_blocks = 0  # of an SM that the compiler is told; roles can change registers with 1

    def _make_plan(self) -> PagedPlan2Cta:
        return PagedPlan2Cta(is_fp8=self.is_fp8)

    def _make_source(self) -> TmaRows | Fp8Rows:
        return self._gather_of(HALF_DIM, is_pair=True)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """Make the TMA descriptors and launch as many clusters as run at a time, or as there are
        work tiles.
        """
        q = arguments.q
        o = make_output_tma(arguments.o, q.iterator, WARP_ROWS)
        params = PagedParams.of(arguments, q, o, self.head_blocks, self.rounds_rows)
        self._launch_pairs(arguments, params, stream)

    @cute.jit
    def _launch_pairs(self, arguments: PagedArguments, params: PagedParams, stream):
        clusters = cutlass.min(params.work_tiles, cutlass.max(arguments.num_sms // 2, 1))
        self._kernel_of(arguments, params).launch(
            grid=(2 * clusters, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            min_blocks_per_mp=self.min_blocks,
            use_pdl=True,
        )

    # ---- device --------------------------------------------------------------------------------

    @cute.jit
    def _find_keys(
        self, ctx: Context2Cta, index: Int32, has_flags: cutlass.Constexpr[bool] = False
    ) -> KeySpan:
        index = cutlass.min(index, ctx.scheduler.count - 1)
        return ctx.params.find_keys(self.config, self._work_tile(ctx, index), has_flags)

    # ---- load warps ----------------------------------------------------------------------------

    @cute.jit
    def load_warps(self, ctx: Context2Cta):
        """This CTA's half of the columns of every tile, once."""
        if cutlass.const_expr(not self.is_fp8):
            self._load_rows(ctx)
        elif ctx.cta_rank == 0:
            # What is converted of an entry is known when the kernel is compiled.
            self._load_entries(ctx, 0)
        else:
            self._load_entries(ctx, 1)

    @cute.jit
    def _load_entries(self, ctx: Context2Cta, half: cutlass.Constexpr[int]):
        """Half of the columns of FP8 entries, which all warps convert."""
        params, scheduler = ctx.params, ctx.scheduler
        pdl.launch_dependents()
        warp, lane = self._gather_warp()
        row = warp * self.kv_source.warp_keys + lane % self.kv_source.warp_keys
        start = ctx.smem.kv_rows.iterator
        slots = Slots(ctx.pipelines.kv, ctx.info, start, (half,), self.plan.kv_stages)
        keys = self._find_keys(ctx, scheduler.first)
        count = TileCount(Int32(0))
        self._wait_for_cluster()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            token = self._work_tile(ctx, index).token
            word = params.keys.fetch(keys, token, keys.first, row, KEYS)
            count = self.kv_source.gather_tiles(
                slots, params.keys, keys, token, word, warp, lane, count
            )
            keys = self._find_keys(ctx, index + scheduler.step)

    @cute.jit
    def _load_rows(self, ctx: Context2Cta):
        """Half of the columns of the rows that TMA gathers."""
        params, scheduler, kv, source = ctx.params, ctx.scheduler, ctx.pipelines.kv, self.kv_source
        pdl.launch_dependents()

        # ---- prologue: tables first, queries would delay them
        state = pipeline.make_pipeline_state(PRODUCER, self.plan.kv_stages)
        keys = self._find_keys(ctx, scheduler.first)
        count = Int32(0)
        self._wait_for_cluster()

        # ---- mainloop: the tiles of every work tile
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            token = self._work_tile(ctx, index).token
            words = source.fetch(params, keys, token, keys.first)
            for tile in cutlass.range(keys.first, keys.last, unroll=1):
                rows = source.coordinates(params, keys, tile, words)
                # Past the last tile there are none to fetch: the words are -1.
                words = source.fetch(params, keys, token, tile + 1)
                is_window = tile >= keys.compressed_tiles
                source.describe(ctx.info, count, rows, is_window)
                kv.producer_acquire(state)
                stage = ctx.smem.kv_rows.iterator + state.index * (KEYS * HALF_DIM)
                source.copy(
                    params,
                    is_window,
                    source.quads(rows),
                    ctx.cta_rank * HALF_DIM,
                    stage,
                    kv.producer_get_barrier(state),
                )
                state.advance()
                count += 1
            keys = self._find_keys(ctx, index + scheduler.step)

    # ---- softmax warps -------------------------------------------------------------------------

    def _row_scale(self, ctx: Context2Cta, work: WorkTile, thread: Thread) -> cute.Tensor:
        head = work.head_block * ROWS + thread.row
        scale = cute.make_rmem_tensor(1, Float32)
        scale[0] = ctx.params.score_scale(self.config, self.scale_log2, work, head)
        return scale

    def _new_largest(self) -> cute.Tensor:
        largest = cute.make_rmem_tensor(1, Float32)
        largest.fill(-Float32.inf)
        return largest

    def _keep_largest(self, largest: cute.Tensor, tile_max: cute.Tensor) -> None:
        largest[0] = cute.arch.fmax(largest[0], tile_max[0])

    @cute.jit
    def _store_largest(
        self, ctx: Context2Cta, work: WorkTile, thread: Thread, largest: cute.Tensor
    ):
        max_logits, values = ctx.params.max_logits, ctx.smem.row_values
        if work.token < max_logits.shape[0]:
            values[thread.index, 0] = largest[0]
            thread.row_pair_barrier().arrive_and_wait()
            head = work.head_block * ROWS + thread.row
            if thread.half == 0 and head < self.config.num_query_heads:
                other = values[thread.index ^ ROWS, 0]
                max_logits[work.token, head] = cute.arch.fmax(largest[0], other) * LN_2
            # The next row sums, or maxima, go to the same place.
            thread.row_pair_barrier().arrive_and_wait()

    @cute.jit
    def _mask(
        self, ctx: Context2Cta, count: Int32, valid: Int32, scores: cute.Tensor, thread: Thread
    ):
        low, high = ctx.info.receive(count, thread.lane)
        word = cutlass.select_(thread.half == 0, low, high)
        if word != -1:
            mask.mask_bits(scores, word)

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def _store_output(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        address: cute.Pointer,
        thread: Thread,
        factor: Float32,
        has_keys,
    ):
        if cutlass.const_expr(self.rounds_rows):
            for block in cutlass.range(HALF_DIM // K_BLOCK, unroll=1):
                for first in cutlass.range_constexpr(0, LOADED_ROWS, ROUNDED_ROWS):
                    self._store_group(ctx, work, address, thread, block, first, has_keys)
        else:
            super()._store_output(ctx, work, address, thread, factor, has_keys)

    @cute.jit
    def _store_group(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        address: cute.Pointer,
        thread: Thread,
        block: Int32,
        first: cutlass.Constexpr[int],
        has_keys,
    ):
        """Write the codes of a group of columns of the thread's half, of its rows from `first`
        on."""
        rows = [fragments.first_of(thread, first + row)[0] for row in range(ROUNDED_ROWS)]
        words = cute.make_rmem_tensor((GROUP_PAIRS, ROUNDED_ROWS), Uint32)
        for part in cutlass.range_constexpr(K_BLOCK // COLUMNS):
            i = block * (K_BLOCK // COLUMNS) + part
            values = self._load_rows_of_o(address, thread, i, has_keys)
            for row in cutlass.range_constexpr(ROUNDED_ROWS):
                factor = ctx.smem.row_values[rows[row], 1]
                for j in cutlass.range_constexpr(COLUMNS // 8):
                    for c in cutlass.range_constexpr(2):
                        values[first + row, (c, j)] *= factor
            if has_keys:
                self._rotate_pairs(ctx, work, thread, values, i)
            self._pack_columns(values, words, part, first)
        heads = [work.head_block * ROWS + row for row in rows]
        of_head = thread.half * (HALF_DIM // K_BLOCK) + block
        self._store_codes(ctx.params, work.token, heads, of_head, words)

    @cute.jit
    def _rotate_half(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        thread: Thread,
        values: cute.Tensor,
        part: cutlass.Constexpr[int],
    ):
        rope = ctx.params.rope
        if rope.shape[0] > 0 and thread.half == 1:
            table_row = rope_row(rope, ctx.params.keys.positions, work.token)
            for i in cutlass.range_constexpr(FRAGMENT_COLUMNS // 2):
                angle = rotation(rope, table_row, part * (FRAGMENT_COLUMNS // 2) + i)
                values[2 * i], values[2 * i + 1] = rotate_back(
                    values[2 * i], values[2 * i + 1], angle
                )

    @cute.jit
    def _rotate_pairs(
        self, ctx: Context2Cta, work: WorkTile, thread: Thread, values: cute.Tensor, i: Int32
    ):
        if ctx.params.rope.shape[0] > 0 and thread.half == 1 and i == COLUMN_BLOCKS - 1:
            self._rotate_rows(ctx.params, work, values, LOADED_ROWS, thread.lane)
