"""Output warpgroups of the kernel of FP8 codes: O^T += V^T P^T, then the epilogue.

An FP8 product wants both operands by keys, and entries lie by columns: V is transposed on its way
into registers, as the first operand. `ldmatrix` transposes pairs of bytes, a permutation of bytes
then parts the two columns of a pair. Rows of such a product are columns of V in this order: the
thread that has rows g and g + 8 of a warp's 16 has the columns 2 g and 2 g + 1.

The tensor core keeps 14 bits of a sum of products of codes: each tile has a sum of its own, which
is added to the accumulators in fp32.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsv4.kernels.attention.inverse_rope import rope_row, rotate_back, rotation
from dsv4.kernels.attention.key_span import KeySpan
from dsv4.kernels.attention.sm90.codes_context import (
    CODE_STEP,
    HALF_HEADS,
    ROPE_STEP,
    rope_values_mma,
    values_mma,
)
from dsv4.kernels.attention.sm90.codes_plan import PLACES, SCORE_WARPS, CodesPlan
from dsv4.kernels.attention.sm90.heads_m_combine import HeadsMCombine
from dsv4.kernels.attention.sm90.heads_m_context import HeadsMContext
from dsv4.kernels.attention.sm90.plan import HALVES, HEADS, KEYS
from dsv4.kernels.kit.kv_entry import GROUP
from dsv4.kernels.kit.mbarrier import Cursor
from dsv4.kernels.kit.pointers import row_pointer
from dsv4.kernels.kit.quant import pack_bf16
from dsv4.kernels.kit.swizzle import VECTOR_BYTES
from dsv4.kernels.kit.wgmma import by_row, gemm

HEAD_GROUPS = HEADS // 8
VALUE_WORDS = KEYS // CODE_STEP * 4  # registers of a chunk's V in a thread


class OutputFragments(NamedTuple):
    """Operands and sums of a thread of an output warpgroup."""

    lane: cutlass.Int32
    warp: cutlass.Int32  # of the warpgroup
    chunks: tuple  # accumulators [4, head group] of 64 columns each
    tiles: tuple  # sums of a key tile over 64 columns, of each half of the heads
    values: tuple  # V of two chunks in turn
    v_rope: cute.Tensor
    p: cute.Tensor
    p_rope: cute.Tensor


class CodesOutputWarpgroups:
    """Two warpgroups, each with half of the output's columns; the second has the rotated ones."""

    def __init__(self, plan: CodesPlan, combine: HeadsMCombine, num_query_heads: int):
        self.plan = plan
        self.combine = combine
        self.num_query_heads = num_query_heads

    def _fragments(self, ctx: HeadsMContext) -> OutputFragments:
        codes, rope, smem = values_mma(), rope_values_mma(), ctx.smem
        of_codes, of_rope = codes.get_slice(0), rope.get_slice(0)
        shape = codes.partition_shape_C((GROUP, HALF_HEADS))
        values = codes.partition_shape_A((GROUP, KEYS))
        return OutputFragments(
            lane=cute.arch.lane_idx(),
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx() % 4),
            chunks=tuple(
                cute.make_rmem_tensor((4, HEAD_GROUPS), cutlass.Float32)
                for _ in range(self.plan.chunks)
            ),
            tiles=tuple(codes.make_fragment_C(shape) for _ in range(HALVES)),
            values=tuple(codes.make_fragment_A(values) for _ in range(2)),
            v_rope=of_rope.make_fragment_A(of_rope.partition_A(smem.v_rope)),
            p=of_codes.make_fragment_B(of_codes.partition_B(smem.p_codes)),
            p_rope=of_rope.make_fragment_B(of_rope.partition_B(smem.p_rope)),
        )

    @cute.jit
    def output(self, ctx: HeadsMContext, half: cutlass.Constexpr):
        """O^T += V^T P^T over half of the columns, and the output rows, of every work tile."""
        f = self._fragments(ctx)
        index, stop, step = ctx.scheduler.range_of(cute.arch.block_idx()[0])
        phase, tiles = cutlass.Int32(0), cutlass.Int32(0)
        kv = ctx.pipes.kv.consumer()
        while index < stop:
            coord = self.combine.coord(ctx.tiling, index)
            ctx.pipes.span.wait(phase)
            count = KeySpan.load(ctx.smem.span).count
            ctx.pipes.span.release(f.lane)
            for chunk in f.chunks:
                chunk.fill(0.0)
            for _ in cutlass.range(count, unroll=1):
                self._multiply_tile(ctx, f, half, tiles, kv)
                tiles += 1
                kv = ctx.pipes.kv.next(kv)
            if cutlass.const_expr(half == 1):
                exchange_columns(f.chunks[-1], f.lane)
                self._rotate(ctx, f, coord)
            self._store(ctx, f, coord, half, phase)
            phase ^= 1
            index += step

    @cute.jit
    def _multiply_tile(
        self, ctx: HeadsMContext, f: OutputFragments, half: cutlass.Constexpr, tiles, kv: Cursor
    ):
        """Add a key tile's weighted values; frees it and its P."""
        place, chunks = tiles % PLACES, self.plan.chunks
        coded = chunks - half
        ctx.pipes.values.wait(kv)
        self._load_values(ctx, f, half * chunks, kv.stage, 0)
        ctx.pipes.p.at(place).wait(tiles // PLACES % 2)
        self._rescale(ctx, f, place)
        # Half of the heads at a time: while one sum is added, the tensor cores have the next.
        units = chunks * HALVES
        for unit in cutlass.range_constexpr(units):
            self._issue(f, half, place, kv.stage, unit)
            if cutlass.const_expr(unit > 0):
                warpgroup.wait_group(1)
                add_half(f, unit - 1)
            chunk = unit // HALVES + 1
            if cutlass.const_expr(unit % HALVES == 0 and chunk < coded):
                # The sums with what was there are complete.
                self._load_values(ctx, f, half * chunks + chunk, kv.stage, chunk % 2)
        warpgroup.wait_group(0)
        ctx.pipes.p.at(place).release(f.lane)
        ctx.pipes.values.release(kv, f.lane)
        add_half(f, units - 1)

    def _issue(self, f: OutputFragments, half: int, place, stage, unit: int) -> None:
        """Start the sum of a key tile over 64 columns and half of the heads."""
        chunk, heads, terms = unit // HALVES, unit % HALVES, self.plan.terms
        tile = f.tiles[heads]
        warpgroup.fence()
        if chunk < self.plan.chunks - half:
            for term in reversed(range(terms)):
                p = f.p[None, None, None, (place * terms + term) * HALVES + heads]
                steps, is_later = range(KEYS // CODE_STEP), term < terms - 1
                gemm(values_mma, tile, f.values[chunk % 2], p, steps, 0, is_later)
        else:
            v, p = (
                f.v_rope[None, None, None, stage],
                f.p_rope[None, None, None, place * HALVES + heads],
            )
            gemm(rope_values_mma, tile, v, p, range(KEYS // ROPE_STEP), 0, False)
        warpgroup.commit_group()

    def _load_values(self, ctx: HeadsMContext, f: OutputFragments, chunk, stage, turn: int) -> None:
        """Read the codes of 64 columns of a key tile, transposed."""
        lane, words = f.lane, cute.recast_tensor(f.values[turn], cutlass.Uint32)
        # Each lane has the address of a key's 16 columns of the warp's; eight keys are a matrix.
        start = cutlass.Int32(ctx.smem.codes_start.toint()) + stage * self.plan.code_bytes
        start += lane * GROUP + (f.warp ^ lane // 2 % 4) * VECTOR_BYTES
        for step in range(KEYS // CODE_STEP):
            offset = (chunk * KEYS + step * CODE_STEP) * GROUP
            pairs = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
                write_only_types=[cutlass.Uint32] * 4,
                read_only_args=[start],
            )
            for k in range(2):
                for column, selector in enumerate((0x6420, 0x7531)):
                    two = (pairs[2 * k], pairs[2 * k + 1])
                    place = 4 * step + 2 * k + column
                    words[place] = cutlass.Uint32(cute.arch.prmt(*two, selector))

    @cute.jit
    def _rescale(self, ctx: HeadsMContext, f: OutputFragments, place):
        """Multiply the accumulators by what goes with P, if any row's reference was raised."""
        changes = cute.make_rmem_tensor(SCORE_WARPS, cutlass.Int32)
        for i in cutlass.range_constexpr(SCORE_WARPS):
            changes[i] = ctx.smem.changes[i, place]
        for i in cutlass.range_constexpr(SCORE_WARPS):
            # 16 rows of a head tile are two head groups.
            if cute.arch.make_warp_uniform(changes[i]) != 0:
                for j in cutlass.range_constexpr(2 * i, 2 * i + 2):
                    for c in cutlass.range_constexpr(2):
                        factor = ctx.smem.rescale[8 * j + f.lane % 4 * 2 + c, place]
                        for chunk in f.chunks:
                            rows = by_row(chunk)
                            for r in cutlass.range_constexpr(2):
                                rows[r, c, j] *= factor

    @cute.jit
    def _rotate(self, ctx: HeadsMContext, f: OutputFragments, coord):
        """Rotate the last chunk, whose columns have been exchanged, if there is a table."""
        rope = ctx.operands.rope
        if rope.shape[0] > 0:
            row = rope_row(rope, ctx.operands.keys.positions, coord.token)
            angle = rotation(rope, row, exchanged_column(f.warp, f.lane) // 2)
            values = by_row(f.chunks[-1])
            for j in cutlass.range_constexpr(HEAD_GROUPS):
                for c in cutlass.range_constexpr(2):
                    pair = (values[0, c, j], values[1, c, j])
                    values[0, c, j], values[1, c, j] = rotate_back(*pair, angle)

    @cute.jit
    def _store(self, ctx: HeadsMContext, f: OutputFragments, coord, half: cutlass.Constexpr, phase):
        """Scale, round and write half of the columns of a head tile."""
        o, chunks = ctx.operands.o, self.plan.chunks
        ctx.pipes.rows.wait(phase)
        scales = cute.make_rmem_tensor((2, HEAD_GROUPS), cutlass.Float32)
        for j in cutlass.range_constexpr(HEAD_GROUPS):
            for c in cutlass.range_constexpr(2):
                scales[c, j] = ctx.smem.row_scale[8 * j + f.lane % 4 * 2 + c]
        ctx.pipes.rows.release(f.lane)
        plain = f.warp * 16 + f.lane // 4 * 2
        for j in cutlass.range_constexpr(HEAD_GROUPS):
            for c in cutlass.range_constexpr(2):
                head = coord.head + 8 * j + f.lane % 4 * 2 + c
                if head < self.num_query_heads:
                    row = row_pointer(o, coord.token, head).toint()
                    for i in cutlass.range_constexpr(chunks):
                        column = plain
                        if cutlass.const_expr(half == 1 and i == chunks - 1):
                            column = exchanged_column(f.warp, f.lane)
                        values = by_row(f.chunks[i])
                        pair = [values[r, c, j] * scales[c, j] for r in range(2)]
                        cute.arch.inline_ptx(
                            "st.global.b32 [{$r0}], {$r1};",
                            read_only_args=[
                                row + ((half * chunks + i) * GROUP + column) * 2,
                                pack_bf16(*pair),
                            ],
                        )


def add_half(f: OutputFragments, unit: int) -> None:
    """Add the sum of a key tile to half of a chunk's heads."""
    chunk, tile = f.chunks[unit // HALVES], f.tiles[unit % HALVES]
    size = cute.size(tile)
    for n in range(size):
        place = unit % HALVES * size + n
        chunk[place] = chunk[place] + tile[n]


@cute.jit
def exchange_columns(acc: cute.Tensor, lane):
    """Give each thread two neighbouring columns in place of two that are 8 apart."""
    values, is_odd = by_row(acc), lane // 4 % 2 != 0
    for j in cutlass.range_constexpr(HEAD_GROUPS):
        for c in cutlass.range_constexpr(2):
            first, second = values[0, c, j], values[1, c, j]
            sent = cutlass.select_(is_odd, first, second)
            got = cute.arch.shuffle_sync_bfly(sent, offset=4)
            values[0, c, j] = cutlass.select_(is_odd, got, first)
            values[1, c, j] = cutlass.select_(is_odd, second, got)


def exchanged_column(warp, lane):
    """First of a thread's two neighbouring columns of a chunk."""
    group = lane // 4
    return warp * 16 + group + group % 2 * 7
