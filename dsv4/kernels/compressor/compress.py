"""State, pooling and emission of a compressor, for sm_90a and sm_100a.

A cluster takes a block of tokens that ends within the step, a CTA 128 channels of it, or 64 where
the block is long: the softmax of the block's scores weighs its values, channel by channel; the mean
is rounded to bf16, normalised, rotated, rounded, and written as an entry of the cache. A team of
lanes, four channels each, holds every eighth or sixteenth token of the block in registers; three
exchanges through shared memory: maxima, sums, and, over the cluster, the sum of squares.

Tokens before the step come from the request's ring, those of the step from their projections. The
first cluster of a request also appends the step's tokens to the ring: behind the blocks that read
it, which are its own, since each CTA reads and writes its own channels alone.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import NamedTuple

import cutlass
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    cute,
)
from cutlass.memory import SmemAllocator

from dsv4.kernels.compressor.config import ARGS, SLICE, CompressConfig, has_kernel, values
from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.index_entry import FP4_GROUP, SCALE_BYTES, IndexEntry
from dsv4.kernels.kit.index_rounding import coded, packed, rotated, transformed
from dsv4.kernels.kit.kv_entry import GROUP, ROPE_DIM, Fp8Entry
from dsv4.kernels.kit.remote import store_remote
from dsv4.kernels.kit.rms import inverse_rms
from dsv4.kernels.kit.vectors import address_of, in_registers, pointer_to, prefetch_l2, vector_at

WARP = 32
WARPS = 8
THREADS = WARPS * WARP
VECTOR = 4  # channels of a lane
MOST_TERMS = 8  # tokens of a mean in a lane's registers, where a CTA of fewer channels allows it
MOST_BIASES = 4  # loaded together
CTAS_PER_SM = 2  # at least: one cannot keep enough loads under way
MOST_ASKING = 264  # CTAs: of more, loads behind the wait and what was asked for before it queue up
LINE_LANES = 8  # whose vectors are a line of L2
PAIRS = VECTOR // 2
LOG2_E = 1.4426950408889634


class Operands(NamedTuple):
    """Tensors of a launch."""

    values: cute.Tensor  # [B, C, width] fp32
    scores: cute.Tensor  # [B, C, width] fp32
    ape: cute.Tensor  # [ratio, width] fp32
    state: cute.Tensor  # [rows, size, 2, width] fp32, written
    weight: cute.Tensor  # [d] fp32
    rope: cute.Tensor  # [R, rope_dim] fp32
    state_rows: cute.Tensor  # [B] int32
    starts: cute.Tensor  # [B] int32
    lens: cute.Tensor  # [B] int32
    slots: cute.Tensor  # [B, K] int32
    pool: cute.Tensor  # [pages, P, row], written


class Request(NamedTuple):
    """The request of a cluster."""

    index: Int32
    row: Int32  # of the state
    start: Int32  # position of its first new token
    count: Int32  # new tokens


class Smem(NamedTuple):
    """Views of shared memory, [4, lane, warp] each, and the cluster's sums of squares."""

    tops: cute.Tensor
    weights: cute.Tensor
    sums: cute.Tensor
    squares: cute.Tensor  # [CTAs]


class Compress:
    """Kernel of one configuration.

    Attributes:
        channels: of a CTA; cluster: CTAs of an entry.
        lanes: of a team; teams: of a CTA; own_terms: tokens of a mean that a team holds.
        series: of channels of a projection.
    """

    def __init__(self, config: CompressConfig):
        assert has_kernel(config), config
        self.config = config
        self.channels = SLICE
        narrow = SLICE // 2
        is_long = config.terms > MOST_TERMS * (THREADS * VECTOR // SLICE)
        if is_long and config.terms % (THREADS * VECTOR // narrow) == 0 and not config.is_index:
            self.channels = narrow
        self.cluster = config.dim // self.channels
        self.lanes = self.channels // VECTOR
        self.teams = THREADS // self.lanes
        self.own_terms = config.terms // self.teams
        self.series = config.width // config.dim
        self.entry = None if config.is_index else Fp8Entry(config.dim)

    @cute.jit
    def __call__(
        self,
        values: cute.Tensor,
        scores: cute.Tensor,
        ape: cute.Tensor,
        state: cute.Tensor,
        weight: cute.Tensor,
        rope: cute.Tensor,
        state_rows: cute.Tensor,
        starts: cute.Tensor,
        lens: cute.Tensor,
        slots: cute.Tensor,
        pool: cute.Tensor,
        stream,
    ):
        """Launch a cluster for each request, and for each of its blocks from the third on."""
        operands = Operands(
            values, scores, ape, state, weight, rope, state_rows, starts, lens, slots, pool
        )
        tasks = cutlass.max(slots.shape[1] - 1, 1)
        self.kernel(operands).launch(
            grid=[self.cluster * tasks, cutlass.max(values.shape[0], 1), 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        block, request, _ = cute.arch.block_idx()
        smem = self.allocate(SmemAllocator())
        pdl.launch_dependents()
        self.run(operands, smem, block // self.cluster, request, block % self.cluster)

    @cute.jit
    def run(self, operands: Operands, smem: Smem, task: Int32, request: Int32, rank: Int32):
        """Take a task of a request, as the CTA of this rank in its cluster."""
        lane = cute.arch.thread_idx()[0] % self.lanes
        # The norm's weight is not an output of the launch before.
        gains = cute.make_rmem_tensor(VECTOR, Float32)
        channel = rank * self.channels + lane * VECTOR
        cute.autovec_copy(
            vector_at(address_of(operands.weight, Int64(channel)), Float32, 0, VECTOR), gains
        )
        # Nor are the step's requests.
        requests, blocks = operands.values.shape[0], operands.slots.shape[1]
        is_given = request < requests and operands.values.shape[1] > 0
        row, start, count = Int32(-1), Int32(0), Int32(0)
        # The first cluster has two blocks: those that may begin before the step.
        begin = cutlass.select_(task == 0, Int32(0), task + 1)
        end = cutlass.min(task + 2, blocks)
        if is_given:
            given = self.request(operands, request)
            row, start, count = given.row, given.start, given.count
            if requests * self.cluster * cutlass.max(blocks - 1, 1) <= MOST_ASKING:
                for j in cutlass.range(begin, end, unroll=1):
                    if operands.slots[request, j] >= 0:
                        self.ask_for_past(operands, given, start // self.config.ratio + j, channel)
        pdl.wait_for_previous_launch()
        if is_given:
            found = Request(request, row, start, count)
            # Loads of what comes last are under way while a block is pooled.
            ahead = self.first_new(operands, found, task == 0, channel)
            for j in cutlass.range(begin, end, unroll=1):
                slot = operands.slots[request, j]
                page = cutlass.select_(slot < 0, Int32(0), slot) // operands.pool.shape[1]
                if slot >= 0 and page < operands.pool.shape[0]:
                    number = found.start // self.config.ratio + j
                    turns = self.rotation(operands, number * self.config.ratio, lane)
                    pairs = self.pooled(operands, smem, found, number, channel)
                    place = slot - page * operands.pool.shape[1]
                    self.emit(operands, smem, pairs, gains, turns, (page, place), rank)
            if task == 0 and found.row >= 0:
                # The barriers of `pooled` lie behind all reads of the ring.
                self.append(operands, found, channel, ahead)

    def request(self, operands: Operands, index: Int32) -> Request:
        """A request; without a row of the state, or with one out of range, it has no tokens."""
        row, count = operands.state_rows[index], operands.lens[index]
        exists = (row >= 0) & (row < operands.state.shape[0])
        count = cutlass.max(cutlass.min(count, operands.values.shape[1]), 0)
        return Request(
            index,
            Int32(cutlass.select_(exists, row, Int32(-1))),
            cutlass.max(operands.starts[index], 0),
            Int32(cutlass.select_(exists, count, Int32(0))),
        )

    def allocate(self, smem: SmemAllocator) -> Smem:
        """The CTA's shared memory."""

        def tensor(*shape: int) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)

        boards = [tensor(VECTOR, self.lanes, WARPS) for _ in range(3)]
        return Smem(*boards, tensor(self.cluster))

    # ---- pooling ---------------------------------------------------------------------------------

    @cute.jit
    def pooled(
        self, operands: Operands, smem: Smem, request: Request, number: Int32, channel: Int32
    ) -> list[Uint32]:
        """The lane's channels of a block's mean, as pairs of bf16; the same in all teams."""
        thread = cute.arch.thread_idx()[0]
        lane, team = thread % self.lanes, thread // self.lanes
        found = cute.make_rmem_tensor((VECTOR, self.own_terms), Float32)
        scores = cute.make_rmem_tensor((VECTOR, self.own_terms), Float32)
        self.load_terms(operands, request, number, team, channel, (found, scores))
        tops = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            tops[c] = scores[c, 0]
            for i in cutlass.range_constexpr(1, self.own_terms):
                tops[c] = cute.arch.fmax(tops[c], scores[c, i])
        # A second block writes here what all have read before the barrier of the first one's sums.
        self.put(smem.tops, self.over_warp(tops, cute.arch.fmax))
        cute.arch.sync_threads()
        tops = self.over_warps(smem.tops, lane, cute.arch.fmax)
        weights = cute.make_rmem_tensor(VECTOR, Float32)
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            weights[c], sums[c] = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(self.own_terms):
                weight = cute.math.exp2((scores[c, i] - tops[c]) * Float32(LOG2_E), fastmath=True)
                weights[c] = weights[c] + weight
                sums[c] = cute.math.fma(weight, found[c, i], sums[c])
        self.put(smem.weights, self.over_warp(weights, add))
        self.put(smem.sums, self.over_warp(sums, add))
        cute.arch.sync_threads()
        weights = self.over_warps(smem.weights, lane, add)
        sums = self.over_warps(smem.sums, lane, add)
        means = [sums[c] / weights[c] for c in range(VECTOR)]
        return [quant.pack_bf16(*means[i : i + 2]) for i in range(0, VECTOR, 2)]

    def over_warp(self, part: cute.Tensor, combine: Callable) -> cute.Tensor:
        """A team's part with those of the other teams of its warp."""
        offset = self.lanes
        while offset < WARP:
            for c in range(VECTOR):
                other = cute.arch.shuffle_sync_bfly(part[c], offset=offset)
                part[c] = combine(part[c], other)
            offset *= 2
        return part

    @cute.jit
    def put(self, board: cute.Tensor, part: cute.Tensor):
        """Write a warp's part to a board."""
        thread = cute.arch.thread_idx()[0]
        if thread % WARP < self.lanes:
            cute.autovec_copy(part, board[None, thread % self.lanes, thread // WARP])

    def over_warps(self, board: cute.Tensor, lane: Int32, combine: Callable) -> list[Float32]:
        """The parts of all warps, in their order."""
        found = []
        for warp in range(WARPS):
            part = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(board[None, lane, warp], part)
            found.append(part)
        result = [found[0][c] for c in range(VECTOR)]
        for part in found[1:]:
            result = [combine(result[c], part[c]) for c in range(VECTOR)]
        return result

    @cute.jit
    def ask_for_past(self, operands: Operands, request: Request, number: Int32, channel: Int32):
        """Ask for a block's tokens in the ring, to L2: what the launch before still writes meets
        them there."""
        state, thread = operands.state, cute.arch.thread_idx()[0]
        team = thread // self.lanes
        first = self.first_term(number, team)
        # Rolled up: addresses would be kept for the loads behind the wait.
        for i in cutlass.range(self.own_terms, unroll=1):
            position = first + i * self.teams
            if self.is_past(request, position) & (thread % LINE_LANES == 0):
                column = self.column(i * self.teams + team, channel)
                at = self.ring_offset(state, request, position % state.shape[1], column)
                for part in cutlass.range_constexpr(2):
                    prefetch_l2(address_of(state, at + part * state.stride[2]))

    def first_term(self, number: Int32, team: Int32) -> Int32:
        """Position of a team's first token of a block's mean."""
        first = number * self.config.ratio + team
        return first - self.config.ratio if self.config.overlap else first

    def is_past(self, request: Request, position: Int32) -> Boolean:
        """Whether a token is one of those before the step, which the ring has."""
        return (position < request.start) & (position >= 0) & (request.row >= 0)

    def ring_offset(
        self, state: cute.Tensor, request: Request, place: Int32, column: Int32
    ) -> Int64:
        """Elements before a column of a place's value in the request's ring."""
        return Int64(request.row) * state.stride[0] + Int64(place) * state.stride[1] + column

    @cute.jit
    def load_terms(
        self, operands: Operands, request: Request, number: Int32, team: Int32, channel: Int32,
        place: tuple,
    ):  # fmt: skip
        """Values and scores of the team's tokens of a mean, of the lane's channels.

        There is no branch among the loads, so that all are under way together: behind each branch
        the compiler would wait for what was loaded in it.
        """
        values_, scores = place
        size = operands.state.shape[1]
        first = self.first_term(number, team)
        ring = first % size
        for i in cutlass.range_constexpr(self.own_terms):
            # Rings hold at least a mean's tokens.
            at = ring + i * self.teams
            at = cutlass.select_(at >= size, at - size, at)
            term = i * self.teams + team
            target = values_[None, i], scores[None, i]
            self.load_term(operands, request, term, first + i * self.teams, at, channel, target)
        if first + (self.own_terms - 1) * self.teams >= request.start:
            self.add_bias(operands, request, first, team, channel, scores)
        for i in cutlass.range_constexpr(self.own_terms):
            position = first + i * self.teams
            # Before the sequence there is nothing; the ring may hold a NaN there.
            is_past = (position >= 0) & (request.row >= 0)
            exists = (position >= request.start) | is_past
            for c in cutlass.range_constexpr(VECTOR):
                values_[c, i] = cutlass.select_(exists, values_[c, i], Float32(0.0))
                scores[c, i] = cutlass.select_(exists, scores[c, i], -Float32.inf)

    def load_term(
        self, operands: Operands, request: Request, term: Int32, position: Int32, place: Int32,
        channel: Int32, target: tuple,
    ) -> None:  # fmt: skip
        """Value and score of a token, from its place in the ring or from the step's projections;
        where it is in neither, anything."""
        column = self.column(term, channel)
        state, count = operands.state, operands.values.shape[1]
        is_past = self.is_past(request, position)
        offset = cutlass.max(cutlass.min(position - request.start, count - 1), 0)
        ring = self.ring_offset(state, request, place, column)
        for part, tensor in enumerate((operands.values, operands.scores)):
            at = Int64(request.index) * tensor.stride[0] + Int64(offset) * tensor.stride[1]
            new = address_of(tensor, at + column)
            past = address_of(state, ring + part * state.stride[2])
            source = vector_at(Int64(cutlass.select_(is_past, past, new)), Float32, 0, VECTOR)
            cute.autovec_copy(source, target[part])

    def column(self, term: Int32, channel: Int32) -> Int32:
        """Column of a token's projections that contributes to a channel."""
        if not self.config.overlap:
            return channel
        return channel + cutlass.select_(term < self.config.ratio, Int32(0), Int32(self.config.dim))

    @cute.jit
    def add_bias(
        self, operands: Operands, request: Request, first: Int32, team: Int32, channel: Int32,
        scores: cute.Tensor,
    ):  # fmt: skip
        """Add the bias of its position to each score that is new."""
        ape, ratio = operands.ape, self.config.ratio
        # A few at a time: registers are short.
        for begin in cutlass.range_constexpr(0, self.own_terms, MOST_BIASES):
            end = min(begin + MOST_BIASES, self.own_terms)
            bias = cute.make_rmem_tensor((VECTOR, MOST_BIASES), Float32)
            for i in cutlass.range_constexpr(begin, end):
                term = i * self.teams + team
                at = Int64(term % ratio) * ape.stride[0] + self.column(term, channel)
                source = vector_at(address_of(ape, at), Float32, 0, VECTOR)
                cute.autovec_copy(source, bias[None, i - begin])
            for i in cutlass.range_constexpr(begin, end):
                is_new = first + i * self.teams >= request.start
                for c in cutlass.range_constexpr(VECTOR):
                    added = scores[c, i] + bias[c, i - begin]
                    scores[c, i] = cutlass.select_(is_new, added, scores[c, i])

    # ---- state -----------------------------------------------------------------------------------

    def items(self, operands: Operands, request: Request) -> tuple[Int32, Int32]:
        """The team's first item to append, and the end of all: a series of a token each."""
        series, team = self.series, cute.arch.thread_idx()[0] // self.lanes
        first = cutlass.max(request.count - operands.state.shape[1], 0) * series
        return first + team, request.count * series

    def first_new(
        self, operands: Operands, request: Request, appends: Boolean, channel: Int32
    ) -> tuple[cute.Tensor, ...]:
        """Value, score and bias of the team's first item; where it has none, of any token."""
        item, end = self.items(operands, request)
        is_item = appends & (item < end)
        item = Int32(cutlass.select_(is_item, item, Int32(0)))
        # Lanes that append nothing load one sector, all the same.
        return self.load_new(
            operands, request, item, Int32(cutlass.select_(is_item, channel, Int32(0)))
        )

    def load_new(
        self, operands: Operands, request: Request, item: Int32, channel: Int32
    ) -> tuple[cute.Tensor, ...]:
        """Value, score and bias of a series of a new token."""
        offset, column = item // self.series, channel + item % self.series * self.config.dim
        ape, position = operands.ape, request.start + offset
        places = [(ape, Int64(position % self.config.ratio) * ape.stride[0])]
        for tensor in (operands.scores, operands.values):
            at = Int64(request.index) * tensor.stride[0] + Int64(offset) * tensor.stride[1]
            places.insert(0, (tensor, at))
        found = []
        for tensor, at in places:
            part = cute.make_rmem_tensor(VECTOR, Float32)
            source = vector_at(address_of(tensor, at + column), Float32, 0, VECTOR)
            cute.autovec_copy(source, part)
            found.append(part)
        return tuple(found)

    @cute.jit
    def append(self, operands: Operands, request: Request, channel: Int32, ahead: tuple):
        """Write the CTA's channels of the new tokens that the ring has room for."""
        item, end = self.items(operands, request)
        if item < end:
            self.store_new(operands, request, item, channel, ahead)
        for later in cutlass.range(item + self.teams, end, self.teams, unroll=1):
            found = self.load_new(operands, request, later, channel)
            self.store_new(operands, request, later, channel, found)

    @cute.jit
    def store_new(
        self, operands: Operands, request: Request, item: Int32, channel: Int32, found: tuple
    ):
        """Write value and biased score of a series of a new token."""
        state, (values_, scores, bias) = operands.state, found
        offset, column = item // self.series, channel + item % self.series * self.config.dim
        biased = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            biased[c] = scores[c] + bias[c]
        at = Int64(request.row) * state.stride[0] + column
        at += Int64((request.start + offset) % state.shape[1]) * state.stride[1]
        cute.autovec_copy(values_, vector_at(address_of(state, at), Float32, 0, VECTOR))
        at += Int64(state.stride[2])
        cute.autovec_copy(biased, vector_at(address_of(state, at), Float32, 0, VECTOR))

    # ---- entries ---------------------------------------------------------------------------------

    @cute.jit
    def emit(
        self, operands: Operands, smem: Smem, pairs: list, gains: cute.Tensor, turns: tuple,
        target: tuple, rank: Int32,
    ):  # fmt: skip
        """Normalise, rotate, round and write an entry; every team computes it, the first writes."""
        config, thread = self.config, cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        elements = [value for pair in pairs for value in quant.unpack_bf16(pair)]
        squares = Float32(0.0)
        for value in elements:
            squares = cute.math.fma(value, value, squares)
        total = cute.arch.warp_reduction_sum(squares, threads_in_group=self.lanes)
        if cutlass.const_expr(self.cluster > 1):
            total = self.over_cluster(smem, total, rank, thread)
        factor = inverse_rms(total, config.dim, config.eps)
        scaled = [value * factor * gains[c] for c, value in enumerate(elements)]
        pairs = [quant.pack_bf16(*scaled[i : i + 2]) for i in range(0, VECTOR, 2)]
        channel = rank * self.channels + lane * VECTOR
        is_rotated = channel >= config.dim - ROPE_DIM
        turned = rotated(pairs, *turns)
        pairs = [Uint32(cutlass.select_(is_rotated, new, old)) for new, old in zip(turned, pairs)]
        if cutlass.const_expr(config.is_index):
            pairs = transformed(pairs, lane)
            if cutlass.const_expr(config.kv_format == "fp4"):
                codes, exponent = packed(pairs)
                if thread < self.lanes:
                    self.store_packed_key(operands.pool, target, codes, exponent, lane)
            else:
                codes, scale = coded(pairs)
                if thread < self.lanes:
                    self.store_key(operands.pool, target, codes, scale, lane)
        else:
            scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, GROUP // VECTOR))
            if thread < self.lanes:
                if cutlass.const_expr(config.kv_format == "fp8"):
                    self.store_entry(operands.pool, target, pairs, scale, channel)
                else:
                    self.store_row(operands.pool, target, pairs, scale, channel)

    @cute.jit
    def over_cluster(self, smem: Smem, total: Float32, rank: Int32, thread: Int32) -> Float32:
        """Sum over the CTAs, in their order."""
        # The others have begun, and have read what the block before left.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if thread < self.cluster:
            store_remote(smem.squares.iterator + rank, thread, total.bitcast(Int32))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        result = smem.squares[0]
        for other in cutlass.range_constexpr(1, self.cluster):
            result = result + smem.squares[other]
        return result

    def rotation(
        self, operands: Operands, position: Int32, lane: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Cosines and sines of the lane's pairs; of plain channels any."""
        rope = operands.rope
        position = cutlass.max(cutlass.min(position, rope.shape[0] - 1), 0)
        column = lane % (ROPE_DIM // VECTOR) * PAIRS
        found = []
        for part in (0, ROPE_DIM // 2):
            turns = cute.make_rmem_tensor(PAIRS, Float32)
            at = address_of(rope, Int64(position) * rope.stride[0] + part + column)
            cute.autovec_copy(vector_at(at, Float32, 0, PAIRS), turns)
            found.append(turns)
        return tuple(found)

    @cute.jit
    def store_key(
        self, pool: cute.Tensor, target: tuple, codes: cute.Tensor, scale: Float32, lane: Int32
    ):
        """Write an FP8 index key."""
        page, place = target
        start = address_of(pool, Int64(page) * pool.stride[0])
        at = start + place * SLICE + lane * VECTOR
        cute.autovec_copy(codes, vector_at(at, Float8E4M3FN, 0, VECTOR))
        if lane == 0:
            at = start + pool.shape[1] * SLICE + place * SCALE_BYTES
            pointer_to(at, Float32, SCALE_BYTES).store(scale)

    @cute.jit
    def store_packed_key(
        self, pool: cute.Tensor, target: tuple, codes: Uint32, exponent: Int32, lane: Int32
    ):
        """Write the lane's part of an FP4 index key."""
        entry, (page, place) = IndexEntry(SLICE, "fp4"), target
        start = address_of(pool, Int64(page) * pool.stride[0])
        at = start + place * entry.code_bytes + lane * (VECTOR // 2)
        pointer_to(at, Uint16, VECTOR // 2).store(Uint16(codes))
        if lane % (FP4_GROUP // VECTOR) == 0:
            at = start + pool.shape[1] * entry.code_bytes + place * entry.scale_bytes
            pointer_to(at + lane // (FP4_GROUP // VECTOR), Uint8, 1).store(Uint8(exponent))

    @cute.jit
    def store_entry(
        self, pool: cute.Tensor, target: tuple, pairs: list, scale: Int32, channel: Int32
    ):
        """Write the lane's part of an FP8 entry."""
        entry, (page, place) = self.entry, target
        start = address_of(pool, Int64(page) * pool.stride[0])
        record = start + place * entry.record_bytes
        scale_at = start + pool.shape[1] * entry.record_bytes + place * entry.scale_bytes
        if channel >= entry.codes:
            at = vector_at(record + 2 * channel - entry.codes, BFloat16, 0, VECTOR)
            cute.autovec_copy(in_registers(pairs), cute.recast_tensor(at, Uint32))
            if channel == entry.codes:
                for i in cutlass.range_constexpr(entry.groups, entry.scale_bytes):
                    pointer_to(scale_at + i, Uint8, 1).store(Uint8(0))
        else:
            codes = quant.quantize_e4m3(pairs, scale)
            cute.autovec_copy(codes, vector_at(record + channel, Float8E4M3FN, 0, VECTOR))
            if channel % GROUP == 0:
                pointer_to(scale_at + channel // GROUP, Uint8, 1).store(Uint8(scale))

    @cute.jit
    def store_row(
        self, pool: cute.Tensor, target: tuple, pairs: list, scale: Int32, channel: Int32
    ):
        """Write the lane's part of a row, rounded to what an entry would hold where asked for."""
        page, place = target
        words = pairs
        if cutlass.const_expr(self.config.is_rounded):
            codes = quant.quantize_e4m3(pairs, scale).load().to(Float32)
            factor = quant.unpack_e8m0(scale)
            plain = [codes[i] * factor for i in range(VECTOR)]
            plain = [quant.pack_bf16(*plain[i : i + 2]) for i in range(0, VECTOR, 2)]
            is_plain = channel < self.config.dim - ROPE_DIM
            words = [Uint32(cutlass.select_(is_plain, a, b)) for a, b in zip(plain, pairs)]
        at = Int64(page) * pool.stride[0] + Int64(place) * pool.stride[1] + channel
        out = vector_at(address_of(pool, at), BFloat16, 0, VECTOR)
        cute.autovec_copy(in_registers(words), cute.recast_tensor(out, Uint32))


def build(config: CompressConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(Compress(config), ARGS, values(config), options)
