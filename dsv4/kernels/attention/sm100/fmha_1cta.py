"""Attention on Blackwell by single CTAs: 64 query heads of one token over one range of its keys.

It fetches every KV tile of 64 rows once and reads it twice: as K (K-major) for S = Q K^T and as V
(MN-major) for O = P V; the two swizzled operand layouts are the same bytes.

Why this shape. head_dim 512 decides: O takes rows x 512 fp32 of Tensor Memory, so 128 rows would
fill all of it and leave S no place. 64 rows fill half, a CTA holds Q (64 KB), two KV tiles (128 KB)
and P, and every head count from 1 up is served by the same code: missing heads are zero-filled by
TMA and never stored. tcgen05 runs M = 64 at half rate, 4.1k cycles per 128 keys; but the 128 KB of
dense bf16 KV that go with them take an SM 5.4k cycles of its share of memory, so memory hides it.
With 65 to 128 heads the two CTAs of a token form a cluster: each fetches half of every tile, for
both, by TMA multicast, so that KV is read once for all heads. (At head_dim 512 `fmha_pair` does
better.)

Roles of the six warps, and what travels between them (`print(FmhaPlan(512))`):

    load (5)      Q, then KV chunks by TMA                        -> q, kv
    mma (4)       S(k), then O(k), which frees the tile's chunks  -> s, o; frees kv, p
                  for a load that waits for them
    softmax (0-3) S from TMEM, mask, weights, P to shared memory, -> p; frees s
                  rescaling of O, output

The softmax keeps a lazy reference (`softmax`), so O is rescaled in the first tiles only; the sink
of "swa_gate" moves that reference where the window begins (`sink_merge`), so that one accumulator
serves both branches and no logit is ever biased. Only the last tile of a branch can be partial
(`mask`): its masked scores become -inf and its rows are zeroed in shared memory, where they may
hold NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention import mask, sink_merge, softmax
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import fragments_1cta as fragments
from dsv4.kernels.attention.sm100.combine import partial_pointer
from dsv4.kernels.attention.sm100.context import Arguments, Keys, Operands, Pipes, Smem, Work
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS, FmhaPlan
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

WARP_ROWS = ROWS // 4  # rows that one softmax warp owns
ONE = tcgen05.CtaGroup.ONE
ONE_CTA = (1, 1, 1, 1)  # (V, M, N, K) shape of the cluster


class FmhaSingle:
    """A CTA per token, 64 heads and split."""

    def __init__(self, config: FmhaConfig):
        self.config = config
        self.scale_log2 = config.scale * softmax.LOG2_E
        self.head_blocks = -(-config.num_query_heads // ROWS)
        # CTAs of a cluster: neighbours that share the loads of a token's keys.
        self.sharers = 2 if self.head_blocks % 2 == 0 else 1

        self.plan = FmhaPlan(config.head_dim)
        self.tiling = self.plan.tiling
        self.warps = self.plan.warps
        self.tmem = self.plan.tmem
        self.edges = self.plan.pipelines

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Shape of a cluster."""
        return self.sharers, 1, 1

    # ---- layouts -------------------------------------------------------------------------------

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T with the tile as stored, O = P V with the same tile read the other way round.

        Made anew wherever they are used: setting ACCUMULATE changes the object, which must not be
        seen outside the loop that does it.
        """
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def make(b_major, shape):
            types = (BFloat16, BFloat16, k_major, b_major, Float32)
            return sm100.make_trivial_tiled_mma(*types, ONE, shape)

        return make(k_major, (ROWS, KEYS)), make(mn_major, (ROWS, self.tiling.chunk_dim))

    def _smem_layouts(self) -> dict[str, cute.ComposedLayout]:
        """Layouts of `Smem`, all of them 128-byte swizzled."""
        qk_mma, pv_mma = self._mmas()
        head_dim, chunk_dim = self.tiling.head_dim, self.tiling.chunk_dim
        kv_stages, p_stages = self.edges.kv.stages, self.edges.p.stages
        pv_tile = (ROWS, chunk_dim, KEYS)
        return {
            "q": sm100.make_smem_layout_a(qk_mma, (ROWS, KEYS, head_dim), BFloat16, 1),
            "k": sm100.make_smem_layout_b(qk_mma, (ROWS, KEYS, chunk_dim), BFloat16, kv_stages),
            "v": sm100.make_smem_layout_b(pv_mma, pv_tile, BFloat16, kv_stages),
            "p": sm100.make_smem_layout_a(pv_mma, pv_tile, BFloat16, p_stages),
            "p_rows": row_layout((ROWS, KEYS), p_stages),
            "o_rows": row_layout((ROWS, head_dim), 1),
        }

    def _shared_storage(self):
        edges, smem = self.edges, self.plan.smem

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, edges.q.mbarriers]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, edges.kv.mbarriers]
            s_barriers: cute.struct.MemRange[cutlass.Int64, edges.s.mbarriers]
            p_barriers: cute.struct.MemRange[cutlass.Int64, edges.p.mbarriers]
            o_barriers: cute.struct.MemRange[cutlass.Int64, edges.o.mbarriers]
            tmem_address: Int32
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, smem.q_elements], 1024]
            kv: cute.struct.Align[cute.struct.MemRange[BFloat16, smem.kv_elements], 1024]
            p: cute.struct.Align[cute.struct.MemRange[BFloat16, smem.p_elements], 1024]

        size = SharedStorage.size_in_bytes()
        assert size == smem.total_bytes, f"SMEM: storage {size}, plan {smem.total_bytes} bytes"
        return SharedStorage

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: Arguments, stream):
        """Build the tensor maps and launch one CTA per token, 64 heads and split."""
        q = arguments.q
        layouts = self._smem_layouts()
        qk_mma, _ = self._mmas()
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        kv_load = load
        if cutlass.const_expr(self.sharers == 2):
            kv_load = cpasync.CopyBulkTensorTileG2SMulticastOp(ONE)
        q_tile = (ROWS, KEYS, self.tiling.head_dim)
        kv_tile = (ROWS, KEYS, self.tiling.chunk_dim)
        q_box = cute.select(layouts["q"], mode=[0, 1, 2])
        kv_box = cute.select(layouts["k"], mode=[0, 1, 2])
        compressed_map, window_map = [
            cute.nvgpu.make_tiled_tma_atom_B(
                kv_load,
                row_view(kv, q.iterator),
                kv_box,
                kv_tile,
                qk_mma,
                (1, self.sharers, 1, 1),
            )
            for kv in (arguments.compressed_kv, arguments.swa_kv)
        ]
        operands = Operands(
            q=cute.nvgpu.make_tiled_tma_atom_A(
                load, row_view(q, q.iterator), q_box, q_tile, qk_mma, ONE_CTA
            ),
            compressed=compressed_map,
            window=window_map,
            o=output_map(arguments.o, q.iterator, WARP_ROWS),
            items=q.shape[0] * arguments.num_splits * self.head_blocks,
            **arguments.tables(),
        )
        self.kernel(operands).launch(
            grid=(operands.items, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
        )

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, operands: Operands):
        """Allocate, then send every warp to its role."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Splits and head blocks of a token are neighbours: they share KV rows in L2.
        block, _, _ = cute.arch.block_idx()
        row_block = block // self.head_blocks
        work = Work(
            token=row_block // operands.num_splits,
            head_block=block % self.head_blocks,
            split=row_block % operands.num_splits,
        )
        storage = SmemAllocator().allocate(self._shared_storage())
        pipes = self._pipes(storage)
        smem = self._smem(storage)
        tmem = TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(
                TMEM_ALLOCATED, self.warps.softmax_threads + cute.arch.WARP_SIZE
            ),
            allocator_warp_id=self.warps.softmax[0],
        )
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.sharers, 1))

        if warp_idx == self.warps.load:
            self.load_warp(operands, work, pipes, smem)
        elif warp_idx == self.warps.mma:
            self.mma_warp(operands, work, pipes, smem, tmem)
        else:
            self.softmax_warps(operands, work, pipes, smem, tmem)
        if cutlass.const_expr(self.sharers == 2):
            # Shared memory must outlive what the other CTA of the pair sends to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _pipes(self, storage) -> Pipes:
        """Initialise every mbarrier."""
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        # A chunk is filled anew once both CTAs of a pair are done with it.
        releases = pipeline.CooperativeGroup(pipeline.Agent.Thread, self.sharers)
        softmax_threads = pipeline.CooperativeGroup(
            pipeline.Agent.Thread, self.warps.softmax_threads
        )

        def create(kind, name, producer_group, consumer_group, ctas=1, **tx_count):
            return kind.create(
                barrier_storage=getattr(storage, f"{name}_barriers").data_ptr(),
                num_stages=getattr(self.edges, name).stages,
                producer_group=producer_group,
                consumer_group=consumer_group,
                cta_layout_vmnk=cute.make_layout((1, ctas, 1, 1)),
                defer_sync=True,
                **tx_count,
            )

        tma, mma, p = (
            pipeline.PipelineTmaUmma,
            pipeline.PipelineUmmaAsync,
            pipeline.PipelineAsyncUmma,
        )
        pipes = Pipes(
            q=create(tma, "q", one, one, tx_count=self.edges.q.tx_bytes),
            kv=create(tma, "kv", one, releases, self.sharers, tx_count=self.edges.kv.tx_bytes),
            s=create(mma, "s", one, softmax_threads),
            p=create(p, "p", softmax_threads, one),
            o=create(mma, "o", one, softmax_threads),
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.sharers, 1), is_relaxed=True)
        return pipes

    def _smem(self, storage) -> Smem:
        """Views of the shared buffers."""
        buffers = {"q": storage.q, "k": storage.kv, "v": storage.kv, "p": storage.p}
        buffers |= {"p_rows": storage.p, "o_rows": storage.q}
        return Smem(
            **{
                name: buffers[name].get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in self._smem_layouts().items()
            }
        )

    def _tmem_views(self, address: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor]:
        """S (MMA, 1, 1, stage) and O (MMA, 1, 1, chunk) in Tensor Memory."""
        qk_mma, pv_mma = self._mmas()
        s_shape = qk_mma.partition_shape_C((ROWS, KEYS))
        s = qk_mma.make_fragment_C(cute.append(s_shape, self.edges.s.stages))
        o_shape = pv_mma.partition_shape_C((ROWS, self.tiling.chunk_dim))
        o = pv_mma.make_fragment_C(cute.append(o_shape, self.tiling.chunks))
        return (
            cute.make_tensor(address + self.tmem.s_column, s.layout),
            cute.make_tensor(address + self.tmem.o_column, o.layout),
        )

    # ---- load warp -----------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, operands: Operands, work: Work, pipes: Pipes, smem: Smem):
        """Q once, then the chunks of every tile, each once."""
        kv = pipes.kv
        cute.arch.griddepcontrol_launch_dependents()

        # ---- prologue: Q, which needs no table
        self._load_q(operands.q, work, pipes, smem)

        # ---- mainloop: compressed tiles, then window tiles
        keys = keys_of(self.config, operands, work)
        split_point = cutlass.min(cutlass.max(keys.compressed_tiles, keys.first), keys.last)
        state = pipeline.make_pipeline_state(PRODUCER, self.edges.kv.stages)
        both_ctas = None
        if cutlass.const_expr(self.sharers == 2):
            both_ctas = Int16(0b11)
        source, ring = self._partition_kv(operands.compressed, smem, Int32(0))
        for tile in cutlass.range(keys.first, split_point, unroll=1):
            for chunk in cutlass.range_constexpr(self.tiling.chunks):
                kv.producer_acquire(state)
                cute.copy(
                    operands.compressed.atom,
                    source[(None, chunk, None, work.token)][None, tile],
                    ring[None, state.index],
                    tma_bar_ptr=kv.producer_get_barrier(state),
                    mcast_mask=both_ctas,
                )
                state.advance()
        request = operands.request_ids[work.token]
        source, ring = self._partition_kv(operands.window, smem, keys.window_first)
        for index in cutlass.range(split_point, keys.last, unroll=1):
            tile = index - keys.compressed_tiles
            for chunk in cutlass.range_constexpr(self.tiling.chunks):
                kv.producer_acquire(state)
                cute.copy(
                    operands.window.atom,
                    source[(None, chunk, None, request)][None, tile],
                    ring[None, state.index],
                    tma_bar_ptr=kv.producer_get_barrier(state),
                    mcast_mask=both_ctas,
                )
                state.advance()

    @cute.jit
    def _load_q(self, q: cpasync.TmaInfo, work: Work, pipes: Pipes, smem: Smem):
        """Fetch the CTA's query rows; rows past the last head arrive as zeros."""
        qk_mma, _ = self._mmas()
        tiles = cute.local_tile(q.tma_tensor, (ROWS, self.tiling.head_dim), (None, None, None))
        target, source = cpasync.tma_partition(
            q.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem.q, 0, 3),
            cute.group_modes(qk_mma.get_slice(0).partition_A(tiles), 0, 3),
        )
        state = pipeline.make_pipeline_state(PRODUCER, 1)
        pipes.q.producer_acquire(state)
        cute.copy(
            q.atom,
            source[None, work.head_block, 0, work.token],
            target[None, 0],
            tma_bar_ptr=pipes.q.producer_get_barrier(state),
        )

    def _partition_kv(
        self, kv: cpasync.TmaInfo, smem: Smem, first_row: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """TMA views of a KV tensor (box, chunk, tile, batch) and of the ring (box, stage).

        The tile is mode 2: slicing with (None, chunk, None, batch) keeps it free. Pinning it
        instead loads tile 0 for every tile, which no single-tile shape shows.
        """
        qk_mma, _ = self._mmas()
        rows = cute.domain_offset((first_row, 0, 0), kv.tma_tensor)
        tiles = cute.local_tile(rows, (KEYS, self.tiling.chunk_dim), (None, None, None))
        ring, source = cpasync.tma_partition(
            kv.atom,
            cute.arch.block_idx_in_cluster() % self.sharers,
            cute.make_layout(self.sharers),
            cute.group_modes(smem.k, 0, 3),
            cute.group_modes(qk_mma.get_slice(0).partition_B(tiles), 0, 3),
        )
        by_chunk = cute.select(source.layout, mode=[0, 2, 1, 3])
        return cute.make_tensor(source.iterator, by_chunk), ring

    # ---- MMA warp ------------------------------------------------------------------------------

    @cute.jit
    def mma_warp(
        self, operands: Operands, work: Work, pipes: Pipes, smem: Smem, tmem: TmemAllocator
    ):
        """O of tile k before S of tile k+1: a load waits for the stages that O frees.

        Only before the last tile is it the other way round: no load waits any more, and the
        softmax of tile k runs beside the last S.
        """
        keys = keys_of(self.config, operands, work)
        tiles = keys.last - keys.first
        tmem.wait_for_alloc()
        t_s, t_o = self._tmem_views(tmem.retrieve_ptr(Float32))
        kv_full = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
        kv_done = pipeline.make_pipeline_state(CONSUMER, self.edges.kv.stages)
        s_state = pipeline.make_pipeline_state(PRODUCER, self.edges.s.stages)
        p_state = pipeline.make_pipeline_state(CONSUMER, self.edges.p.stages)
        pipes.q.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        if tiles > 0:
            # ---- prologue
            kv_full, s_state = self._qk(pipes, smem, t_s, kv_full, s_state)
            # ---- mainloop
            for tile in cutlass.range(1, tiles, unroll=1):
                is_last = tile == tiles - 1
                if is_last:
                    kv_full, s_state = self._qk(pipes, smem, t_s, kv_full, s_state)
                kv_done, p_state = self._pv(pipes, smem, t_o, kv_done, p_state, tile > 1)
                if not is_last:
                    kv_full, s_state = self._qk(pipes, smem, t_s, kv_full, s_state)
            # ---- epilogue
            kv_done, p_state = self._pv(pipes, smem, t_o, kv_done, p_state, tiles > 1)

    @cute.jit
    def _qk(self, pipes: Pipes, smem: Smem, t_s: cute.Tensor, kv_full, s_state):
        """S = Q K^T of the next tile.

        States are returned, because a staged loop carries only what its own body assigns.
        """
        qk_mma, _ = self._mmas()
        f_q, f_k = qk_mma.make_fragment_A(smem.q), qk_mma.make_fragment_B(smem.k)
        k_blocks = cute.size(f_k, mode=[2])
        pipes.s.producer_acquire(s_state)
        take_over_tmem()
        s = t_s[None, None, None, s_state.index]
        qk_mma.set(tcgen05.Field.ACCUMULATE, False)
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            pipes.kv.consumer_wait(kv_full)
            for k in cutlass.range_constexpr(k_blocks):
                q_block = f_q[None, None, chunk * k_blocks + k, 0]
                cute.gemm(qk_mma, s, q_block, f_k[None, None, k, kv_full.index], s)
                qk_mma.set(tcgen05.Field.ACCUMULATE, True)
            kv_full.advance()
        pipes.s.producer_commit(s_state)
        s_state.advance()
        return kv_full, s_state

    @cute.jit
    def _pv(self, pipes: Pipes, smem: Smem, t_o: cute.Tensor, kv_done, p_state, accumulate):
        """O += P V of the next tile; its chunks go back to the load warp one by one."""
        _, pv_mma = self._mmas()
        f_p, f_v = pv_mma.make_fragment_A(smem.p), pv_mma.make_fragment_B(smem.v)
        pipes.p.consumer_wait(p_state)
        take_over_tmem()
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            o = t_o[None, None, None, chunk]
            # Allocation does not clear TMEM: the first tile overwrites, in every chunk.
            pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
            for k in cutlass.range_constexpr(cute.size(f_p, mode=[2])):
                p_block = f_p[None, None, k, p_state.index]
                cute.gemm(pv_mma, o, p_block, f_v[None, None, k, kv_done.index], o)
                pv_mma.set(tcgen05.Field.ACCUMULATE, True)
            pipes.kv.consumer_release(kv_done)
            kv_done.advance()
        pipes.p.consumer_release(p_state)
        # Never acquired: the softmax hands O back with the next P.
        pipes.o.producer_commit(pipeline.make_pipeline_state(PRODUCER, 1))
        p_state.advance()
        return kv_done, p_state

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def softmax_warps(
        self, operands: Operands, work: Work, pipes: Pipes, smem: Smem, tmem: TmemAllocator
    ):
        """Scores to weights, the rescaling of O, and the output; a warp owns 16 rows throughout."""
        q_pipe, p_pipe, o_pipe = pipes.q, pipes.p, pipes.o
        keys = keys_of(self.config, operands, work)
        tmem.allocate(self.tmem.allocated_columns)
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(Float32)
        t_s, t_o = self._tmem_views(address)
        copies = fragments.make_copies(t_s[(None, None), 0, 0, 0])

        # ---- prologue: row state
        row_sinks = self._row_sinks(operands, work)
        both = keys.compressed > 0 and keys.window > 0
        rows = sink_merge.new_rows(row_sinks, both, self.config.sink_mode)
        s_state = pipeline.make_pipeline_state(CONSUMER, self.edges.s.stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.edges.p.stages)
        o_state = pipeline.make_pipeline_state(CONSUMER, 1)

        # ---- mainloop
        for tile in cutlass.range(keys.first, keys.last, unroll=1):
            if tile == keys.compressed_tiles and tile > keys.first:
                sink_merge.enter_window(rows)
            valid = valid_keys(keys, tile)
            fragment = self._load_scores(pipes, copies, t_s, s_state)
            scores = fragments.by_rows(fragment)
            s_state.advance()
            if valid < KEYS:
                mask.mask_tail(scores, valid, cute.arch.lane_idx())
                self._clear_rows(smem, tile - keys.first, valid, copies.thread)
            tile_maximum = cute.make_rmem_tensor(2, Float32)
            softmax.row_maxima(scores, tile_maximum, self.scale_log2)
            if softmax.any_row_outgrew(rows.maximum, tile_maximum):
                factor = cute.make_rmem_tensor(2, Float32)
                has_o = tile > keys.first
                softmax.raise_maxima(rows.maximum, rows.total, tile_maximum, factor, has_o)
                if has_o:
                    o_pipe.consumer_wait(o_state)
                    take_over_tmem()
                    self._rescale(copies, t_o, factor)
            softmax.accumulate_weights(scores, rows.maximum, rows.total, self.scale_log2)
            p_pipe.producer_acquire(p_state)
            fragments.store_rows(copies, fragment, smem.p_rows[None, None, p_state.index])
            # Every O is waited for, in order, before the next one may start: a parity wait that
            # skips a phase returns at once, one that lags two phases never does. S of the next
            # tile runs meanwhile.
            if tile > keys.first:
                o_pipe.consumer_wait(o_state)
                o_state.advance()
            hand_over_tmem()
            p_pipe.producer_commit(p_state)
            p_state.advance()

        # ---- epilogue
        if keys.last > keys.first:
            o_pipe.consumer_wait(o_state)
            take_over_tmem()
        else:
            # The output is staged over Q, which no score has shown to be there.
            q_pipe.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        self._finish(operands, work, keys, smem, copies, t_o, rows)
        # Freed while another warp still reads, O would belong to the next CTA of this SM.
        hand_over_tmem()
        pipeline.NamedBarrier(TMEM_UNUSED, self.warps.softmax_threads).arrive_and_wait()
        take_over_tmem()
        tmem.relinquish_alloc_permit()
        tmem.free(address)

    def _rows_of_thread(self, work: Work) -> tuple[Int32, Int32]:
        """Query heads of a softmax thread's two rows."""
        tidx, _, _ = cute.arch.thread_idx()
        head = work.head_block * ROWS + tidx // 32 * WARP_ROWS + tidx % 32 // 4
        return head, head + 8

    @cute.jit
    def _row_sinks(self, operands: Operands, work: Work) -> cute.Tensor:
        """Sinks of the two rows; rows past the last head get 0."""
        heads = self._rows_of_thread(work)
        sinks = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            sinks[row] = Float32(0.0)
            if heads[row] < self.config.num_query_heads:
                sinks[row] = operands.sink_logits[heads[row]]
        return sinks

    @cute.jit
    def _load_scores(self, pipes: Pipes, copies: fragments.Copies, t_s: cute.Tensor, s_state):
        """Scores of the next tile; the TMEM stage goes back at once."""
        columns = t_s[(None, None), 0, 0, s_state.index]
        pipes.s.consumer_wait(s_state)
        take_over_tmem()
        fragment = fragments.load_columns(copies, columns)
        hand_over_tmem()
        pipes.s.consumer_release(s_state)
        return fragment

    @cute.jit
    def _clear_rows(self, smem: Smem, index: Int32, valid: Int32, tidx: Int32):
        """Zero the rows of a partial tile past its keys.

        S of the tile is complete and P V waits for this thread's P: the softmax warps own the tile.

        Args:
            index: how many tiles the CTA loaded before this one.
            valid: keys of the tile.
        """
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            stage = (index * self.tiling.chunks + chunk) % self.edges.kv.stages
            columns = self.tiling.chunk_dim
            clear_rows(smem.k.iterator + stage * columns * KEYS, columns, valid, tidx)

    def _output_columns(self, t_o: cute.Tensor) -> cute.Tensor:
        """O as (64, 64, block): its column blocks in the order of head_dim."""
        blocks = cute.flat_divide(t_o[(None, None), 0, 0, None], (ROWS, COLUMNS))
        return cute.group_modes(blocks[None, None, 0, None, None], 2, 4)

    @cute.jit
    def _rescale(self, copies: fragments.Copies, t_o: cute.Tensor, factor: cute.Tensor):
        """Multiply the accumulated rows by `factor`."""
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=2):
            columns = o_columns[None, None, i]
            fragment = fragments.load_columns(copies, columns)
            fragments.scale_rows(fragment, factor)
            fragments.store_columns(copies, fragment, columns)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def _finish(
        self,
        operands: Operands,
        work: Work,
        keys: Keys,
        smem: Smem,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        rows: sink_merge.RowState,
    ):
        """Write the CTA's rows: the output and lse, or with several splits its partial result."""
        heads = self._rows_of_thread(work)
        factor = cute.make_rmem_tensor(2, Float32)
        sees_window = keys.last > keys.compressed_tiles
        for row in cutlass.range_constexpr(2):
            reference = sink_merge.reference(rows, row, sees_window)
            total = softmax.quad_sum(rows.total[row])
            scale = Float32(1.0)
            # One lane of the quad does what concerns the row, for all four.
            if copies.thread % 4 == 0:
                scale = finish_row(
                    self.config, operands, work, heads[row], reference, total, rows.sink[row]
                )
            factor[row] = softmax.quad_first(scale)
        has_keys = keys.last > keys.first
        if operands.num_splits == 1:
            self._store_output(operands.o, work, smem, copies, t_o, factor, has_keys)
        else:
            self._store_partial(operands, work, copies, t_o, factor, has_keys)

    @cute.jit
    def _finished_columns(
        self, copies: fragments.Copies, columns: cute.Tensor, factor: cute.Tensor, has_keys
    ) -> cute.Tensor:
        """(64, 64) columns of the result; without keys nothing was written to O, and they are 0."""
        fragment = fragments.new_fragment(copies)
        fragment.fill(0.0)
        if has_keys:
            fragment.store(fragments.load_columns(copies, columns).load())
            fragments.scale_rows(fragment, factor)
        return fragment

    @cute.jit
    def _store_output(
        self,
        o: cpasync.TmaInfo,
        work: Work,
        smem: Smem,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        factor: cute.Tensor,
        has_keys,
    ):
        """Stage o in shared memory; each warp stores its 16 rows, 64 columns as soon as they
        are there.
        """
        warp_idx = cute.arch.make_warp_uniform(copies.thread // 32)
        tile = (WARP_ROWS, COLUMNS)
        staged = smem.o_rows[None, None, 0]
        source, target = cpasync.tma_partition(
            o.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(staged, tile), 0, 2),
            cute.group_modes(cute.local_tile(o.tma_tensor, tile, (None, None, None)), 0, 2),
        )
        row_tile = work.head_block * len(self.warps.softmax) + warp_idx
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = self._finished_columns(copies, o_columns[None, None, i], factor, has_keys)
            tile_columns = cute.local_tile(staged, (ROWS, COLUMNS), (0, i))
            fragments.store_rows(copies, fragment, tile_columns)
            cute.arch.sync_warp()
            # A row tile past the last head has no coordinate of its own: it would land on another.
            if row_tile * WARP_ROWS < self.config.num_query_heads:
                with cute.arch.elect_one():
                    cute.copy(
                        o.atom, source[None, warp_idx, i], target[None, row_tile, i, work.token]
                    )
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory must outlive the reads of the store.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _store_partial(
        self,
        operands: Operands,
        work: Work,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        factor: cute.Tensor,
        has_keys,
    ):
        """Write the unnormalised rows to the workspace; a quad writes 32 contiguous bytes."""
        config = self.config
        heads = self._rows_of_thread(work)
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = self._finished_columns(copies, o_columns[None, None, i], factor, has_keys)
            values = fragments.by_rows(fragment)
            column = i * COLUMNS + copies.thread % 4 * 2
            for row in cutlass.range_constexpr(2):
                if heads[row] < config.num_query_heads:
                    index = partial_index(config, operands, work, heads[row])
                    target = partial_pointer(operands.workspace, index, config.head_dim)
                    store_pairs(target + cute.assume(column, divby=2), values, row)
