"""Seam between two sublayers (mHC), for sm_90a and sm_100a: streams written, mixed, normalised,
quantised in one launch, or for many tokens in two (`products.py`, `collapse.py`).

X'_k = bf16(post_k y + sum_j comb[j, k] X_j); m = fn X' / rms(X'); pre, post and comb of m; then
x = norm(bf16(sum_j pre_j X'_j)), and its FP8 codes. Technical report section 2.2; the official
`hc_split_sinkhorn` where it differs. Behind experts y is bf16(sum of a token's rows), added here
with the bits of `kernels/moe/combine.py`.

A cluster takes one token, or a few, at a time. A warp owns 128 columns of all streams, one group
of FP8 codes, and fn lies in shared memory, loaded before the launch before has ended. The CTAs of
a cluster exchange two sums by stores to each other's shared memory: of the products and squares of
X', and of the squares of x. A warp of its own turns the products into post and comb meanwhile.

Every sum has one order: the columns of a lane, lanes as a butterfly, the groups of a CTA in order,
CTAs as a butterfly. A token's bits depend neither on the pass size nor on the other tokens, nor on
the number of launches: the second of two adds groups as if they were those of a cluster's CTAs.

Half of comb's iteration ends with x; the seam that needs comb runs the other half, beside the
launch before (`combs.py`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl, quant
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.reduce import spread_sums, tree
from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.seam.args import ARGS, values
from dsv4.kernels.seam.collapse import Collapse
from dsv4.kernels.seam.columns import (
    PAIRS,
    Columns,
    Held,
    Operands,
    butterfly,
    load_gains,
    mix,
    squares_of,
)
from dsv4.kernels.seam.combs import Combs, Guess
from dsv4.kernels.seam.config import (
    GROUP,
    LANE_COLUMNS,
    MIX_ROWS,
    PARTIAL_ROWS,
    SQUARES_ROW,
    STREAMS,
    WARP,
    WARPS,
    SeamConfig,
    can_join,
    tiling_of,
)
from dsv4.kernels.seam.joined import Joined
from dsv4.kernels.seam.mixing import Mixing
from dsv4.kernels.seam.products import Products, partials_in

QUAD = 4  # floats of a remote store
SHARED_ROWS = 8  # of the sums that every CTA gets: pre, then the squares
COMPUTE = WARPS * WARP  # threads
# Named barriers: of the computing warps, and of all, on which the warp beside them only arrives:
# when it has read the sums, and when comb is there.
COMPUTING, READ, COMBS = 1, 2, 3


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a CTA; the leading index is contiguous.

    Attributes:
        fn: [4, lane, group, stream, row] fp32.
        streams: X' [4, lane, group, stream, token] bf16.
        partials: [row, token, group] fp32, sums over the columns of a group.
        sums: [row, token, rank] fp32, of pre and of squares, by the CTA that they come from.
        mix_sums: [row, owned token, rank] fp32, of post and comb of the tokens that this CTA
            mixes.
        squares: [group, token] fp32, of x.
        square_sums: [token, rank] fp32.
        starts: [16, owned token] fp32, what comb's iteration starts with.
        combs: [target, source, token] fp32, of the sublayer before.
        exchanged: mbarriers of the two exchanges.
    """

    fn: cute.Tensor
    streams: cute.Tensor
    partials: cute.Tensor
    sums: cute.Tensor
    mix_sums: cute.Tensor
    squares: cute.Tensor
    square_sums: cute.Tensor
    starts: cute.Tensor
    combs: cute.Tensor
    exchanged: cute.Pointer


@dataclass(frozen=True)
class Place:
    """A thread's place: its CTA in the cluster, its warp's set and group, its lane."""

    thread: Int32
    warp: Int32
    lane: Int32
    rank: Int32
    set: Int32
    group: Int32
    is_group: Boolean | bool  # whether the CTA has the warp's group
    column: Int32  # first of the lane's


class Seam:
    """Kernel of one configuration."""

    def __init__(self, config: SeamConfig):
        self.config = config
        self.tiling = tiling_of(config)
        self.columns = Columns(config)
        self.products = Products(config, self.columns)
        self.collapse_tokens = Collapse(config, self.columns)
        self.joined = None
        if can_join(self.tiling):
            self.joined = Joined(config, self.columns, self.products)
        self.max_tokens = self.tiling.pass_sizes[-1]
        self.mixing = None if config.is_head else Mixing(config)
        self.combs = Combs(config) if config.expands else None
        self.threads = COMPUTE + WARP * (not config.is_head or config.expands)

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,  # [T, 4, D] bf16
        fn: cute.Tensor,  # [R, 4 D] fp32
        base: cute.Tensor,  # [R] fp32
        scale: cute.Tensor,  # [3] or [1] fp32
        norm_weight: cute.Tensor,  # [D] fp32
        x: cute.Tensor,  # [T, D] bf16, written
        stream,
        *,
        y: cute.Tensor,  # [T, D] bf16
        post: cute.Tensor,  # [T, 4] fp32
        comb: cute.Tensor,  # [T, 4, 4] fp32
        rows: cute.Tensor,  # [T, k + 1, D] bf16, in place of y
        ids: cute.Tensor,  # [T, k], below 0: no row
        counts: cute.Tensor,  # [2], the second: tokens that have rows
        streams_out: cute.Tensor,  # [T, 4, D] bf16, written
        post_out: cute.Tensor,  # [T, 4] fp32, written
        comb_out: cute.Tensor,  # [T, 4, 4] fp32, written
        codes: cute.Tensor,  # [T, D] e4m3, written, or no rows: not wanted
        scale_out: cute.Tensor,  # [T, D / 128] e8m0, written, or no rows
        workspace: cute.Tensor,  # of two launches
        num_clusters: Int32,
        pass_tokens: Int32,  # a pass size of the tiling
        parts: Int32,  # of the tokens; 0: clusters take them
        is_joined: Int32,  # whether parts take one launch; else two
    ):
        operands = Operands(
            streams, base, scale, norm_weight, x, y, post, comb, rows, ids, counts, streams_out,
            post_out, comb_out, codes, scale_out,
        )  # fmt: skip
        if parts > 0:
            partials = partials_in(workspace, x.shape[0], self.tiling.groups)
            if cutlass.const_expr(self.joined is None):
                self.launch_both(operands, fn, partials, parts, stream)
            elif is_joined > 0:
                self.joined.launch(operands, fn, partials, workspace, parts, stream)
            else:
                self.launch_both(operands, fn, partials, parts, stream)
        else:
            self.launch(operands, fn, num_clusters, pass_tokens, stream)

    @cute.jit
    def launch_both(
        self, operands: Operands, fn: cute.Tensor, partials: cute.Tensor, parts: Int32, stream
    ):
        """Two launches: products of groups, and tokens."""
        self.products.launch(operands, fn, partials, parts, stream)
        self.collapse_tokens.launch(operands, partials, stream)

    @cute.jit
    def launch(
        self, operands: Operands, fn: cute.Tensor, num_clusters: Int32, pass_tokens: Int32, stream
    ):
        """One launch for all, of clusters that take a few tokens at a time."""
        ranks = self.tiling.ranks
        self.kernel(operands, fn, pass_tokens).launch(
            grid=[num_clusters * ranks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[ranks, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.tiling.ctas_per_sm,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, fn: cute.Tensor, pass_tokens: Int32):
        buffers = self.allocate()
        place = self.find_place()
        guess, token, is_guessing = None, None, None
        if cutlass.const_expr(self.combs is not None):
            # First of all: the rest of what is done before the wait hides the load.
            guess = self.combs.registers()
            token = cute.arch.block_idx()[0] // self.tiling.ranks * pass_tokens + place.lane
            is_guessing = (place.warp == WARPS) & (place.lane < pass_tokens)
            is_guessing = is_guessing & (token < operands.x.shape[0])
            if is_guessing:
                self.combs.load(operands.comb, token, guess.words)
        if place.warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(buffers.exchanged + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()
        # The parameters are no outputs of the launch before.
        if place.warp < WARPS:
            self.load_fn(fn, buffers, place)
            # These warps have the fewest tokens of a pass.
            if place.set == self.tiling.sets - 1 and place.is_group:
                self.prefetch(operands, place, pass_tokens)
        held = self.columns.load_parameters(operands)
        gains = cute.make_rmem_tensor(LANE_COLUMNS, Float32)
        gains.fill(0.0)
        if place.is_group & (place.warp < WARPS):
            load_gains(operands, place.column, gains)
        mix_row = None
        if cutlass.const_expr(self.mixing is not None):
            mix_row = self.mixing.load_parameters(operands, place.lane)
        # The mbarriers of the other CTAs exist from here on.
        cute.arch.cluster_wait()
        if cutlass.const_expr(self.combs is not None):  # noqa: SIM102 static, dynamic
            # Not earlier: all warps of the CTA meet there.
            if is_guessing:
                self.combs.iterate(guess)
        pdl.wait_for_previous_launch()
        # Not before: the next launch's weights would take DRAM from the launch that is waited for.
        pdl.launch_dependents()
        if cutlass.const_expr(self.combs is not None):
            self.settle_comb(operands, buffers, place, guess, token, is_guessing)
        self.run_size(operands, buffers, place, (held, gains, mix_row), pass_tokens, 0)

    @cute.jit
    def run_size(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        parameters: tuple,
        pass_tokens: Int32,
        index: cutlass.Constexpr,
    ):
        """`run` with the pass size that is `pass_tokens`, of those from `index` on."""
        sizes = self.tiling.pass_sizes
        if cutlass.const_expr(index == len(sizes) - 1):  # noqa: SIM114 static, then dynamic
            self.run(operands, buffers, place, parameters, sizes[index])
        elif pass_tokens == sizes[index]:
            self.run(operands, buffers, place, parameters, sizes[index])
        else:
            self.run_size(operands, buffers, place, parameters, pass_tokens, index + 1)

    def allocate(self) -> Buffers:
        """The CTA's shared memory."""
        tiling, tokens = self.tiling, self.max_tokens
        smem = SmemAllocator()

        def tensor(dtype, *shape: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        groups, ranks, owned = tiling.rank_groups, tiling.ranks, tiling.owned(tokens)
        lanes = (LANE_COLUMNS, WARP, groups, STREAMS)
        return Buffers(
            tensor(Float32, *lanes, tiling.rows),
            tensor(BFloat16, *lanes, tokens),
            tensor(Float32, PARTIAL_ROWS, tokens, groups),
            tensor(Float32, SHARED_ROWS, tokens, ranks),
            tensor(Float32, MIX_ROWS, owned, ranks),
            tensor(Float32, groups, tokens),
            tensor(Float32, tokens, ranks),
            tensor(Float32, STREAMS * STREAMS, owned),
            tensor(Float32, STREAMS, STREAMS, tokens),
            smem.allocate_array(Int64, 2),
        )

    def find_place(self) -> Place:
        """This thread's place."""
        tiling = self.tiling
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        group = warp % tiling.rank_groups
        found = rank + group * tiling.ranks
        is_group = found < tiling.groups if tiling.is_ragged else True
        column = found * GROUP + lane * LANE_COLUMNS
        return Place(thread, warp, lane, rank, warp // tiling.rank_groups, group, is_group, column)

    @cute.jit
    def load_fn(self, fn: cute.Tensor, buffers: Buffers, place: Place) -> None:
        """Begin to load the rows of fn that the warp's set sums, in the warp's columns."""
        if place.is_group:
            # Not unrolled: instructions that run once are fetched where they are needed.
            for q in cutlass.range(self.tiling.set_rows, unroll=1):
                row = place.set * self.tiling.set_rows + q
                if row < self.tiling.rows:
                    at = address_of(fn, Int64(row) * fn.stride[0] + place.column)
                    for j in cutlass.range_constexpr(STREAMS):
                        source = vector_at(at, Float32, j * self.config.dim, LANE_COLUMNS)
                        target = buffers.fn[None, place.lane, place.group, j, row]
                        cute.copy(copy_async(), source, target)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def prefetch(self, operands: Operands, place: Place, pass_tokens: Int32) -> None:
        """Ask for the streams of the first pass, in the warp's columns, to be brought into L2."""
        first = cute.arch.block_idx()[0] // self.tiling.ranks * pass_tokens
        end = cutlass.min(first + pass_tokens, operands.x.shape[0])
        group = place.rank + place.group * self.tiling.ranks
        for token in cutlass.range(first, end, unroll=1):
            self.columns.prefetch(operands, token, group, place.lane)

    @cute.jit
    def run(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        parameters: tuple,
        size: cutlass.Constexpr,
    ):
        """All passes of the cluster, of `size` tokens each."""
        tiling = self.tiling
        held, gains, mix_row = parameters
        clusters = cute.arch.grid_dim()[0] // tiling.ranks
        first = cute.arch.block_idx()[0] // tiling.ranks * size
        tokens = operands.x.shape[0]
        parity = Int32(0)
        while first < tokens:
            if place.warp < WARPS:
                self.expect(buffers, place, size)
                self.write_streams(operands, buffers, place, first, size)
                # The lane's own part of fn; after the first pass nothing is under way.
                cute.arch.cp_async_wait_group(0)
                sync_computing()
                self.sum_products(buffers, place, size)
                sync_computing()
                self.send_sums(buffers, place, size)
                self.collapse(operands, buffers, place, (held, gains), first, size, parity)
            elif cutlass.const_expr(self.threads > COMPUTE):
                self.mix(operands, buffers, place, mix_row, first, size, parity)
                if cutlass.const_expr(self.combs is not None):
                    # No warp of this CTA reads the pass's own ones any more: it has sent its sums.
                    self.store_comb(operands, buffers, place, first + clusters * size, size)
            first += clusters * size
            parity ^= 1

    # ---- comb of the sublayer before -------------------------------------------------------------

    @cute.jit
    def settle_comb(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        guess: Guess,
        token: Int32,
        is_guessing: Boolean,
    ) -> None:
        """comb of the first pass, by the warp beside those that compute, a token a lane."""
        if place.warp == WARPS:
            if is_guessing:
                target = buffers.combs[None, None, place.lane]
                self.combs.settle(operands.comb, token, guess, target)
            cute.arch.barrier_arrive(barrier_id=COMBS, number_of_threads=self.threads)

    @cute.jit
    def store_comb(
        self, operands: Operands, buffers: Buffers, place: Place, first, size: cutlass.Constexpr
    ) -> None:
        """comb of a later pass, if there is one, by the same warp."""
        if first < operands.x.shape[0]:
            if (place.lane < size) & (first + place.lane < operands.x.shape[0]):
                target = buffers.combs[None, None, place.lane]
                self.combs.store(operands.comb, first + place.lane, target)
            cute.arch.barrier_arrive(barrier_id=COMBS, number_of_threads=self.threads)

    # ---- streams ---------------------------------------------------------------------------------

    @cute.jit
    def expect(self, buffers: Buffers, place: Place, size: cutlass.Constexpr) -> None:
        """Announce what the cluster's CTAs send in this pass."""
        tiling = self.tiling
        if place.thread == 0:
            sent = Int32(SHARED_ROWS * size)
            if cutlass.const_expr(self.mixing is not None):
                sent += (size - place.rank + tiling.ranks - 1) // tiling.ranks * MIX_ROWS
            bytes_ = sent * (tiling.ranks * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(buffers.exchanged, bytes_)
            bytes_ = tiling.ranks * size * 4
            cute.arch.mbarrier_arrive_and_expect_tx(buffers.exchanged + 1, bytes_)

    @cute.jit
    def write_streams(
        self, operands: Operands, buffers: Buffers, place: Place, first, size: cutlass.Constexpr
    ) -> None:
        """Streams of the set's tokens into shared memory, and out where they are new; their
        squares. Tokens past the end are zeros."""
        sets, tokens = self.tiling.sets, operands.x.shape[0]
        rounds = -(-size // sets)
        loaded = self.columns.registers(rounds)
        # All loads before the first store, which could have written what they read.
        for i in cutlass.range_constexpr(rounds):
            t = place.set + i * sets
            if t < size and first + t < tokens and place.is_group:
                self.columns.load(operands, first + t, place.column, place.lane, loaded, i)
        if cutlass.const_expr(self.combs is not None):
            cute.arch.barrier(barrier_id=COMBS, number_of_threads=self.threads)
        for i in cutlass.range_constexpr(rounds):
            t = place.set + i * sets
            if t < size:
                own = loaded.words[None, None, i]
                if place.is_group:
                    if cutlass.const_expr(self.config.expands):  # noqa: SIM102 static, dynamic
                        if first + t < tokens:
                            weights = loaded.weights[None, None, i]
                            for j in cutlass.range_constexpr(STREAMS):
                                comb = buffers.combs[None, j, t]
                                cute.autovec_copy(comb, weights[None, j])
                            self.columns.write(operands, first + t, place.column, loaded, i)
                    for j in cutlass.range_constexpr(STREAMS):
                        target = buffers.streams[None, place.lane, place.group, j, t]
                        cute.autovec_copy(own[None, j], cute.recast_tensor(target, Uint32))
                total = squares_of(*(own[None, j] for j in range(STREAMS)))
                total = cute.arch.warp_reduction_sum(total)
                if place.lane < QUAD:
                    # The rest of the quad is sent, too.
                    value = cutlass.select_(place.lane == 0, total, Float32(0.0))
                    buffers.partials[SQUARES_ROW + place.lane, t, place.group] = value

    # ---- products --------------------------------------------------------------------------------

    @cute.jit
    def sum_products(self, buffers: Buffers, place: Place, size: cutlass.Constexpr) -> None:
        """partials of the set's rows of fn and all tokens, over the warp's columns."""
        tiling = self.tiling
        first_row = place.set * tiling.set_rows
        if first_row < tiling.rows:
            products = cute.make_rmem_tensor((size, tiling.set_rows), Float32)
            products.fill(0.0)
            if place.is_group:
                self.multiply(buffers, place, first_row, products)
            terms = [products[t, q] for q in range(tiling.set_rows) for t in range(size)]
            index, sums, copies = spread_sums(terms, place.lane)
            for i in cutlass.range_constexpr(len(sums)):
                row, t = first_row + (index + i) // size, (index + i) % size
                is_sum = (index + i < len(terms)) & (place.lane % copies == 0)
                if is_sum & (row < tiling.rows):
                    buffers.partials[row, t, place.group] = sums[i]

    @cute.jit
    def multiply(
        self, buffers: Buffers, place: Place, first_row: Int32, products: cute.Tensor
    ) -> None:
        """products[token, row] += fn[row] X'[token] over the lane's columns."""
        size, set_rows = products.shape
        weights = cute.make_rmem_tensor((LANE_COLUMNS, set_rows), Float32)
        words = cute.make_rmem_tensor(PAIRS, Uint32)
        for j in cutlass.range_constexpr(STREAMS):
            for q in cutlass.range_constexpr(set_rows):
                row = cutlass.min(first_row + q, self.tiling.rows - 1)
                source = buffers.fn[None, place.lane, place.group, j, row]
                cute.autovec_copy(source, weights[None, q])
            for t in cutlass.range_constexpr(size):
                source = buffers.streams[None, place.lane, place.group, j, t]
                cute.autovec_copy(cute.recast_tensor(source, Uint32), words)
                for p in cutlass.range_constexpr(PAIRS):
                    pair = quant.unpack_bf16(words[p])
                    for c in cutlass.range_constexpr(2):
                        for q in cutlass.range_constexpr(set_rows):
                            weight = weights[2 * p + c, q]
                            products[t, q] = cute.math.fma(pair[c], weight, products[t, q])

    @cute.jit
    def send_sums(self, buffers: Buffers, place: Place, size: cutlass.Constexpr) -> None:
        """Send the CTA's sums: pre and squares to all, post and comb to the one that mixes."""
        tiling = self.tiling
        ranks, mix_quads = tiling.ranks, MIX_ROWS // QUAD
        shared = size * 2 * ranks
        items = shared + size * mix_quads * (self.mixing is not None)
        for item in cutlass.range(place.thread, items, COMPUTE, unroll=1):
            if item < shared:
                # Neighbouring lanes store side by side in one CTA.
                half, t = item % 2, item // 2 % size
                target = buffers.sums[None, t, place.rank].iterator + half * QUAD
                rank = item // (2 * size)
                self.send_quad(buffers, target, half * (SQUARES_ROW // QUAD), t, rank)
            else:
                quad, t = (item - shared) % mix_quads, (item - shared) // mix_quads
                target = buffers.mix_sums[None, t // ranks, place.rank].iterator + quad * QUAD
                self.send_quad(buffers, target, 1 + quad, t, t % ranks)

    @cute.jit
    def send_quad(self, buffers: Buffers, target: cute.Pointer, quad, t, rank) -> None:
        """Add four rows of a token over the CTA's groups, and store them in another CTA."""
        total = cute.make_rmem_tensor(QUAD, Float32)
        part = cute.make_rmem_tensor(QUAD, Float32)
        for g in cutlass.range_constexpr(self.tiling.rank_groups):
            source = buffers.partials[None, t, g].iterator + quad * QUAD
            source = cute.make_tensor(source.align(16), cute.make_layout(QUAD))
            cute.autovec_copy(source, total if g == 0 else part)
            if cutlass.const_expr(g > 0):
                for i in cutlass.range_constexpr(QUAD):
                    total[i] = total[i] + part[i]
        words = cute.recast_tensor(total, Int32)
        value = tuple(words[i] for i in range(QUAD))
        cute.arch.store_async_dsmem(target.align(16), value, buffers.exchanged, rank)

    # ---- the sublayer's input --------------------------------------------------------------------

    @cute.jit
    def collapse(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        parameters: tuple,
        first,
        size: cutlass.Constexpr,
        parity,
    ) -> None:
        """x of the set's tokens: mixed, normalised, quantised."""
        tiling = self.tiling
        held, gains = parameters
        rounds = -(-size // tiling.sets)
        mixed = cute.make_rmem_tensor((PAIRS, rounds), Uint32)
        mixed.fill(0)
        cute.arch.mbarrier_wait(buffers.exchanged, parity)
        for i in cutlass.range_constexpr(rounds):
            t = place.set + i * tiling.sets
            if t < size:
                self.mix_streams(buffers, place, held, t, mixed[None, i])
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.threads)
        for item in cutlass.range(place.thread, size * tiling.ranks, COMPUTE, unroll=1):
            t, rank = item % size, item // size
            total = buffers.squares[0, t]
            for g in cutlass.range_constexpr(1, tiling.rank_groups):
                total = total + buffers.squares[g, t]
            target = buffers.square_sums[None, place.rank].iterator + t
            word = Float32(total).bitcast(Int32)
            cute.arch.store_async_dsmem(target, word, buffers.exchanged + 1, rank)
        cute.arch.mbarrier_wait(buffers.exchanged + 1, parity)
        for i in cutlass.range_constexpr(rounds):
            t = place.set + i * tiling.sets
            if t < size and first + t < operands.x.shape[0] and place.is_group:
                (squares,) = self.over_ranks(buffers.square_sums[t, place.lane % tiling.ranks])
                factor = self.columns.inverse_rms(squares, 1)
                where = (operands, first + t, place.column, place.lane)
                self.columns.store(*where, mixed[None, i], gains, factor)

    def over_ranks(self, *found: Float32) -> list[Float32]:
        """Sums over the cluster's CTAs, of which lane l has the values of l % ranks."""
        steps = self.tiling.ranks.bit_length() - 1
        return butterfly([1 << i for i in reversed(range(steps))], *found)

    @cute.jit
    def mix_streams(
        self, buffers: Buffers, place: Place, held: Held, t, mixed: cute.Tensor
    ) -> None:
        """mixed = pairs of bf16(sum_j pre_j X'_j) in the lane's columns; their squares."""
        source = place.lane % self.tiling.ranks
        *sums, squares = self.over_ranks(*(buffers.sums[j, t, source] for j in range(STREAMS + 1)))
        pre = self.columns.pre(held, sums, squares)
        if place.is_group:
            words = cute.make_rmem_tensor((PAIRS, STREAMS), Uint32)
            for j in cutlass.range_constexpr(STREAMS):
                row = buffers.streams[None, place.lane, place.group, j, t]
                cute.autovec_copy(cute.recast_tensor(row, Uint32), words[None, j])
            mix(words, pre, mixed)
        total = cute.arch.warp_reduction_sum(squares_of(mixed))
        if place.lane == 0:
            buffers.squares[place.group, t] = total

    # ---- post and comb ---------------------------------------------------------------------------

    @cute.jit
    def mix(
        self,
        operands: Operands,
        buffers: Buffers,
        place: Place,
        mix_row,
        first,
        size: cutlass.Constexpr,
        parity,
    ) -> None:
        """post and comb of the tokens that this CTA mixes: t with t % ranks == rank; of a head
        there is none."""
        tiling = self.tiling
        ranks, owned = tiling.ranks, tiling.owned(size)
        cute.arch.mbarrier_wait(buffers.exchanged, parity)
        projected = cute.make_rmem_tensor(owned, Float32)
        projected.fill(0.0)
        if cutlass.const_expr(self.mixing is not None):
            for o in cutlass.range_constexpr(owned):
                t = place.rank + o * ranks
                if t < size:
                    projected[o] = self.projection(buffers, place, t, o)
        # Other CTAs may overwrite what was read once they have this CTA's squares.
        cute.arch.barrier_arrive(barrier_id=READ, number_of_threads=self.threads)
        if cutlass.const_expr(self.mixing is not None):
            for o in cutlass.range_constexpr(owned):
                t = place.rank + o * ranks
                if t < size:
                    target = operands, buffers, first + t, o
                    self.mixing.store_post(target, place.lane, mix_row, projected[o])
            cute.arch.sync_warp()
            if place.lane < owned:
                t = place.rank + place.lane * ranks
                if t < size and first + t < operands.x.shape[0]:
                    starts = buffers.starts[None, place.lane]
                    self.mixing.store_comb(starts, operands.comb_out, first + t)
            # The next pass writes the starts that other lanes read here.
            cute.arch.sync_warp()

    @cute.jit
    def projection(self, buffers: Buffers, place: Place, t, owned: cutlass.Constexpr) -> Float32:
        """The lane's row of fn times the streams of a token, over their root mean square."""
        ranks = self.tiling.ranks
        (squares,) = self.over_ranks(buffers.sums[STREAMS, t, place.lane % ranks])
        row = cutlass.min(place.lane, MIX_ROWS - 1)
        parts = [buffers.mix_sums[row, owned, rank] for rank in range(ranks)]
        return tree(operator.add, parts) * self.columns.inverse_rms(squares, STREAMS)


@cute.jit
def sync_computing() -> None:
    """Named barrier of the computing warps."""
    cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=COMPUTE)


def copy_async() -> cute.CopyAtom:
    """Asynchronous copy of 16 bytes to shared memory, past L1."""
    operation = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
    return cute.make_copy_atom(operation, Float32, num_bits_per_copy=128)


def build(config: SeamConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(Seam(config), ARGS, values(config), options)
