"""First of two launches for many tokens: streams written, and their products with fn by groups of
128 columns.

A CTA takes a group, and its part of the tokens in tiles of eight. A warp has rows of fn in the
group's columns in registers. It begins to load a token of the next tile, multiplies its rows with
all tokens of this one, and writes the loaded token to the streams. The sums over a group's columns
go to memory; `collapse.py` adds the groups.

Every CTA iterates comb of its tokens by itself (`combs.py`), those of 32 tiles at once: of the
first ones before its wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.reduce import spread_sums
from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.seam.columns import PAIRS, Columns, Operands, squares_of
from dsv4.kernels.seam.combs import Combs
from dsv4.kernels.seam.config import (
    COUNTER_WORDS,
    GROUP,
    LANE_COLUMNS,
    MAX_PARTS,
    PARTIAL_ROWS,
    SQUARES_ROW,
    STREAMS,
    TILE,
    TILE_CTAS,
    WARP,
    SeamConfig,
)

STAGES = 2  # tiles by turns
CHUNK = WARP  # tiles whose combs are made together, a token a thread


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a CTA; the leading index is contiguous.

    Attributes:
        loaded: [4, lane, row, token, stage] bf16, of the streams and of the sublayer's rows.
        post: [stream, token, stage] fp32.
        experts: [lane, token, stage] int32.
        streams: X' [4, lane, stream, token, stage] fp32.
        combs: [target, source, token] fp32, of a chunk of tiles; None: nothing is written to the
            streams.
    """

    loaded: cute.Tensor
    post: cute.Tensor
    experts: cute.Tensor
    streams: cute.Tensor
    combs: cute.Tensor | None


@dataclass(frozen=True)
class Place:
    """A thread's place: warp, lane, the CTA's group and part, the first of the lane's columns."""

    warp: Int32
    lane: Int32
    group: Int32
    part: Int32
    column: Int32


class Products:
    """Kernel of one configuration."""

    threads = TILE * WARP  # a token of a tile a warp

    def __init__(self, config: SeamConfig, columns: Columns):
        self.config = config
        self.columns = columns
        self.groups = config.dim // GROUP
        self.warp_rows = -(-config.rows // TILE)
        self.loaded_rows = STREAMS + (config.top_k + 1) * config.expands
        self.combs = Combs(config) if config.expands else None

    @cute.jit
    def launch(
        self, operands: Operands, fn: cute.Tensor, partials: cute.Tensor, parts: Int32, stream
    ):
        """partials[token, group, row] of rows of fn, and of squares of the streams."""
        self.kernel(operands, fn, partials).launch(
            grid=[self.groups, parts, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=TILE_CTAS,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, fn: cute.Tensor, partials: cute.Tensor):
        place = self.find_place()
        buffers = self.allocate()
        weights = self.begin(operands, fn, buffers, place)
        live = self.write_first(operands, buffers, place, partials)
        self.run(operands, buffers, place, weights, live, partials)

    def find_place(self) -> Place:
        """This thread's place."""
        group, part, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        return Place(warp, lane, group, part, group * GROUP + lane * LANE_COLUMNS)

    @cute.jit
    def begin(
        self, operands: Operands, fn: cute.Tensor, buffers: Buffers, place: Place
    ) -> cute.Tensor:
        """Load the warp's rows of fn, and wait for the launch before; then begin to load the first
        tile, and make comb of the first chunk."""
        pdl.launch_dependents()
        own, guess = self.own_token(place, 0), None
        if cutlass.const_expr(self.combs is not None):
            guess = self.combs.registers()
            if own < operands.x.shape[0]:
                self.combs.load(operands.comb, own, guess.words)
        # fn is no output of the launch before.
        weights = self.load_fn(fn, place)
        token = place.part * TILE + place.warp
        if token < operands.x.shape[0]:
            self.columns.prefetch(operands, token, place.group, place.lane)
        if cutlass.const_expr(self.combs is not None):  # noqa: SIM102 static, dynamic
            if own < operands.x.shape[0]:
                self.combs.iterate(guess)
        pdl.wait_for_previous_launch()
        self.load(operands, buffers, place, Int32(0))
        if cutlass.const_expr(self.combs is not None):
            if own < operands.x.shape[0]:
                target = buffers.combs[None, None, cute.arch.thread_idx()[0]]
                self.combs.settle(operands.comb, own, guess, target)
            # Other warps need it.
            cute.arch.sync_threads()
        return weights

    def own_token(self, place: Place, chunk: Int32 | int) -> Int32:
        """The token of a chunk of tiles whose comb a thread makes."""
        thread = cute.arch.thread_idx()[0]
        return first_of(place, chunk * CHUNK + thread // TILE) + thread % TILE

    @cute.jit
    def write_first(
        self, operands: Operands, buffers: Buffers, place: Place, partials: cute.Tensor
    ) -> Int32:
        """Write the first tile, which is under way, to the streams; how many tokens have rows of
        experts."""
        live, tile = operands.x.shape[0], Int32(0)
        if cutlass.const_expr(self.config.top_k > 0):
            live = operands.counts[1]
        self.write(operands, buffers, place, tile, live, partials)
        cute.arch.sync_threads()
        return live

    @cute.jit
    def run(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        weights: cute.Tensor,
        live,
        partials: cute.Tensor,
    ) -> None:
        """All tiles, of which the first is written; at the end all warps have met."""
        tokens, tile = operands.x.shape[0], Int32(0)
        while first_of(place, tile) < tokens:
            # The other stage was read in the round before, at whose end all warps have met.
            self.load(operands, buffers, place, tile + 1)
            self.multiply(place, tile, tokens, weights, buffers.streams, partials)
            tile += 1
            if first_of(place, tile) < tokens:
                if cutlass.const_expr(self.combs is not None):  # noqa: SIM102 static, dynamic
                    if tile % CHUNK == 0:
                        self.store_combs(operands, buffers, place, tile // CHUNK)
                        cute.arch.sync_threads()
                self.write(operands, buffers, place, tile, live, partials)
            cute.arch.sync_threads()

    @cute.jit
    def store_combs(self, operands: Operands, buffers: Buffers, place: Place, chunk: Int32) -> None:
        """comb of a later chunk of tiles."""
        own = self.own_token(place, chunk)
        if own < operands.x.shape[0]:
            target = buffers.combs[None, None, cute.arch.thread_idx()[0]]
            self.combs.store(operands.comb, own, target)

    def allocate(self) -> Buffers:
        """The CTA's shared memory."""
        smem = SmemAllocator()

        def tensor(dtype, *shape: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        return Buffers(
            tensor(BFloat16, LANE_COLUMNS, WARP, self.loaded_rows, TILE, STAGES),
            tensor(Float32, STREAMS, TILE, STAGES),
            tensor(Int32, WARP, TILE, STAGES),
            tensor(Float32, LANE_COLUMNS, WARP, STREAMS, TILE, STAGES),
            tensor(Float32, STREAMS, STREAMS, self.threads) if self.combs is not None else None,
        )

    @cute.jit
    def load_fn(self, fn: cute.Tensor, place: Place) -> cute.Tensor:
        """[column, stream, row] of the warp's rows."""
        weights = cute.make_rmem_tensor((LANE_COLUMNS, STREAMS, self.warp_rows), Float32)
        for q in cutlass.range_constexpr(self.warp_rows):
            row = cutlass.min(place.warp * self.warp_rows + q, self.config.rows - 1)
            at = address_of(fn, Int64(row) * fn.stride[0] + place.column)
            for j in cutlass.range_constexpr(STREAMS):
                source = vector_at(at, Float32, j * self.config.dim, LANE_COLUMNS)
                cute.autovec_copy(source, weights[None, j, q])
        return weights

    @cute.jit
    def load(self, operands: Operands, buffers: Buffers, place: Place, tile: Int32) -> None:
        """Begin to load the warp's token of a tile."""
        token, t, lane = first_of(place, tile) + place.warp, place.warp, place.lane
        stage = tile % STAGES
        if token < operands.x.shape[0]:
            streams, outputs = self.columns.addresses(operands, token, place.column)
            for row in cutlass.range_constexpr(self.loaded_rows):
                source = vector_at((streams + outputs)[row], BFloat16, 0, LANE_COLUMNS)
                cute.copy(copy_async(64), source, buffers.loaded[None, lane, row, t, stage])
            if cutlass.const_expr(self.config.expands):  # noqa: SIM102 static, dynamic
                # A lane a weight: all read all.
                if lane < STREAMS:
                    at = Int64(token) * operands.post.stride[0] + lane
                    target = buffers.post[None, t, stage].iterator + lane
                    copy_word(address_of(operands.post, at), Float32, target)
            if cutlass.const_expr(self.config.top_k > 0):
                ids = operands.ids
                place_ = cutlass.min(lane, self.config.top_k - 1)
                at = address_of(ids, Int64(token) * ids.stride[0] + place_)
                copy_word(at, Int32, buffers.experts[None, t, stage].iterator + lane)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def write(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        tile: Int32,
        live,
        partials: cute.Tensor,
    ) -> None:
        """Write the warp's token of a tile to the streams; in shared memory, zeros past the end."""
        token, t, lane = first_of(place, tile) + place.warp, place.warp, place.lane
        stage = tile % STAGES
        loaded = self.columns.registers(1)
        words = loaded.words[None, None, 0]
        cute.arch.cp_async_wait_group(0)
        if token < operands.x.shape[0]:
            for j in cutlass.range_constexpr(STREAMS):
                read_words(buffers.loaded[None, lane, j, t, stage], words[None, j])
            if cutlass.const_expr(self.config.expands):
                for row in cutlass.range_constexpr(self.loaded_rows - STREAMS):
                    source = buffers.loaded[None, lane, STREAMS + row, t, stage]
                    read_words(source, loaded.outputs[None, row, 0])
                # Weights are other lanes' copies.
                cute.arch.sync_warp()
                cute.autovec_copy(buffers.post[None, t, stage], loaded.weights[None, STREAMS, 0])
                index = tile % CHUNK * TILE + t
                for j in cutlass.range_constexpr(STREAMS):
                    comb = buffers.combs[None, j, index]
                    cute.autovec_copy(comb, loaded.weights[None, j, 0])
            if cutlass.const_expr(self.config.top_k > 0):
                expert = buffers.experts[lane, t, stage]
                loaded.experts[0] = self.columns.used_expert(expert, lane, token < live)
            if cutlass.const_expr(self.config.expands):
                self.columns.write(operands, token, place.column, loaded, 0)
            total = squares_of(*(words[None, j] for j in range(STREAMS)))
            total = cute.arch.warp_reduction_sum(total)
            if place.lane == 0:
                partials[token, place.group, SQUARES_ROW] = total
        values = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        for j in cutlass.range_constexpr(STREAMS):
            for p in cutlass.range_constexpr(PAIRS):
                values[2 * p], values[2 * p + 1] = quant.unpack_bf16(words[p, j])
            cute.autovec_copy(values, buffers.streams[None, lane, j, t, stage])

    @cute.jit
    def multiply(
        self,
        place: Place,
        tile: Int32,
        tokens,
        weights: cute.Tensor,
        streams: cute.Tensor,
        partials: cute.Tensor,
    ) -> None:
        """partials of the warp's rows and the tokens of a tile."""
        first, stage = first_of(place, tile), tile % STAGES
        first_row = place.warp * self.warp_rows
        if first_row < self.config.rows:
            products = cute.make_rmem_tensor((TILE, self.warp_rows), Float32)
            products.fill(0.0)
            values = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
            for j in cutlass.range_constexpr(STREAMS):
                for t in cutlass.range_constexpr(TILE):
                    cute.autovec_copy(streams[None, place.lane, j, t, stage], values)
                    for c in cutlass.range_constexpr(LANE_COLUMNS):
                        for q in cutlass.range_constexpr(self.warp_rows):
                            total = products[t, q]
                            products[t, q] = cute.math.fma(values[c], weights[c, j, q], total)
            terms = [products[t, q] for q in range(self.warp_rows) for t in range(TILE)]
            index, sums, copies = spread_sums(terms, place.lane)
            for i in cutlass.range_constexpr(len(sums)):
                at = index + i
                row, token = first_row + at // TILE, first + at % TILE
                is_sum = (at < len(terms)) & (place.lane % copies == 0)
                if is_sum & (row < self.config.rows) & (token < tokens):
                    partials[token, place.group, row] = sums[i]


def first_of(place: Place, tile: Int32) -> Int32:
    """First token of a tile, by its number among those of the part."""
    return (place.part + tile * cute.arch.grid_dim()[1]) * TILE


def partials_in(workspace: cute.Tensor, tokens: Int32, groups: int) -> cute.Tensor:
    """Sums by token, group of columns and row: [T, groups, 32] fp32, the rows of fn first."""
    row = groups * PARTIAL_ROWS
    layout = cute.make_layout((tokens, groups, PARTIAL_ROWS), stride=(Int64(row), PARTIAL_ROWS, 1))
    return cute.make_tensor(workspace.iterator + COUNTER_WORDS * MAX_PARTS, layout)


def read_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Columns of a lane from shared memory."""
    cute.autovec_copy(cute.recast_tensor(source, Uint32), target)


def copy_word(address: Int64, dtype: type, target: cute.Pointer) -> None:
    """Begin to copy a number of four bytes to shared memory."""
    source = vector_at(address, dtype, 0, 1)
    cute.copy(copy_async(32), source, cute.make_tensor(target, cute.make_layout(1)))


def copy_async(bits: int) -> cute.CopyAtom:
    """Asynchronous copy to shared memory."""
    operation = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.ALWAYS)
    return cute.make_copy_atom(operation, BFloat16 if bits == 64 else Int32, num_bits_per_copy=bits)
