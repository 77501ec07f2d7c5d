"""Attention on Blackwell, 2 CTAs: 128 query heads of one token over a range of its keys.

The two CTAs of a cluster drive their tensor cores as one (cta_group::2, M = 128, full rate). CTA c
owns heads 64c to 64c + 63 as rows, and holds columns 256c to 256c + 255 of every key: a KV element
comes from global memory once per cluster, into one CTA, and serves both products from there.

- S. With A in Tensor Memory, the upper 64 lanes of a CTA multiply what the second half of N brings,
  and that is the tile of CTA 1. So the lower lanes of Q hold columns below 256, the upper lanes the
  others, and one N = 128 product makes two contractions of K = 256: partial scores of 64 keys from
  either half of the columns. Two softmax threads share a row; each sends the other half of its
  partial scores through shared memory, adds what it receives, and exponentiates 32 keys.
- O. N = 512 are two instructions. Instruction j takes columns 256c + 128j to 256c + 128j + 127 from
  CTA c, and leaves those of CTA 1 in the upper lanes: lane 64h + row, column i of O is element
  256h + i of the row. No operand is permuted, and the epilogue reads its lanes straight through.

Every tile costs 1.2k cycles of shared-memory port and 1.0k of tensor core, under the 1.3k that an
SM's share of memory takes to deliver it. To keep memory busy clusters are persistent: while the
output of one work tile is written, KV stages fill for the next.

Roles of the ten warps of each CTA, and what travels between them (`print(Plan2Cta())`):

    load (9)      this CTA's half of the KV tiles by TMA          -> kv
    query (4-7)   Q of a work tile from global memory to TMEM     -> q
    mma (8)       for both CTAs, from CTA 0: S(k + 1), then O(k)  -> s; frees q, kv, p
    softmax (0-3) scores, mask, P to shared memory,               -> p; frees s
                  rescaling of O, epilogue

O needs no pipeline of its own: what frees P(k) is the completion of O(k). Row maxima, sinks and
masks are those of `fmha_1cta`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention import mask, sink_merge, softmax
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.context import FmhaArguments
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.sm100 import fragments_2cta as fragments
from dsv4.kernels.attention.sm100.combine import partial_pointer
from dsv4.kernels.attention.sm100.context import (
    Context2Cta,
    KernelParams,
    Pipelines2Cta,
    Smem2Cta,
    TileScheduler,
    Tmem2Cta,
    WorkTile,
)
from dsv4.kernels.attention.sm100.fragments_2cta import WARP_ROWS, Thread
from dsv4.kernels.attention.sm100.kv_source import DenseKv2Cta, KvBranch
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_2cta import (
    HALF_DIM,
    HALF_KEYS,
    HEAD_DIM,
    HEADS,
    NamedBarriers,
    Plan2Cta,
)
from dsv4.kernels.attention.sm100.work_tile import (
    COLUMNS,
    CONSUMER,
    PRODUCER,
    find_keys,
    make_output_tma,
    partial_index,
    row_epilogue,
    row_layout,
    store_pairs,
    zero_rows,
)
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import row_pointer
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tcgen05 import (
    TMEM_LANES,
    create_pipeline,
    fence_after_thread_sync,
    fence_before_thread_sync,
    make_mma,
    make_tmem_copy,
)

TWO = tcgen05.CtaGroup.TWO
COLUMN_BLOCKS = HALF_DIM // COLUMNS  # of O that a thread holds
# TMEM columns in registers at a time: of O beside the scores, of Q beside another 32.
FRAGMENT_COLUMNS = 32


class Fmha2Cta:
    """Attention kernel of two CTAs per token, 128 heads and split; clusters are persistent."""

    cluster = (2, 1, 1)
    # Whether a tile may be without a key, which dense rows never are.
    has_empty_tiles = False

    def __init__(self, config: FmhaConfig):
        self.config = config
        self.scale_log2 = config.scale * softmax.LOG2_E
        self.head_blocks = -(-config.num_query_heads // HEADS)

        self.plan = self._make_plan()
        self.warps = self.plan.warps
        self.tmem = self.plan.tmem
        self.barriers = self.plan.barriers
        self.kv_source = self._make_source()

    def _make_plan(self) -> Plan2Cta:
        return Plan2Cta()

    def _make_source(self) -> DenseKv2Cta:
        return DenseKv2Cta()

    # ---- layouts -------------------------------------------------------------------------------

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S, which has two columns for a key, one for each half of head_dim; and O."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        qk_mma = make_mma(TWO, (HEADS, 2 * KEYS), k_major, tcgen05.OperandSource.TMEM)
        return qk_mma, make_mma(TWO, (HEADS, HALF_DIM), mn_major)

    def _smem_layouts(self) -> dict[str, cute.ComposedLayout]:
        """Layouts of the KV ring and of P, all of them 128-byte swizzled."""
        qk_mma, pv_mma = self._mmas()
        qk_tile, pv_tile = (HEADS, 2 * KEYS, HALF_DIM), (HEADS, HEAD_DIM, KEYS)
        kv_stages, p_stages = self.plan.kv_stages, self.plan.p_stages
        return {
            "k": sm100.make_smem_layout_b(qk_mma, qk_tile, BFloat16, kv_stages),
            "v": sm100.make_smem_layout_b(pv_mma, pv_tile, BFloat16, kv_stages),
            "p": sm100.make_smem_layout_a(pv_mma, pv_tile, BFloat16, p_stages),
            "kv_rows": row_layout((KEYS, HALF_DIM), kv_stages),
        }

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Make the TMA descriptors and launch as many clusters as run at a time, or as there are
        work tiles.
        """
        q = arguments.q
        compressed, window = [
            self.kv_source.descriptor(kv, q.iterator)
            for kv in (arguments.compressed_kv, arguments.swa_kv)
        ]
        params = KernelParams(
            q=q,
            compressed=compressed,
            window=window,
            o=make_output_tma(arguments.o, q.iterator, WARP_ROWS),
            work_tiles=q.shape[0] * arguments.num_splits * self.head_blocks,
            by_splits=cute.fast_divmod_create_divisor_v2(arguments.num_splits),
            **arguments.tables(),
        )
        clusters = cutlass.min(params.work_tiles, cutlass.max(arguments.num_sms // 2, 1))
        self.kernel(params).launch(
            grid=(2 * clusters, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            use_pdl=True,
        )

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, params: KernelParams):
        """The work tiles of a cluster."""
        self.run(params)

    @cute.jit
    def run(self, params: KernelParams):
        """Allocate, then send every warp to its role."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        scheduler = TileScheduler(first=block // 2, step=grid // 2, count=params.work_tiles)
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = SmemAllocator().allocate(storage_struct(self.plan.smem))
        info = self._create_info(storage)
        pipelines = self._create_pipelines(storage)
        smem = self._smem(storage)
        warps = self.warps
        users = sum(warps[role].threads for role in ("softmax", "query", "mma"))
        tmem = TmemAllocator(
            storage.tmem_address.data_ptr(),
            barrier_for_retrieve=pipeline.NamedBarrier(NamedBarriers.TMEM_ALLOCATED, users),
            allocator_warp_id=warps["softmax"].first,
            is_two_cta=True,
            two_cta_tmem_dealloc_mbar_ptr=storage.tmem_unused.data_ptr(),
        )
        # Roles wait for the barriers of the other CTA when they need them, not here.
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster[:2], is_relaxed=True)
        pdl.wait_for_previous_launch()
        ctx = Context2Cta(params, scheduler, cta_rank, pipelines, smem, tmem, info)
        if self._is_load(warp_idx):
            self.load_warps(ctx)
        elif warp_idx == warps["mma"].first:
            self.mma_warp(ctx)
        elif warp_idx >= warps["query"].first:
            self.query_warps(ctx)
        else:
            self.softmax_warps(ctx)
        # The peer CTA still signals barriers in this CTA's shared memory.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _create_info(self, storage) -> None:
        """Ring of words about gathered tiles."""

    def _create_pipelines(self, storage) -> Pipelines2Cta:
        """Pipelines of the barrier graph, their mbarriers initialised."""
        cta_layout = cute.tiled_divide(cute.make_layout(self.cluster), (2,))
        return Pipelines2Cta(*[
            create_pipeline(self.barriers, name, storage, cta_layout)
            for name in Pipelines2Cta._fields
        ])  # fmt: skip

    def _wait_for_cluster(self):
        """Wait until the barriers of both CTAs are initialised."""
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster[:2])

    def _smem(self, storage) -> Smem2Cta:
        """Views of the shared buffers."""
        buffers = {"k": storage.kv, "v": storage.kv, "p": storage.p, "kv_rows": storage.kv}
        views = {
            name: buffers[name].get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in self._smem_layouts().items()
        }
        exchange = storage.exchange.data_ptr()
        staged = row_layout((WARP_ROWS, COLUMNS), self.warps["softmax"].count)
        pointers = [
            cute.recast_ptr(buffer, staged.inner, dtype=BFloat16)
            for buffer in (storage.p.data_ptr(), exchange)
        ]
        # Lanes next to each other: a warp's 16-byte accesses fill all banks.
        sent = cute.make_layout((4, 32, HALF_KEYS // 4, 4), stride=(1, 4, 128, 32 * HALF_KEYS))
        return Smem2Cta(
            **views,
            staged=tuple(cute.make_tensor(pointer, staged.outer) for pointer in pointers),
            exchange=cute.make_tensor(exchange, sent),
            row_values=storage.row_values.get_tensor(cute.make_layout((2 * ROWS, 2))),
        )

    def _tmem_views(self, address: cute.Pointer) -> Tmem2Cta:
        """Views of Tensor Memory as the tensor core addresses it."""
        qk_mma, pv_mma = self._mmas()
        s_shape = cute.append(qk_mma.partition_shape_C((HEADS, 2 * KEYS)), self.plan.s_stages)
        s = qk_mma.make_fragment_C(s_shape)
        o = pv_mma.make_fragment_C(pv_mma.partition_shape_C((HEADS, HEAD_DIM)))
        q = qk_mma.make_fragment_A(qk_mma.partition_shape_A((HEADS, HALF_DIM)))
        q_address = cute.recast_ptr(address + self.tmem.column("q"), dtype=BFloat16)
        return Tmem2Cta(
            q=cute.make_tensor(q_address, q.layout),
            s=cute.make_tensor(address + self.tmem.column("s"), s.layout),
            o=cute.make_tensor(address + self.tmem.column("o"), o.layout),
        )

    def _work_tile(self, ctx: Context2Cta, index: Int32) -> WorkTile:
        """A work tile as this CTA sees it; splits of a token are neighbours that share L2 lines."""
        row_block = index // self.head_blocks
        return WorkTile(
            token=row_block // ctx.params.num_splits,
            head_block=index % self.head_blocks * 2 + ctx.cta_rank,
            split=row_block % ctx.params.num_splits,
        )

    def _is_load(self, warp_idx: Int32) -> Boolean:
        return warp_idx == self.warps["load"].first

    def _find_keys(self, ctx: Context2Cta, index: Int32, has_flags: bool = False) -> KeySpan:
        """Keys of a work tile; past the last one, of the last one.

        Args:
            has_flags: whether the caller asks `_has_both_branches` of them.
        """
        index = cutlass.min(index, ctx.scheduler.count - 1)
        return find_keys(self.config, ctx.params, self._work_tile(ctx, index))

    def _has_both_branches(self, keys: KeySpan) -> Boolean:
        return keys.has_both_branches()

    # ---- load warp -----------------------------------------------------------------------------

    @cute.jit
    def load_warps(self, ctx: Context2Cta):
        """This CTA's half of the columns of every tile, once."""
        params, scheduler, rows = ctx.params, ctx.scheduler, ctx.smem.kv_rows
        pdl.launch_dependents()

        # ---- prologue: tables first, queries would delay them
        state = pipeline.make_pipeline_state(PRODUCER, self.plan.kv_stages)
        keys = self._find_keys(ctx, scheduler.first)
        self._wait_for_cluster()

        # ---- mainloop: of every work tile the compressed tiles, then the window tiles
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            work = self._work_tile(ctx, index)
            split_point = cutlass.min(cutlass.max(keys.compressed_tiles, keys.first), keys.last)
            branch = self.kv_source.branch(params.compressed, rows, Int32(0), work.token)
            state = self._load_tiles(ctx, branch, keys.first, split_point, Int32(0), state)
            branch = self.kv_source.branch(params.window, rows, keys.window_begin, keys.request)
            origin = keys.compressed_tiles
            state = self._load_tiles(ctx, branch, split_point, keys.last, origin, state)
            keys = self._find_keys(ctx, index + scheduler.step)

    @cute.jit
    def _load_tiles(
        self, ctx: Context2Cta, branch: KvBranch, first: Int32, last: Int32, origin: Int32, state
    ):
        """Fetch tiles [first, last), of which the branch's own count starts at `origin`."""
        kv = ctx.pipelines.kv
        for index in cutlass.range(first, last, unroll=1):
            kv.producer_acquire(state)
            self.kv_source.copy(branch, index - origin, ctx.cta_rank, kv, state)
            state.advance()
        return state

    # ---- query warps ---------------------------------------------------------------------------

    @cute.jit
    def query_warps(self, ctx: Context2Cta):
        """Q of every work tile into TMEM, as soon as the one before it has its last score.

        Half of it waits for that in registers; all of it would not fit.
        """
        scheduler, q_pipe = ctx.scheduler, ctx.pipelines.q
        thread = fragments.this_thread(self.warps["query"].first)
        halves = tuple(cute.make_rmem_tensor(FRAGMENT_COLUMNS, Float32) for _ in range(2))

        # ---- prologue: the first Q is in flight while TMEM is being allocated
        state = pipeline.make_pipeline_state(PRODUCER, self.barriers["q"].stages)
        self._wait_for_cluster()
        work = self._work_tile(ctx, scheduler.first)
        for i in cutlass.range_constexpr(2):
            self._load_q(ctx, work, thread, i, halves[i])
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32) + self.tmem.column("q")

        # ---- mainloop
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            q_pipe.producer_acquire(state)
            fence_after_thread_sync()
            work = self._work_tile(ctx, index)
            for i in cutlass.range_constexpr(self.plan.q_columns // FRAGMENT_COLUMNS):
                fragments.store_rows(address + i * FRAGMENT_COLUMNS, thread, halves[i % 2])
                if cutlass.const_expr(i < 2):
                    self._load_q(ctx, work, thread, i + 2, halves[i])
            cute.arch.fence_view_async_tmem_store()
            fence_before_thread_sync()
            q_pipe.producer_commit(state)
            state.advance()
            if index + scheduler.step < scheduler.count:
                work = self._work_tile(ctx, index + scheduler.step)
                for i in cutlass.range_constexpr(2):
                    self._load_q(ctx, work, thread, i, halves[i])

        self._end_queries(q_pipe, state)

    def _end_queries(self, q_pipe: pipeline.PipelineAsyncUmma, state) -> None:
        """Wait until the last Q has been read; the query warps use no TMEM from here."""
        q_pipe.producer_acquire(state)
        fence_before_thread_sync()
        self._tmem_unused().arrive_and_wait()

    def _free_tmem(self, ctx: Context2Cta, address: cute.Pointer) -> None:
        """The end of the softmax warps: their stores have read what they store, TMEM is free."""
        self._wait_for_stores()
        fence_before_thread_sync()
        self._tmem_unused().arrive_and_wait()
        fence_after_thread_sync()
        ctx.tmem.relinquish_alloc_permit()
        ctx.tmem.free(address)

    def _tmem_unused(self) -> pipeline.NamedBarrier:
        """Barrier of softmax and query warps: freed while one of them still uses it, TMEM would
        belong to the next CTA of this SM.
        """
        users = self.warps["softmax"].threads + self.warps["query"].threads
        return pipeline.NamedBarrier(NamedBarriers.TMEM_UNUSED, users)

    @cute.jit
    def _load_q(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        thread: Thread,
        quarter: cutlass.Constexpr[int],
        values: cute.Tensor,
    ):
        """A quarter of the TMEM columns of the CTA's 64 query rows; rows past the last head repeat
        it.
        """
        rows = fragments.by_rows(values)
        for r in cutlass.range_constexpr(4):
            row, column = fragments.first_of(thread, r)
            head = cutlass.min(work.head_block * ROWS + row, self.config.num_query_heads - 1)
            # 4 bytes a TMEM column.
            columns = thread.half * (HALF_DIM // 2) + quarter * FRAGMENT_COLUMNS + column
            start = cute.recast_ptr(row_pointer(ctx.params.q, work.token, head), dtype=Float32)
            start = start + cute.assume(columns, divby=2)
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1, 1])):
                pair = cute.make_tensor(start + 8 * i, cute.make_layout(2))
                cute.autovec_copy(pair, rows[r, (None, i)])

    # ---- MMA warp ------------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, ctx: Context2Cta):
        """S of tile k + 1 before O of tile k: it runs beside the softmax of tile k."""
        scheduler, q_pipe = ctx.scheduler, ctx.pipelines.q
        self._wait_for_cluster()
        ctx.tmem.wait_for_alloc()
        views = self._tmem_views(ctx.tmem.retrieve_ptr(Float32))
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
                if tiles > 0:
                    kv_full, s_state = self._qk(ctx, views, kv_full, s_state)
                for tile in cutlass.range(1, tiles, unroll=1):
                    kv_full, s_state = self._qk(ctx, views, kv_full, s_state)
                    kv_done, p_state = self._pv(ctx, views, kv_done, p_state, tile > 1)
                q_pipe.consumer_release(q_state)
                q_state.advance()
                if tiles > 0:
                    kv_done, p_state = self._pv(ctx, views, kv_done, p_state, tiles > 1)

    @cute.jit
    def _qk(self, ctx: Context2Cta, views: Tmem2Cta, kv_full, s_state):
        """S = Q K^T of the next tile.

        States are returned, because a staged loop carries only what its own body assigns.
        """
        pipelines = ctx.pipelines
        qk_mma, _ = self._mmas()
        f_k = qk_mma.make_fragment_B(ctx.smem.k)
        pipelines.s.producer_acquire(s_state)
        fence_after_thread_sync()
        pipelines.kv.consumer_wait(kv_full)
        s = views.s[None, None, None, s_state.index]
        qk_mma.set(tcgen05.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(f_k, mode=[2])):
            q_block = views.q[None, None, k]
            cute.gemm(qk_mma, s, q_block, f_k[None, None, k, kv_full.index], s)
            qk_mma.set(tcgen05.Field.ACCUMULATE, True)
        pipelines.s.producer_commit(s_state)
        kv_full.advance()
        s_state.advance()
        return kv_full, s_state

    @cute.jit
    def _pv(self, ctx: Context2Cta, views: Tmem2Cta, kv_done, p_state, accumulate):
        """O += P V of the next tile, which frees the tile."""
        pipelines, smem = ctx.pipelines, ctx.smem
        _, pv_mma = self._mmas()
        f_p, f_v = pv_mma.make_fragment_A(smem.p), pv_mma.make_fragment_B(smem.v)
        pipelines.p.consumer_wait(p_state)
        fence_after_thread_sync()
        # Allocation does not clear TMEM: the first tile overwrites, in both instructions.
        pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in cutlass.range_constexpr(cute.size(f_p, mode=[2])):
            p_block = f_p[None, None, k, p_state.index]
            cute.gemm(pv_mma, views.o, p_block, f_v[None, None, k, kv_done.index], views.o)
            pv_mma.set(tcgen05.Field.ACCUMULATE, True)
        pipelines.kv.consumer_release(kv_done)
        pipelines.p.consumer_release(p_state)
        kv_done.advance()
        p_state.advance()
        return kv_done, p_state

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def softmax_warps(self, ctx: Context2Cta):
        """Scores to P, the rescaling of O, and the epilogue; two threads share a row."""
        scheduler, smem, p_pipe = ctx.scheduler, ctx.smem, ctx.pipelines.p
        thread = fragments.this_thread(self.warps["softmax"].first)
        self._wait_for_cluster()
        ctx.tmem.allocate(self.tmem.allocated_columns)
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32)
        s_state = pipeline.make_pipeline_state(CONSUMER, self.plan.s_stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.plan.p_stages)
        keys = self._find_keys(ctx, scheduler.first, has_flags=True)
        tiles_done = Int32(0)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.step, unroll=1):
            # ---- prologue: row state
            work = self._work_tile(ctx, index)
            both = self._has_both_branches(keys)
            sink = self._row_sink(ctx, work, thread)
            scale, largest = self._row_scale(ctx, work, thread), self._new_largest()
            rows = sink_merge.new_rows(sink, both, self.config.sink_mode)
            self._wait_for_stores()

            # ---- mainloop
            for tile in cutlass.range(keys.first, keys.last, unroll=1):
                if tile == keys.compressed_tiles and tile > keys.first:
                    sink_merge.enter_window(rows, self.has_empty_tiles)
                _, _, valid = keys.tile(tile, KEYS)
                scores = self._load_scores(ctx, address, thread, s_state)
                s_state.advance()
                self._mask(ctx, tiles_done + tile - keys.first, valid, scores, thread)
                tile_max = cute.make_rmem_tensor(1, Float32)
                softmax.thread_max(scores, tile_max)
                tile_max[0] = tile_max[0] * softmax.row_scale(scale, 0)
                self._keep_largest(largest, tile_max)
                # Both threads of a row must move its maximum, or neither.
                exceeds = softmax.exceeds_rescale_threshold(rows.row_max, tile_max)
                if fragments.any_in_row_pair(thread, exceeds):
                    has_o = tile > keys.first
                    factor = self._update_row_max(ctx, thread, rows, tile_max[0], has_o)
                    if has_o:
                        self._wait_for_o(p_pipe, p_state)
                        self._rescale(address, thread, factor)
                reference = rows.row_max
                if cutlass.const_expr(self.has_empty_tiles):
                    reference = softmax.finite_reference(reference)
                softmax.exponentiate(scores, reference, rows.row_sum, scale)
                p_pipe.producer_acquire(p_state)
                p_tile = smem.p.iterator + p_state.index * (ROWS * KEYS)
                first_unit = thread.half * (HALF_KEYS // fragments.UNIT)
                fragments.store_units(p_tile, thread.row, first_unit, scores)
                fence_before_thread_sync()
                p_pipe.producer_commit(p_state)
                p_state.advance()

            # ---- epilogue; the next keys are looked up while O of the last tile runs
            upcoming = self._find_keys(ctx, index + scheduler.step, has_flags=True)
            if keys.last > keys.first:
                self._wait_for_o(p_pipe, p_state)
            self._epilogue(ctx, work, keys, address, thread, rows)
            self._store_largest(ctx, work, thread, largest)
            tiles_done = tiles_done + keys.last - keys.first
            keys = upcoming
        self._free_tmem(ctx, address)

    @cute.jit
    def _row_sink(self, ctx: Context2Cta, work: WorkTile, thread: Thread) -> cute.Tensor:
        """Sink of the thread's row; rows past the last head get 0."""
        head = work.head_block * ROWS + thread.row
        sink = cute.make_rmem_tensor(1, Float32)
        sink[0] = Float32(0.0)
        if head < self.config.num_query_heads:
            sink[0] = ctx.params.sink_logits[head]
        return sink

    def _row_scale(self, ctx: Context2Cta, work: WorkTile, thread: Thread) -> float | cute.Tensor:
        """Factor from scores to logits in base 2, of all rows or of the thread's."""
        return self.scale_log2

    def _new_largest(self) -> cute.Tensor | None:
        """Where the largest of the thread's logits is kept, if it is an output."""
        return None

    def _keep_largest(self, largest: cute.Tensor | None, tile_max: cute.Tensor) -> None:
        """Take the largest logit of the thread's in a tile into account."""

    def _store_largest(
        self, ctx: Context2Cta, work: WorkTile, thread: Thread, largest: cute.Tensor | None
    ) -> None:
        """Write the largest logits."""

    @cute.jit
    def _mask(
        self, ctx: Context2Cta, count: Int32, valid: Int32, scores: cute.Tensor, thread: Thread
    ):
        """Make the scores of what is no key -inf, and such rows of the tile in shared memory 0.

        Args:
            count: how many tiles the cluster loaded before this one.
            valid: rows of the tile that are in the span.
        """
        if valid < KEYS:
            mask.mask_from(scores, thread.half * HALF_KEYS, valid)
            stage = count % self.plan.kv_stages
            # S of the tile is complete and P V waits for this thread's P.
            kv_tile = ctx.smem.kv_rows.iterator + stage * (KEYS * HALF_DIM)
            zero_rows(kv_tile, HALF_DIM, valid, thread.index)

    @cute.jit
    def _load_scores(
        self, ctx: Context2Cta, address: cute.Pointer, thread: Thread, s_state
    ) -> cute.Tensor:
        """(1, 32) scores of the thread's keys in the next tile; the TMEM stage goes back at once.

        An exchange slot is written again only after the warps of the row pair have synchronised
        once more, over the maxima.
        """
        pipelines, smem = ctx.pipelines, ctx.smem
        pipelines.s.consumer_wait(s_state)
        fence_after_thread_sync()
        first = address + (self.tmem.column("s") + s_state.index * KEYS)
        sent = fragments.load_lane(first + (1 - thread.half) * HALF_KEYS, HALF_KEYS, thread)
        scores = fragments.load_lane(first + thread.half * HALF_KEYS, HALF_KEYS, thread)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        pipelines.s.consumer_release(s_state)
        by_4 = cute.make_tensor(sent.iterator, cute.make_layout((4, HALF_KEYS // 4)))
        for i in cutlass.range_constexpr(HALF_KEYS // 4):
            slot = smem.exchange[None, thread.lane, i, thread.warp]
            cute.autovec_copy(by_4[None, i], slot)
        thread.row_pair_barrier().arrive_and_wait()
        # All loads are in flight before the first addition waits for one.
        received = cute.make_rmem_tensor(cute.make_layout((4, HALF_KEYS // 4)), Float32)
        for i in cutlass.range_constexpr(HALF_KEYS // 4):
            slot = smem.exchange[None, thread.lane, i, thread.warp ^ 2]
            cute.autovec_copy(slot, received[None, i])
        for i in cutlass.range_constexpr(HALF_KEYS):
            scores[0, i] = scores[0, i] + received[i]
        return scores

    @cute.jit
    def _update_row_max(
        self,
        ctx: Context2Cta,
        thread: Thread,
        rows: sink_merge.RowState,
        tile_max: Float32,
        has_o,
    ) -> Float32:
        """Raise the row maximum to this tile's; the factor that O must be scaled by, if there is
        any: one thread of the row computes it.
        """
        values = ctx.smem.row_values
        values[thread.index, 0] = tile_max
        thread.row_pair_barrier().arrive_and_wait()
        raised = cute.arch.fmax(tile_max, values[thread.index ^ ROWS, 0])
        raised = cute.arch.fmax(rows.row_max[0], raised)
        factor = Float32(1.0)
        if has_o:
            if thread.half == 0:
                # A maximum that stays may be infinite, and the difference NaN.
                if raised > rows.row_max[0]:
                    factor = softmax.exp2(rows.row_max[0] - raised)
                values[thread.row, 1] = factor
            thread.row_pair_barrier().arrive_and_wait()
            factor = values[thread.row, 1]
            rows.row_sum[0] = rows.row_sum[0] * factor
        rows.row_max[0] = raised
        return factor

    @cute.jit
    def _wait_for_o(self, p_pipe: pipeline.PipelineAsyncUmma, p_state):
        """Wait for O of the last tile whose P was committed; `p_state` is the next tile's.

        Its completion frees its P, which is the stage after the next one.
        """
        after_next = p_state.clone()
        after_next.advance()
        p_pipe.producer_acquire(after_next)
        fence_after_thread_sync()

    @cute.jit
    def _rescale(self, address: cute.Pointer, thread: Thread, factor: Float32):
        """Multiply the accumulated row by `factor`."""
        for i in cutlass.range(HALF_DIM // FRAGMENT_COLUMNS, unroll=1):
            columns = address + (self.tmem.column("o") + i * FRAGMENT_COLUMNS)
            fragments.scale_lane(columns, FRAGMENT_COLUMNS, thread, factor)
        cute.arch.fence_view_async_tmem_store()

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def _epilogue(
        self,
        ctx: Context2Cta,
        work: WorkTile,
        keys: KeySpan,
        address: cute.Pointer,
        thread: Thread,
        rows: sink_merge.RowState,
    ):
        """Write the CTA's rows: the output and lse, or with several splits its partial result."""
        values = ctx.smem.row_values
        head = work.head_block * ROWS + thread.row
        final_max = sink_merge.final_row_max(rows, 0, keys.last > keys.compressed_tiles)
        values[thread.index, 0] = rows.row_sum[0]
        thread.row_pair_barrier().arrive_and_wait()
        if thread.half == 0:
            row_sum = rows.row_sum[0] + values[thread.index ^ ROWS, 0]
            values[thread.row, 1] = row_epilogue(
                self.config, ctx.params, work, head, final_max, row_sum, rows.sink[0]
            )
        thread.row_pair_barrier().arrive_and_wait()
        has_keys = keys.last > keys.first
        if ctx.params.num_splits == 1:
            factor = values[thread.row, 1]
            self._store_output(ctx, work, address, thread, factor, has_keys)
        else:
            self._store_partial(ctx, work, address, thread, has_keys)

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
        """Each warp stores its half of 32 rows, 64 columns at a time, from two buffers in turn.

        Without keys nothing was written to O, and the output is 0.
        """
        o, smem = ctx.params.o, ctx.smem
        tiles = cute.local_tile(o.tma_tensor, (WARP_ROWS, COLUMNS), (None, None, None))
        row_tile = work.head_block * (ROWS // WARP_ROWS) + thread.warp % 2
        for i in cutlass.range_constexpr(COLUMN_BLOCKS):
            source, target = cpasync.tma_partition(
                o.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(smem.staged[i % 2], 0, 2),
                cute.group_modes(tiles, 0, 2),
            )
            if cutlass.const_expr(i >= 2):
                self._wait_for_stores(pending=1)
            slot = smem.staged[i % 2].iterator + thread.warp * (WARP_ROWS * COLUMNS)
            for part in cutlass.range_constexpr(COLUMNS // FRAGMENT_COLUMNS):
                values = cute.make_rmem_tensor(FRAGMENT_COLUMNS, Float32)
                values.fill(0.0)
                if has_keys:
                    columns = address + (
                        self.tmem.column("o") + i * COLUMNS + part * FRAGMENT_COLUMNS
                    )
                    accumulated = fragments.load_lane(columns, FRAGMENT_COLUMNS, thread)
                    cute.arch.fence_view_async_tmem_load()
                    for c in cutlass.range_constexpr(FRAGMENT_COLUMNS):
                        values[c] = accumulated[0, c] * factor
                    if cutlass.const_expr(i == COLUMN_BLOCKS - 1):
                        self._rotate_half(ctx, work, thread, values, part)
                first_unit = part * (FRAGMENT_COLUMNS // fragments.UNIT)
                fragments.store_units(slot, thread.lane, first_unit, values)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                # A tile past the last head has no coordinate of its own: it would land on another.
                if row_tile * WARP_ROWS < self.config.num_query_heads:
                    cute.copy(
                        o.atom,
                        source[None, thread.warp],
                        target[None, row_tile, thread.half * COLUMN_BLOCKS + i, work.token],
                    )
                cute.arch.cp_async_bulk_commit_group()

    def _rotate_half(
        self, ctx: Context2Cta, work: WorkTile, thread: Thread, values: cute.Tensor, part: int
    ) -> None:
        """Rotate a part of the last columns of the thread's half row, if they are to be."""

    def _rotate_pairs(
        self, ctx: Context2Cta, work: WorkTile, thread: Thread, values: cute.Tensor, i: Int32
    ) -> None:
        """Rotate columns i of four half rows, pairs of neighbours, if they are to be."""

    @cute.jit
    def _wait_for_stores(self, pending: cutlass.Constexpr[int] = 0):
        """Wait until all but `pending` stores of this warp have read what they store.

        The other warp of the row pair writes there too, but only after both have synchronised.
        """
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def _load_rows_of_o(self, address: cute.Pointer, thread: Thread, i: Int32, has_keys):
        """Columns i, 64 of the thread's half, of four rows, by rows; 0 without keys, where nothing
        was written to O.
        """
        coordinates = cute.make_identity_tensor((TMEM_LANES, COLUMNS))
        columns = address + cute.assume(self.tmem.column("o") + i * COLUMNS, divby=COLUMNS)
        copy, tensor = make_tmem_copy(
            tcgen05.Ld16x256bOp, COLUMNS // 8, COLUMNS, columns, thread.index
        )
        fragment = cute.make_rmem_tensor(copy.partition_D(coordinates).shape, Float32)
        fragment.fill(0.0)
        if has_keys:
            cute.copy(copy, copy.partition_S(tensor), fragment)
            cute.arch.fence_view_async_tmem_load()
        return fragments.by_rows(fragment)

    @cute.jit
    def _store_partial(
        self, ctx: Context2Cta, work: WorkTile, address: cute.Pointer, thread: Thread, has_keys
    ):
        """Write the unnormalised rows to the workspace; a quad writes 32 contiguous bytes."""
        config = self.config
        for i in cutlass.range(COLUMN_BLOCKS, unroll=1):
            values = self._load_rows_of_o(address, thread, i, has_keys)
            self._rotate_pairs(ctx, work, thread, values, i)
            for r in cutlass.range_constexpr(4):
                row, column = fragments.first_of(thread, r)
                head = work.head_block * ROWS + row
                if head < config.num_query_heads:
                    index = partial_index(config, ctx.params, work, head)
                    target = partial_pointer(ctx.params.workspace, index, HEAD_DIM)
                    column = thread.half * HALF_DIM + i * COLUMNS + column
                    store_pairs(target + cute.assume(column, divby=2), values, r)
