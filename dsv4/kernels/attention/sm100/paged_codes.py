"""Attention on Blackwell over FP8 entries whose codes are multiplied as they are, 2 CTAs a token.

The kernel of `paged_2cta` with other operands. Entries whose groups share one scale need no
conversion: the scale of a key multiplies its score, and goes into its weight. Queries and weights
are one e4m3 number, or the sum of two (`compute`); the 64 rotated columns are bf16 in entries, and
stay so in both products.

Of every key CTA c holds codes 224c to 224c + 223 and rotated columns 32c to 32c + 31: both kinds of
products are then shared evenly, QK in partial sums as in `fmha_2cta`. Rotated values are divided by
the scale of their key on the way into shared memory, so that S / scale is one sum in TMEM, and the
weights times scales are those of both. O has 224 columns of codes behind 32 of rotated ones in each
half of the lanes. Up to 64 heads, CTA 1 computes rows that are not stored.

`print(CodesPlan2Cta(terms=2))` shows the budgets.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4.kernels.attention import mask, sink_merge, softmax
from dsv4.kernels.attention.inverse_rope import rope_row, rotate_back, rotation
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.paged_config import TERMS
from dsv4.kernels.attention.paged_context import PagedArguments
from dsv4.kernels.attention.sm100 import codes_weights
from dsv4.kernels.attention.sm100 import fragments_2cta as fragments
from dsv4.kernels.attention.sm100.codes_context import (
    CodesInfo,
    CodesSmem,
    CodesThread,
)
from dsv4.kernels.attention.sm100.codes_gather import HalfEntries, RingPlace
from dsv4.kernels.attention.sm100.codes_products import multiply_keys, multiply_values
from dsv4.kernels.attention.sm100.codes_queries import BATCH, THREAD_ROWS, CodeQueries
from dsv4.kernels.attention.sm100.context import Context2Cta, WorkTile
from dsv4.kernels.attention.sm100.fragments_2cta import WARP_ROWS
from dsv4.kernels.attention.sm100.paged_2cta import PagedFmha2Cta
from dsv4.kernels.attention.sm100.paged_context import PagedParams
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_codes import (
    GROUPS,
    HALF_ROPE,
    HALVES,
    O_BOXES,
    PLACES,
    SPANS,
    CodesPlan2Cta,
)
from dsv4.kernels.attention.sm100.plan_paged import GATHER_WARPS
from dsv4.kernels.attention.sm100.work_tile import (
    CONSUMER,
    PRODUCER,
    make_output_tma,
    row_epilogue,
)
from dsv4.kernels.attention.softmax import LN_2
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.tcgen05 import fence_after_thread_sync, fence_before_thread_sync

QK_AHEAD = 2  # tiles


class PagedCodes2Cta(PagedFmha2Cta):
    """Attention over FP8 entries with products of FP8 codes, without splits (sm_100a)."""

    min_blocks = 1

    def __init__(self, config):
        super().__init__(config)
        self.queries = CodeQueries(self.plan, config.num_query_heads)

    def _make_plan(self) -> CodesPlan2Cta:
        return CodesPlan2Cta(terms=TERMS[self.config.compute])

    def _make_source(self) -> None:
        """The gather needs to know its CTA."""

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: PagedArguments, stream):
        """As many clusters as run at a time, or as there are tokens."""
        q = arguments.q
        o = make_output_tma(arguments.o, q.iterator, WARP_ROWS, HALF_ROPE)
        params = PagedParams.of(arguments, q, o, self.head_blocks, rounds_rows=False)
        self._launch_pairs(arguments, params, stream)

    # ---- device --------------------------------------------------------------------------------

    def _is_load(self, warp_idx: Int32) -> Boolean:
        """Idle ones, too."""
        return (warp_idx >= self.warps["load"].first) & (warp_idx != self.warps["mma"].first)

    def _create_info(self, storage) -> CodesInfo:
        return CodesInfo.create(storage, self.barriers)

    def _smem(self, storage) -> CodesSmem:
        return CodesSmem.of(self.plan, storage)

    def _tmem_views(self, address: cute.Pointer) -> cute.Pointer:
        """Products are told columns."""
        return address

    def _parity(self, ctx: Context2Cta, token: Int32) -> Int32:
        """Parity of a work tile's number in its cluster: without splits, of up to 128 heads, work
        tiles are tokens."""
        return (token - ctx.scheduler.first) // ctx.scheduler.step % 2

    # ---- load warps ----------------------------------------------------------------------------

    @cute.jit
    def load_warps(self, ctx: Context2Cta):
        """This CTA's half of the columns of every tile, once."""
        warp, lane = self._gather_warp()
        if warp < GATHER_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.registers["load"])
            self._gather(ctx, warp, lane)
        else:
            # Beside the MMA warp.
            cute.arch.setmaxregister_decrease(self.plan.registers["idle"])
            self._wait_for_cluster()

    @cute.jit
    def _gather(self, ctx: Context2Cta, warp: Int32, lane: Int32):
        """Rows of a warp, of every work tile."""
        scheduler, stages = ctx.scheduler, self.plan.kv_stages
        pdl.launch_dependents()
        entries = HalfEntries(ctx.cta_rank)
        keys = self._find_keys(ctx, scheduler.first)
        # Every stage is empty.
        place = RingPlace(Int32(0), Int32(0), Int32(1))
        self._wait_for_cluster()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            token = self._work_tile(ctx, index).token
            place = entries.gather_tiles(ctx, stages, keys, token, warp, lane, place)
            keys = self._find_keys(ctx, index + scheduler.step)

    # ---- query warps ---------------------------------------------------------------------------

    @cute.jit
    def query_warps(self, ctx: Context2Cta):
        """Q of every work tile into TMEM, as soon as the one before it has its last score; until
        then it waits in registers, as codes."""
        cute.arch.setmaxregister_increase(self.plan.registers["query"])
        scheduler, q_pipe = ctx.scheduler, ctx.pipelines.q
        thread = fragments.this_thread(self.warps["query"].first)
        state = pipeline.make_pipeline_state(PRODUCER, self.barriers["q"].stages)
        batches = range(THREAD_ROWS // BATCH)
        self._wait_for_cluster()
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32) + self.tmem.column("q")

        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            work = self._work_tile(ctx, index)
            parity = self._parity(ctx, work.token)
            self.queries.acquire(ctx, parity)
            codes = []
            for batch in batches:
                rows = self.queries.load_batch(ctx, work, thread, batch)
                scales = self.queries.scales(ctx, thread, rows, batch, parity)
                codes.append(self.queries.codes(rows, scales))
            self.queries.commit(ctx, thread)
            q_pipe.producer_acquire(state)
            fence_after_thread_sync()
            for batch in batches:
                self.queries.store_batch(address, thread, batch, codes[batch])
            cute.arch.fence_view_async_tmem_store()
            fence_before_thread_sync()
            q_pipe.producer_commit(state)
            state.advance()

        self._end_queries(q_pipe, state)

    # ---- MMA warp ------------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, ctx: Context2Cta):
        """S two tiles ahead of O: what CTA 1 says of its weights takes long to arrive."""
        cute.arch.setmaxregister_decrease(self.plan.registers["mma"])
        scheduler, q_pipe = ctx.scheduler, ctx.pipelines.q
        self._wait_for_cluster()
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32)
        # One CTA issues for both.
        if ctx.cta_rank == 0:
            q_state = pipeline.make_pipeline_state(CONSUMER, self.barriers["q"].stages)
            kv_full = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
            kv_done = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
            s_state = pipeline.make_pipeline_state(PRODUCER, self.plan.s_stages)
            p_state = pipeline.make_pipeline_state(CONSUMER, self.plan.p_stages)
            for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
                keys = self._find_keys(ctx, index)
                tiles = keys.last - keys.first
                q_pipe.consumer_wait(q_state)
                fence_after_thread_sync()
                for _ in cutlass.range(cutlass.min(tiles, QK_AHEAD), unroll=1):
                    kv_full, s_state = self._qk(ctx, address, kv_full, s_state)
                for tile in cutlass.range(QK_AHEAD, tiles, unroll=1):
                    kv_full, s_state = self._qk(ctx, address, kv_full, s_state)
                    kv_done, p_state = self._pv(ctx, address, kv_done, p_state, tile > QK_AHEAD)
                q_pipe.consumer_release(q_state)
                q_state.advance()
                for tile in cutlass.range(cutlass.max(tiles - QK_AHEAD, 0), tiles, unroll=1):
                    kv_done, p_state = self._pv(ctx, address, kv_done, p_state, tile > 0)

    @cute.jit
    def _qk(self, ctx: Context2Cta, views: cute.Pointer, kv_full, s_state):
        pipelines = ctx.pipelines
        pipelines.s.producer_acquire(s_state)
        fence_after_thread_sync()
        pipelines.kv.consumer_wait(kv_full)
        sums = views + (self.tmem.column("s") + s_state.index * KEYS)
        with cute.arch.elect_one():
            multiply_keys(self.plan, ctx.smem, sums, views + self.tmem.column("q"), kv_full.index)
        pipelines.s.producer_commit(s_state)
        kv_full.advance()
        s_state.advance()
        return kv_full, s_state

    @cute.jit
    def _pv(self, ctx: Context2Cta, views: cute.Pointer, kv_done, p_state, accumulate):
        pipelines = ctx.pipelines
        pipelines.p.consumer_wait(p_state)
        fence_after_thread_sync()
        sums = views + self.tmem.column("o")
        with cute.arch.elect_one():
            multiply_values(self.plan, ctx.smem, sums, kv_done.index, p_state.index, accumulate)
        pipelines.kv.consumer_release(kv_done)
        pipelines.p.consumer_release(p_state)
        kv_done.advance()
        p_state.advance()
        return kv_done, p_state

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def softmax_warps(self, ctx: Context2Cta):
        """Scores to P, the rescaling of O, and the epilogue; the warpgroups take tiles in turn.

        Row maxima pass from one to the other with each tile, row sums stay.
        """
        cute.arch.setmaxregister_increase(self.plan.registers["softmax"])
        scheduler = ctx.scheduler
        thread = CodesThread.this(self.warps["softmax"].first)
        self._wait_for_cluster()
        ctx.tmem.allocate(self.tmem.allocated_columns)
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32)
        keys = self._find_keys(ctx, scheduler.first, has_flags=True)
        # Work tiles are tokens: a thread's head stays the same.
        sink = self._row_sink(ctx, self._work_tile(ctx, scheduler.first), thread)
        tiles_done = Int32(0)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            # ---- prologue: row state
            work = self._work_tile(ctx, index)
            both = self._has_both_branches(keys)
            scale, largest = self._row_scale(ctx, work, thread), self._new_largest()
            rows = sink_merge.new_rows(sink, both, self.config.sink_mode)

            # ---- mainloop: every other tile
            own = keys.first + ((tiles_done ^ thread.group) & 1)
            for tile in cutlass.range(own, keys.last, GROUPS, unroll=1):
                count = tiles_done + tile - keys.first
                self._weigh(ctx, keys, tile, count, address, thread, scale, largest, rows)

            # ---- epilogue; the next keys are looked up while O of the last tile runs
            upcoming = self._find_keys(ctx, index + scheduler.step, has_flags=True)
            tiles_done = tiles_done + keys.last - keys.first
            if keys.last > keys.first:
                if (tiles_done ^ thread.group) & 1 == 0:
                    # The last tile was the other warpgroup's.
                    info = ctx.info
                    info.turn.at(thread.group).wait(tiles_done >> 1 & 1 ^ 1 ^ thread.group)
                self._wait_for_o(ctx, tiles_done - 1)
            self._epilogue(ctx, work, keys, own, address, thread, rows)
            self._store_largest(ctx, work, thread, largest)
            keys = upcoming
        self._free_tmem(ctx, address)

    @cute.jit
    def _weigh(
        self, ctx: Context2Cta, keys: KeySpan, tile, count: Int32, address: cute.Pointer,
        thread: CodesThread, scale: cute.Tensor, largest: cute.Tensor, rows: sink_merge.RowState,
    ):  # fmt: skip
        """P of a tile.

        Args:
            count: number of the tile in the cluster.
            rows: the maximum that the row sum is relative to, in the scale of the last tile.
        """
        info, p_pipe, use = ctx.info, ctx.pipelines.p, count >> 1 & 1
        scores = self._load_scores(ctx, address, thread, _state(count, use))
        word, of_keys = info.receive_keys(count, thread)
        codes_weights.scale_scores(scores, of_keys.scales)
        if word != -1:
            mask.mask_bits(scores, word)
        tile_max = cute.make_rmem_tensor(1, Float32)
        codes_weights.thread_max(scores, tile_max)
        tile_max[0] = tile_max[0] * scale[0]
        self._keep_largest(largest, tile_max)

        # ---- the turn: row maxima, by the scores of all tiles before
        info.turn.at(thread.group).wait(use ^ 1 ^ thread.group)
        has_o = tile > keys.first
        if has_o:
            # Of the tiles since the thread's last one, two, one may be the window's first.
            begin = keys.compressed_tiles
            crosses = (tile >= begin) & (tile - GROUPS < begin)
            self._follow_row_max(ctx, thread, rows, crosses, tile == begin)
        exceeds = codes_weights.exceeds(rows, tile_max, of_keys)
        if fragments.any_in_row_pair(thread, exceeds):
            wanted = codes_weights.wanted_max(scores, scale, of_keys)
            factor = self._raise_row_max(ctx, thread, rows, wanted)
            if has_o:
                self._wait_for_o(ctx, count - 1)
                self._rescale(address, thread, factor)
        maxima = ctx.smem.row_maxima
        if thread.half == 0:
            maxima[thread.row, 0] = rows.row_max[0]
            if tile == keys.compressed_tiles:
                maxima[thread.row, 1] = rows.compressed_row_max[0]
                maxima[thread.row, 2] = rows.window_row_max[0]
        # Whoever waits for this tile's O knows from here that the use of P before is over.
        state = _state(count, use ^ 1)
        p_pipe.producer_acquire(state)
        info.turn.at(1 - thread.group).arrive(thread.lane)

        reference = softmax.finite_reference(rows.row_max)
        codes_weights.exponentiate(scores, reference, rows.row_sum, scale)
        codes_weights.store_weights(self.plan, ctx.smem, state.index, thread, scores, of_keys)
        fence_before_thread_sync()
        p_pipe.producer_commit(state)

    @cute.jit
    def _follow_row_max(
        self, ctx: Context2Cta, thread: CodesThread, rows: sink_merge.RowState, crosses, enters
    ):
        """Make the row sum relative to the maximum that the other warpgroup has left.

        Args:
            crosses: whether the window was entered since the thread's last tile.
            enters: whether it is entered now.
        """
        own, current = rows.row_max[0], ctx.smem.row_maxima[thread.row, 0]
        if crosses:
            own = own - _gate(rows, own)
        if enters:
            rows.compressed_row_max[0] = current
            current = current - _gate(rows, current)
            rows.window_row_max[0] = current
        # A maximum that stays may be infinite, and the difference NaN.
        factor = Float32(1.0)
        if own != current:
            factor = softmax.exp2(own - current)
        rows.row_sum[0] = rows.row_sum[0] * factor
        rows.row_max[0] = current

    @cute.jit
    def _raise_row_max(
        self, ctx: Context2Cta, thread: CodesThread, rows: sink_merge.RowState, wanted: Float32
    ) -> Float32:
        """Raise the row maximum to what either half asks for; the factor for what is relative to
        the old one."""
        values, row = ctx.smem.row_values, thread.row
        values[row, thread.place] = wanted
        thread.row_pair_barrier().arrive_and_wait()
        other = values[row, (1 - thread.half) * GROUPS + thread.group]
        raised = cute.arch.fmax(cute.arch.fmax(wanted, other), rows.row_max[0])
        factor = Float32(1.0)
        if raised > rows.row_max[0]:
            factor = softmax.exp2(rows.row_max[0] - raised)
        rows.row_sum[0] = rows.row_sum[0] * factor
        rows.row_max[0] = raised
        return factor

    @cute.jit
    def _row_scale(self, ctx: Context2Cta, work: WorkTile, thread: CodesThread) -> cute.Tensor:
        scale = super()._row_scale(ctx, work, thread)
        info = ctx.info
        info.queries.wait(self._parity(ctx, work.token))
        scale[0] = scale[0] * info.q_scales[thread.row]
        info.queries.release(thread.lane)
        return scale

    @cute.jit
    def _wait_for_o(self, ctx: Context2Cta, count: Int32):
        """Wait for O with tile number `count`: its completion frees the tile's P."""
        p_pipe = ctx.pipelines.p
        p_pipe.producer_acquire(_state(count, count >> 1 & 1))
        fence_after_thread_sync()

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def _epilogue(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        keys: KeySpan,
        own: Int32,
        address: cute.Pointer,
        thread: CodesThread,
        rows: sink_merge.RowState,
    ):
        """Write the CTA's rows: the output and lse.

        Args:
            own: first tile of the thread's warpgroup.
        """
        values, row, last = ctx.smem.row_values, thread.row, keys.last - 1
        if keys.last > keys.first:
            # The thread's own last tile may be the one before.
            is_own = (last - own) % GROUPS == 0
            crosses = (last == keys.compressed_tiles) & (not is_own)
            self._follow_row_max(ctx, thread, rows, crosses, Boolean(False))
            maxima = ctx.smem.row_maxima
            if last >= keys.compressed_tiles:
                rows.compressed_row_max[0] = maxima[row, 1]
                rows.window_row_max[0] = maxima[row, 2]
        final_max = sink_merge.final_row_max(rows, 0, keys.last > keys.compressed_tiles)
        values[row, thread.place] = rows.row_sum[0]
        thread.sync_rows()
        if thread.place == 0:
            row_sum = values[row, 0]
            for place in cutlass.range_constexpr(1, PLACES):
                row_sum = row_sum + values[row, place]
            head = work.head_block * ROWS + row
            values[row, PLACES] = row_epilogue(
                self.config, ctx.params, work, head, final_max, row_sum, rows.sink[0]
            )
        thread.sync_rows()
        factor, has_keys = values[row, PLACES], keys.last > keys.first
        self._store_output(ctx, work, address, thread, factor, has_keys)
        # Whichever warpgroup has the next weights, all of O has been read; and the next row sums,
        # or maxima, go to the same place.
        thread.sync_rows()

    @cute.jit
    def _store_output(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        address: cute.Pointer,
        thread: CodesThread,
        factor: Float32,
        has_keys,
    ):
        """Each warp stores its part of 32 rows, 32 columns at a time, which goes on beside the next
        work tile."""
        o, smem = ctx.params.o, ctx.smem
        tiles = cute.local_tile(o.tma_tensor, (WARP_ROWS, HALF_ROPE), (None, None, None))
        row_tile = work.head_block * (ROWS // WARP_ROWS) + thread.warp % 2
        warp = thread.warp
        # What was stored before has been read.
        self._wait_for_stores()
        for j in cutlass.range_constexpr(O_BOXES):
            i = thread.group * O_BOXES + j
            staged = smem.staged
            source, target = cpasync.tma_partition(
                o.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(staged, 0, 2),
                cute.group_modes(tiles, 0, 2),
            )
            values = cute.make_rmem_tensor(HALF_ROPE, Float32)
            values.fill(0.0)
            if has_keys:
                columns = address + (self.tmem.column("o") + i * HALF_ROPE)
                accumulated = fragments.load_lane(columns, HALF_ROPE, thread)
                cute.arch.fence_view_async_tmem_load()
                for c in cutlass.range_constexpr(HALF_ROPE):
                    values[c] = accumulated[0, c] * factor
                if cutlass.const_expr(j == O_BOXES - 1):
                    self._rotate_values(ctx, work, thread, values)
            rows = staged[None, None, j, warp].iterator
            units = HALF_ROPE // fragments.UNIT
            fragments.store_units(rows, thread.lane, Int32(0), values, units)
            cute.arch.sync_warp()
            # Of codes a half has seven boxes of 32 columns, and one behind all of them.
            box = thread.half * SPANS + i
            if i == SPANS:
                box = HALVES * SPANS + thread.half
            with cute.arch.elect_one():
                # A tile past the last head has no coordinate of its own: it would land on another.
                if row_tile * WARP_ROWS < self.config.num_query_heads:
                    cute.copy(
                        o.atom, source[None, j, warp], target[None, row_tile, box, work.token]
                    )
                cute.arch.cp_async_bulk_commit_group()

    def _reuse_staged(self) -> None:
        """Nothing else uses it."""

    @cute.jit
    def _rotate_values(
        self, ctx: Context2Cta, work: WorkTile, thread: CodesThread, values: cute.Tensor
    ):
        """Rotate the last 32 columns of the thread's half row, if they are to be."""
        rope = ctx.params.rope
        if rope.shape[0] > 0 and thread.group == GROUPS - 1:
            table_row = rope_row(rope, ctx.params.keys.positions, work.token)
            pairs = HALF_ROPE // 2
            for i in cutlass.range_constexpr(pairs):
                angle = rotation(rope, table_row, thread.half * pairs + i)
                values[2 * i], values[2 * i + 1] = rotate_back(
                    values[2 * i], values[2 * i + 1], angle
                )

    @cute.jit
    def _store_largest(
        self, ctx: Context2Cta, work: WorkTile, thread: CodesThread, largest: cute.Tensor
    ):
        max_logits, values, row = ctx.params.max_logits, ctx.smem.row_values, thread.row
        if work.token < max_logits.shape[0]:
            values[row, thread.place] = largest[0]
            thread.sync_rows()
            head = work.head_block * ROWS + row
            if thread.place == 0 and head < self.config.num_query_heads:
                found = values[row, 0]
                for place in cutlass.range_constexpr(1, PLACES):
                    found = cute.arch.fmax(found, values[row, place])
                max_logits[work.token, head] = found * LN_2
            # The next row sums, or maxima, go to the same place.
            thread.sync_rows()


def _state(count: Int32, phase: Int32) -> pipeline.PipelineState:
    """Pipeline state of tile number `count` where tiles have two stages in turn."""
    return pipeline.PipelineState(GROUPS, count, count & 1, phase)


def _gate(rows: sink_merge.RowState, row_max: Float32) -> Float32:
    """What a row maximum loses where the window begins; that of no key stays -inf."""
    return cutlass.select_(row_max == -Float32.inf, Float32(0.0), rows.gate[0])
