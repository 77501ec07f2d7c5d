"""Hopper kernel of `sparse_fmha_with_swa`: TMA, wgmma, one score and two output warpgroups.

One CTA computes 64 heads of one token (or one split of its keys). Keys come in blocks of 64,
compressed rows first, then the window; a block is fetched once and serves as K and as V:

    length warp        finds where the keys of the next work items are
    prefetch warp      asks L2 for what comes first while the launch before ends
    load warp          Q, KV blocks -> shared memory (TMA)
    score warpgroup    S = Q K^T, softmax, P -> shared memory, one block ahead of
    output warpgroups  O += P V, each over half of the columns

Most of Q lives in the score warpgroup's registers, which leaves shared memory for three KV blocks
of head_dim 512: a block's successor-but-two is in flight while it is used, and the softmax of one
block runs beside the PV products of the previous one.

Where a launch has work for at most half of the multiprocessors, two CTAs compute a tile: both the
weights, each half of the output columns. Blocks are then free, and rows written, sooner. CTAs that
read the same keys are neighbours in a cluster, and load in step (`fmha_sm90_pace`).

The softmax keeps a stale reference per row instead of the running maximum: P = 2^(s - ref), and
ref moves only when a block exceeds it by more than 2^8; then the accumulators are rescaled. All
weights stay relative to one reference, so the final division is exact and nothing overflows.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental.cuda.tensor_map import TensorMap
from cutlass.experimental.primitives import mbarrier_try_wait_parity, prefetch_tensormap

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.mask import mask_tail
from dsv4.kernels.attention.sm90.device import (
    SMEM_CAPACITY,
    by_row,
    gemm,
    make_mma,
    make_q_map,
    make_row_tile_map,
    tma_load,
    tma_prefetch,
)
from dsv4.kernels.attention.sm90.heads_m_combine import SplitJoin, Tiling, make_tiling
from dsv4.kernels.attention.sm90.heads_m_epilogue import SPAN, WARP_ROWS, FinishedRows, load_sinks
from dsv4.kernels.attention.sm90.heads_m_fragments import (
    scale_rows,
    score_fragments,
    weight_steps,
    zero_rows,
)
from dsv4.kernels.attention.sm90.heads_m_softmax import set_bias, softmax
from dsv4.kernels.attention.sm90.heads_m_storage import init_barriers, shared_views, storage_type
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
from dsv4.kernels.attention.sm90.scheduler import Rounds, Turns, make_rounds
from dsv4.kernels.attention.sm90.throttle import CLUSTER, Pace, even_grid, keep_step, meet
from dsv4.kernels.attention.softmax import LOG2_E, quad_sum

REGISTERS_PER_SM = 65536
# K steps of P that fit the registers of an output thread: the last one takes the first one's place.
P_PLACES = 3
# K steps of QK that are left when the previous block's PV gets its turn.
EARLY_STEPS = 8
# K step of QK at which the previous block's P is stored.
STORE_STEP = 3
# K steps between asking a barrier and needing its answer.
ANSWER_STEPS = 2
WINDOW_FLAG = 128
# Pause between two prefetches of a CTA that waits for the launch before, in nanoseconds.
PREFETCH_PAUSE = 100


class FmhaManyHeads(FinishedRows):
    """Attention of any number of heads over compressed entries and a sliding window (sm_90a)."""

    # Arrivals of a warp on a barrier. One lane speaks for its warp after a warp sync; a checker
    # that follows each thread by itself needs all 32.
    warp_arrivals = 1

    # ---- construction ----

    def __init__(self, config: FmhaConfig, dtype=cutlass.BFloat16):
        self.head_dim = config.head_dim
        self.num_query_heads = config.num_query_heads
        self.sliding_window = config.sliding_window
        self.is_causal = config.is_causal
        self.is_gate = config.sink_mode == "swa_gate"
        self.scale_log2 = config.scale * LOG2_E
        self.dtype = dtype

        # ==== tile shape ====
        self.heads = 64  # rows of a tile: the M of a wgmma
        self.keys = 64  # keys of a block
        self.half_dim = self.head_dim // 2  # output columns of an output warpgroup
        self.pv_dim = min(128, self.half_dim)  # columns of a PV product: the N of a wgmma
        self.pieces = self.half_dim // self.pv_dim
        self.join = SplitJoin(
            config.head_dim, config.num_query_heads, config.sink_mode, self.pv_dim
        )
        self.chunk = min(64, self.half_dim)  # columns of a swizzle span
        # Whether rows leave in the boxes of a tensor map.
        self.can_stage = self.chunk * dtype.width // 8 == SPAN
        # Tiles of fewer heads are possible where they divide the heads evenly.
        heads = self.num_query_heads
        self.has_even_tiles = heads <= self.heads or heads % self.heads == 0
        # One CTA reads a token's keys, in blocks of 64 KB: where there are CTAs for all
        # multiprocessors, they wait for DRAM.
        self.is_read_bound = heads <= self.heads and self.head_dim == 512
        # Two CTAs read a token's keys, one for each head tile.
        self.has_neighbours = heads > self.heads
        # Columns of Q in shared memory; the rest passes through the KV ring into registers.
        self.q_smem_dim = 192 if self.head_dim == 512 else self.head_dim
        self.q_register_dim = self.head_dim - self.q_smem_dim

        # ==== warp schedule ====
        self.score_group, self.output_group, self.load_group = 0, 1, 3
        self.threads = 128 * 4
        self.score_registers, self.output_registers, self.load_registers = 152, 168, 24
        used = 128 * (self.score_registers + 2 * self.output_registers + self.load_registers)
        assert used <= REGISTERS_PER_SM, f"registers: {used} of {REGISTERS_PER_SM}"

        # ==== shared memory ====
        self.stages = 3  # KV ring
        self.storage = storage_type(self)
        size = self.storage.size_in_bytes()
        assert size <= SMEM_CAPACITY, f"shared memory: {size} of {SMEM_CAPACITY} bytes"

    def qk_mma(self):
        return make_mma(self.dtype, (self.heads, self.keys), OperandMajorMode.K)

    def qk_register_mma(self):
        return make_mma(self.dtype, (self.heads, self.keys), OperandMajorMode.K, True)

    def pv_mma(self):
        return make_mma(self.dtype, (self.heads, self.pv_dim), OperandMajorMode.MN, True)

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
        tiling = make_tiling(
            *(self.num_query_heads, self.heads, self.has_even_tiles),
            *(q.shape[0], num_splits, num_ctas, self.pieces == 2, self.join.column_groups),
            workspace.shape[0],
        )
        tile_rows = tiling.tile_heads if self.has_even_tiles else self.num_query_heads
        q_map = make_q_map(q, tile_rows, self.chunk, self.heads)
        box = (self.keys, self.half_dim)
        compressed_map = make_row_tile_map(compressed_kv, q.iterator, self.chunk, box)
        window_map = make_row_tile_map(swa_kv, q.iterator, self.chunk, box)
        o_map = make_row_tile_map(o, q.iterator, self.chunk, (WARP_ROWS, self.chunk))
        arguments = (
            (q_map, compressed_map, window_map),
            o_map,
            q,
            compressed_kv.shape[1],
            (swa_kv.shape[0], swa_kv.shape[1]),
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            tiling,
            request_divisor(q.shape[0], swa_kv.shape[0]),
        )
        rounds = make_rounds(tiling.works, num_ctas, self.is_read_bound)
        alone = {"grid": [rounds.grid(tiling.works), 1, 1]}
        pairs = {"grid": [even_grid(tiling.works, num_ctas), 1, 1], "cluster": CLUSTER}
        plain_grid = pairs if self.has_neighbours else alone
        launch = {
            "block": [self.threads, 1, 1],
            "stream": stream,
            "min_blocks_per_mp": 1,
            "use_pdl": True,
        }
        # Two kernels: what splits and shared columns need costs the others instructions and
        # registers at every change of tiles.
        if num_splits == 1 and tiling.column_shares == 1:
            self.kernel(*arguments, *rounds, True).launch(**plain_grid, **launch)
        else:
            self.kernel(*arguments, *rounds, False).launch(**pairs, **launch)

    # ---- device: dispatch ----

    @cute.kernel
    def kernel(
        self,
        maps: tuple[
            cutlass.GridConstant[TensorMap],
            cutlass.GridConstant[TensorMap],
            cutlass.GridConstant[TensorMap],
        ],
        o_map: cutlass.GridConstant[TensorMap],
        q: cute.Tensor,
        compressed_rows: cutlass.Int32,
        window_shape: tuple,  # batch, W
        swa_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        request_ids: cute.Tensor,
        o: cute.Tensor,
        compressed_lens: cute.Tensor,
        lse: cute.Tensor,
        workspace: cute.Tensor,
        tiling: Tiling,
        by_request_tokens: cute.FastDivmodDivisorV2,
        ctas: cutlass.Int32,
        regular_works: cutlass.Int32,
        is_plain: cutlass.Constexpr,  # neither splits nor shared columns
    ):
        if cutlass.const_expr(is_plain):
            tiling = tiling.plain(self.num_query_heads, self.heads)
        pace = Pace.FREE
        if cutlass.const_expr(is_plain and self.is_read_bound):
            pace = Pace.TWO_HALVES
        elif cutlass.const_expr(is_plain and self.has_neighbours):
            pace = Pace.IN_STEP
        if cutlass.const_expr(pace is Pace.TWO_HALVES):
            turns = Rounds(ctas, regular_works)
        else:
            turns = Turns(tiling.works)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        smem = shared_views(self)
        if warp == 0:
            with cute.arch.elect_one():
                init_barriers(self, smem, tiling.column_shares, pace)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(pace is Pace.IN_STEP):
            meet()
        else:
            cute.arch.sync_threads()
        if group == self.load_group:
            cute.arch.setmaxregister_decrease(self.load_registers)
            tensors = (swa_lens, request_ids, compressed_lens)
            sizes = (q.shape[0], compressed_rows, *window_shape)
            lengths = Lengths(*sizes, *tensors, by_request_tokens)
            if warp == 4 * self.load_group:
                cute.arch.griddepcontrol_launch_dependents()
                self.load(smem, maps, lengths, tiling, turns, pace)
                if cutlass.const_expr(pace is Pace.IN_STEP):
                    meet()
            elif warp == 4 * self.load_group + 1:
                q_stages = 1 if self.q_register_dim else 0
                find_keys(
                    *(smem, lengths, tiling, turns),
                    *(self.keys, self.is_causal, self.sliding_window),
                    lambda work: self._describe_block(smem, work, work.first, q_stages),
                )
            elif warp == 4 * self.load_group + 2:  # noqa: SIM102 dynamic, then static
                if cutlass.const_expr(pace is Pace.TWO_HALVES):
                    self.fetch_ahead(smem, maps, tiling, turns)
        elif group == self.score_group:
            cute.arch.setmaxregister_increase(self.score_registers)
            self.score(smem, sink_logits, lse, workspace, tiling, turns)
        else:
            cute.arch.setmaxregister_increase(self.output_registers)
            half = group - self.output_group
            output_maps = (o_map,) if is_plain and self.can_stage else ()
            self.output(smem, half, sink_logits, o, output_maps, lse, workspace, tiling, turns)

    # ---- device: load warps ----

    @cute.jit
    def fetch_ahead(self, smem, maps, tiling, turns):
        """Bring what comes first into L2, piece by piece, until the launch before is over.

        A CTA that starts early finds DRAM idle; one that starts late soon stops: all that it asks
        for twice is in the way of its loads. `_prefetch` says why this may overlap writes.
        """
        q_map, compressed_map, _ = maps
        lane = cute.arch.lane_idx()
        index, _, _ = turns.of_cta(cute.arch.block_idx()[0])
        head_tile, _, token = tiling.coordinates(index)
        chunks, half_chunks = self.head_dim // self.chunk, self.half_dim // self.chunk
        is_over = cutlass.Boolean(tiling.leaves_room)
        piece = cutlass.Int32(0)
        while piece < 2 + chunks and not is_over:
            if lane == 0:
                if piece < 2:
                    tma_prefetch(compressed_map, [0, 0, piece * half_chunks, token])
                else:
                    tma_prefetch(q_map, self._q_coordinates(head_tile, piece - 2, token))
            piece += 1
            is_over = cute.arch.vote_any_sync(
                mbarrier_try_wait_parity(smem.inputs_ready, 0, time_limit=PREFETCH_PAUSE)
            )

    @cute.jit
    def _describe_block(self, smem, work, block, stage):
        """Say how many keys of the block in a stage are valid, and of which branch they are."""
        is_window, _, valid = work.place(block, self.keys)
        smem.block[stage] = valid + cutlass.select_(
            is_window, cutlass.Int32(WINDOW_FLAG), cutlass.Int32(0)
        )

    @cute.jit
    def load(self, smem, maps, lengths, tiling, turns, pace: cutlass.Constexpr):
        """Keep Q and the KV ring full."""
        q_map, _, _ = maps
        lane = cute.arch.lane_idx()
        for tensor_map in maps:
            prefetch_tensormap(tensor_map.get_ptr())
        index, stop, step = turns.of_cta(cute.arch.block_idx()[0])
        head_tile, split, token = tiling.coordinates(index)
        guess = guess_first_block(lengths, token, split, tiling.by_splits, self.keys)
        # A CTA that starts when the launch before it is over would only load everything twice.
        if tiling.leaves_room and lane == 0:
            self._prefetch(maps, head_tile, token, guess)
        # Whatever ran before may still be writing the inputs, or reading what this launch writes.
        # The warps that compute touch memory only after data that this one and `find_keys` fetch.
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(pace is Pace.TWO_HALVES):  # noqa: SIM102 static, then dynamic
            if lane == 0:
                cute.arch.mbarrier_arrive(smem.inputs_ready)
        q_bytes = self.heads * self.q_smem_dim * self.dtype.width // 8
        q_phase, work_phase = cutlass.Int32(1), cutlass.Int32(0)
        stage, phase = cutlass.Int32(0), cutlass.Int32(1)
        while index < stop:
            # ---- Q: one part passes through the ring, the other needs the last QK to be over ----
            stage, phase = self._load_q_registers(
                smem, q_map, head_tile, token, lane, stage, phase, pace
            )
            cute.arch.mbarrier_wait(smem.q_empty, q_phase)
            q_phase ^= 1
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full, q_bytes)
                for chunk in cutlass.range_constexpr(self.q_smem_dim // self.chunk):
                    target = smem.q_raw + chunk * self.heads * self.chunk
                    self._load_q(q_map, target, head_tile, chunk, token, smem.q_full)
            if guess.exists():
                # Nobody has to free this stage: it has not been used before. The half that QK
                # reads first comes first, and behind Q: QK starts before the other one is there.
                if cutlass.const_expr(pace is Pace.IN_STEP):
                    keep_step(smem.in_step, stage, phase, lane)
                if lane == 0:
                    for half in cutlass.range_constexpr(1, -1, -1):
                        self._load_half(smem, maps, guess, token, stage, half)
                stage, phase = self._advance(stage, phase)

            if cutlass.const_expr(self.q_register_dim > 0):
                # All CTAs start at once. Where neighbours fetch the same keys, Q is much of what
                # they fetch first, and blocks beside it would make it late.
                has_neighbours = tiling.head_tiles * tiling.column_shares > 1
                is_first = index == cute.arch.block_idx()[0]
                if is_first and has_neighbours and not tiling.leaves_room:
                    cute.arch.mbarrier_wait(smem.kv_full + 1, cutlass.Int32(0))
                    cute.arch.mbarrier_wait(smem.q_full, cutlass.Int32(0))

            # ---- KV blocks ----
            cute.arch.mbarrier_wait(smem.work_full, work_phase)
            work_phase ^= 1
            work = Work.load(smem.work)
            self._release(smem.work_empty, lane)
            guess = guess._replace(block=cutlass.Int32(-1))
            done = cutlass.select_(work.has(RIGHT_GUESS), cutlass.Int32(1), cutlass.Int32(0))
            for n in cutlass.range(done, work.count, unroll=1):
                self._load_block(smem, maps, work, work.first + n, token, lane, stage, phase, pace)
                stage, phase = self._advance(stage, phase)
            index += step
            head_tile, split, token = tiling.coordinates(index)

    @cute.jit
    def _load_q_registers(
        self, smem, q_map, head_tile, token, lane, stage, phase, pace: cutlass.Constexpr
    ):
        """Send the register columns of Q through a stage of the KV ring, in the place of K's."""
        if cutlass.const_expr(self.q_register_dim > 0):
            chunks = self.head_dim // self.chunk
            first = self.q_smem_dim // self.chunk
            for half in cutlass.range_constexpr(2):
                begin, end = max(first, half * chunks // 2), (half + 1) * chunks // 2
                slot = stage * 2 + half
                full = smem.kv_full + slot
                chunk_elements = self.heads * self.chunk
                cute.arch.mbarrier_wait(smem.kv_empty + slot, phase)
                if cutlass.const_expr(pace is Pace.IN_STEP and half == 0):
                    keep_step(smem.in_step, stage, phase, lane)
                if lane == 0:
                    bytes = (end - begin) * chunk_elements * self.dtype.width // 8
                    cute.arch.mbarrier_arrive_and_expect_tx(full, bytes)
                    for chunk in cutlass.range_constexpr(begin, end):
                        target = smem.kv_raw + (stage * chunks + chunk) * chunk_elements
                        self._load_q(q_map, target, head_tile, chunk, token, full)
            stage, phase = self._advance(stage, phase)
        return stage, phase

    @cute.jit
    def _load_block(
        self, smem, maps, work, block, token, lane, stage, phase, pace: cutlass.Constexpr
    ):
        """Fetch a block of a token's keys into a stage, each half when it is free; the one that QK
        reads first comes first."""
        is_window, row, _ = work.place(block, self.keys)
        place = Guess(block, is_window, row, work.request)
        before, before_phase = self._retreat(stage, phase ^ 1)
        for half in cutlass.range_constexpr(1, -1, -1):
            cute.arch.mbarrier_wait(smem.kv_empty + (stage * 2 + half), phase)
            if cutlass.const_expr(pace is Pace.IN_STEP and half == 1):
                keep_step(smem.in_step, stage, phase, lane)
            if cutlass.const_expr(pace is Pace.TWO_HALVES):
                cute.arch.mbarrier_wait(smem.kv_full + (before * 2 + half), before_phase)
            if lane == 0:
                if cutlass.const_expr(half == 1):
                    self._describe_block(smem, work, block, stage)
                self._load_half(smem, maps, place, token, stage, half)

    @cute.jit
    def _load_half(self, smem, maps, place, token, stage, half: cutlass.Constexpr):
        """Fetch half of the columns of a block; one thread calls this."""
        _, compressed_map, window_map = maps
        slot = stage * 2 + half
        full = smem.kv_full + slot
        target = smem.kv_raw + slot * self.keys * self.half_dim
        chunk = half * (self.half_dim // self.chunk)
        half_bytes = self.keys * self.half_dim * self.dtype.width // 8
        cute.arch.mbarrier_arrive_and_expect_tx(full, half_bytes)
        if place.is_window:
            tma_load(window_map, target, [0, place.row, chunk, place.request], full)
        else:
            tma_load(compressed_map, target, [0, place.row, chunk, token], full)

    @cute.jit
    def _prefetch(self, maps, head_tile, token, guess):
        """Bring Q and the block that is likely to come first into L2; one thread calls this.

        This may overlap whatever runs before and writes them: L2 is where all writes meet, so that
        a line fetched too early is not a stale one.
        """
        q_map, compressed_map, window_map = maps
        for chunk in cutlass.range_constexpr(self.head_dim // self.chunk):
            tma_prefetch(q_map, self._q_coordinates(head_tile, chunk, token))
        if guess.exists():
            for half in cutlass.range_constexpr(1, -1, -1):
                chunk = half * (self.half_dim // self.chunk)
                if guess.is_window:
                    tma_prefetch(window_map, [0, guess.row, chunk, guess.request])
                else:
                    tma_prefetch(compressed_map, [0, guess.row, chunk, token])

    def _load_q(self, q_map, target, head_tile, chunk, token, barrier):
        tma_load(q_map, target, self._q_coordinates(head_tile, chunk, token), barrier)

    def _q_coordinates(self, head_tile, chunk, token):
        row, tile = (0, head_tile) if self.has_even_tiles else (head_tile * self.heads, 0)
        return [0, row, chunk, tile, token]

    # ---- device: score warpgroup ----

    @cute.jit
    def score(self, smem, sink_logits, lse, workspace, tiling, turns):
        """S = Q K^T and the softmax of every block; the row statistics of every work item."""
        tile = score_fragments(self, smem)
        lane = tile.lane
        index, stop, step = turns.of_cta(cute.arch.block_idx()[0])
        q_phase, rows_phase = cutlass.Int32(0), cutlass.Int32(1)
        stage, phase, blocks = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        while index < stop:
            member = self.join.member(tiling, index)
            head = member.head + tile.row

            # ---- prologue ----
            cute.arch.mbarrier_wait(smem.work_full, q_phase)
            work = Work.load(smem.work)
            self._release(smem.work_empty, lane)
            count, is_miss = work.count, work.has(WRONG_GUESS)
            has_both = work.has(BOTH_BRANCHES)
            gate_offset = set_bias(
                tile.rows, self.is_gate, has_both, sink_logits, head, self.num_query_heads
            )
            tile.rows.reset()
            # Asked for at the end, they would hold up the output, and the next work item with it.
            sinks = load_sinks(sink_logits, head, self.num_query_heads)
            stage, phase = self._take_q_registers(smem, tile, tiling, stage, phase)
            cute.arch.mbarrier_wait(smem.q_full, q_phase)
            q_phase ^= 1
            if is_miss:
                for half in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_wait(smem.kv_full + (stage * 2 + half), phase)
                    self._release(smem.kv_empty + (stage * 2 + half), lane, tiling.column_shares)
                stage, phase = self._advance(stage, phase)

            # ---- blocks ----
            # P waits in registers until the next block's QK is under way, and PV until it is over:
            # so PV fills the tensor cores during the softmax, and storing P delays nobody. Unless
            # that block is not there yet.
            is_held, is_here = cutlass.Boolean(False), cutlass.Boolean(False)
            for n in cutlass.range(count, unroll=1):
                keys, is_here = self._multiply_keys(
                    smem, tile, blocks, stage, phase, is_held, is_here
                )
                if n == count - 1:
                    self._release(smem.q_empty, lane)
                self._weigh_keys(smem, tile, stage, keys)
                is_held = cutlass.Boolean(True)
                blocks += 1
                stage, phase = self._advance(stage, phase)
            if is_held:
                cute.arch.mbarrier_wait(smem.p_empty, blocks % 2)
                self._store_weights(smem, tile)
                self._release(smem.pv_turn + (1 - blocks % 2), lane)
            if count == 0:
                self._release(smem.q_empty, lane)

            # ---- epilogue ----
            for r in cutlass.range_constexpr(2):
                tile.rows.sum[r] = quad_sum(tile.rows.sum[r])
            cute.arch.mbarrier_wait(smem.rows_empty, rows_phase)
            rows_phase ^= 1
            if lane % 4 == 0:
                self.finish_rows(smem, tile, member, tiling, gate_offset, sinks, lse, workspace)
            self._release(smem.rows_full, lane)
            index += step

    @cute.jit
    def _multiply_keys(self, smem, tile, blocks, stage, phase, is_held, is_here):
        """S of a block; returns its word in `smem.block`, and whether the next block is there.

        P of the previous block is stored meanwhile, and its PV gets its turn, if it is held back.
        """
        turn = smem.pv_turn + (1 - blocks % 2)
        if not is_here:
            if is_held and not self._has_landed(smem, stage, phase):
                cute.arch.mbarrier_wait(smem.p_empty, blocks % 2)
                self._store_weights(smem, tile)
                self._release(turn, tile.lane)
                is_held = cutlass.Boolean(False)
            cute.arch.mbarrier_wait(smem.kv_full + (stage * 2 + 1), phase)
        is_held = self._issue_scores(smem, tile, blocks, stage, phase, is_held)

        # Beside PV shared memory answers late: the softmax must not wait for it.
        keys = smem.block[stage]
        is_next_here = self._has_landed(smem, *self._advance(stage, phase))
        warpgroup.wait_group(1)
        if is_held:
            self._release(turn, tile.lane)
        warpgroup.wait_group(0)
        return keys, is_next_here

    @cute.jit
    def _weigh_keys(self, smem, tile, stage, keys):
        """P of a block, and what the older accumulators are to be scaled by, in registers."""
        valid = keys % WINDOW_FLAG
        if valid < self.keys:
            mask_tail(cute.group_modes(by_row(tile.s), 1, 3), valid, tile.lane)
            self._zero_rows(smem, stage, valid, tile.thread)
        softmax(tile.s, tile.rows, keys >= WINDOW_FLAG, self.scale_log2, self.is_gate)
        tile.p.store(tile.s.load().to(self.dtype))

    @cute.jit
    def _store_weights(self, smem, tile):
        """Leave P, and its factors, for PV to read."""
        p = weight_steps(tile.p)
        for i in cutlass.range_constexpr(self.keys // 16):
            cute.autovec_copy(p[None, i], smem.p[None, tile.thread, i])
        cute.autovec_copy(tile.rows.rescale, smem.rescale[None, tile.thread])
        self._release(smem.p_full, tile.lane)

    @cute.jit
    def _take_q_registers(self, smem, tile, tiling, stage: cutlass.Int32, phase: cutlass.Int32):
        """Read the register columns of Q from the ring stage that brought them, and free it."""
        if cutlass.const_expr(self.q_register_dim > 0):
            mma = self.qk_register_mma()
            load = cute.make_tiled_copy_A(
                cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma
            )
            load_slice = load.get_slice(tile.thread)
            source = load_slice.partition_S(smem.k)
            target = load_slice.retile(tile.q_registers)
            first = self.q_smem_dim // 16
            for half in cutlass.range_constexpr(2):
                cute.arch.mbarrier_wait(smem.kv_full + (stage * 2 + half), phase)
            for i in cutlass.range_constexpr(self.q_register_dim // 16):
                cute.copy(load, source[None, None, first + i, stage], target[None, None, i])
            # An arrival overtakes loads on their way: the next TMA would then be what they read.
            cute.arch.fence_view_async_shared()
            for half in cutlass.range_constexpr(2):
                self._release(smem.kv_empty + (stage * 2 + half), tile.lane, tiling.column_shares)
            stage, phase = self._advance(stage, phase)
        return stage, phase

    @cute.jit
    def _has_landed(self, smem, stage: cutlass.Int32, phase: cutlass.Int32):
        """Whether the half of a block is there that QK reads first."""
        full = smem.kv_full + (stage * 2 + 1)
        return cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(full, phase))

    @cute.jit
    def _issue_scores(
        self, smem, tile, blocks, stage: cutlass.Int32, phase, is_held: cutlass.Boolean
    ):
        """S = Q K^T in two groups; returns whether PV of the previous block still waits.

        When the first group is over, PV of the previous block may start: the output warpgroups
        take about as long to do so as the second group takes to end. The second half of the
        columns comes first: it is loaded first, and the other may still be on its way.
        """
        steps, smem_steps = self.head_dim // 16, self.q_smem_dim // 16
        middle, early = steps // 2, steps - min(EARLY_STEPS, steps // 2)
        store = min(STORE_STEP, early - 1)
        # Products with Q in registers first: the others queue up, and leave the warps free.
        order = [*range(middle, steps), *range(smem_steps, middle), *range(min(smem_steps, middle))]
        rest_full = smem.kv_full + stage * 2
        k = tile.k[None, None, None, stage]
        warpgroup.fence()
        for i in cutlass.range_constexpr(steps):
            if cutlass.const_expr(i == early):
                warpgroup.commit_group()
            if cutlass.const_expr(i == max(store - ANSWER_STEPS, 0)):
                is_free = cute.arch.mbarrier_test_wait(smem.p_empty, blocks % 2)
            if cutlass.const_expr(i == store):  # noqa: SIM102 static, then dynamic
                if is_held:
                    if not cute.arch.vote_all_sync(is_free):
                        cute.arch.mbarrier_wait(smem.p_empty, blocks % 2)
                    self._store_weights(smem, tile)
            if cutlass.const_expr(i == max(middle - ANSWER_STEPS, 0)):
                is_rest_here = cute.arch.mbarrier_test_wait(rest_full, phase)
            if cutlass.const_expr(i == middle):  # noqa: SIM102 static, then dynamic
                if not cute.arch.vote_all_sync(is_rest_here):
                    if is_held:
                        self._release(smem.pv_turn + (1 - blocks % 2), tile.lane)
                        is_held = cutlass.Boolean(False)
                    cute.arch.mbarrier_wait(rest_full, phase)
            step = order[i]
            if cutlass.const_expr(step < smem_steps):
                gemm(self.qk_mma, tile.s, tile.q, k, [step], 0, i > 0)
            else:
                gemm(self.qk_register_mma, tile.s, tile.q_registers, k, [step], smem_steps, i > 0)
        warpgroup.commit_group()
        return is_held

    @cute.jit
    def _zero_rows(self, smem, stage, valid: cutlass.Int32, thread):
        """Clear the rows of a block from `valid` on."""
        vectors_per_row = self.chunk // 8
        shape = (8, self.keys * vectors_per_row, self.head_dim // self.chunk)
        start = smem.kv_raw + stage * self.keys * self.head_dim
        vectors = cute.make_tensor(start, cute.make_layout(shape))
        zero_rows(vectors, valid * vectors_per_row + thread, self.dtype)

    # ---- device: output warpgroups ----

    @cute.jit
    def output(
        self, smem, half: cutlass.Int32, sink_logits, o, o_maps, lse, workspace, tiling, turns
    ):
        """O += P V over half of the columns, and the output rows."""
        thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        row = thread // 32 * 16 + lane // 4
        for o_map in o_maps:
            prefetch_tensormap(o_map.get_ptr())

        mma = self.pv_mma()
        mma_slice = mma.get_slice(0)
        p = mma.make_fragment_A(mma.partition_shape_A((self.heads, 16 * P_PLACES)))
        v = mma_slice.make_fragment_B(mma_slice.partition_B(smem.v))
        piece = mma.make_fragment_C(mma.partition_shape_C((self.heads, self.pv_dim)))
        acc = cute.make_rmem_tensor(self.pieces * cute.size(piece), cutlass.Float32)
        pieces = tuple(
            cute.make_tensor(acc.iterator + i * cute.size(piece), piece.layout)
            for i in range(self.pieces)
        )

        # Half of the columns for each, or a piece each of the CTA's half.
        index, stop, step = turns.of_cta(cute.arch.block_idx()[0])
        is_shared = cutlass.Boolean(False)
        if cutlass.const_expr(self.pieces == 2):
            is_shared = tiling.column_shares > 1
        column_half = cutlass.select_(is_shared, tiling.column_share(index), half)
        # A shuffle stays where it is, outside of the loops.
        column_half = cute.arch.make_warp_uniform(column_half)
        first_piece = column_half * self.pieces + cutlass.select_(is_shared, half, cutlass.Int32(0))
        work_phase, blocks = cutlass.Int32(0), cutlass.Int32(0)
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        while index < stop:
            # ---- prologue ----
            member = self.join.member(tiling, index)
            cute.arch.mbarrier_wait(smem.work_full, work_phase)
            work = Work.load(smem.work)
            self._release(smem.work_empty, lane)
            count, is_miss = work.count, work.has(WRONG_GUESS)
            place = cutlass.Int32(0)
            if tiling.num_splits > 1:
                place = self.join.warp_place(tiling, member, half, thread // 32)
            acc.fill(0.0)
            # Stages with Q, or with nothing of use, belong to the score warpgroup.
            if cutlass.const_expr(self.q_register_dim > 0):
                stage, phase = self._advance(stage, phase)
            if is_miss:
                stage, phase = self._advance(stage, phase)

            # ---- blocks ----
            # Two loops: what is not known of the columns when the products start makes them late.
            if is_shared:
                blocks, stage, phase = self._multiply_blocks(
                    *(smem, p, v, pieces[:1], column_half, first_piece, count),
                    *(blocks, stage, phase),
                )
            else:
                blocks, stage, phase = self._multiply_blocks(
                    *(smem, p, v, pieces, half, half * self.pieces, count),
                    *(blocks, stage, phase),
                )

            # ---- epilogue ----
            if tiling.num_splits > 1:
                self._join_splits(
                    *(smem, pieces, workspace, tiling, member, place, half, work_phase),
                    *(sink_logits, o, lse),
                )
                self._release(smem.rows_empty, lane)
            else:
                cute.arch.mbarrier_wait(smem.rows_full, work_phase)
                scales = [smem.row_scale[row], smem.row_scale[row + 8]]
                self._release(smem.rows_empty, lane)
                # The stage after the last block's: free when nothing is loaded any more.
                target = smem.kv_raw + (stage * 2 + half) * self.keys * self.half_dim
                self.store_output(
                    *(pieces[0], acc, scales, o, o_maps, target, member),
                    *(first_piece * self.pv_dim, is_shared, index + step >= stop),
                )
            work_phase ^= 1
            index += step

    @cute.jit
    def _join_splits(
        self, smem, pieces, workspace, tiling, member, place, half, work_phase, sink_logits, o, lse
    ):
        """Leave the partial rows of a split, and join some of all of them."""
        thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        warp = thread // 32
        generation = self.join.generation(workspace, member, half, thread)
        self.join.store_accumulators(pieces, workspace, tiling, member, place, half, warp, lane)
        cute.arch.mbarrier_wait(smem.rows_full, work_phase)
        self.join.arrive(workspace, tiling, member, half, thread)
        # Found meanwhile: a warp that knows what to load may load it at once.
        piece = self.join.first_piece(tiling, half, member.split, warp)
        shares = self.join.await_others(
            workspace, tiling, member, half, generation, smem.shares, thread
        )
        self.join.join(
            *(workspace, tiling, member, half, shares, piece, warp, lane),
            *(sink_logits, smem.row_scale, o, lse),
        )

    @cute.jit
    def _multiply_blocks(
        self,
        smem,
        p,
        v,
        pieces,
        column_half,
        first_piece,
        count,
        blocks: cutlass.Int32,
        stage: cutlass.Int32,
        phase: cutlass.Int32,
    ):
        """O += P V of all blocks, over all pieces of half of the columns, or over one of them."""
        thread, lane = cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        factors = cute.make_rmem_tensor(2, cutlass.Float32)
        for _ in cutlass.range(count, unroll=1):
            slot = stage * 2 + column_half
            cute.arch.mbarrier_wait(smem.p_full, blocks % 2)
            for step in cutlass.range_constexpr(P_PLACES):
                self._take_weights(smem, p, thread, step, step)
            cute.autovec_copy(smem.rescale[None, thread], factors)
            if cutlass.const_expr(len(pieces) < self.pieces):
                # Columns that only QK reads, which is over.
                self._release(smem.kv_empty + (stage * 2 + 1 - column_half), lane)
            if cute.arch.vote_any_sync(factors[0] != 1.0 or factors[1] != 1.0):
                for piece in pieces:
                    scale_rows(piece, factors)
            cute.arch.mbarrier_wait(smem.kv_full + slot, phase)
            first = stage * (2 * self.pieces) + first_piece
            # The half of the columns that QK reads first goes first: its stage is free, and filled
            # again, that much sooner.
            is_first = cutlass.Boolean(False)
            if cutlass.const_expr(len(pieces) == self.pieces):
                is_first = column_half == 1
                if is_first:
                    cute.arch.mbarrier_wait(smem.pv_turn + blocks % 2, blocks // 2 % 2)
                else:
                    cute.arch.mbarrier_wait(smem.pv_next, blocks % 2)
            else:
                cute.arch.mbarrier_wait(smem.pv_turn + blocks % 2, blocks // 2 % 2)
            self._multiply_values(smem, pieces, p, v, first, thread, lane, is_first)
            self._release(smem.kv_empty + slot, lane)
            blocks += 1
            stage, phase = self._advance(stage, phase)
        return blocks, stage, phase

    @cute.jit
    def _multiply_values(self, smem, pieces, p, v, first, thread, lane, is_first):
        """O += P V of a block's pieces from `first` on; frees P.

        Three quarters of P wait in registers. When the products with the first quarter are over,
        the last one takes its place. The warpgroup that goes first lets the other one follow when
        the products with the last quarter are all that is left.
        """
        warpgroup.fence()
        for step in cutlass.range_constexpr(self.keys // 16):
            place = step % P_PLACES
            if cutlass.const_expr(step == P_PLACES):
                warpgroup.wait_group(P_PLACES - 1)
                self._take_weights(smem, p, thread, step, place)
                self._release(smem.p_empty, lane)
                warpgroup.fence()
            for i in cutlass.range_constexpr(len(pieces)):
                v_piece = v[None, None, None, first + i]
                gemm(self.pv_mma, pieces[i], p, v_piece, [step], step - place, True)
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        if is_first:
            self._release(smem.pv_next, lane)
        warpgroup.wait_group(0)

    def _take_weights(self, smem, p, thread, step: int, place: int):
        """Read a K step of P into a place of the registers."""
        cute.autovec_copy(smem.p[None, thread, step], weight_steps(p)[None, place])

    # ---- device: shared by the roles ----

    @cute.jit
    def _advance(self, stage: cutlass.Int32, phase: cutlass.Int32):
        """Next place in the KV ring; the phase flips when the ring wraps."""
        stage += 1
        if stage == self.stages:
            stage = cutlass.Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def _retreat(self, stage: cutlass.Int32, phase: cutlass.Int32):
        """Previous place in the KV ring."""
        stage -= 1
        if stage < 0:
            stage = cutlass.Int32(self.stages - 1)
            phase ^= 1
        return stage, phase

    @cute.jit
    def _release(self, barrier, lane, arrivals=1):
        """Arrivals of a warp, usually one, after every lane's reads and writes."""
        cute.arch.sync_warp()
        if lane < self.warp_arrivals:
            cute.arch.mbarrier_arrive(barrier, arrive_count=arrivals)
