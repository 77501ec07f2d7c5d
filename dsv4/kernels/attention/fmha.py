"""Sparse decode attention for Blackwell (sm_100a): compressed keys, sliding window and sink in one
launch.

One CTA computes 64 query heads of one token over one range of its keys ("split"). It fetches every
KV tile of 64 rows once and reads it twice: as K (K-major) for S = Q K^T and as V (MN-major) for O =
P V; the two swizzled operand layouts are the same bytes.

Why this shape. head_dim 512 decides: O takes rows x 512 fp32 of Tensor Memory, so 128 rows would
fill all of it and leave S no place. 64 rows fill half, a CTA holds Q (64 KB), two KV tiles (128 KB)
and P, and every head count from 1 up is served by the same code: missing heads are zero-filled by
TMA and never stored. tcgen05 runs M = 64 at half rate, 4.1k cycles per 128 keys; but the 128 KB of
dense bf16 KV that go with them take an SM 5.4k cycles of its share of memory, so memory hides it.
With 65 to 128 heads the two CTAs of a token form a cluster: each fetches half of every tile, for
both, by TMA multicast, so that KV is read once for all heads. (One pair of tensor cores working
together, cta_group::2, would run at full rate, but wants K and V cut differently: two loads of the
tile.)

Roles of the six warps, and what travels between them (`print(FmhaPlan(512))`):

    load (5)      Q, then KV chunks by TMA                        -> q, kv
    mma (4)       S(k), then O(k), which frees the tile's chunks  -> s, o; frees kv, p
                  for a load that waits for them
    softmax (0-3) S from TMEM, mask, weights, P to shared memory, -> p; frees s
                  rescaling of O, output

The softmax keeps a lazy reference (`softmax`), so O is rescaled in the first tiles only; the sink
of "swa_gate" moves that reference where the window begins (`merge`), so that one accumulator serves
both branches and no logit is ever biased. Only the last tile of a branch can be partial (`mask`):
its masked scores become -inf and its rows are zeroed in shared memory, where they may hold NaN.

With several splits each CTA writes its unnormalised rows and their reference, and a second kernel
joins them in split order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention import fmha_fragments as fragments
from dsv4.kernels.attention import mask, merge, softmax
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.fmha_combine import STATS, Combine
from dsv4.kernels.attention.fmha_fragments import COLUMNS
from dsv4.kernels.attention.fmha_plan import KEYS, ROWS, FmhaPlan
from dsv4.kernels.attention.fmha_types import Keys, Operands, Pipes, Smem, Work

WARP_ROWS = ROWS // 4  # rows that one softmax warp owns
ONE_CTA = (1, 1, 1, 1)  # (V, M, N, K) shape of the cluster

# Named barriers; 0 is the barrier of the whole CTA.
TMEM_ALLOCATED = 1  # softmax and MMA warps
TMEM_UNUSED = 2  # softmax warps

PRODUCER = pipeline.PipelineUserType.Producer
CONSUMER = pipeline.PipelineUserType.Consumer


class FmhaKernel:
    """Attention over compressed entries and a sliding window, fused with the sink merge (sm_100a).

    Args:
        head_dim: 64, 128, 256 or 512.
        num_query_heads: any; computed in blocks of 64.
        sliding_window: window of `is_causal=True`; otherwise all rows below `swa_lens` are visible.
        top_k: promised bound of compressed rows; the real capacity is a runtime size.
        cta_group, cluster_shape_mn: ONE and (1, 1), a CTA per 64 heads; pairs form by themselves.
        softmax_scale: positive; default head_dim**-0.5.
        num_splits: fixed number of KV splits, or None where each launch says.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        sliding_window: int,
        top_k: int,
        q_dtype=BFloat16,
        kv_dtype=BFloat16,
        o_dtype=BFloat16,
        qk_acc_dtype=Float32,
        pv_acc_dtype=Float32,
        is_causal: bool = False,
        cta_group=tcgen05.CtaGroup.ONE,
        cluster_shape_mn: tuple[int, int] = (1, 1),
        *,
        softmax_scale: float | None = None,
        sink_mode: str = "swa_gate",
        num_splits: int | None = None,
    ):
        self.config = FmhaConfig(
            head_dim,
            num_query_heads,
            sliding_window,
            top_k,
            is_causal,
            sink_mode,
            softmax_scale,
            num_splits,
        )
        if (q_dtype, kv_dtype, o_dtype) != (BFloat16,) * 3:
            raise ValueError(f"q, KV and o must be BFloat16, got {q_dtype}, {kv_dtype}, {o_dtype}")
        if (qk_acc_dtype, pv_acc_dtype) != (Float32,) * 2:
            raise ValueError(f"accumulators must be Float32, got {qk_acc_dtype}, {pv_acc_dtype}")
        if cta_group != tcgen05.CtaGroup.ONE or cluster_shape_mn != (1, 1):
            raise ValueError(
                "cta_group must be ONE and cluster_shape_mn (1, 1), "
                f"got {cta_group} and {cluster_shape_mn}"
            )
        if self.config.scale <= 0:
            raise ValueError(f"softmax_scale must be positive, got {self.config.scale}")
        self.dtype, self.acc_dtype = q_dtype, qk_acc_dtype
        self.cta_group = cta_group
        self.scale_log2 = self.config.scale * softmax.LOG2_E
        self.head_blocks = -(-num_query_heads // ROWS)
        self.cluster = 2 if self.head_blocks % 2 == 0 else 1
        self.combine = Combine(head_dim, num_query_heads, sink_mode, o_dtype)

        self.plan = FmhaPlan(head_dim)
        self.tiling = self.plan.tiling
        self.warps = self.plan.warps
        self.tmem = self.plan.tmem
        self.edges = self.plan.pipelines

    @classmethod
    def from_config(cls, config: FmhaConfig):
        """The kernel of a configuration; ValueError for what it cannot compute."""
        if config.dtype != "bfloat16":
            raise ValueError(f"dtype must be bfloat16 on sm_100a, got {config.dtype}")
        return cls(
            config.head_dim,
            config.num_query_heads,
            config.sliding_window,
            config.top_k,
            is_causal=config.is_causal,
            softmax_scale=config.softmax_scale,
            sink_mode=config.sink_mode,
            num_splits=config.num_splits,
        )

    def compile(self, options: str = ""):
        """Compile from fake tensors, to be called through tvm-ffi."""
        args, optional = fake_arguments(self.config)
        options = f"--enable-tvm-ffi {options}".strip()
        return cute.compile(self, *args, **optional, options=options)

    # ---- layouts -------------------------------------------------------------------------------

    def _mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """S = Q K^T with the tile as stored, O = P V with the same tile read the other way round.

        Made anew wherever they are used: setting ACCUMULATE changes the object, which must not be
        seen outside the loop that does it.
        """
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def make(b_major, shape):
            types = (self.dtype, self.dtype, k_major, b_major, self.acc_dtype)
            return sm100.make_trivial_tiled_mma(*types, self.cta_group, shape)

        return make(k_major, (ROWS, KEYS)), make(mn_major, (ROWS, self.tiling.chunk_dim))

    def _smem_layouts(self) -> dict[str, cute.ComposedLayout]:
        """Layouts of `Smem`, all of them 128-byte swizzled."""
        qk_mma, pv_mma = self._mmas()
        head_dim, chunk_dim = self.tiling.head_dim, self.tiling.chunk_dim
        kv_stages, p_stages = self.edges.kv.stages, self.edges.p.stages
        pv_tile = (ROWS, chunk_dim, KEYS)
        return {
            "q": sm100.make_smem_layout_a(qk_mma, (ROWS, KEYS, head_dim), self.dtype, 1),
            "k": sm100.make_smem_layout_b(qk_mma, (ROWS, KEYS, chunk_dim), self.dtype, kv_stages),
            "v": sm100.make_smem_layout_b(pv_mma, pv_tile, self.dtype, kv_stages),
            "p": sm100.make_smem_layout_a(pv_mma, pv_tile, self.dtype, p_stages),
            "p_rows": self._row_layout((ROWS, KEYS), p_stages),
            "o_rows": self._row_layout((ROWS, head_dim), 1),
        }

    def _row_layout(self, tile: tuple[int, int], stages: int) -> cute.ComposedLayout:
        """(rows, columns, stages) as a K-major operand lies in shared memory."""
        return sm100.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, tile, stages)

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
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, smem.q_elements], 1024]
            kv: cute.struct.Align[cute.struct.MemRange[self.dtype, smem.kv_elements], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, smem.p_elements], 1024]

        size = SharedStorage.size_in_bytes()
        assert size == smem.total_bytes, f"SMEM: storage {size}, plan {smem.total_bytes} bytes"
        return SharedStorage

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # [T, n_h, head_dim] bf16
        compressed_kv: cute.Tensor,  # [T, top_k, head_dim] bf16
        swa_kv: cute.Tensor,  # [batch, W, head_dim] bf16
        swa_lens: cute.Tensor,  # [batch] int32
        sink_logits: cute.Tensor,  # [n_h] fp32
        request_ids: cute.Tensor,  # [T] int32
        o: cute.Tensor,  # [T, n_h, head_dim] bf16, written
        stream,
        *,
        compressed_lens: cute.Tensor,  # [T] int32, or [0]: every row counts
        lse: cute.Tensor,  # [T, n_h] fp32, written, or [0, n_h]: not wanted
        workspace: cute.Tensor,  # [T * n_h * num_splits * (head_dim + 4)] fp32 if num_splits > 1
        num_splits: Int32,
        num_ctas: Int32,  # for persistent kernels; here every CTA has one work item
    ):
        """Build the tensor maps and launch one CTA per token, 64 heads and split, then the
        combine.
        """
        layouts = self._smem_layouts()
        qk_mma, _ = self._mmas()
        load = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        kv_load = load
        if cutlass.const_expr(self.cluster == 2):
            kv_load = cpasync.CopyBulkTensorTileG2SMulticastOp(self.cta_group)
        q_tile = (ROWS, KEYS, self.tiling.head_dim)
        kv_tile = (ROWS, KEYS, self.tiling.chunk_dim)
        q_box = cute.select(layouts["q"], mode=[0, 1, 2])
        kv_box = cute.select(layouts["k"], mode=[0, 1, 2])
        compressed_map, window_map = [
            cute.nvgpu.make_tiled_tma_atom_B(
                kv_load,
                self._row_view(kv, q.iterator),
                kv_box,
                kv_tile,
                qk_mma,
                (1, self.cluster, 1, 1),
            )
            for kv in (compressed_kv, swa_kv)
        ]
        o_tile = (WARP_ROWS, COLUMNS)
        operands = Operands(
            q=cute.nvgpu.make_tiled_tma_atom_A(
                load, self._row_view(q, q.iterator), q_box, q_tile, qk_mma, ONE_CTA
            ),
            compressed=compressed_map,
            window=window_map,
            o=cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                self._row_view(o, q.iterator),
                cute.select(self._row_layout(o_tile, 1), mode=[0, 1]),
                o_tile,
            ),
            compressed_rows=compressed_kv.shape[1],
            window_rows=swa_kv.shape[1],
            swa_lens=swa_lens,
            sink_logits=sink_logits,
            request_ids=request_ids,
            compressed_lens=compressed_lens,
            lse=lse,
            workspace=workspace,
            num_splits=num_splits,
        )
        self.kernel(operands).launch(
            grid=(q.shape[0] * num_splits * self.head_blocks, 1, 1),
            block=(self.warps.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )
        if num_splits > 1:
            self.combine(workspace, sink_logits, o, lse, num_splits, stream)

    @cute.jit
    def _row_view(self, x: cute.Tensor, fallback: cute.Pointer) -> cute.Tensor:
        """[batch, row, d] seen as (row, d, batch): three dimensions in the tensor map.

        A ragged tile then ends at the last row of its batch, it cannot run into the next one. A map
        must not describe an empty tensor: it claims one row, at an address that exists, and nobody
        loads it.
        """
        batch, rows, dim = x.shape
        address = x.iterator.toint()
        if batch * rows == 0:
            address = fallback.toint()
        layout = cute.make_layout(
            (cutlass.max(rows, 1), dim, cutlass.max(batch, 1)),
            stride=(x.stride[1], 1, x.stride[0]),
        )
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, layout)

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
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.cluster, 1))

        if warp_idx == self.warps.load:
            self.load_warp(operands, work, pipes, smem)
        elif warp_idx == self.warps.mma:
            self.mma_warp(operands, work, pipes, smem, tmem)
        else:
            self.softmax_warps(operands, work, pipes, smem, tmem)
        if cutlass.const_expr(self.cluster == 2):
            # Shared memory must outlive what the other CTA of the pair sends to it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _pipes(self, storage) -> Pipes:
        """Initialise every mbarrier."""
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        # A chunk is filled anew once both CTAs of a pair are done with it.
        releases = pipeline.CooperativeGroup(pipeline.Agent.Thread, self.cluster)
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
            kv=create(tma, "kv", one, releases, self.cluster, tx_count=self.edges.kv.tx_bytes),
            s=create(mma, "s", one, softmax_threads),
            p=create(p, "p", softmax_threads, one),
            o=create(mma, "o", one, softmax_threads),
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.cluster, 1), is_relaxed=True)
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

    @cute.jit
    def _keys(self, operands: Operands, work: Work) -> Keys:
        """What the CTA attends to. Every role works it out: cheaper than handing it over."""
        token = work.token
        request = operands.request_ids[token]
        compressed = Int32(0)
        if request >= 0:
            compressed = operands.compressed_rows
            if token < operands.compressed_lens.shape[0]:
                compressed = mask.clamp_length(operands.compressed_lens[token], compressed)
        window_first, window = mask.window_span(
            operands.request_ids,
            operands.swa_lens,
            token,
            request,
            operands.window_rows,
            self.config.sliding_window,
            self.config.is_causal,
        )
        compressed_tiles = mask.tile_count(compressed, KEYS)
        tiles = compressed_tiles + mask.tile_count(window, KEYS)
        return Keys(
            compressed,
            window,
            window_first,
            compressed_tiles,
            first=tiles * work.split // operands.num_splits,
            last=tiles * (work.split + 1) // operands.num_splits,
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
        keys = self._keys(operands, work)
        split_point = cutlass.min(cutlass.max(keys.compressed_tiles, keys.first), keys.last)
        state = pipeline.make_pipeline_state(PRODUCER, self.edges.kv.stages)
        both_ctas = None
        if cutlass.const_expr(self.cluster == 2):
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
            cute.arch.block_idx_in_cluster() % self.cluster,
            cute.make_layout(self.cluster),
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
        keys = self._keys(operands, work)
        tiles = keys.last - keys.first
        tmem.wait_for_alloc()
        t_s, t_o = self._tmem_views(tmem.retrieve_ptr(self.acc_dtype))
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
        keys = self._keys(operands, work)
        tmem.allocate(self.tmem.allocated_columns)
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(self.acc_dtype)
        t_s, t_o = self._tmem_views(address)
        copies = fragments.make_copies(t_s[(None, None), 0, 0, 0])

        # ---- prologue: row state
        row_sinks = self._row_sinks(operands, work)
        both = keys.compressed > 0 and keys.window > 0
        rows = merge.new_rows(row_sinks, both, self.config.sink_mode)
        s_state = pipeline.make_pipeline_state(CONSUMER, self.edges.s.stages)
        p_state = pipeline.make_pipeline_state(PRODUCER, self.edges.p.stages)
        o_state = pipeline.make_pipeline_state(CONSUMER, 1)

        # ---- mainloop
        for tile in cutlass.range(keys.first, keys.last, unroll=1):
            if tile == keys.compressed_tiles and tile > keys.first:
                merge.enter_window(rows)
            valid = keys.compressed - tile * KEYS
            if tile >= keys.compressed_tiles:
                valid = keys.window - (tile - keys.compressed_tiles) * KEYS
            fragment = self._load_scores(pipes, copies, t_s, s_state)
            scores = fragments.by_rows(fragment)
            s_state.advance()
            if valid < KEYS:
                mask.mask_tail(scores, valid)
                self._clear_rows(smem, tile - keys.first, valid, copies.thread)
            tile_maximum = cute.make_rmem_tensor(2, Float32)
            softmax.row_maxima(scores, tile_maximum, self.scale_log2)
            if softmax.any_row_outgrew(rows.maximum, tile_maximum):
                factor = cute.make_rmem_tensor(2, Float32)
                softmax.raise_maxima(rows.maximum, rows.total, tile_maximum, factor)
                if tile > keys.first:
                    o_pipe.consumer_wait(o_state)
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
            p_pipe.producer_commit(p_state)
            p_state.advance()

        # ---- epilogue
        if keys.last > keys.first:
            o_pipe.consumer_wait(o_state)
        else:
            # The output is staged over Q, which no score has shown to be there.
            q_pipe.consumer_wait(pipeline.make_pipeline_state(CONSUMER, 1))
        self._finish(operands, work, keys, smem, copies, t_o, rows)
        # Freed while another warp still reads, O would belong to the next CTA of this SM.
        pipeline.NamedBarrier(TMEM_UNUSED, self.warps.softmax_threads).arrive_and_wait()
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
        fragment = fragments.load_columns(copies, columns)
        pipes.s.consumer_release(s_state)
        return fragment

    @cute.jit
    def _clear_rows(self, smem: Smem, index: Int32, valid: Int32, tidx: Int32):
        """Zero the rows of a partial tile past its keys: they may hold NaN, and 0 * NaN is NaN in P
        V.

        S of the tile is complete and P V waits for this thread's P: the softmax warps own the tile.
        Swizzling permutes 16-byte units within the 128-byte row of a 64-column box, so rows can be
        cleared by address.

        Args:
            index: how many tiles the CTA loaded before this one.
            valid: keys of the tile.
        """
        units = self.tiling.chunk_dim // 8
        unit, first_row = tidx % units, valid + tidx // units
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        for chunk in cutlass.range_constexpr(self.tiling.chunks):
            stage = (index * self.tiling.chunks + chunk) % self.edges.kv.stages
            box = stage * self.tiling.chunk_dim * KEYS + unit // 8 * COLUMNS * KEYS
            step = self.warps.softmax_threads // units
            for row in cutlass.range(first_row, KEYS, step, unroll=1):
                pointer = smem.k.iterator + (box + row * COLUMNS + unit % 8 * 8)
                raw = cute.recast_ptr(pointer.align(16), dtype=self.dtype)
                cute.autovec_copy(zeros, cute.make_tensor(raw, cute.make_layout(8)))

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
        rows: merge.RowState,
    ):
        """Write the CTA's rows: the output and lse, or with several splits its partial result."""
        heads = self._rows_of_thread(work)
        factor = cute.make_rmem_tensor(2, Float32)
        sees_window = keys.last > keys.compressed_tiles
        for row in cutlass.range_constexpr(2):
            reference, offset = merge.reference(rows, row, sees_window)
            total = softmax.quad_sum(rows.total[row])
            factor[row] = Float32(1.0)
            first_lane = copies.thread % 4 == 0 and heads[row] < self.config.num_query_heads
            if operands.num_splits == 1:
                factor[row] = merge.output_factor(
                    reference, total, rows.sink[row], self.config.sink_mode
                )
                if first_lane and work.token < operands.lse.shape[0]:
                    lse = softmax.natural_lse(reference, total) + offset
                    operands.lse[work.token, heads[row]] = lse
            elif first_lane:
                _, stats = self._partials(operands)
                index = work.token * self.config.num_query_heads + heads[row]
                stats[0, work.split, index] = reference
                stats[1, work.split, index] = total
                stats[2, work.split, index] = offset
        has_keys = keys.last > keys.first
        if operands.num_splits == 1:
            self._store_output(operands.o, work, smem, copies, t_o, factor, has_keys)
        else:
            self._store_partial(operands, work, copies, t_o, factor, has_keys)

    def _partials(self, operands: Operands) -> tuple[cute.Tensor, cute.Tensor]:
        """The workspace as the combine reads it: rows (head_dim, split, row), then their stats."""
        rows = operands.request_ids.shape[0] * self.config.num_query_heads
        splits, head_dim = Int64(operands.num_splits), self.tiling.head_dim
        partials = cute.make_layout(
            (head_dim, operands.num_splits, rows), stride=(1, head_dim, splits * head_dim)
        )
        stats = cute.make_layout(
            (STATS, operands.num_splits, rows), stride=(1, STATS, splits * STATS)
        )
        start = operands.workspace.iterator
        return (
            cute.make_tensor(start, partials),
            cute.make_tensor(start + rows * splits * head_dim, stats),
        )

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
        partials, _ = self._partials(operands)
        heads = self._rows_of_thread(work)
        o_columns = self._output_columns(t_o)
        for i in cutlass.range(cute.size(o_columns, mode=[2]), unroll=1):
            fragment = self._finished_columns(copies, o_columns[None, None, i], factor, has_keys)
            values = fragments.by_rows(fragment)
            for row in cutlass.range_constexpr(2):
                if heads[row] < self.config.num_query_heads:
                    index = work.token * self.config.num_query_heads + heads[row]
                    target = partials[None, work.split, index].iterator
                    for group in cutlass.range_constexpr(COLUMNS // 8):
                        column = i * COLUMNS + group * 8 + copies.thread % 4 * 2
                        pair = cute.make_tensor((target + column).align(8), cute.make_layout(2))
                        pair[0] = values[row, 2 * group]
                        pair[1] = values[row, 2 * group + 1]


def fake_arguments(config: FmhaConfig) -> tuple[tuple, dict]:
    """Arguments of the kernel's call without data: every size and outer stride is symbolic."""
    tokens, rows, batch, width = (cute.sym_int() for _ in range(4))
    heads = config.num_query_heads
    fake = cute.runtime.make_fake_tensor

    def rows_of(*shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape), 1)
        return fake(BFloat16, (*shape, config.head_dim), strides, assumed_align=16)

    args = (
        rows_of(tokens, heads),
        rows_of(tokens, rows),
        rows_of(batch, width),
        fake(Int32, (batch,), (1,), assumed_align=4),
        fake(Float32, (heads,), (1,), assumed_align=4),
        fake(Int32, (tokens,), (1,), assumed_align=4),
        rows_of(tokens, heads),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    optional = {
        "compressed_lens": fake(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        "lse": fake(Float32, (cute.sym_int(), heads), (cute.sym_int64(), 1), assumed_align=4),
        "workspace": fake(Float32, (cute.sym_int64(),), (1,), assumed_align=16),
        "num_splits": Int32(1),
        "num_ctas": Int32(1),
    }
    return args, optional


def build(config: FmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return FmhaKernel.from_config(config).compile(options)
