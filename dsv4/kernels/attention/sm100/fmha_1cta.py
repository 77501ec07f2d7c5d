"""Attention on Blackwell, 1 CTA: 64 query heads of one token over one range of its keys.

A CTA fetches every KV tile of 64 rows once and reads it twice: as K (K-major) for S = Q K^T and as
V (MN-major) for O = P V; the two swizzled operand layouts are the same bytes.

Why this shape. head_dim 512 decides: O takes rows x 512 fp32 of Tensor Memory, so 128 rows would
fill all of it and leave S no room. 64 rows fill half, a CTA holds Q (64 KB), two KV tiles (128 KB)
and P, and every head count from 1 up is served by the same code: missing heads are zero-filled by
TMA and never stored. tcgen05 runs M = 64 at half rate, 4.1k cycles per 128 keys; but the 128 KB of
dense bf16 KV that go with them take an SM 5.4k cycles of its share of memory, so memory hides it.
With 65 to 128 heads the two CTAs of a token form a cluster: each fetches half of every tile, for
both, by TMA multicast, so that KV is read once for all heads. (At head_dim 512 `fmha_2cta` does
better.)

Roles of the six warps, and what travels between them (`print(Plan1Cta(512))`):

    load (5)      Q, then KV chunks by TMA                        -> q, kv
    mma (4)       S(k), then O(k), which frees the tile's chunks  -> s, o; frees kv, p
                  for a load that waits for them
    softmax (0-3) S from TMEM, mask, P to shared memory,          -> p; frees s
                  rescaling of O, epilogue

The softmax keeps a stale row maximum (`softmax`), so O is rescaled in the first tiles only; the
sink of "swa_gate" moves that maximum where the window begins (`sink_merge`), so that one
accumulator serves both branches and no logit is ever biased. Only the last tile of a branch can be
partial (`mask`): its masked scores become -inf and its rows are zeroed in shared memory, where they
may hold NaN.
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
from dsv4.kernels.attention.sm100 import fragments_1cta as fragments
from dsv4.kernels.attention.sm100.combine import partial_pointer
from dsv4.kernels.attention.sm100.context import (
    Context1Cta,
    KernelParams,
    Pipelines1Cta,
    Smem1Cta,
    WorkTile,
)
from dsv4.kernels.attention.sm100.kv_source import DenseKv1Cta, KvBranch
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS, NamedBarriers, Plan1Cta
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
    tma_row_view,
    zero_rows,
)
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.reduce import quad_sum
from dsv4.kernels.kit.storage import storage_struct
from dsv4.kernels.kit.tcgen05 import (
    create_pipeline,
    fence_after_thread_sync,
    fence_before_thread_sync,
    make_mma,
)

WARP_ROWS = ROWS // 4  # rows that one softmax warp owns
ONE = tcgen05.CtaGroup.ONE
ONE_CTA = (1, 1, 1, 1)  # (V, M, N, K) shape of the cluster


class Fmha1Cta:
    """Attention kernel of one CTA per token, 64 heads and split."""

    # Whether a tile may be without a key, which dense rows never are.
    has_empty_tiles = False

    def __init__(self, config: FmhaConfig):
        self.config = config
        self.scale_log2 = config.scale * softmax.LOG2_E
        self.head_blocks = -(-config.num_query_heads // ROWS)

        self.plan = self._make_plan()
        self.multicast_ctas = self.plan.multicast_ctas
        self.tiling = self.plan.tiling
        self.warps = self.plan.warps
        self.tmem = self.plan.tmem
        self.barriers = self.plan.barriers
        self.kv_source = self._make_source()

    def _make_plan(self) -> Plan1Cta:
        # CTAs of a cluster: neighbours that share the loads of a token's keys.
        return Plan1Cta(self.config.head_dim, 2 if self.head_blocks % 2 == 0 else 1)

    def _make_source(self) -> DenseKv1Cta:
        return DenseKv1Cta(self.plan)

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Shape of a cluster."""
        return self.multicast_ctas, 1, 1

    # ---- layouts -------------------------------------------------------------------------------

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T with the tile as stored, O = P V with the same tile read as MN-major."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        qk_mma = make_mma(ONE, (ROWS, KEYS), k_major)
        return qk_mma, make_mma(ONE, (ROWS, self.tiling.chunk_dim), mn_major)

    def _smem_layouts(self) -> dict[str, cute.ComposedLayout]:
        """Layouts of `Smem1Cta`, all of them 128-byte swizzled."""
        qk_mma, pv_mma = self._mmas()
        head_dim, chunk_dim = self.tiling.head_dim, self.tiling.chunk_dim
        kv_stages, p_stages = self.plan.kv_stages, self.plan.p_stages
        pv_tile = (ROWS, chunk_dim, KEYS)
        return {
            "q": sm100.make_smem_layout_a(qk_mma, (ROWS, KEYS, head_dim), BFloat16, 1),
            "k": sm100.make_smem_layout_b(qk_mma, (ROWS, KEYS, chunk_dim), BFloat16, kv_stages),
            "v": sm100.make_smem_layout_b(pv_mma, pv_tile, BFloat16, kv_stages),
            "p": sm100.make_smem_layout_a(pv_mma, pv_tile, BFloat16, p_stages),
            "p_rows": row_layout((ROWS, KEYS), p_stages),
            "o_rows": row_layout((ROWS, head_dim), 1),
        }

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def launch(self, arguments: FmhaArguments, stream):
        """Make the TMA descriptors and launch one CTA per token, 64 heads and split."""
        q = arguments.q
        layouts = self._smem_layouts()
        qk_mma, _ = self._mmas()
        q_tile = (ROWS, KEYS, self.tiling.head_dim)
        q_box = cute.select(layouts["q"], mode=[0, 1, 2])
        kv_box = cute.select(layouts["k"], mode=[0, 1, 2])
        compressed, window = [
            self.kv_source.descriptor(kv, q.iterator, kv_box)
            for kv in (arguments.compressed_kv, arguments.swa_kv)
        ]
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        params = KernelParams(
            q=cute.nvgpu.make_tiled_tma_atom_A(
                load, tma_row_view(q, q.iterator), q_box, q_tile, qk_mma, ONE_CTA
            ),
            compressed=compressed,
            window=window,
            o=make_output_tma(arguments.o, q.iterator, WARP_ROWS),
            work_tiles=q.shape[0] * arguments.num_splits * self.head_blocks,
            by_splits=cute.fast_divmod_create_divisor_v2(arguments.num_splits),
            **arguments.tables(),
        )
        self.kernel(params).launch(
            grid=(params.work_tiles, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            use_pdl=True,
        )

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, params: KernelParams):
        """One work tile."""
        self.run(params)

    @cute.jit
    def run(self, params: KernelParams):
        """Allocate, then send every warp to its role."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Splits and head blocks of a token are neighbours: they share KV rows in L2.
        block, _, _ = cute.arch.block_idx()
        row_block = block // self.head_blocks
        work = WorkTile(
            token=row_block // params.num_splits,
            head_block=block % self.head_blocks,
            split=row_block % params.num_splits,
        )
        storage = SmemAllocator().allocate(storage_struct(self.plan.smem))
        info = self._create_info(storage)
        pipelines = self._create_pipelines(storage)
        smem = self._smem(storage)
        warps = self.warps
        users = warps["softmax"].threads + warps["mma"].threads
        tmem = TmemAllocator(
            storage.tmem_address.data_ptr(),
            barrier_for_retrieve=pipeline.NamedBarrier(NamedBarriers.TMEM_ALLOCATED, users),
            allocator_warp_id=warps["softmax"].first,
        )
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.multicast_ctas, 1))
        pdl.wait_for_previous_launch()

        ctx = Context1Cta(params, work, pipelines, smem, tmem, info)
        if self._is_load(warp_idx):
            self.load_warps(ctx)
        elif warp_idx == warps["mma"].first:
            self.mma_warp(ctx)
        else:
            self.softmax_warps(ctx)
        if cutlass.const_expr(self.multicast_ctas == 2):
            # Shared memory must outlive what the other CTA of the cluster sends to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _create_info(self, storage) -> None:
        """Ring of words about gathered tiles."""

    def _create_pipelines(self, storage) -> Pipelines1Cta:
        """Pipelines of the barrier graph, their mbarriers initialised."""
        alone = cute.make_layout(ONE_CTA)
        multicast = cute.make_layout((1, self.multicast_ctas, 1, 1))
        pipelines = Pipelines1Cta(
            q=create_pipeline(self.barriers, "q", storage, alone),
            kv=create_pipeline(self.barriers, "kv", storage, multicast),
            s=create_pipeline(self.barriers, "s", storage, alone),
            p=create_pipeline(self.barriers, "p", storage, alone),
            o=create_pipeline(self.barriers, "o", storage, alone),
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.multicast_ctas, 1), is_relaxed=True)
        return pipelines

    def _smem(self, storage) -> Smem1Cta:
        """Views of the shared buffers."""
        buffers = {"q": storage.q, "k": storage.kv, "v": storage.kv, "p": storage.p}
        buffers |= {"p_rows": storage.p, "o_rows": storage.q}
        return Smem1Cta(
            **{
                name: buffers[name].get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in self._smem_layouts().items()
            }
        )

    def _tmem_views(self, address: cute.Pointer) -> tuple[cute.Tensor, cute.Tensor]:
        """S (MMA, 1, 1, stage) and O (MMA, 1, 1, chunk) in Tensor Memory."""
        qk_mma, pv_mma = self._mmas()
        s_shape = qk_mma.partition_shape_C((ROWS, KEYS))
        s = qk_mma.make_fragment_C(cute.append(s_shape, self.plan.s_stages))
        o_shape = pv_mma.partition_shape_C((ROWS, self.tiling.chunk_dim))
        o = pv_mma.make_fragment_C(cute.append(o_shape, self.tiling.chunks))
        return (
            cute.make_tensor(address + self.tmem.column("s"), s.layout),
            cute.make_tensor(address + self.tmem.column("o"), o.layout),
        )

    # ---- load warp -----------------------------------------------------------------------------

    def _is_load(self, warp_idx: Int32) -> Boolean:
        return warp_idx == self.warps["load"].first

    def _find_keys(self, ctx: Context1Cta, has_flags: bool = False) -> KeySpan:
        """Keys of the CTA.

        Args:
            has_flags: whether the caller asks `_has_both_branches` of them.
        """
        return find_keys(self.config, ctx.params, ctx.work)

    def _has_both_branches(self, keys: KeySpan) -> Boolean:
        return keys.has_both_branches()

    @cute.jit
    def load_warps(self, ctx: Context1Cta):
        """Q once, then the chunks of every tile, each once."""
        params, work = ctx.params, ctx.work
        pdl.launch_dependents()

        # ---- prologue: Q, which needs no table
        self._load_q(ctx)

        # ---- mainloop: compressed tiles, then window tiles
        keys = self._find_keys(ctx)
        split_point = cutlass.min(cutlass.max(keys.compressed_tiles, keys.first), keys.last)
        state = pipeline.make_pipeline_state(PRODUCER, self.plan.kv_stages)
        branch = self.kv_source.branch(params.compressed, ctx.smem.k, Int32(0), work.token)
        state = self._load_tiles(ctx, branch, keys.first, split_point, Int32(0), state)
        branch = self.kv_source.branch(params.window, ctx.smem.k, keys.window_begin, keys.request)
        self._load_tiles(ctx, branch, split_point, keys.last, keys.compressed_tiles, state)

    @cute.jit
    def _load_tiles(
        self, ctx: Context1Cta, branch: KvBranch, first: Int32, last: Int32, origin: Int32, state
    ):
        """Fetch tiles [first, last), of which the branch's own count starts at `origin`."""
        kv = ctx.pipelines.kv
        for index in cutlass.range(first, last, unroll=1):
            for chunk in cutlass.range_constexpr(self.tiling.chunks):
                kv.producer_acquire(state)
                self.kv_source.copy(branch, index - origin, chunk, kv, state)
                state.advance()
        return state

    @cute.jit
    def _load_q(self, ctx: Context1Cta):
        """Fetch the CTA's query rows; rows past the last head arrive as zeros."""
        q, q_pipeline = ctx.params.q, ctx.pipelines.q
        qk_mma, _ = self._mmas()
        tiles = cute.local_tile(q.tma_tensor, (ROWS, self.tiling.head_dim), (None, None, None))
        target, source = cpasync.tma_partition(
            q.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ctx.smem.q, 0, 3),
            cute.group_modes(qk_mma.get_slice(0).partition_A(tiles), 0, 3),
        )
        state = pipeline.make_pipeline_state(PRODUCER, 1)
        q_pipeline.producer_acquire(state)
        cute.copy(
            q.atom,
            source[None, ctx.work.head_block, 0, ctx.work.token],
            target[None, 0],
            tma_bar_ptr=q_pipeline.producer_get_barrier(state),
        )

    # ---- MMA warp ------------------------------------------------------------------------------

    @cute.jit
    def mma_warp(self, ctx: Context1Cta):
        """O of tile k before S of tile k+1: a load waits for the stages that O frees.

        Only before the last tile is it the other way round: no load waits any more, and the
        softmax of tile k runs beside the last S.
        """
        keys = self._find_keys(ctx)
        tiles = keys.last - keys.first
        ctx.tmem.wait_for_alloc()
        t_s, t_o = self._tmem_views(ctx.tmem.retrieve_ptr(Float32))
        kv_full = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
        kv_done = pipeline.make_pipeline_state(CONSUMER, self.plan.kv_stages)
        s_state = pipeline.make_pipeline_state(PRODUCER, self.plan.s_stages)
        p_state = pipeline.make_pipeline_state(CONSUMER, self.plan.p_stages)
        ctx.pipelines.q.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        if tiles > 0:
            # ---- prologue
            kv_full, s_state = self._qk(ctx, t_s, kv_full, s_state)
            # ---- mainloop
            for tile in cutlass.range(1, tiles, unroll=1):
                is_last = tile == tiles - 1
                if is_last:
                    kv_full, s_state = self._qk(ctx, t_s, kv_full, s_state)
                kv_done, p_state = self._pv(ctx, t_o, kv_done, p_state, tile > 1)
                if not is_last:
                    kv_full, s_state = self._qk(ctx, t_s, kv_full, s_state)
            # ---- epilogue
            kv_done, p_state = self._pv(ctx, t_o, kv_done, p_state, tiles > 1)

    @cute.jit
    def _qk(self, ctx: Context1Cta, t_s: cute.Tensor, kv_full, s_state):
        """S = Q K^T of the next tile.

        States are returned, because a staged loop carries only what its own body assigns.
        """
        pipelines, smem = ctx.pipelines, ctx.smem
        qk_mma, _ = self._mmas()
        f_q, f_k = qk_mma.make_fragment_A(smem.q), qk_mma.make_fragment_B(smem.k)
        k_blocks = cute.size(f_k, mode=[2])
        pipelines.s.producer_acquire(s_state)
        fence_after_thread_sync()
        s = t_s[None, None, None, s_state.index]
        qk_mma.set(tcgen05.Field.ACCUMULATE, False)
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            pipelines.kv.consumer_wait(kv_full)
            for k in cutlass.range_constexpr(k_blocks):
                q_block = f_q[None, None, chunk * k_blocks + k, 0]
                cute.gemm(qk_mma, s, q_block, f_k[None, None, k, kv_full.index], s)
                qk_mma.set(tcgen05.Field.ACCUMULATE, True)
            kv_full.advance()
        pipelines.s.producer_commit(s_state)
        s_state.advance()
        return kv_full, s_state

    @cute.jit
    def _pv(self, ctx: Context1Cta, t_o: cute.Tensor, kv_done, p_state, accumulate):
        """O += P V of the next tile; its chunks go back to the load warp one by one."""
        pipelines, smem = ctx.pipelines, ctx.smem
        _, pv_mma = self._mmas()
        f_p, f_v = pv_mma.make_fragment_A(smem.p), pv_mma.make_fragment_B(smem.v)
        pipelines.p.consumer_wait(p_state)
        fence_after_thread_sync()
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            o = t_o[None, None, None, chunk]
            # Allocation does not clear TMEM: the first tile overwrites, in every chunk.
            pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
            for k in cutlass.range_constexpr(cute.size(f_p, mode=[2])):
                p_block = f_p[None, None, k, p_state.index]
                cute.gemm(pv_mma, o, p_block, f_v[None, None, k, kv_done.index], o)
                pv_mma.set(tcgen05.Field.ACCUMULATE, True)
            pipelines.kv.consumer_release(kv_done)
            kv_done.advance()
        pipelines.p.consumer_release(p_state)
        # Never acquired: the next P of the softmax also says that O may be written again.
        pipelines.o.producer_commit(pipeline.make_pipeline_state(PRODUCER, 1))
        p_state.advance()
        return kv_done, p_state

    # ---- softmax warps -------------------------------------------------------------------------

    @cute.jit
    def softmax_warps(self, ctx: Context1Cta):
        """Scores to P, the rescaling of O, and the epilogue; a warp owns 16 rows throughout."""
        q_pipe, p_pipe, o_pipe = ctx.pipelines.q, ctx.pipelines.p, ctx.pipelines.o
        keys = self._find_keys(ctx, has_flags=True)
        ctx.tmem.allocate(self.tmem.allocated_columns)
        ctx.tmem.wait_for_alloc()
        address = ctx.tmem.retrieve_ptr(Float32)
        t_s, t_o = self._tmem_views(address)
        copies = fragments.make_copies(t_s[(None, None), 0, 0, 0])

        # ---- prologue: row state
        row_sinks = self._row_sinks(ctx)
        scale, largest = self._row_scale(ctx), self._new_largest()
        both = self._has_both_branches(keys)
        rows = sink_merge.new_rows(row_sinks, both, self.config.sink_mode)
        s_state = pipeline.make_pipeline_state(CONSUMER, self.plan.s_stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.plan.p_stages)
        o_state = pipeline.make_pipeline_state(CONSUMER, 1)

        # ---- mainloop
        for tile in cutlass.range(keys.first, keys.last, unroll=1):
            if tile == keys.compressed_tiles and tile > keys.first:
                sink_merge.enter_window(rows, self.has_empty_tiles)
            _, _, valid = keys.tile(tile, KEYS)
            fragment = self._load_scores(ctx, copies, t_s, s_state)
            scores = fragments.by_rows(fragment)
            s_state.advance()
            self._mask(ctx, tile - keys.first, valid, scores, copies.thread)
            tile_max = cute.make_rmem_tensor(2, Float32)
            softmax.quad_tile_max(scores, tile_max, scale)
            self._keep_largest(largest, tile_max)
            if softmax.warp_exceeds_rescale_threshold(rows.row_max, tile_max):
                factor = cute.make_rmem_tensor(2, Float32)
                has_o = tile > keys.first
                softmax.update_row_max(rows.row_max, rows.row_sum, tile_max, factor, has_o)
                if has_o:
                    o_pipe.consumer_wait(o_state)
                    fence_after_thread_sync()
                    self._rescale(copies, t_o, factor)
            reference = rows.row_max
            if cutlass.const_expr(self.has_empty_tiles):
                reference = softmax.finite_reference(reference)
            softmax.exponentiate(scores, reference, rows.row_sum, scale)
            p_pipe.producer_acquire(p_state)
            fragments.store_rows(copies, fragment, ctx.smem.p_rows[None, None, p_state.index])
            # Every O is waited for, in order, before the next one may start: a parity wait that
            # skips a phase returns at once, one that lags two phases never does. S of the next
            # tile runs meanwhile.
            if tile > keys.first:
                o_pipe.consumer_wait(o_state)
                o_state.advance()
            fence_before_thread_sync()
            p_pipe.producer_commit(p_state)
            p_state.advance()

        # ---- epilogue
        if keys.last > keys.first:
            o_pipe.consumer_wait(o_state)
            fence_after_thread_sync()
        else:
            # The output is staged over Q, which no score has shown to be there.
            q_pipe.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        self._store_largest(ctx, copies, largest)
        self._epilogue(ctx, keys, copies, t_o, rows)
        # Freed while another warp still reads, O would belong to the next CTA of this SM.
        fence_before_thread_sync()
        threads = self.warps["softmax"].threads
        pipeline.NamedBarrier(NamedBarriers.TMEM_UNUSED, threads).arrive_and_wait()
        fence_after_thread_sync()
        ctx.tmem.relinquish_alloc_permit()
        ctx.tmem.free(address)

    def _rows_of_thread(self, work: WorkTile) -> tuple[Int32, Int32]:
        """Query heads of a softmax thread's two rows."""
        tidx, _, _ = cute.arch.thread_idx()
        head = work.head_block * ROWS + tidx // 32 * WARP_ROWS + tidx % 32 // 4
        return head, head + 8

    @cute.jit
    def _row_sinks(self, ctx: Context1Cta) -> cute.Tensor:
        """Sinks of the two rows; rows past the last head get 0."""
        heads = self._rows_of_thread(ctx.work)
        sinks = cute.make_rmem_tensor(2, Float32)
        for row in cutlass.range_constexpr(2):
            sinks[row] = Float32(0.0)
            if heads[row] < self.config.num_query_heads:
                sinks[row] = ctx.params.sink_logits[heads[row]]
        return sinks

    def _row_scale(self, ctx: Context1Cta) -> float | cute.Tensor:
        """Factor from scores to logits in base 2, of all rows or of each."""
        return self.scale_log2

    def _new_largest(self) -> cute.Tensor | None:
        """Where the largest logits of the two rows are kept, if they are an output."""
        return None

    def _keep_largest(self, largest: cute.Tensor | None, tile_max: cute.Tensor) -> None:
        """Take a tile's largest logits into account."""

    def _store_largest(
        self, ctx: Context1Cta, copies: fragments.Copies, largest: cute.Tensor | None
    ) -> None:
        """Write the largest logits."""

    @cute.jit
    def _mask(self, ctx: Context1Cta, count: Int32, valid: Int32, scores: cute.Tensor, tidx: Int32):
        """Make the scores of what is no key -inf, and such rows of the tile in shared memory 0.

        Args:
            count: how many tiles the CTA loaded before this one.
            valid: rows of the tile that are in the span.
        """
        if valid < KEYS:
            mask.mask_tail(scores, valid, cute.arch.lane_idx())
            self._zero_rows(ctx, count, valid, tidx)

    @cute.jit
    def _load_scores(
        self, ctx: Context1Cta, copies: fragments.Copies, t_s: cute.Tensor, s_state
    ) -> cute.Tensor:
        """Scores of the next tile; the TMEM stage goes back at once."""
        columns = t_s[(None, None), 0, 0, s_state.index]
        ctx.pipelines.s.consumer_wait(s_state)
        fence_after_thread_sync()
        fragment = fragments.load_columns(copies, columns)
        fence_before_thread_sync()
        ctx.pipelines.s.consumer_release(s_state)
        return fragment

    @cute.jit
    def _zero_rows(self, ctx: Context1Cta, index: Int32, valid: Int32, tidx: Int32):
        """Zero the rows of a partial tile past its keys.

        S of the tile is complete and P V waits for this thread's P: the softmax warps own the tile.

        Args:
            index: how many tiles the CTA loaded before this one.
            valid: keys of the tile.
        """
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            stage = (index * self.tiling.chunks + chunk) % self.plan.kv_stages
            columns = self.tiling.chunk_dim
            zero_rows(ctx.smem.k.iterator + stage * columns * KEYS, columns, valid, tidx)

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

    # ---- epilogue ------------------------------------------------------------------------------

    @cute.jit
    def _epilogue(
        self,
        ctx: Context1Cta,
        keys: KeySpan,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        rows: sink_merge.RowState,
    ):
        """Write the CTA's rows: the output and lse, or with several splits its partial result."""
        heads = self._rows_of_thread(ctx.work)
        factor = cute.make_rmem_tensor(2, Float32)
        sees_window = keys.last > keys.compressed_tiles
        for row in cutlass.range_constexpr(2):
            final_max = sink_merge.final_row_max(rows, row, sees_window)
            row_sum = quad_sum(rows.row_sum[row])
            scale = Float32(1.0)
            # One lane of the quad computes and writes what is one value per row.
            if copies.thread % 4 == 0:
                scale = row_epilogue(
                    self.config, ctx.params, ctx.work, heads[row], final_max, row_sum,
                    rows.sink[row],
                )  # fmt: skip
            factor[row] = softmax.quad_first(scale)
        has_keys = keys.last > keys.first
        if ctx.params.num_splits == 1:
            self._store_output(ctx, copies, t_o, factor, has_keys)
        else:
            self._store_partial(ctx, copies, t_o, factor, has_keys)

    @cute.jit
    def _scaled_columns(
        self,
        ctx: Context1Cta,
        copies: fragments.Copies,
        o_columns: cute.Tensor,
        i: Int32,
        factor: cute.Tensor,
        has_keys,
    ) -> cute.Tensor:
        """(64, 64) columns i of the result; without keys nothing was written to O, and they are
        0.
        """
        columns = o_columns[None, None, i]
        fragment = fragments.new_fragment(copies)
        fragment.fill(0.0)
        if has_keys:
            fragment.store(fragments.load_columns(copies, columns).load())
            fragments.scale_rows(fragment, factor)
            self._rotate(ctx, fragment, i)
        return fragment

    def _rotate(self, ctx: Context1Cta, fragment: cute.Tensor, i: Int32) -> None:
        """Rotate columns i of the result, if they are to be."""

    @cute.jit
    def _store_output(
        self,
        ctx: Context1Cta,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        factor: cute.Tensor,
        has_keys,
    ):
        """Stage o in shared memory; each warp stores its 16 rows, 64 columns as soon as they
        are there.
        """
        o, work = ctx.params.o, ctx.work
        warp_idx = cute.arch.make_warp_uniform(copies.thread // 32)
        tile = (WARP_ROWS, COLUMNS)
        staged = ctx.smem.o_rows[None, None, 0]
        source, target = cpasync.tma_partition(
            o.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(staged, tile), 0, 2),
            cute.group_modes(cute.local_tile(o.tma_tensor, tile, (None, None, None)), 0, 2),
        )
        row_tile = work.head_block * (ROWS // WARP_ROWS) + warp_idx
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = self._scaled_columns(ctx, copies, o_columns, i, factor, has_keys)
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
        ctx: Context1Cta,
        copies: fragments.Copies,
        t_o: cute.Tensor,
        factor: cute.Tensor,
        has_keys,
    ):
        """Write the unnormalised rows to the workspace; a quad writes 32 contiguous bytes."""
        config = self.config
        heads = self._rows_of_thread(ctx.work)
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = self._scaled_columns(ctx, copies, o_columns, i, factor, has_keys)
            values = fragments.by_rows(fragment)
            column = i * COLUMNS + copies.thread % 4 * 2
            for row in cutlass.range_constexpr(2):
                if heads[row] < config.num_query_heads:
                    index = partial_index(config, ctx.params, ctx.work, heads[row])
                    target = partial_pointer(ctx.params.workspace, index, config.head_dim)
                    store_pairs(target + cute.assume(column, divby=2), values, row)
