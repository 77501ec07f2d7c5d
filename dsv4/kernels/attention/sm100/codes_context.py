"""Context of Blackwell's kernel of FP8 codes: views of shared memory, and what its warps tell the
softmax of keys and queries."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, pipeline

from dsv4.kernels.attention.key_tiles import TILE_INFO_WORDS
from dsv4.kernels.attention.sm100.fragments_2cta import WARP_ROWS
from dsv4.kernels.attention.sm100.paged_context import TileInfo
from dsv4.kernels.attention.sm100.plan_1cta import KEYS, ROWS
from dsv4.kernels.attention.sm100.plan_2cta import HALF_KEYS
from dsv4.kernels.attention.sm100.plan_codes import (
    GROUPS,
    HALF_ROPE,
    HALVES,
    O_BOXES,
    PLACES,
    SCALE_HALVES,
    CodesBarriers,
    CodesPlan2Cta,
)
from dsv4.kernels.attention.sm100.plan_paged import INFO_STAGES
from dsv4.kernels.attention.sm100.work_tile import row_layout
from dsv4.kernels.attention.tile_info import store_tile_info
from dsv4.kernels.kit.gather import vector_offset
from dsv4.kernels.kit.mbarrier import Buffer, Signal
from dsv4.kernels.kit.plan import BarrierGraph
from dsv4.kernels.kit.quant import unpack_bf16
from dsv4.kernels.kit.swizzle import SPAN_BYTES, VECTOR_BYTES

CODE_VECTORS = HALF_KEYS // VECTOR_BYTES  # of weights of a softmax thread in one term
ROPE_VECTORS = 2 * CODE_VECTORS  # and in bf16


def _kept(value: Int32) -> Int32:
    """The value in a register: the compiler would compute it anew for every key tile."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


class CodesThread(NamedTuple):
    """Softmax thread: lane `index` of TMEM, half a row of every other tile."""

    index: Int32
    warp: Int32  # of both warpgroups
    lane: Int32
    half: Int32  # as of `fragments_2cta.Thread`
    group: Int32  # warpgroup
    row: Int32  # of the CTA's 64 heads
    # Bytes from the start of a tile's weights in one term, or in bf16, to the thread's.
    code_offset: Int32
    rope_offset: Int32

    @classmethod
    def this(cls, first_warp: int) -> "CodesThread":
        """The calling thread, of the warpgroups that start at a warp."""
        tidx, _, _ = cute.arch.thread_idx()
        index, warp = tidx % 128, cute.arch.make_warp_uniform(tidx // 32) - first_warp
        half, row = warp % 4 // 2, index % ROWS
        offsets = (
            vector_offset(row, half * CODE_VECTORS, KEYS),
            vector_offset(row, half * ROPE_VECTORS, SPAN_BYTES),
        )
        found = (index, warp, tidx % 32, half, warp // 4, row, *offsets)
        return cls(*(_kept(value) for value in found))

    @property
    def place(self) -> Int32:
        """Of the thread among those of its row."""
        return self.half * GROUPS + self.group

    def row_pair_barrier_id(self) -> Int32:
        return CodesBarriers.PAIRS + self.group * 2 + self.warp % 2

    def row_pair_barrier(self) -> pipeline.NamedBarrier:
        """Barrier of the two warps that hold the halves of the same scores."""
        return pipeline.NamedBarrier(self.row_pair_barrier_id(), 2 * cute.arch.WARP_SIZE)

    def sync_rows(self) -> None:
        """Wait for the four warps that share rows."""
        pipeline.NamedBarrier(
            CodesBarriers.ROWS + self.warp % 2, PLACES * cute.arch.WARP_SIZE
        ).arrive_and_wait()


@dataclass(frozen=True)
class CodesSmem:
    """Views of shared memory; frozen, as what a staged loop carries must be."""

    kv_start: cute.Pointer
    p_start: cute.Pointer
    exchange: cute.Tensor  # (4, lane, unit, warp) fp32
    row_values: cute.Tensor  # (row, place) fp32
    row_maxima: cute.Tensor  # (row, which) fp32
    q_maxima: cute.Tensor  # (row, half, work tile) fp32
    staged: cute.Tensor  # of the output, (32, 32, box, warp)

    @classmethod
    def of(cls, plan: CodesPlan2Cta, storage) -> "CodesSmem":
        """The views of a CTA."""
        p_start, exchange = storage.p.data_ptr(), storage.exchange.data_ptr()
        sent = cute.make_layout(
            (4, 32, HALF_KEYS // 4, 4 * GROUPS), stride=(1, 4, 128, 32 * HALF_KEYS)
        )
        return cls(
            kv_start=storage.kv.data_ptr(),
            p_start=p_start,
            exchange=cute.make_tensor(exchange, sent),
            row_values=storage.row_values.get_tensor(cute.make_layout((ROWS, PLACES + 1))),
            row_maxima=storage.row_maxima.get_tensor(cute.make_layout((ROWS, 3))),
            q_maxima=storage.q_maxima.get_tensor(cute.make_layout((ROWS, HALVES, 2))),
            staged=_staged(storage.o.data_ptr()),
        )


def _staged(start: cute.Pointer) -> cute.Tensor:
    """Boxes of the output from an address on."""
    layout = row_layout((WARP_ROWS, HALF_ROPE), 1)
    pointer = cute.recast_ptr(start, layout.inner, dtype=BFloat16)
    warps, boxes, tile = 4 * GROUPS, O_BOXES, WARP_ROWS * HALF_ROPE
    by_warp = cute.make_layout((boxes, warps), stride=(tile, boxes * tile))
    outer = cute.select(layout.outer, mode=[0, 1])
    outer = cute.make_layout(
        (*outer.shape, *by_warp.shape), stride=(*outer.stride, *by_warp.stride)
    )
    return cute.make_tensor(pointer, outer)


class KeyScales(NamedTuple):
    """Scales of the keys of which a thread has scores, and a bound of them."""

    scales: cute.Tensor  # (32,) fp32
    largest: Float32


@dataclass(frozen=True)
class CodesInfo(TileInfo):
    """Words about key tiles, with the scales of their keys; and scales of rows of queries."""

    scales: cute.Tensor  # (SCALE_HALVES, stage) bf16: powers of two
    q_scales: cute.Tensor  # (row,) fp32
    queries: Buffer
    turn: Signal

    @classmethod
    def create(cls, storage, graph: BarrierGraph) -> "CodesInfo":
        """The rings of a plan, their mbarriers initialised; see `TileInfo.create`."""
        barriers, queries = storage.info_barriers.data_ptr(), storage.q_scales_barriers.data_ptr()
        words = storage.tile_info.get_tensor(cute.make_layout(INFO_STAGES * TILE_INFO_WORDS))
        scales = storage.scales.get_tensor(cute.make_layout((SCALE_HALVES, INFO_STAGES)))
        info = cls(
            *(words, barriers, barriers + INFO_STAGES, scales),
            storage.q_scales.get_tensor(cute.make_layout(ROWS)),
            Buffer(queries, queries + 1),
            Signal(storage.turn_barriers.data_ptr()),
        )
        info._init(graph)
        info._init_others(graph)
        return info

    @cute.jit
    def _init_others(self, graph: cutlass.Constexpr[BarrierGraph]):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for index, arrivals in graph.initial_counts("q_scales"):
                    cute.arch.mbarrier_init(self.queries.full + index, arrivals)
                for index, arrivals in graph.initial_counts("turn"):
                    cute.arch.mbarrier_init(self.turn.full + index, arrivals)

    def _at(self, count: Int32) -> tuple[Int32, Buffer, Int32]:
        # Counts are not negative: a division would not know.
        stage, bits = count & INFO_STAGES - 1, INFO_STAGES.bit_length() - 1
        return stage, Buffer(self.full + stage, self.empty + stage), count >> bits & 1

    @cute.jit
    def send_keys(
        self, count: Int32, is_key, is_window, scale: Float32, warp, lane,
        warp_keys: cutlass.Constexpr,
    ):  # fmt: skip
        """`send` with the scale of row `lane` of the warp's."""
        stage, barriers, parity = self._at(count)
        barriers.acquire(parity ^ 1)
        first = stage * TILE_INFO_WORDS
        store_tile_info(self.words, first, is_key, is_window, warp, lane, warp_keys)
        # Positive numbers order as their bits do, and NaN is the largest.
        largest = cute.arch.warp_redux_sync(scale.bitcast(Int32), "max")
        if lane < warp_keys:
            self.scales[warp * warp_keys + lane, stage] = scale.to(BFloat16)
        if lane == 0:
            self.scales[KEYS + warp, stage] = Int32(largest).bitcast(Float32).to(BFloat16)
        barriers.commit(lane)

    @cute.jit
    def receive_keys(self, count: Int32, thread: CodesThread) -> tuple[Int32, KeyScales]:
        """The bits of the thread's keys of tile number `count`, and their scales; all warps of the
        tile's warpgroup ask."""
        stage, barriers, parity = self._at(count)
        barriers.wait(parity)
        word = self.words[stage * TILE_INFO_WORDS + thread.half]
        scales = cute.make_rmem_tensor(HALF_KEYS, Float32)
        words = cute.make_rmem_tensor(4, Uint32)
        start = self.scales.iterator + stage * SCALE_HALVES + thread.half * HALF_KEYS
        for i in cutlass.range_constexpr(HALF_KEYS // 8):
            source = cute.make_ptr(
                Uint32, (start + 8 * i).toint(), start.memspace, assumed_align=16
            )
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
            for k in cutlass.range_constexpr(4):
                scales[8 * i + 2 * k], scales[8 * i + 2 * k + 1] = unpack_bf16(words[k])
        # They are the rows of two gather warps.
        largest = [Float32(self.scales[KEYS + 2 * thread.half + i, stage]) for i in range(2)]
        bound = cute.arch.fmax(*largest, nan=True)
        barriers.release(thread.lane)
        return word, KeyScales(scales, bound)
