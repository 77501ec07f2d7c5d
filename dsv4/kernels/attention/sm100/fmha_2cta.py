"""Attention on Blackwell by pairs of CTAs: 128 query heads of one token over a range of its keys.

The two CTAs of a cluster drive their tensor cores as one (cta_group::2, M = 128, full rate). CTA c
owns heads 64c to 64c + 63 as rows, and holds columns 256c to 256c + 255 of every key: a KV element
comes from global memory once per pair, into one CTA, and serves both products from there.

- S. With A in Tensor Memory, the upper 64 lanes of a CTA multiply what the second half of N brings,
  and that is the tile of CTA 1. So the lower lanes of Q hold columns below 256, the upper lanes the
  others, and one N = 128 product makes two contractions of K = 256: partial scores of 64 keys from
  either half of the columns. Two softmax threads share a row; each sends the other half of its
  partial scores through shared memory, adds what it receives, and weighs 32 keys.
- O. N = 512 are two instructions. Instruction j takes columns 256c + 128j to 256c + 128j + 127 from
  CTA c, and leaves those of CTA 1 in the upper lanes: lane 64h + row, column i of O is element
  256h + i of the row. No operand is permuted, and the epilogue reads its lanes straight through.

Every tile costs 1.2k cycles of shared-memory port and 1.0k of tensor core, under the 1.3k that an
SM's share of memory takes to deliver it. To keep memory busy pairs are persistent: while one item's
output is written, KV stages fill for the next.

Roles of the ten warps of each CTA, and what travels between them (`print(PairPlan())`):

    load (9)      this CTA's half of the KV tiles by TMA          -> kv
    query (4-7)   Q of an item from global memory to TMEM         -> q
    mma (8)       for both CTAs, from the first one: S(k + 1),    -> s; frees q, kv, p
                  then O(k)
    softmax (0-3) scores, mask, weights, P to shared memory,      -> p; frees s
                  rescaling of O, output

O needs no pipeline of its own: what frees P(k) is the completion of O(k). References, sinks and
masks are those of `fmha_single`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention import mask, sink_merge, softmax
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fragments_2cta as fragments
from dsv4.kernels.attention.sm100.combine import partial_pointer, row_pointer
from dsv4.kernels.attention.sm100.context import (
    Arguments,
    Items,
    Keys,
    Operands,
    PairPipes,
    PairSmem,
    PairTmemViews,
    Work,
)
from dsv4.kernels.attention.sm100.fragments_2cta import WARP_ROWS, Thread
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HALF_DIM, HALF_KEYS, HEAD_DIM, HEADS, PairPlan
from dsv4.kernels.attention.sm100.work_tile import (
    COLUMNS,
    CONSUMER,
    PRODUCER,
    TMEM_ALLOCATED,
    TMEM_UNUSED,
    clear_rows,
    finish_row,
    hand_over_tmem,
    keys_of,
    output_map,
    partial_index,
    row_layout,
    row_view,
    store_pairs,
    take_over_tmem,
    valid_keys,
)

TWO = tcgen05.CtaGroup.TWO
BLOCKS = HALF_DIM // COLUMNS  # of columns of O that a thread holds
CHUNK = 32  # TMEM columns in registers at a time: of O beside the scores, of Q beside another 32


class FmhaPair:
    """A pair of CTAs per token, 128 heads and split; each pair takes several of these."""

    cluster = (2, 1, 1)

    def __init__(self, config: FmhaConfig):
        self.config = config
        self.scale_log2 = config.scale * softmax.LOG2_E
        self.head_pairs = -(-config.num_query_heads // HEADS)

        self.plan = PairPlan()
        self.warps = self.plan.warps
        self.tmem = self.plan.tmem
        self.edges = self.plan.pipelines

    # ---- layouts -------------------------------------------------------------------------------

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Both products; made anew wherever they are used, since setting ACCUMULATE changes them.

        S has two columns for a key, one for each half of head_dim.
        """
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        in_tmem, in_smem = tcgen05.OperandSource.TMEM, tcgen05.OperandSource.SMEM

        def make(b_major, n, a_source):
            types = (BFloat16, BFloat16, k_major, b_major, Float32)
            return sm100.make_trivial_tiled_mma(*types, TWO, (HEADS, n), a_source)

        return make(k_major, 2 * KEYS, in_tmem), make(mn_major, HALF_DIM, in_smem)

    def _smem_layouts(self) -> dict[str, cute.ComposedLayout]:
        """Layouts of the KV ring and of P, all of them 128-byte swizzled."""
        qk_mma, pv_mma = self._mmas()
        qk_tile, pv_tile = (HEADS, 2 * KEYS, HALF_DIM), (HEADS, HEAD_DIM, KEYS)
        kv_stages, p_stages = self.edges.kv.stages, self.edges.p.stages
        return {
            "k": sm100.make_smem_layout_b(qk_mma, qk_tile, BFloat16, kv_stages),
            "v": sm100.make_smem_layout_b(pv_mma, pv_tile, BFloat16, kv_stages),
            "p": sm100.make_smem_layout_a(pv_mma, pv_tile, BFloat16, p_stages),
            "kv_rows": row_layout((KEYS, HALF_DIM), kv_stages),
        }

    def _shared_storage(self):
        edges, smem = self.edges, self.plan.smem

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[Int64, edges.q.mbarriers]
            kv_barriers: cute.struct.MemRange[Int64, edges.kv.mbarriers]
            s_barriers: cute.struct.MemRange[Int64, edges.s.mbarriers]
            p_barriers: cute.struct.MemRange[Int64, edges.p.mbarriers]
            tmem_unused: Int64
            tmem_address: Int32
            row_values: cute.struct.Align[cute.struct.MemRange[Float32, smem.row_elements], 16]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, smem.kv_elements], 1024]
            p: cute.struct.Align[cute.struct.MemRange[BFloat16, smem.p_elements], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, smem.exchange_elements], 1024]

        size = SharedStorage.size_in_bytes()
        assert size == smem.total_bytes, f"SMEM: storage {size}, plan {smem.total_bytes} bytes"
        return SharedStorage

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: Arguments, stream):
        """Build the tensor maps and launch as many pairs as run at a time, or as there is work."""
        q = arguments.q
        tile = (KEYS, HALF_DIM)
        box = cute.select(row_layout(tile, 1), mode=[0, 1])
        load = cpasync.CopyBulkTensorTileG2SOp(TWO)
        compressed_map, window_map = [
            cpasync.make_tiled_tma_atom(load, row_view(kv, q.iterator), box, tile)
            for kv in (arguments.compressed_kv, arguments.swa_kv)
        ]
        operands = Operands(
            q=q,
            compressed=compressed_map,
            window=window_map,
            o=output_map(arguments.o, q.iterator, WARP_ROWS),
            items=q.shape[0] * arguments.num_splits * self.head_pairs,
            **arguments.tables(),
        )
        pairs = cutlass.min(operands.items, cutlass.max(arguments.num_ctas // 2, 1))
        self.kernel(operands).launch(
            grid=(2 * pairs, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
        )

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, operands: Operands):
        """Allocate, then send every warp to its role."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        items = Items(
            first=block // 2,
            step=grid // 2,
            count=operands.items,
            rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
        )
        storage = SmemAllocator().allocate(self._shared_storage())
        pipes = self._pipes(storage)
        smem = self._smem(storage)
        tmem = TmemAllocator(
            storage.tmem_address.ptr,
            # All but the load warp.
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_ALLOCATED, self.warps.threads - 32),
            allocator_warp_id=self.warps.softmax[0],
            is_two_cta=True,
            two_cta_tmem_dealloc_mbar_ptr=storage.tmem_unused.ptr,
        )
        # Roles wait for the barriers of the other CTA when they need them, not here.
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster[:2], is_relaxed=True)
        if warp_idx == self.warps.load:
            self.load_warp(operands, items, pipes, smem)
        elif warp_idx == self.warps.mma:
            self.mma_warp(operands, items, pipes, smem, tmem)
        elif warp_idx >= self.warps.query[0]:
            self.query_warps(operands, items, pipes, tmem)
        else:
            self.softmax_warps(operands, items, pipes, smem, tmem)
        # A CTA that left would take the shared memory away that its peer still signals.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _pipes(self, storage) -> PairPipes:
        """Initialise every mbarrier."""
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        threads = pipeline.CooperativeGroup(pipeline.Agent.Thread, 2 * self.warps.group_threads)
        cta_layout = cute.tiled_divide(cute.make_layout(self.cluster), (2,))

        def create(kind, name, producer_group, consumer_group, **tx_count):
            return kind.create(
                barrier_storage=getattr(storage, f"{name}_barriers").data_ptr(),
                num_stages=getattr(self.edges, name).stages,
                producer_group=producer_group,
                consumer_group=consumer_group,
                cta_layout_vmnk=cta_layout,
                defer_sync=True,
                **tx_count,
            )

        kv_bytes = self.edges.kv.tx_bytes
        return PairPipes(
            q=create(pipeline.PipelineAsyncUmma, "q", threads, one),
            kv=create(pipeline.PipelineTmaUmma, "kv", one, one, tx_count=kv_bytes),
            s=create(pipeline.PipelineUmmaAsync, "s", one, threads),
            p=create(pipeline.PipelineAsyncUmma, "p", threads, one),
        )

    def _pair_ready(self):
        """Wait until the barriers of both CTAs are initialised."""
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster[:2])

    def _smem(self, storage) -> PairSmem:
        """Views of the shared buffers."""
        buffers = {"k": storage.kv, "v": storage.kv, "p": storage.p, "kv_rows": storage.kv}
        views = {
            name: buffers[name].get_tensor(layout.outer, swizzle=layout.inner)
            for name, layout in self._smem_layouts().items()
        }
        exchange = storage.exchange.data_ptr()
        staged = row_layout((WARP_ROWS, COLUMNS), len(self.warps.softmax))
        pointers = [
            cute.recast_ptr(buffer, staged.inner, dtype=BFloat16)
            for buffer in (storage.p.data_ptr(), exchange)
        ]
        # Lanes next to each other: a warp's 16-byte accesses fill all banks.
        sent = cute.make_layout((4, 32, HALF_KEYS // 4, 4), stride=(1, 4, 128, 32 * HALF_KEYS))
        return PairSmem(
            **views,
            staged=tuple(cute.make_tensor(pointer, staged.outer) for pointer in pointers),
            exchange=cute.make_tensor(exchange, sent),
            row_values=storage.row_values.get_tensor(cute.make_layout((2 * ROWS, 2))),
        )

    def _tmem_views(self, address: cute.Pointer) -> PairTmemViews:
        """What the tensor core sees of Tensor Memory."""
        qk_mma, pv_mma = self._mmas()
        s_shape = cute.append(qk_mma.partition_shape_C((HEADS, 2 * KEYS)), self.edges.s.stages)
        s = qk_mma.make_fragment_C(s_shape)
        o = pv_mma.make_fragment_C(pv_mma.partition_shape_C((HEADS, HEAD_DIM)))
        q = qk_mma.make_fragment_A(qk_mma.partition_shape_A((HEADS, HALF_DIM)))
        q_address = cute.recast_ptr(address + self.tmem.q_column, dtype=BFloat16)
        return PairTmemViews(
            q=cute.make_tensor(q_address, q.layout),
            s=cute.make_tensor(address + self.tmem.s_column, s.layout),
            o=cute.make_tensor(address + self.tmem.o_column, o.layout),
        )

    def _work(self, operands: Operands, items: Items, item: Int32) -> Work:
        """An item as this CTA sees it. Splits of a token are neighbours: they share rows in L2."""
        row_block = item // self.head_pairs
        return Work(
            token=row_block // operands.num_splits,
            head_block=item % self.head_pairs * 2 + items.rank,
            split=row_block % operands.num_splits,
        )

    def _keys(self, operands: Operands, items: Items, item: Int32) -> Keys:
        """Keys of an item; past the last one, of the last one."""
        item = cutlass.min(item, items.count - 1)
        return keys_of(self.config, operands, self._work(operands, items, item))

    # ---- load warp -----------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, operands: Operands, items: Items, pipes: PairPipes, smem: PairSmem):
        """This CTA's half of the columns of every tile, once."""
        kv = pipes.kv
        cute.arch.griddepcontrol_launch_dependents()

        # ---- prologue: tables first, queries would delay them
        state = pipeline.make_pipeline_state(PRODUCER, self.edges.kv.stages)
        keys = self._keys(operands, items, items.first)
        self._pair_ready()

        # ---- mainloop: of every item the compressed tiles, then the window tiles
        for item in cutlass.range(items.first, items.count, items.step, unroll=1):
            work = self._work(operands, items, item)
            split_point = cutlass.min(cutlass.max(keys.compressed_tiles, keys.first), keys.last)
            source, ring = self._partition_kv(operands.compressed, smem, Int32(0))
            for tile in cutlass.range(keys.first, split_point, unroll=1):
                kv.producer_acquire(state)
                cute.copy(
                    operands.compressed.atom,
                    source[None, tile, items.rank, work.token],
                    ring[None, state.index],
                    tma_bar_ptr=kv.producer_get_barrier(state),
                )
                state.advance()
            request = operands.request_ids[work.token]
            source, ring = self._partition_kv(operands.window, smem, keys.window_first)
            for tile in cutlass.range(split_point, keys.last, unroll=1):
                kv.producer_acquire(state)
                cute.copy(
                    operands.window.atom,
                    source[None, tile - keys.compressed_tiles, items.rank, request],
                    ring[None, state.index],
                    tma_bar_ptr=kv.producer_get_barrier(state),
                )
                state.advance()
            keys = self._keys(operands, items, item + items.step)

    def _partition_kv(
        self, kv: cpasync.TmaInfo, smem: PairSmem, first_row: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """TMA views of a KV tensor (box, tile, half, batch) and of the ring (box, stage)."""
        rows = cute.domain_offset((first_row, 0, 0), kv.tma_tensor)
        tiles = cute.local_tile(rows, (KEYS, HALF_DIM), (None, None, None))
        ring, source = cpasync.tma_partition(
            kv.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem.kv_rows, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return source, ring

    # ---- query warps ---------------------------------------------------------------------------

    @cute.jit
    def query_warps(self, operands: Operands, items: Items, pipes: PairPipes, tmem: TmemAllocator):
        """Q of every item into TMEM, as soon as the item before it has its last score.

        Half of it waits for that in registers; all of it would not fit.
        """
        q_pipe = pipes.q
        thread = fragments.this_thread(self.warps.query[0])
        pieces = tuple(cute.make_rmem_tensor(CHUNK, Float32) for _ in range(2))

        # ---- prologue: the first Q is under way while TMEM is being allocated
        state = pipeline.make_pipeline_state(PRODUCER, self.edges.q.stages)
        self._pair_ready()
        work = self._work(operands, items, items.first)
        for i in cutlass.range_constexpr(2):
            self._load_q(operands, work, thread, i, pieces[i])
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(Float32) + self.tmem.q_column

        # ---- mainloop
        for item in cutlass.range(items.first, items.count, items.step, unroll=1):
            q_pipe.producer_acquire(state)
            take_over_tmem()
            work = self._work(operands, items, item)
            for i in cutlass.range_constexpr(self.tmem.q_columns // CHUNK):
                fragments.store_rows(address + i * CHUNK, thread, pieces[i % 2])
                if cutlass.const_expr(i < 2):
                    self._load_q(operands, work, thread, i + 2, pieces[i])
            cute.arch.fence_view_async_tmem_store()
            hand_over_tmem()
            q_pipe.producer_commit(state)
            state.advance()
            if item + items.step < items.count:
                work = self._work(operands, items, item + items.step)
                for i in cutlass.range_constexpr(2):
                    self._load_q(operands, work, thread, i, pieces[i])

        # ---- epilogue: the last Q has been read
        q_pipe.producer_acquire(state)
        hand_over_tmem()
        self._tmem_unused().arrive_and_wait()

    def _tmem_unused(self) -> pipeline.NamedBarrier:
        """Softmax and query warps: freed while one of them still uses it, TMEM would belong to the
        next CTA of this SM.
        """
        return pipeline.NamedBarrier(TMEM_UNUSED, 2 * self.warps.group_threads)

    @cute.jit
    def _load_q(
        self,
        operands: Operands,
        work: Work,
        thread: Thread,
        piece: cutlass.Constexpr[int],
        values: cute.Tensor,
    ):
        """32 TMEM columns of the CTA's 64 query rows; rows past the last head repeat it."""
        rows = fragments.by_rows(values)
        for r in cutlass.range_constexpr(4):
            row, column = fragments.first_of(thread, r)
            head = cutlass.min(work.head_block * ROWS + row, self.config.num_query_heads - 1)
            # 4 bytes a TMEM column.
            columns = thread.half * (HALF_DIM // 2) + piece * CHUNK + column
            start = cute.recast_ptr(row_pointer(operands.q, work.token, head), dtype=Float32)
            start = start + cute.assume(columns, divby=2)
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1, 1])):
                pair = cute.make_tensor(start + 8 * i, cute.make_layout(2))
                cute.autovec_copy(pair, rows[r, (None, i)])

    # ---- MMA warp ------------------------------------------------------------------------------

    @cute.jit
    def mma_warp(
        self,
        operands: Operands,
        items: Items,
        pipes: PairPipes,
        smem: PairSmem,
        tmem: TmemAllocator,
    ):
        """S of tile k + 1 before O of tile k: it runs while the softmax weighs tile k."""
        q_pipe = pipes.q
        self._pair_ready()
        tmem.wait_for_alloc()
        views = self._tmem_views(tmem.retrieve_ptr(Float32))
        # One CTA issues for both.
        if items.rank == 0:
            q_state = pipeline.make_pipeline_state(CONSUMER, self.edges.q.stages)
            kv_full = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
            kv_done = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
            s_state = pipeline.make_pipeline_state(PRODUCER, self.edges.s.stages)
            p_state = pipeline.make_pipeline_state(CONSUMER, self.edges.p.stages)
            for item in cutlass.range(items.first, items.count, items.step, unroll=1):
                keys = self._keys(operands, items, item)
                tiles = keys.last - keys.first
                q_pipe.consumer_wait(q_state)
                take_over_tmem()
                if tiles > 0:
                    kv_full, s_state = self._qk(pipes, smem, views, kv_full, s_state)
                for tile in cutlass.range(1, tiles, unroll=1):
                    kv_full, s_state = self._qk(pipes, smem, views, kv_full, s_state)
                    kv_done, p_state = self._pv(pipes, smem, views, kv_done, p_state, tile > 1)
                q_pipe.consumer_release(q_state)
                q_state.advance()
                if tiles > 0:
                    kv_done, p_state = self._pv(pipes, smem, views, kv_done, p_state, tiles > 1)

    @cute.jit
    def _qk(self, pipes: PairPipes, smem: PairSmem, views: PairTmemViews, kv_full, s_state):
        """S = Q K^T of the next tile.

        States are returned, because a staged loop carries only what its own body assigns.
        """
        qk_mma, _ = self._mmas()
        f_k = qk_mma.make_fragment_B(smem.k)
        pipes.s.producer_acquire(s_state)
        take_over_tmem()
        pipes.kv.consumer_wait(kv_full)
        s = views.s[None, None, None, s_state.index]
        qk_mma.set(tcgen05.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(f_k, mode=[2])):
            q_block = views.q[None, None, k]
            cute.gemm(qk_mma, s, q_block, f_k[None, None, k, kv_full.index], s)
            qk_mma.set(tcgen05.Field.ACCUMULATE, True)
        pipes.s.producer_commit(s_state)
        kv_full.advance()
        s_state.advance()
        return kv_full, s_state

    @cute.jit
    def _pv(
        self, pipes: PairPipes, smem: PairSmem, views: PairTmemViews, kv_done, p_state, accumulate
    ):
        """O += P V of the next tile, which frees the tile."""
        _, pv_mma = self._mmas()
        f_p, f_v = pv_mma.make_fragment_A(smem.p), pv_mma.make_fragment_B(smem.v)
        pipes.p.consumer_wait(p_state)
        take_over_tmem()
        # Allocation does not clear TMEM: the first tile overwrites, in both instructions.
        pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in cutlass.range_constexpr(cute.size(f_p, mode=[2])):
            p_block = f_p[None, None, k, p_state.index]
            cute.gemm(pv_mma, views.o, p_block, f_v[None, None, k, kv_done.index], views.o)
            pv_mma.set(tcgen05.Field.ACCUMULATE, True)
        pipes.kv.consumer_release(kv_done)
        pipes.p.consumer_release(p_state)
        kv_done.advance()
        p_state.advance()
        return kv_done, p_state

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def softmax_warps(
        self,
        operands: Operands,
        items: Items,
        pipes: PairPipes,
        smem: PairSmem,
        tmem: TmemAllocator,
    ):
        """Scores to weights, the rescaling of O, and the output; two threads share a row."""
        p_pipe = pipes.p
        thread = fragments.this_thread(self.warps.softmax[0])
        self._pair_ready()
        tmem.allocate(self.tmem.allocated_columns)
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(Float32)
        s_state = pipeline.make_pipeline_state(CONSUMER, self.edges.s.stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.edges.p.stages)
        keys = self._keys(operands, items, items.first)
        tiles_done = Int32(0)
        for item in cutlass.range(items.first, items.count, items.step, unroll=1):
            # ---- prologue: row state
            work = self._work(operands, items, item)
            both = keys.compressed > 0 and keys.window > 0
            sink = self._row_sink(operands, work, thread)
            rows = sink_merge.new_rows(sink, both, self.config.sink_mode)
            self._wait_for_stores()

            # ---- mainloop
            for tile in cutlass.range(keys.first, keys.last, unroll=1):
                if tile == keys.compressed_tiles and tile > keys.first:
                    sink_merge.enter_window(rows)
                valid = valid_keys(keys, tile)
                scores = self._load_scores(pipes, smem, address, thread, s_state)
                s_state.advance()
                if valid < KEYS:
                    mask.mask_from(scores, thread.half * HALF_KEYS, valid)
                    stage = (tiles_done + tile - keys.first) % self.edges.kv.stages
                    # S of the tile is complete and P V waits for this thread's P.
                    kv_tile = smem.kv_rows.iterator + stage * (KEYS * HALF_DIM)
                    clear_rows(kv_tile, HALF_DIM, valid, thread.index)
                maximum = cute.make_rmem_tensor(1, Float32)
                softmax.thread_maxima(scores, maximum)
                maximum[0] = maximum[0] * self.scale_log2
                # Both threads of a row must move its reference, or neither.
                if fragments.either_warp(thread, softmax.outgrew(rows.maximum, maximum)):
                    has_o = tile > keys.first
                    factor = self._raise_maximum(smem, thread, rows, maximum[0], has_o)
                    if has_o:
                        self._wait_for_o(p_pipe, p_state)
                        self._rescale(address, thread, factor)
                softmax.accumulate_weights(scores, rows.maximum, rows.total, self.scale_log2)
                p_pipe.producer_acquire(p_state)
                p_tile = smem.p.iterator + p_state.index * (ROWS * KEYS)
                first_unit = thread.half * (HALF_KEYS // fragments.UNIT)
                fragments.store_units(p_tile, thread.row, first_unit, scores)
                hand_over_tmem()
                p_pipe.producer_commit(p_state)
                p_state.advance()

            # ---- epilogue; the next item's keys are looked up while O of the last tile runs
            upcoming = self._keys(operands, items, item + items.step)
            if keys.last > keys.first:
                self._wait_for_o(p_pipe, p_state)
            self._finish(operands, work, keys, smem, address, thread, rows)
            tiles_done = tiles_done + keys.last - keys.first
            keys = upcoming
        self._wait_for_stores()
        hand_over_tmem()
        self._tmem_unused().arrive_and_wait()
        take_over_tmem()
        tmem.relinquish_alloc_permit()
        tmem.free(address)

    @cute.jit
    def _row_sink(self, operands: Operands, work: Work, thread: Thread) -> cute.Tensor:
        """Sink of the thread's row; rows past the last head get 0."""
        head = work.head_block * ROWS + thread.row
        sink = cute.make_rmem_tensor(1, Float32)
        sink[0] = Float32(0.0)
        if head < self.config.num_query_heads:
            sink[0] = operands.sink_logits[head]
        return sink

    @cute.jit
    def _load_scores(
        self, pipes: PairPipes, smem: PairSmem, address: cute.Pointer, thread: Thread, s_state
    ) -> cute.Tensor:
        """(1, 32) scores of the thread's keys in the next tile; the TMEM stage goes back at once.

        An exchange slot is written again only after both warps have met once more, over the maxima.
        """
        pipes.s.consumer_wait(s_state)
        take_over_tmem()
        first = address + (self.tmem.s_column + s_state.index * KEYS)
        sent = fragments.load_lane(first + (1 - thread.half) * HALF_KEYS, HALF_KEYS, thread)
        scores = fragments.load_lane(first + thread.half * HALF_KEYS, HALF_KEYS, thread)
        cute.arch.fence_view_async_tmem_load()
        hand_over_tmem()
        pipes.s.consumer_release(s_state)
        by_4 = cute.make_tensor(sent.iterator, cute.make_layout((4, HALF_KEYS // 4)))
        for i in cutlass.range_constexpr(HALF_KEYS // 4):
            slot = smem.exchange[None, thread.lane, i, thread.warp]
            cute.autovec_copy(by_4[None, i], slot)
        thread.partners().arrive_and_wait()
        # Every load is under way before the first addition waits for one.
        received = cute.make_rmem_tensor(cute.make_layout((4, HALF_KEYS // 4)), Float32)
        for i in cutlass.range_constexpr(HALF_KEYS // 4):
            slot = smem.exchange[None, thread.lane, i, thread.warp ^ 2]
            cute.autovec_copy(slot, received[None, i])
        for i in cutlass.range_constexpr(HALF_KEYS):
            scores[0, i] = scores[0, i] + received[i]
        return scores

    @cute.jit
    def _raise_maximum(
        self, smem: PairSmem, thread: Thread, rows: sink_merge.RowState, maximum: Float32, has_o
    ) -> Float32:
        """Move the row's reference up to this tile's maximum; what O must be scaled by, if there
        is any: one thread of the row computes it.
        """
        smem.row_values[thread.index, 0] = maximum
        thread.partners().arrive_and_wait()
        raised = cute.arch.fmax(maximum, smem.row_values[thread.index ^ ROWS, 0])
        raised = cute.arch.fmax(rows.maximum[0], raised)
        factor = Float32(1.0)
        if has_o:
            if thread.half == 0:
                # An unmoved reference may be infinite, and the difference NaN.
                if raised > rows.maximum[0]:
                    factor = softmax.exp2(rows.maximum[0] - raised)
                smem.row_values[thread.row, 1] = factor
            thread.partners().arrive_and_wait()
            factor = smem.row_values[thread.row, 1]
            rows.total[0] = rows.total[0] * factor
        rows.maximum[0] = raised
        return factor

    @cute.jit
    def _wait_for_o(self, p_pipe: pipeline.PipelineAsyncUmma, p_state):
        """Wait for O of the last tile whose P was committed; `p_state` is the next tile's.

        Its completion frees its P, which is the stage after the next one.
        """
        after_next = p_state.clone()
        after_next.advance()
        p_pipe.producer_acquire(after_next)
        take_over_tmem()

    @cute.jit
    def _rescale(self, address: cute.Pointer, thread: Thread, factor: Float32):
        """Multiply the accumulated row by `factor`."""
        for i in cutlass.range(HALF_DIM // CHUNK, unroll=1):
            columns = address + (self.tmem.o_column + i * CHUNK)
            fragments.scale_lane(columns, CHUNK, thread, factor)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def _finish(
        self,
        operands: Operands,
        work: Work,
        keys: Keys,
        smem: PairSmem,
        address: cute.Pointer,
        thread: Thread,
        rows: sink_merge.RowState,
    ):
        """Write the CTA's rows: the output and lse, or with several splits its partial result."""
        values = smem.row_values
        head = work.head_block * ROWS + thread.row
        reference = sink_merge.reference(rows, 0, keys.last > keys.compressed_tiles)
        values[thread.index, 0] = rows.total[0]
        thread.partners().arrive_and_wait()
        if thread.half == 0:
            total = rows.total[0] + values[thread.index ^ ROWS, 0]
            values[thread.row, 1] = finish_row(
                self.config, operands, work, head, reference, total, rows.sink[0]
            )
        thread.partners().arrive_and_wait()
        has_keys = keys.last > keys.first
        if operands.num_splits == 1:
            factor = values[thread.row, 1]
            self._store_output(operands.o, work, smem, address, thread, factor, has_keys)
        else:
            self._store_partial(operands, work, address, thread, has_keys)

    @cute.jit
    def _store_output(
        self,
        o: cpasync.TmaInfo,
        work: Work,
        smem: PairSmem,
        address: cute.Pointer,
        thread: Thread,
        factor: Float32,
        has_keys,
    ):
        """Each warp stores its half of 32 rows, 64 columns at a time, from two places in turn.

        Without keys nothing was written to O, and the output is 0.
        """
        tiles = cute.local_tile(o.tma_tensor, (WARP_ROWS, COLUMNS), (None, None, None))
        row_tile = work.head_block * (ROWS // WARP_ROWS) + thread.warp % 2
        for i in cutlass.range_constexpr(BLOCKS):
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
            for part in cutlass.range_constexpr(COLUMNS // CHUNK):
                values = cute.make_rmem_tensor(CHUNK, Float32)
                values.fill(0.0)
                if has_keys:
                    columns = address + (self.tmem.o_column + i * COLUMNS + part * CHUNK)
                    accumulated = fragments.load_lane(columns, CHUNK, thread)
                    cute.arch.fence_view_async_tmem_load()
                    for c in cutlass.range_constexpr(CHUNK):
                        values[c] = accumulated[0, c] * factor
                first_unit = part * (CHUNK // fragments.UNIT)
                fragments.store_units(slot, thread.lane, first_unit, values)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                # A tile past the last head has no coordinate of its own: it would land on another.
                if row_tile * WARP_ROWS < self.config.num_query_heads:
                    cute.copy(
                        o.atom,
                        source[None, thread.warp],
                        target[None, row_tile, thread.half * BLOCKS + i, work.token],
                    )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _wait_for_stores(self, pending: cutlass.Constexpr[int] = 0):
        """Wait until all but `pending` stores of this warp have read what they store.

        Its partner warp writes there too, but only after both have met.
        """
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def _store_partial(
        self, operands: Operands, work: Work, address: cute.Pointer, thread: Thread, has_keys
    ):
        """Write the unnormalised rows to the workspace; a quad writes 32 contiguous bytes."""
        config = self.config
        coordinates = cute.make_identity_tensor((fragments.LANES, COLUMNS))
        for i in cutlass.range(BLOCKS, unroll=1):
            columns = address + cute.assume(self.tmem.o_column + i * COLUMNS, divby=COLUMNS)
            copy, tensor = fragments.make_copy(
                tcgen05.Ld16x256bOp, COLUMNS // 8, COLUMNS, columns, thread
            )
            fragment = cute.make_rmem_tensor(copy.partition_D(coordinates).shape, Float32)
            fragment.fill(0.0)
            if has_keys:
                cute.copy(copy, copy.partition_S(tensor), fragment)
                cute.arch.fence_view_async_tmem_load()
            values = fragments.by_rows(fragment)
            for r in cutlass.range_constexpr(4):
                row, column = fragments.first_of(thread, r)
                head = work.head_block * ROWS + row
                if head < config.num_query_heads:
                    index = partial_index(config, operands, work, head)
                    target = partial_pointer(operands.workspace, index, HEAD_DIM)
                    column = thread.half * HALF_DIM + i * COLUMNS + column
                    store_pairs(target + cute.assume(column, divby=2), values, r)
