"""Hopper kernel of `sparse_fmha_with_swa`: TMA, wgmma, two math warpgroups that share the output columns.

One CTA computes 64 heads of one token (or one split of its keys). Keys come in blocks of 64, compressed rows
first, then the window; a block is fetched once and serves as K and as V. Block n belongs to math warpgroup
n % 2: it computes S = Q K^T and the softmax, keeps its P in registers and hands a copy to the other warpgroup.
Each warpgroup accumulates half of the output columns over every block:

    warpgroup n % 2:  QK(n)   PV(n - 1, P from the other)   softmax(n) -> P   PV(n, own P)

so that one warpgroup's softmax runs beside the other's matrix products.

The softmax keeps a stale reference per row instead of the running maximum: P = 2^(s - ref), and ref moves only
when a block exceeds it by more than 2^8. Every handed-over P carries its reference; a receiver whose own
differs rescales whichever side is smaller. All weights stay relative to one reference, so the final division is
exact, and no exponential overflows.

The `swa_gate` sink is a bias on one branch's scores: -max(sink, 0) on compressed scores, min(sink, 0) on window
scores. The branch with the larger weight keeps bias 0, which makes sinks of any size, infinities included, exact.
"""

from collections import namedtuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.experimental.cuda.tensor_map import TensorMap
from cutlass.utils import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from dsv4.kernels.attention.config import SINK_MODES, FmhaConfig
from dsv4.kernels.attention.fmha_sm90_combine import (
    CombineSm90,
    output_scale,
    partial_views,
    row_lse,
    row_pointer,
)
from dsv4.kernels.attention.fmha_sm90_device import (
    LOG2_E,
    by_row,
    exp2,
    gemm,
    make_row_tile_map,
    quad_max,
    quad_sum,
    tma_load,
)

SMEM_CAPACITY = 232448
REGISTERS_PER_SM = 65536
# log2 of how far a score may exceed its row's reference before the reference moves.
STALE_LIMIT = 8.0


def frozen(**fields):
    """An immutable record: the tracer carries the fields of mutable objects through every staged loop."""
    return namedtuple("Record", fields)(**fields)


class Barrier:
    """Named barriers; 0 is sync_threads. Each pair is indexed by a warpgroup."""

    P_READY = 1
    WARPGROUP = 3
    PAIR = 5


class FmhaKernelSm90:
    """Attention over compressed entries and a sliding window, fused with the sink merge (sm_90a).

    Args:
        head_dim: 64, 128, 256 or 512.
        num_query_heads: a multiple of 8 up to 128; heads are padded to 64 in shared memory only.
        sliding_window: window size of `is_causal=True`; otherwise every row below `swa_lens` is visible.
        top_k: promised bound of compressed rows; the real capacity is a runtime size.
        num_splits: fixed number of KV splits, or None where each launch says.
    """

    # ---- construction ------------------------------------------------------------------------------------

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        sliding_window: int,
        top_k: int,
        q_dtype=cutlass.BFloat16,
        kv_dtype=cutlass.BFloat16,
        o_dtype=cutlass.BFloat16,
        qk_acc_dtype=cutlass.Float32,
        pv_acc_dtype=cutlass.Float32,
        is_causal: bool = False,
        *,
        softmax_scale: float | None = None,
        sink_mode: str = "swa_gate",
        num_splits: int | None = None,
    ):
        if head_dim not in (64, 128, 256, 512):
            raise ValueError(f"head_dim must be 64, 128, 256 or 512, got {head_dim}")
        if num_query_heads % 8 or not 8 <= num_query_heads <= 128:
            raise ValueError(
                f"num_query_heads must be a multiple of 8 in 8..128, got {num_query_heads}"
            )
        if sink_mode not in SINK_MODES:
            raise ValueError(f"sink_mode must be one of {SINK_MODES}, got {sink_mode!r}")
        if (q_dtype, kv_dtype, o_dtype) != (cutlass.BFloat16,) * 3:
            raise ValueError(f"q, KV and o must be BFloat16, got {q_dtype}, {kv_dtype}, {o_dtype}")
        if (qk_acc_dtype, pv_acc_dtype) != (cutlass.Float32,) * 2:
            raise ValueError(f"accumulators must be Float32, got {qk_acc_dtype}, {pv_acc_dtype}")
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if scale <= 0:
            raise ValueError(f"softmax_scale must be positive, got {scale}")
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads
        self.sliding_window = sliding_window
        self.top_k = top_k
        self.is_causal = is_causal
        self.is_gate = sink_mode == "swa_gate"
        self.scale_log2 = scale * LOG2_E
        self.num_splits = num_splits
        self.dtype = q_dtype
        self.combine = CombineSm90(head_dim, num_query_heads, sink_mode, o_dtype)

        # ==== tile shape ====
        self.heads = 64  # rows of a tile: the M of a wgmma
        self.keys = 64  # keys of a block
        self.stages = 2  # KV ring: the block of each math warpgroup
        self.half_dim = head_dim // 2  # output columns of a math warpgroup
        self.chunk = min(64, self.half_dim)  # columns of a swizzle span
        self.head_tiles = -(-num_query_heads // self.heads)

        # ==== warp schedule ====
        self.math_warpgroups = 2
        self.load_warp = 4 * self.math_warpgroups
        self.threads = 128 * (self.math_warpgroups + 1)
        self.math_registers, self.load_registers = 232, 40
        used = 128 * (self.math_warpgroups * self.math_registers + self.load_registers)
        assert used <= REGISTERS_PER_SM, f"registers: {used} of {REGISTERS_PER_SM}"

        # ==== shared memory ====
        self.storage = self._shared_storage()
        size = self.storage.size_in_bytes()
        assert size <= SMEM_CAPACITY, f"shared memory: {size} of {SMEM_CAPACITY} bytes"

    def _shared_storage(self):
        tile = self.heads * self.head_dim
        block = self.keys * self.head_dim
        p_tile = self.heads * self.keys

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, tile], 1024]
            kv: cute.struct.Align[cute.struct.MemRange[self.dtype, self.stages * block], 1024]
            # P of each warpgroup, double-buffered, in fragment order: thread i writes, thread i reads.
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, 4 * p_tile], 128]
            p_ref: cute.struct.MemRange[cutlass.Float32, 4 * self.heads]
            row_sum: cute.struct.MemRange[cutlass.Float32, 4 * self.heads]
            work: cute.struct.MemRange[cutlass.Int32, 8]
            q_full: cute.struct.MemRange[cutlass.Int64, 1]
            q_empty: cute.struct.MemRange[cutlass.Int64, 1]
            kv_full: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            kv_empty: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        return Storage

    def _qk_mma(self):
        return make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (self.heads, self.keys),
        )

    def _pv_mma(self):
        return make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (1, 1, 1),
            (self.heads, self.half_dim),
            warpgroup.OperandSource.RMEM,
        )

    # ---- host --------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        # fmt: off
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
        workspace: cute.Tensor,  # [>= workspace_size] fp32 when num_splits > 1
        num_splits: cutlass.Int32,
        num_ctas: cutlass.Int32,  # persistent CTAs at most: the number of SMs
        # fmt: on
    ):
        box = (self.keys, self.half_dim)
        q_map = make_row_tile_map(q, q.iterator, self.chunk, box)
        compressed_map = make_row_tile_map(compressed_kv, q.iterator, self.chunk, box)
        window_map = make_row_tile_map(swa_kv, q.iterator, self.chunk, box)
        tokens = q.shape[0]
        works = tokens * self.head_tiles * num_splits
        sizes = (tokens, compressed_kv.shape[1], swa_kv.shape[0], swa_kv.shape[1])
        self.kernel(
            q_map,
            compressed_map,
            window_map,
            sizes,
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            num_splits,
        ).launch(
            grid=[cutlass.min(works, num_ctas), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        if num_splits > 1:
            self.combine(workspace, sink_logits, o, lse, num_splits, stream)

    # ---- device: dispatch --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_map: cutlass.GridConstant[TensorMap],
        compressed_map: cutlass.GridConstant[TensorMap],
        window_map: cutlass.GridConstant[TensorMap],
        sizes: tuple,  # tokens, compressed rows, batch, window rows
        swa_lens: cute.Tensor,
        sink_logits: cute.Tensor,
        request_ids: cute.Tensor,
        o: cute.Tensor,
        compressed_lens: cute.Tensor,
        lse: cute.Tensor,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self._shared_views()
        if warp == 0:
            with cute.arch.elect_one():
                math_warps = 4 * self.math_warpgroups
                cute.arch.mbarrier_init(smem.q_full, 1)
                cute.arch.mbarrier_init(smem.q_empty, math_warps)
                for i in cutlass.range_constexpr(2 * self.stages):
                    cute.arch.mbarrier_init(smem.kv_full + i, 1)
                    cute.arch.mbarrier_init(smem.kv_empty + i, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        works = sizes[0] * self.head_tiles * num_splits
        if warp >= self.load_warp:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == self.load_warp:
                cute.arch.griddepcontrol_launch_dependents()
                self.load(
                    smem,
                    (q_map, compressed_map, window_map),
                    sizes,
                    swa_lens,
                    request_ids,
                    compressed_lens,
                    num_splits,
                    works,
                )
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            self.math(smem, sink_logits, o, lse, workspace, sizes[0], num_splits, works)

    def _shared_views(self):
        storage = SmemAllocator().allocate(self.storage)
        span = {32: "SW64", 64: "SW128"}[self.chunk]
        k_major = warpgroup.make_smem_layout_atom(
            getattr(warpgroup.SmemLayoutAtomKind, f"K_{span}"), self.dtype
        )
        mn_major = warpgroup.make_smem_layout_atom(
            getattr(warpgroup.SmemLayoutAtomKind, f"MN_{span}"), self.dtype
        )
        q = cute.tile_to_shape(k_major, (self.heads, self.head_dim), order=(0, 1))
        k = cute.tile_to_shape(k_major, (self.keys, self.head_dim, self.stages), order=(0, 1, 2))
        # The same bytes as K, seen as the transposed half blocks that the PV products read.
        v = cute.tile_to_shape(
            mn_major, (self.half_dim, self.keys, 2 * self.stages), order=(1, 0, 2)
        )
        return frozen(
            q=storage.q.get_tensor(q.outer, swizzle=q.inner),
            k=storage.kv.get_tensor(k.outer, swizzle=k.inner),
            v=storage.kv.get_tensor(v.outer, swizzle=v.inner),
            q_raw=storage.q.data_ptr(),
            kv_raw=storage.kv.data_ptr(),
            # [8 values, 4 vectors, thread, warpgroup * 2 + buffer]
            p=storage.p.get_tensor(cute.make_layout((8, 4, 128, 4), stride=(1, 1024, 8, 4096))),
            p_ref=storage.p_ref.get_tensor(cute.make_layout((self.heads, 4))),
            row_sum=storage.row_sum.get_tensor(cute.make_layout((self.heads, 4))),
            work=storage.work.get_tensor(cute.make_layout(8)),
            q_full=storage.q_full.data_ptr(),
            q_empty=storage.q_empty.data_ptr(),
            kv_full=storage.kv_full.data_ptr(),
            kv_empty=storage.kv_empty.data_ptr(),
        )

    # ---- device: load warp -------------------------------------------------------------------------------

    @cute.jit
    def load(
        self,
        smem,
        maps,
        sizes,
        swa_lens,
        request_ids,
        compressed_lens,
        num_splits: cutlass.Int32,
        works: cutlass.Int32,
    ):
        """Find each work item's key range, publish it, and keep Q and the KV ring full."""
        q_map, compressed_map, window_map = maps
        lane = cute.arch.lane_idx()
        half_bytes = self.keys * self.half_dim * self.dtype.width // 8
        half_chunks = self.half_dim // self.chunk
        grid = cute.arch.grid_dim()[0]
        index = cute.arch.block_idx()[0]
        q_phase = cutlass.Int32(1)
        phase_0 = cutlass.Int32(1)
        phase_1 = cutlass.Int32(1)
        while index < works:
            head_tile = index % self.head_tiles
            split = index // self.head_tiles % num_splits
            token = index // self.head_tiles // num_splits

            # ---- the keys of this work item ----
            compressed_len, window_begin, window_end, request = self._key_range(
                token, sizes, swa_lens, request_ids, compressed_lens, lane
            )
            compressed_blocks = cute.ceil_div(compressed_len, self.keys)
            blocks = compressed_blocks + cute.ceil_div(window_end - window_begin, self.keys)
            first = blocks * split // num_splits
            count = blocks * (split + 1) // num_splits - first

            # ---- Q and the description of the work ----
            cute.arch.mbarrier_wait(smem.q_empty, q_phase)
            q_phase ^= 1
            if lane == 0:
                smem.work[0] = count
                smem.work[1] = first
                smem.work[2] = compressed_blocks
                smem.work[3] = compressed_len
                smem.work[4] = window_begin
                smem.work[5] = window_end
                if count > 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full, 2 * half_bytes)
                    for half in cutlass.range_constexpr(2):
                        tma_load(
                            q_map,
                            smem.q_raw + half * self.heads * self.half_dim,
                            head_tile * self.heads,
                            half * half_chunks,
                            token,
                            smem.q_full,
                        )
                else:
                    cute.arch.mbarrier_arrive(smem.q_full)

            # ---- KV blocks ----
            for n in cutlass.range(count, unroll=1):
                stage = n % 2
                phase = phase_0 if stage == 0 else phase_1
                block = first + n
                is_window = block >= compressed_blocks
                compressed_row = block * self.keys
                window_row = window_begin + (block - compressed_blocks) * self.keys
                for half in cutlass.range_constexpr(2):
                    slot = stage * 2 + half
                    target = smem.kv_raw + slot * self.keys * self.half_dim
                    cute.arch.mbarrier_wait(smem.kv_empty + slot, phase)
                    if lane == 0:
                        full = smem.kv_full + slot
                        cute.arch.mbarrier_arrive_and_expect_tx(full, half_bytes)
                        if is_window:
                            tma_load(
                                window_map, target, window_row, half * half_chunks, request, full
                            )
                        else:
                            tma_load(
                                compressed_map,
                                target,
                                compressed_row,
                                half * half_chunks,
                                token,
                                full,
                            )
                if stage == 0:
                    phase_0 ^= 1
                else:
                    phase_1 ^= 1
            index += grid

    @cute.jit
    def _key_range(self, token, sizes, swa_lens, request_ids, compressed_lens, lane):
        """Number of compressed keys, first and last window row, request; lengths clamped, padding empty."""
        tokens, compressed_rows, batch, window_rows = sizes
        request = request_ids[token]
        is_real = request >= 0 and request < batch
        compressed_len = cutlass.Int32(compressed_rows)
        if token < compressed_lens.shape[0]:
            compressed_len = compressed_lens[token]
        window_end = cutlass.Int32(0)
        if is_real:
            window_end = swa_lens[request]
        window_end = cutlass.max(cutlass.min(window_end, window_rows), 0)
        window_begin = cutlass.Int32(0)
        if cutlass.const_expr(self.is_causal):
            # The token sits as far from the end of the window as from its request's last token.
            window_end -= self._tokens_after(token, tokens, request, request_ids, lane)
            window_end = cutlass.max(window_end, 0)
            window_begin = cutlass.max(window_end - self.sliding_window, 0)
        compressed_len = cutlass.max(cutlass.min(compressed_len, compressed_rows), 0)
        compressed_len = cutlass.select_(is_real, compressed_len, cutlass.Int32(0))
        window_end = cutlass.select_(is_real, window_end, cutlass.Int32(0))
        window_begin = cutlass.select_(is_real, window_begin, cutlass.Int32(0))
        return compressed_len, window_begin, window_end, request

    @cute.jit
    def _tokens_after(self, token, tokens, request, request_ids, lane):
        """How many consecutive tokens of the same request follow; the whole warp searches."""
        count = cutlass.Int32(0)
        searching = cutlass.Boolean(True)
        while searching:
            other = token + 1 + count + lane
            same = cutlass.Boolean(False)
            if other < tokens:
                same = request_ids[other] == request
            ballot = cute.arch.vote_ballot_sync(same)
            # The length of the ballot's run of trailing ones.
            run = cute.arch.popc(ballot & ~(ballot + 1))
            count += run
            searching = run == 32
        return count

    # ---- device: math warpgroups -------------------------------------------------------------------------

    @cute.jit
    def math(
        self,
        smem,
        sink_logits,
        o,
        lse,
        workspace,
        tokens: cutlass.Int32,
        num_splits: cutlass.Int32,
        works: cutlass.Int32,
    ):
        """Both products and the softmax; each of the two warpgroups owns half of the output columns."""
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        thread = cute.arch.thread_idx()[0] % 128
        lane = cute.arch.lane_idx()
        row = thread // 32 * 16 + lane // 4

        qk_mma, pv_mma = self._qk_mma(), self._pv_mma()
        qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
        acc_o = pv_mma.make_fragment_C(pv_mma.partition_shape_C((self.heads, self.half_dim)))
        acc_s = qk_mma.make_fragment_C(qk_mma.partition_shape_C((self.heads, self.keys)))
        p_shape = pv_mma.partition_shape_A((self.heads, self.keys))
        state = frozen(
            group=group,
            thread=thread,
            lane=lane,
            row=row,
            q=qk_slice.make_fragment_A(qk_slice.partition_A(smem.q)),
            k=qk_slice.make_fragment_B(qk_slice.partition_B(smem.k)),
            v=pv_slice.make_fragment_B(pv_slice.partition_B(smem.v)),
            s=acc_s,
            o=acc_o,
            p=pv_mma.make_fragment_A(p_shape),
            p_other=pv_mma.make_fragment_A(p_shape),
            ref=cute.make_rmem_tensor(2, cutlass.Float32),
            sum=cute.make_rmem_tensor(2, cutlass.Float32),
            raise_by=cute.make_rmem_tensor(2, cutlass.Float32),
            # Biases of the two rows on compressed scores, then on window scores.
            bias=cute.make_rmem_tensor((2, 2), cutlass.Float32),
        )

        grid = cute.arch.grid_dim()[0]
        index = cute.arch.block_idx()[0]
        q_phase = cutlass.Int32(0)
        own_phase = cutlass.Int32(0)
        other_phase = cutlass.Int32(0)
        parity = cutlass.Int32(0)
        while index < works:
            head = index % self.head_tiles * self.heads + row
            split = index // self.head_tiles % num_splits
            token = index // self.head_tiles // num_splits

            # ---- prologue ----
            cute.arch.mbarrier_wait(smem.q_full, q_phase)
            q_phase ^= 1
            work = frozen(
                count=smem.work[0],
                first=smem.work[1],
                compressed_blocks=smem.work[2],
                compressed_len=smem.work[3],
                window_begin=smem.work[4],
                window_end=smem.work[5],
            )
            gate_offset = self._set_bias(state, work, sink_logits, head)
            acc_o.fill(0.0)
            state.ref.fill(-cutlass.Float32.inf)
            state.sum.fill(0.0)

            # ---- blocks of this warpgroup ----
            count = work.count
            own = (count + 1 - group) // 2
            begin = cutlass.Int32(0)
            if group == 0 and own > 0:
                self._step(smem, state, work, cutlass.Int32(0), own_phase, other_phase, True)
                own_phase ^= 1
                begin = cutlass.Int32(1)
            for i in cutlass.range(begin, own, unroll=1):
                self._step(smem, state, work, 2 * i + group, own_phase, other_phase, False)
                own_phase ^= 1
                other_phase ^= 1
            self._release(smem.q_empty, lane)
            if count > 0 and (count - 1) % 2 != group:
                self._take_other(smem, state, work, count - 1, other_phase)
                warpgroup.wait_group(0)
                self._release(smem.kv_empty + ((1 - group) * 2 + group), lane)
                other_phase ^= 1

            # ---- epilogue ----
            self._finish(smem, state, parity)
            if num_splits == 1:
                self._store_output(state, sink_logits, o, lse, token, head, gate_offset)
            else:
                self._store_partial(
                    state, workspace, tokens, num_splits, token, head, split, gate_offset
                )
            parity ^= 1
            index += grid

    @cute.jit
    def _set_bias(self, state, work, sink_logits, head):
        """Score biases of the sink gate; returns what they take off the log of the denominator."""
        offset = cute.make_rmem_tensor(2, cutlass.Float32)
        offset.fill(0.0)
        state.bias.fill(0.0)
        if cutlass.const_expr(self.is_gate):
            # An empty branch leaves the other alone: the sink then counts as 0.
            both = work.compressed_len > 0 and work.window_end > work.window_begin
            for r in cutlass.range_constexpr(2):
                sink = cutlass.Float32(0.0)
                if both and head + 8 * r < self.num_query_heads:
                    sink = sink_logits[head + 8 * r]
                offset[r] = cute.arch.fmax(sink, 0.0)
                state.bias[r, 0] = -offset[r] * LOG2_E
                state.bias[r, 1] = cute.arch.fmin(sink, 0.0) * LOG2_E
        return offset

    @cute.jit
    def _step(
        self,
        smem,
        state,
        work,
        n: cutlass.Int32,
        own_phase: cutlass.Int32,
        other_phase: cutlass.Int32,
        is_first: cutlass.Constexpr[bool],
    ):
        """Block n of this warpgroup: QK(n), the other's PV(n - 1), softmax(n), PV(n)."""
        group = state.group
        own_half = group * 2 + group
        for half in cutlass.range_constexpr(2):
            cute.arch.mbarrier_wait(smem.kv_full + (group * 2 + half), own_phase)
        warpgroup.fence()
        gemm(self._qk_mma, state.s, state.q, state.k[None, None, None, group], False)
        warpgroup.commit_group()
        if cutlass.const_expr(is_first):
            warpgroup.wait_group(0)
        else:
            self._take_other(smem, state, work, n - 1, other_phase)
            warpgroup.wait_group(1)

        valid, is_window = self._block_extent(work, n)
        if valid < self.keys:
            self._mask(state, valid)
        raised = self._softmax(state, is_window)
        self._publish(smem, state, n)
        if cutlass.const_expr(not is_first):
            warpgroup.wait_group(0)
            self._release(smem.kv_empty + ((1 - group) * 2 + group), state.lane)
        if cute.arch.vote_any_sync(raised):
            self._scale_rows(state.o, state.raise_by)
        if valid < self.keys:
            self._zero_rows(smem, state, own_half, valid)
        warpgroup.fence()
        gemm(self._pv_mma, state.o, state.p, state.v[None, None, None, own_half], True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self._release(smem.kv_empty + own_half, state.lane)

    @cute.jit
    def _take_other(self, smem, state, work, n: cutlass.Int32, other_phase: cutlass.Int32):
        """Issue PV(n) with the P of the other warpgroup; the caller waits for it."""
        group = state.group
        other = 1 - group
        slot = other * 2 + group
        buffer = other * 2 + n // 2 % 2
        cute.arch.barrier(barrier_id=Barrier.P_READY + other, number_of_threads=256)
        p_vectors = cute.make_tensor(state.p_other.iterator, cute.make_layout((8, 4)))
        for j in cutlass.range_constexpr(4):
            cute.autovec_copy(smem.p[None, j, state.thread, buffer], p_vectors[None, j])
        refs = [smem.p_ref[state.row + 8 * r, buffer] for r in range(2)]
        differs = refs[0] != state.ref[0] or refs[1] != state.ref[1]
        if cute.arch.vote_any_sync(differs):
            self._align_references(state, refs)
        cute.arch.mbarrier_wait(smem.kv_full + slot, other_phase)
        valid, _ = self._block_extent(work, n)
        if valid < self.keys:
            self._zero_rows(smem, state, slot, valid)
        warpgroup.fence()
        gemm(self._pv_mma, state.o, state.p_other, state.v[None, None, None, slot], True)
        warpgroup.commit_group()

    @cute.jit
    def _align_references(self, state, refs):
        """Bring the accumulators and the other's P to the larger of the two references."""
        p_by_row = by_row(state.p_other)
        for r in cutlass.range_constexpr(2):
            old = state.ref[r]
            new = cute.arch.fmax(old, refs[r])
            is_empty = new == -cutlass.Float32.inf
            mine = cutlass.select_(is_empty, cutlass.Float32(1.0), exp2(old - new))
            theirs = cutlass.select_(is_empty, cutlass.Float32(1.0), exp2(refs[r] - new))
            state.raise_by[r] = mine
            state.sum[r] *= mine
            state.ref[r] = new
            for j in cutlass.range_constexpr(cute.size(p_by_row, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    value = p_by_row[r, c, j].to(cutlass.Float32) * theirs
                    p_by_row[r, c, j] = value.to(self.dtype)
        self._scale_rows(state.o, state.raise_by)

    @cute.jit
    def _softmax(self, state, is_window):
        """S -> P in place of the row references; returns whether a reference of this thread moved."""
        s, p = by_row(state.s), by_row(state.p)
        raised = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            bias = cutlass.select_(is_window, state.bias[r, 1], state.bias[r, 0])
            top = s[r, 0, 0]
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    top = cute.arch.fmax(top, s[r, c, j])
            top = quad_max(top) * self.scale_log2 + bias
            old = state.ref[r]
            is_raised = top > old + STALE_LIMIT
            new = cutlass.select_(is_raised, top, old)
            state.raise_by[r] = cutlass.select_(is_raised, exp2(old - new), cutlass.Float32(1.0))
            # A row without a finite score so far: every weight is 2^-inf.
            shift = bias - cutlass.select_(new == -cutlass.Float32.inf, cutlass.Float32(0.0), new)
            total = cutlass.Float32(0.0)
            for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
                for c in cutlass.range_constexpr(2):
                    weight = exp2(s[r, c, j] * self.scale_log2 + shift)
                    total += weight
                    s[r, c, j] = weight
            state.sum[r] = state.sum[r] * state.raise_by[r] + total
            state.ref[r] = new
            raised = raised or is_raised
        # Row by row would convert one value at a time: pairs of columns share an instruction.
        cute.make_tensor(state.p.iterator, cute.make_layout(cute.size(p))).store(
            cute.make_tensor(state.s.iterator, cute.make_layout(cute.size(s))).load().to(self.dtype)
        )
        return raised

    @cute.jit
    def _publish(self, smem, state, n: cutlass.Int32):
        """Hand P(n) and its references to the other warpgroup."""
        buffer = state.group * 2 + n // 2 % 2
        p_vectors = cute.make_tensor(state.p.iterator, cute.make_layout((8, 4)))
        for j in cutlass.range_constexpr(4):
            cute.autovec_copy(p_vectors[None, j], smem.p[None, j, state.thread, buffer])
        if state.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                smem.p_ref[state.row + 8 * r, buffer] = state.ref[r]
        cute.arch.barrier_arrive(barrier_id=Barrier.P_READY + state.group, number_of_threads=256)

    # ---- device: blocks and rows -------------------------------------------------------------------------

    @cute.jit
    def _block_extent(self, work, n: cutlass.Int32):
        """Number of valid keys of the work item's block n (the rest are masked), and its branch."""
        block = work.first + n
        is_window = block >= work.compressed_blocks
        left = cutlass.select_(
            is_window,
            work.window_end - work.window_begin - (block - work.compressed_blocks) * self.keys,
            work.compressed_len - block * self.keys,
        )
        return cutlass.min(left, self.keys), is_window

    @cute.jit
    def _mask(self, state, valid: cutlass.Int32):
        s = by_row(state.s)
        column = state.lane % 4 * 2
        for j in cutlass.range_constexpr(cute.size(s, mode=[2])):
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    s[r, c, j] = cutlass.select_(
                        column + j * 8 + c < valid, s[r, c, j], -cutlass.Float32.inf
                    )

    @cute.jit
    def _zero_rows(self, smem, state, slot, valid: cutlass.Int32):
        """Clear the masked rows of a half block: P is 0 there, but 0 * NaN is NaN."""
        vectors_per_row = self.chunk // 8
        chunk_vectors = self.keys * vectors_per_row
        zero = cute.make_rmem_tensor(8, self.dtype)
        zero.fill(0.0)
        half_block = cute.make_tensor(
            smem.kv_raw + slot * self.keys * self.half_dim,
            cute.make_layout((8, chunk_vectors, self.half_dim // self.chunk)),
        )
        for chunk in cutlass.range_constexpr(self.half_dim // self.chunk):
            for i in cutlass.range(
                valid * vectors_per_row + state.thread, chunk_vectors, 128, unroll=1
            ):
                cute.autovec_copy(zero, half_block[None, i, chunk])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP + state.group, number_of_threads=128)

    @cute.jit
    def _scale_rows(self, acc, factors):
        rows = by_row(acc)
        for j in cutlass.range_constexpr(cute.size(rows, mode=[2])):
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    rows[r, c, j] *= factors[r]

    @cute.jit
    def _release(self, barrier, lane):
        """One arrival per warp, after every lane's reads."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    # ---- device: epilogue --------------------------------------------------------------------------------

    @cute.jit
    def _finish(self, smem, state, parity: cutlass.Int32):
        """Join the row sums of the two warpgroups, which end on the same references.

        Double-buffered by work item: the next item's sums may be written before the partner read these.
        """
        for r in cutlass.range_constexpr(2):
            state.sum[r] = quad_sum(state.sum[r])
            if state.lane % 4 == 0:
                smem.row_sum[state.row + 8 * r, parity * 2 + state.group] = state.sum[r]
        cute.arch.barrier(barrier_id=Barrier.PAIR, number_of_threads=256)
        for r in cutlass.range_constexpr(2):
            # Always warpgroup 0's sum first, so that both halves divide by the same value.
            state.sum[r] = (
                smem.row_sum[state.row + 8 * r, parity * 2]
                + smem.row_sum[state.row + 8 * r, parity * 2 + 1]
            )

    @cute.jit
    def _store_output(self, state, sink_logits, o, lse, token, head, gate_offset):
        """Divide, round, and write 16 bytes per thread."""
        rows = by_row(state.o)
        lane_in_quad = state.lane % 4
        for r in cutlass.range_constexpr(2):
            if head + 8 * r < self.num_query_heads:
                scale = output_scale(
                    state.ref[r], state.sum[r], sink_logits[head + 8 * r], not self.is_gate
                )
                target = row_pointer(o, token, head + 8 * r) + state.group * self.half_dim
                for j in cutlass.range_constexpr(self.half_dim // 8):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = (rows[r, c, j] * scale).to(self.dtype)
                    cute.autovec_copy(
                        pair,
                        cute.make_tensor(target + j * 8 + lane_in_quad * 2, cute.make_layout(2)),
                    )
                if state.group == 0 and lane_in_quad == 0 and token < lse.shape[0]:
                    lse[token, head + 8 * r] = row_lse(state.ref[r], state.sum[r], gate_offset[r])

    @cute.jit
    def _store_partial(self, state, workspace, tokens, num_splits, token, head, split, gate_offset):
        """Write the unnormalised rows, their reference and sum for the combine kernel."""
        partials, stats = partial_views(
            workspace, tokens * self.num_query_heads, num_splits, self.head_dim
        )
        rows = by_row(state.o)
        lane_in_quad = state.lane % 4
        for r in cutlass.range_constexpr(2):
            if head + 8 * r < self.num_query_heads:
                index = token * self.num_query_heads + head + 8 * r
                target = (
                    partials[None, None, split, index].iterator
                    + state.group * self.half_dim
                    + lane_in_quad * 2
                )
                for j in cutlass.range_constexpr(self.half_dim // 8):
                    pair = cute.make_rmem_tensor(2, cutlass.Float32)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = rows[r, c, j]
                    cute.autovec_copy(pair, cute.make_tensor(target + j * 8, cute.make_layout(2)))
                if state.group == 0 and lane_in_quad == 0:
                    stats[0, split, index] = state.ref[r]
                    stats[1, split, index] = state.sum[r]
                    stats[2, split, index] = gate_offset[r]


# ---- compilation -----------------------------------------------------------------------------------------


def fake_arguments(config: FmhaConfig) -> tuple[tuple, dict]:
    """Arguments of the kernel's call without data: every size and outer stride is symbolic."""
    tokens, rows, batch, width = (cute.sym_int() for _ in range(4))
    heads, dim = config.num_query_heads, config.head_dim

    def rows_of(*shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape), 1)
        return cute.runtime.make_fake_tensor(
            cutlass.BFloat16, (*shape, dim), strides, assumed_align=16
        )

    def vector(dtype, size):
        return cute.runtime.make_fake_tensor(dtype, (size,), (1,), assumed_align=4)

    args = (
        rows_of(tokens, heads),
        rows_of(tokens, rows),
        rows_of(batch, width),
        vector(cutlass.Int32, batch),
        vector(cutlass.Float32, heads),
        vector(cutlass.Int32, tokens),
        rows_of(tokens, heads),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    optional = {
        "compressed_lens": vector(cutlass.Int32, cute.sym_int()),
        "lse": cute.runtime.make_fake_tensor(
            cutlass.Float32, (cute.sym_int(), heads), (cute.sym_int64(), 1), assumed_align=4
        ),
        "workspace": vector(cutlass.Float32, cute.sym_int64()),
        "num_splits": cutlass.Int32(1),
        "num_ctas": cutlass.Int32(1),
    }
    return args, optional


def build(config: FmhaConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    if config.dtype != "bfloat16":
        raise ValueError(f"dtype must be bfloat16 on sm_90a, got {config.dtype}")
    kernel = FmhaKernelSm90(
        config.head_dim,
        config.num_query_heads,
        config.sliding_window,
        config.top_k,
        is_causal=config.is_causal,
        softmax_scale=config.softmax_scale,
        sink_mode=config.sink_mode,
        num_splits=config.num_splits,
    )
    args, optional = fake_arguments(config)
    return cute.compile(kernel, *args, **optional, options=f"--enable-tvm-ffi {options}".strip())


def workspace_size(config: FmhaConfig, tokens: int, num_splits: int) -> int:
    """fp32 elements of split-KV partials that a launch of `tokens` tokens needs."""
    from dsv4.kernels.attention.fmha_sm90_combine import STATS

    if num_splits == 1:
        return 0
    return tokens * config.num_query_heads * num_splits * (config.head_dim + STATS)
