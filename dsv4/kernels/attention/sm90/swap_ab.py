"""Hopper kernel of `sparse_fmha_with_swa` for few query heads: transposed products.

With few heads the time goes into reading keys, and the tiles of `fmha_sm90_many`, 64 heads high,
would be mostly padding. So the products are transposed: keys, then columns of the output, are the
64 rows of a wgmma, and a tile of a token's heads, usually all of them, its N:

    find warp       where the keys of a token are
    load warp       Q and blocks of 64 keys -> shared memory (TMA)
    math warpgroup  S^T = K Q^T, softmax, P^T -> shared memory, O^T += V^T P^T

A block of keys serves as K and as V. It is loaded, and freed, in parts of its columns: the ring of
parts holds two to three blocks, so that memory has always something to fetch while the warpgroup
goes through its chain of products and softmax.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental.cuda.tensor_map import TensorMap
from cutlass.experimental.primitives import prefetch_tensormap

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm90.device import (
    SMEM_CAPACITY,
    frozen,
    gemm,
    make_mma,
    make_row_tile_map,
    tma_load,
    tma_prefetch,
)
from dsv4.kernels.attention.sm90.heads_m_fragments import zero_rows
from dsv4.kernels.attention.sm90.key_span import (
    BOTH_BRANCHES,
    RIGHT_GUESS,
    WRONG_GUESS,
    Guess,
    Lengths,
    Work,
    find_keys,
    guess_first_block,
    request_divisor,
)
from dsv4.kernels.attention.sm90.scheduler import Turns
from dsv4.kernels.attention.sm90.swap_ab_combine import (
    FewHeadsJoin,
    HeadTiling,
    gate_offset,
    store_units,
)
from dsv4.kernels.attention.sm90.swap_ab_softmax import (
    PAIR,
    Board,
    Heads,
    add_weights,
    gate_biases,
    mask_keys,
    raise_references,
    scale_heads,
    store_weights,
    total_sums,
    weigh_keys,
)
from dsv4.kernels.attention.sm90.swap_ab_storage import shared_views, storage_type
from dsv4.kernels.attention.sm90.throttle import CLUSTER, even_grid
from dsv4.kernels.attention.sm100.combine import output_scale, row_lse
from dsv4.kernels.attention.softmax import LOG2_E


class FmhaFewHeads:
    """Attention of few query heads over compressed entries and a sliding window (sm_90a).

    Args:
        tile_heads: heads of a CTA, 8, 16 or 24; those of a token, up to 128, go to CTAs side by
            side.
    """

    # Arrivals of a warp on a barrier. One lane speaks for its warp after a warp sync; a checker
    # that follows each thread by itself needs all 32.
    warp_arrivals = 1

    # ---- construction ----

    def __init__(self, config: FmhaConfig, tile_heads: int, dtype=cutlass.BFloat16):
        self.head_dim = config.head_dim
        self.heads = tile_heads  # the N of both products
        self.head_tiles = config.num_query_heads // tile_heads
        self.sliding_window = config.sliding_window
        self.is_causal = config.is_causal
        self.is_gate = config.sink_mode == "swa_gate"
        self.scale_log2 = config.scale * LOG2_E
        self.dtype = dtype
        self.join = FewHeadsJoin(config.head_dim, tile_heads, config.sink_mode)

        # ==== tile shape ====
        self.keys = 64  # of a block: the M of QK
        self.tile = 64  # output columns of a PV product: its M, and a swizzle span
        self.tiles = self.head_dim // self.tile
        self.parts = min(4, self.tiles)  # of the columns of a block
        self.part_tiles = self.tiles // self.parts
        self.part_dim = self.head_dim // self.parts

        # ==== warps, shared memory ====
        self.math_threads, self.threads = 128, 192
        # The sums of a split are exchanged while its accumulators are on their way to the
        # workspace. With 24 heads the compiler would then serialise the products.
        self.sums_last = tile_heads <= 16
        # Parts in the ring: three blocks, or what is left beside Q.
        self.slots = 3 * self.parts
        while storage_type(self).size_in_bytes() > SMEM_CAPACITY:
            self.slots -= 1
        self.storage = storage_type(self)

    def _qk_mma(self):
        return make_mma(self.dtype, (self.keys, self.heads), OperandMajorMode.K)

    def _pv_mma(self):
        tile, major = (self.tile, self.heads), OperandMajorMode
        return make_mma(self.dtype, tile, major.K, a_major=major.MN)

    # ---- host ----

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
        workspace: cute.Tensor,  # [>= workspace_size] fp32 when num_splits > 1, zeros when new
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,  # persistent CTAs at most: the number of SMs
    ):
        q_map = make_row_tile_map(q, q.iterator, self.tile, (self.heads, self.head_dim))
        box = (self.keys, self.part_dim)
        compressed_map = make_row_tile_map(compressed_kv, q.iterator, self.tile, box)
        window_map = make_row_tile_map(swa_kv, q.iterator, self.tile, box)
        works = q.shape[0] * self.head_tiles * num_splits
        grid = {"grid": [cutlass.min(works, num_ctas), 1, 1]}
        if cutlass.const_expr(self.head_tiles % 2 == 0):
            grid = {"grid": [even_grid(works, num_ctas), 1, 1], "cluster": CLUSTER}
        self.kernel(
            (q_map, compressed_map, window_map),
            compressed_kv.shape[1],
            (swa_kv.shape[0], swa_kv.shape[1]),
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            (num_splits, works),
            cute.fast_divmod_create_divisor_v2(num_splits),
            request_divisor(q.shape[0], swa_kv.shape[0]),
        ).launch(
            **grid,
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device: dispatch ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],
            cutlass.GridConstant[TensorMap],
            cutlass.GridConstant[TensorMap],
        ],
        compressed_rows: cutlass.Int32,
        window_shape: tuple,  # batch, W
        swa_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        request_ids: cute.Tensor,
        o: cute.Tensor,
        compressed_lens: cute.Tensor,
        lse: cute.Tensor,
        workspace: cute.Tensor,
        splits_and_works: tuple,
        by_splits: cute.FastDivmodDivisorV2,
        by_request_tokens: cute.FastDivmodDivisorV2,
    ):
        tiling = HeadTiling(*splits_and_works, self.heads, self.head_tiles, by_splits)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = shared_views(self)
        if warp == 0:
            with cute.arch.elect_one():
                warps = self.math_threads // 32 * self.warp_arrivals
                cute.arch.mbarrier_init(smem.q_full, 1)
                cute.arch.mbarrier_init(smem.q_empty, warps)
                cute.arch.mbarrier_init(smem.work_full, 1)
                cute.arch.mbarrier_init(smem.work_empty, warps + self.warp_arrivals)
                for slot in cutlass.range_constexpr(self.slots):
                    cute.arch.mbarrier_init(smem.kv_full + slot, 1)
                    cute.arch.mbarrier_init(smem.kv_empty + slot, warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tensors = (swa_lens, request_ids, compressed_lens)
        sizes = (o.shape[0], compressed_rows, *window_shape)
        lengths = Lengths(*sizes, *tensors, by_request_tokens)
        if warp == self.math_threads // 32:
            self.load(smem, maps, lengths, tiling)
        elif warp > self.math_threads // 32:
            find_keys(
                *(smem, lengths, tiling, Turns(tiling.works)),
                *(self.keys, self.is_causal, self.sliding_window, None),
            )
        else:
            self.compute(smem, sink_logits, o, lse, workspace, tiling)

    # ---- device: load warp ----

    @cute.jit
    def load(self, smem, maps, lengths, tiling):
        """Bring Q and the blocks of keys of every work item."""
        q_map, _, _ = maps
        lane = cute.arch.lane_idx()
        for tensor_map in maps:
            prefetch_tensormap(tensor_map.get_ptr())
        index = cute.arch.block_idx()[0]
        head, split, token = tiling.coordinates(index)
        guess = guess_first_block(lengths, token, split, tiling.by_splits, self.keys)
        # This may overlap whatever runs before and writes the inputs: L2 is where all writes meet,
        # so that a line fetched too early is not a stale one.
        if lane == 0:
            tma_prefetch(q_map, [0, head, 0, token])
            if guess.exists():
                for part in cutlass.range_constexpr(self.parts):
                    self._prefetch_part(maps, guess, token, part)
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        cute.arch.griddepcontrol_wait()
        q_bytes = self.heads * self.head_dim * self.dtype.width // 8
        slot, phase, work_phase = cutlass.Int32(0), cutlass.Int32(1), cutlass.Int32(1)
        while index < tiling.works:
            cute.arch.mbarrier_wait(smem.q_empty, work_phase)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full, q_bytes)
                tma_load(q_map, smem.q_raw, [0, head, 0, token], smem.q_full)
                if guess.exists():
                    # Nobody has to free these slots: they have not been used before.
                    for part in cutlass.range_constexpr(self.parts):
                        self._load_part(smem, maps, guess, token, part, part)
            if guess.exists():
                slot, phase = self._advance(slot, phase, self.parts)
            guess = guess._replace(block=cutlass.Int32(-1))
            work_phase ^= 1
            cute.arch.mbarrier_wait(smem.work_full, work_phase)
            work = Work.load(smem.work)
            self._release(smem.work_empty, lane)
            done = cutlass.select_(work.has(RIGHT_GUESS), cutlass.Int32(1), cutlass.Int32(0))
            for n in cutlass.range(done, work.count, unroll=1):
                is_window, row, _ = work.place(work.first + n, self.keys)
                place = Guess(n, is_window, row, work.request)
                for part in cutlass.range_constexpr(self.parts):
                    cute.arch.mbarrier_wait(smem.kv_empty + slot, phase)
                    if lane == 0:
                        self._load_part(smem, maps, place, token, part, slot)
                    slot, phase = self._advance(slot, phase, 1)
            index += cute.arch.grid_dim()[0]
            head, _, token = tiling.coordinates(index)
        # Now memory has time for what the next launch fetches ahead.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _load_part(self, smem, maps, place, token, part: cutlass.Constexpr, slot):
        """Fetch a part of the columns of a block; one thread calls this."""
        _, compressed_map, window_map = maps
        full = smem.kv_full + slot
        target = smem.kv_raw + slot * self.keys * self.part_dim
        chunk = part * (self.part_dim // self.tile)
        part_bytes = self.keys * self.part_dim * self.dtype.width // 8
        cute.arch.mbarrier_arrive_and_expect_tx(full, part_bytes)
        if place.is_window:
            tma_load(window_map, target, [0, place.row, chunk, place.request], full)
        else:
            tma_load(compressed_map, target, [0, place.row, chunk, token], full)

    @cute.jit
    def _prefetch_part(self, maps, place, token, part: cutlass.Constexpr):
        """Ask for a part of the columns of a block to be brought into L2; one thread calls this."""
        _, compressed_map, window_map = maps
        chunk = part * (self.part_dim // self.tile)
        if place.is_window:
            tma_prefetch(window_map, [0, place.row, chunk, place.request])
        else:
            tma_prefetch(compressed_map, [0, place.row, chunk, token])

    # ---- device: math warpgroup ----

    @cute.jit
    def compute(self, smem, sink_logits, o, lse, workspace, tiling):
        """Scores, weights, accumulators and output of every work item."""
        state = self._fragments(smem)
        lane = state.lane
        index = cute.arch.block_idx()[0]
        # What the find warp says first comes after the launch before.
        cute.arch.mbarrier_wait(smem.work_full, cutlass.Int32(0))
        if state.thread < self.heads * self.head_tiles:
            smem.sinks[state.thread] = sink_logits[state.thread]
        state.board.sync()
        slot, phase, work_phase = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        while index < tiling.works:
            # ---- prologue ----
            board = state.board.of_heads(tiling.coordinates(index)[0])
            cute.arch.mbarrier_wait(smem.work_full, work_phase)
            work = Work.load(smem.work)
            self._release(smem.work_empty, lane)
            has_both = work.has(BOTH_BRANCHES)
            state.heads.reset()
            state.acc.fill(0.0)
            cute.arch.mbarrier_wait(smem.q_full, work_phase)
            if work.has(WRONG_GUESS):
                for part in cutlass.range_constexpr(self.parts):
                    cute.arch.mbarrier_wait(smem.kv_full + part, phase)
                    self._release(smem.kv_empty + part, lane)
                slot, phase = self._advance(slot, phase, self.parts)

            # ---- blocks ----
            for n in cutlass.range(work.count, unroll=1):
                is_window, _, valid = work.place(work.first + n, self.keys)
                self._multiply_keys(smem, state, slot, phase)
                if n == work.count - 1:
                    self._release(smem.q_empty, lane)
                self._weigh_keys(smem, state, board, n, is_window, has_both, valid, slot)
                self._multiply_values(smem, state, n, slot)
                slot, phase = self._advance(slot, phase, self.parts)
            if work.count == 0:
                self._release(smem.q_empty, lane)

            # ---- epilogue ----
            if cutlass.const_expr(not self.sums_last):
                total_sums(state.heads, state.board)
            member = self.join.member(workspace, tiling, index)
            if tiling.num_splits > 1:
                self._join_splits(
                    smem, state, workspace, tiling, member, has_both, sink_logits, o, lse
                )
            else:
                if cutlass.const_expr(self.sums_last):
                    total_sums(state.heads, state.board)
                self._store_heads(state, board, member, has_both, o, lse)
            work_phase ^= 1
            index += cute.arch.grid_dim()[0]

    def _fragments(self, smem):
        """Operands and state of a thread of the math warpgroup."""
        thread = cute.arch.thread_idx()[0]
        qk, pv = self._qk_mma(), self._pv_mma()
        qk_slice, pv_slice = qk.get_slice(0), pv.get_slice(0)
        s = qk.make_fragment_C(qk.partition_shape_C((self.keys, self.heads)))
        tile = pv.make_fragment_C(pv.partition_shape_C((self.tile, self.heads)))
        size = cute.size(tile)
        acc = cute.make_rmem_tensor((4, self.heads // 8, self.tiles), cutlass.Float32)
        return frozen(
            thread=thread,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            lane=cute.arch.lane_idx(),
            board=Board(smem.board, smem.totals, smem.sinks, thread, cutlass.Int32(0)),
            k=qk_slice.make_fragment_A(qk_slice.partition_A(smem.k)),
            q=qk_slice.make_fragment_B(qk_slice.partition_B(smem.q)),
            v=pv_slice.make_fragment_A(pv_slice.partition_A(smem.v)),
            p=pv_slice.make_fragment_B(pv_slice.partition_B(smem.p)),
            s=s,
            weights=cute.make_rmem_tensor_like(s),
            acc=acc,
            tiles=tuple(
                cute.make_tensor(acc.iterator + i * size, tile.layout) for i in range(self.tiles)
            ),
            heads=Heads.make(self.heads),
        )

    @cute.jit
    def _multiply_keys(self, smem, state, slot, phase):
        """S^T = K Q^T of a block, as its columns land."""
        steps = self.part_dim // 16
        warpgroup.fence()
        for part in cutlass.range_constexpr(self.parts):
            cute.arch.mbarrier_wait(smem.kv_full + slot, phase)
            k, q = state.k[None, None, None, slot], state.q[None, None, None, part]
            gemm(self._qk_mma, state.s, k, q, range(steps), 0, part > 0)
            slot, phase = self._advance(slot, phase, 1)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _weigh_keys(self, smem, state, board, n, is_window, has_both, valid: cutlass.Int32, slot):
        """P^T of a block into shared memory; accumulators and V become what PV wants.

        Weights are stored before anybody knows whether the references may stay: they nearly always
        may, and then this takes one barrier. Shared memory is slow beside products, so that the
        chain has as few accesses and barriers as it can.
        """
        heads, place = state.heads, (state.warp, state.lane, self.dtype)
        if valid < self.keys:
            mask_keys(state.s, valid, state.thread)
            # All warps have multiplied this block's keys.
            board.sync()
            shape = (8, self.keys * self.tile // 8, self.part_tiles)
            for _ in cutlass.range_constexpr(self.parts):
                start = smem.kv_raw + slot * self.keys * self.part_dim
                vectors = cute.make_tensor(start, cute.make_layout(shape))
                zero_rows(vectors, valid * (self.tile // 8) + state.thread, self.dtype)
                slot, _ = self._advance(slot, slot, 1)
        # Slower warps may still multiply by the weights of the block before: they are elsewhere.
        p = smem.p_raw + n % 2 * self.heads * self.keys
        heads.rescale.fill(1.0)
        biases = gate_biases(heads, board, is_window, has_both, self.is_gate)
        are_stale = cutlass.Boolean(True)
        if n > 0:
            are_right = weigh_keys(state.s, state.weights, heads, biases, self.scale_log2)
            store_weights(state.weights, p, *place)
            cute.arch.fence_view_async_shared()
            are_stale = board.any(not are_right)
        if are_stale:
            raise_references(state.s, state.weights, heads, board, biases, self.scale_log2)
            store_weights(state.weights, p, *place)
            cute.arch.fence_view_async_shared()
            board.sync()
        add_weights(state.weights, heads)
        if heads.are_raised():
            for tile in state.tiles:
                scale_heads(tile, heads)

    @cute.jit
    def _multiply_values(self, smem, state, n, slot):
        """O^T += V^T P^T of a block; frees its columns part by part."""
        steps = range(self.keys // 16)
        first, p = slot, state.p[None, None, None, n % 2]
        warpgroup.fence()
        for part in cutlass.range_constexpr(self.parts):
            for i in cutlass.range_constexpr(self.part_tiles):
                v = state.v[None, None, None, slot * self.part_tiles + i]
                acc = state.tiles[part * self.part_tiles + i]
                gemm(self._pv_mma, acc, v, p, steps, 0, True)
            warpgroup.commit_group()
            slot, _ = self._advance(slot, slot, 1)
        slot = first
        for part in cutlass.range_constexpr(self.parts):
            warpgroup.wait_group(self.parts - 1 - part)
            self._release(smem.kv_empty + slot, state.lane)
            slot, _ = self._advance(slot, slot, 1)

    @cute.jit
    def _join_splits(self, smem, state, workspace, tiling, member, has_both, sink_logits, o, lse):
        """Leave the partial rows of a split, and join some of all of them."""
        thread, lane, warp = state.thread, state.lane, state.warp
        generation = self.join.generation(workspace, member, 0, thread)
        self.join.store_accumulators(state.acc, workspace, tiling, member, warp, lane)
        if cutlass.const_expr(self.sums_last):
            total_sums(state.heads, state.board)
        self.join.store_statistics(state.heads, workspace, tiling, member, warp, lane)
        self.join.arrive(workspace, tiling, member, 0, thread)
        shares = self.join.await_others(
            workspace, tiling, member, 0, generation, smem.shares, thread
        )
        self.join.join_shares(
            *(workspace, tiling, member, shares, warp, lane),
            *(has_both, sink_logits, o, lse),
        )

    @cute.jit
    def _store_heads(self, state, board, member, has_both, o, lse):
        """Output and lse of a work item that has all of a token's keys."""
        heads, lane, warp = state.heads, state.lane, state.warp
        for j in cutlass.range_constexpr(self.heads // 8):
            sinks = [board.sink(c, j) for c in range(PAIR)]
            scales = [
                output_scale(heads.ref[c, j], heads.sum[c, j], sinks[c], not self.is_gate)
                for c in range(PAIR)
            ]
            head = member.head + 8 * j
            place = (member.token, head, warp * 16, self.tile, lane)
            store_units(state.acc[None, j, None], scales, o, *place)
            if member.token < lse.shape[0] and warp == 0 and lane < 4:
                for c in cutlass.range_constexpr(PAIR):
                    offset = gate_offset(sinks[c], has_both, self.is_gate)
                    value = row_lse(heads.ref[c, j], heads.sum[c, j], offset)
                    lse[member.token, head + 2 * lane + c] = value

    @cute.jit
    def _advance(self, slot: cutlass.Int32, phase: cutlass.Int32, parts: cutlass.Constexpr):
        """Place in the ring some parts further on; the phase flips when the ring wraps."""
        slot += parts
        if slot >= self.slots:
            slot -= self.slots
            phase ^= 1
        return slot, phase

    @cute.jit
    def _release(self, barrier, lane):
        """The arrival of a warp, after every lane's reads and writes."""
        cute.arch.sync_warp()
        if lane < self.warp_arrivals:
            cute.arch.mbarrier_arrive(barrier)
