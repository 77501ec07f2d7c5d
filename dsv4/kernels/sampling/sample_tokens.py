"""Token of each row of logits, drawn or the likeliest, for sm_90a and sm_100a.

A cluster has a row, in the registers of its threads: logits are read once. First its CTAs tell each
other their largest logits. A token is drawn as the arg max of p / e, of its probability p relative
to the best one's and its noise e; arithmetic whose bits other devices share is long, so all
candidates first get an upper bound of their quotient, by short means. The largest bound of a CTA is
a lower bound of its best quotient, too: only the few candidates that reach it are looked at again,
with the arithmetic of `numbers`. So bounds decide what is computed, never what comes out.

The bound of p / u, in units of 2^32: p by the special function unit, u >= word 2^-32, and the
inverse of a word by its bits, at most 9 / 8 of it. Since -log(1 - u) lies between u and
u / (1 - u), and a word c > 0 means u < 2 c 2^-32, a bound b of a candidate means a quotient of at
least b / (9 / 4) - p 2^-32.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.remote import store_remote
from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.sampling import arithmetic, numbers, truncation
from dsv4.kernels.sampling.config import (
    ARGS,
    THREADS,
    VECTOR,
    WARP,
    SampleTokensConfig,
    has_kernel,
    tiling_of,
    values,
)
from dsv4.kernels.sampling.truncation import Board, Cut, Truncation

WARPS = THREADS // WARP
VECTOR_BYTES = 4 * VECTOR
FAILED = -1  # in place of a token
NO_TOKEN = 0x7FFFFFFF
MIN_INF_KEY = -0x7F800001  # order key of minus infinity
INF_KEY = 0x7F800000
# Of bounds, in units of 2^32: of a word 0 they are at least 2, of others at most 9 / 8.
ZERO_WORD = 1.5
# The best token's noise is under 17.
LEAST_BEST = 2.0**-32 / 17
MOST_TOP_K = 0x7FFFFFFF
# What rounding may take off a lower bound: of the fast exponential, and of its argument, which is
# at most 126.
SLACK = 1 - 2.0**-10


class Smem(NamedTuple):
    """Shared memory of a CTA."""

    keys: cute.Tensor  # [WARPS] int32: largest order keys
    bounds: cute.Tensor  # [WARPS] fp32
    scores: cute.Tensor  # [WARPS] int32: bits of the best quotients
    tokens: cute.Tensor  # [WARPS] int32
    rank_keys: cute.Tensor  # [ranks] int32: what each CTA of the cluster sends
    rank_scores: cute.Tensor
    rank_tokens: cute.Tensor
    board: Board | None  # of cuts, where rows may have some


class Row(NamedTuple):
    """A row of logits, and how it is sampled; all but `first` and `end` are the cluster's."""

    address: Int64
    first: Int32  # vectors of the CTA
    end: Int32
    best: Float32
    rate: Float32  # 1 / temperature
    position: tuple[Uint32, Uint32]
    key: tuple[Uint32, Uint32]


class Keep(NamedTuple):
    """Choice of a row's tokens that are left.

    Attributes:
        min_p: probability of each, at least.
        is_cut: 1 where there is a top_k or top_p, so that probabilities are rounded.
    """

    min_p: Float32
    is_cut: Int32
    cut: Cut


class SampleTokens:
    """Kernel of one configuration."""

    def __init__(self, config: SampleTokensConfig):
        assert has_kernel(config), config
        self.config = config
        self.tiling = tiling_of(config)
        self.truncation = Truncation(self.tiling)

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,  # [B, C, V] fp32
        positions: cute.Tensor,  # [B, C] int64
        temperature: cute.Tensor,  # [B] fp32
        seed: cute.Tensor,  # [B] int64
        tokens: cute.Tensor,  # [B, C] int64, written
        stream,
        *,
        top_p: cute.Tensor,  # [B] fp32, or no rows, as all that follow
        top_k: cute.Tensor,  # [B] int64
        min_p: cute.Tensor,  # [B] fp32
    ):
        ranks = self.tiling.ranks
        options = top_p, top_k, min_p
        self.kernel(logits, positions, temperature, seed, tokens, options).launch(
            grid=[tokens.shape[0] * tokens.shape[1] * ranks, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[ranks, 1, 1],
            stream=stream,
            # Two hide each other's exchanges; cuts need more registers than that leaves.
            min_blocks_per_mp=1 if self.config.truncates else 2,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=10,
            use_pdl=True,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        positions: cute.Tensor,
        temperature: cute.Tensor,
        seed: cute.Tensor,
        tokens: cute.Tensor,
        options: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    ):
        ranks = self.tiling.ranks
        rank = Int32(0)
        if cutlass.const_expr(ranks > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            # Shared memory of the others exists once they have begun.
            cute.arch.cluster_arrive()
        smem = self.allocate()
        number, chunk = cute.arch.block_idx()[0] // ranks, tokens.shape[1]
        request = number // chunk
        column = number - request * chunk
        first = rank * self.tiling.share
        end = cutlass.min(first + self.tiling.share, self.tiling.vectors)
        offset = Int64(request) * logits.stride[0] + Int64(column) * logits.stride[1]
        address = address_of(logits, offset)
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        x = self.load(address, first, end)
        degree = temperature[request]
        position, key = positions[request, column], seed[request]
        best = self.largest(smem, x, rank)
        row = Row(
            address=address,
            first=first,
            end=end,
            best=arithmetic.of_order_key(best),
            rate=arithmetic.inverse(cute.arch.fmax(degree, Float32(numbers.TEMPERATURE_FLOOR))),
            position=(Uint32(position), Uint32(position >> 32)),
            key=(Uint32(key), Uint32(key >> 32)),
        )
        # Of the thread: bits of its best score, and the token.
        score, token = Int32(0), Int32(NO_TOKEN)
        if degree > 0 and best < INF_KEY and best > MIN_INF_KEY:
            if cutlass.const_expr(self.config.truncates):
                score, token = self.draw_kept(smem, row, x, options, request, rank)
            else:
                keep = Keep(Float32(0.0), Int32(0), Cut(Int32(0), Int32(0)))
                score, token = self.draw(smem, row, x, keep)
        else:
            score, token = self.find_best(row, x)
        score, token = self.best_of_warp(score, token)
        token = self.best_of_row(smem, score, token, rank)
        if rank == 0 and cute.arch.thread_idx()[0] == 0:
            if best <= MIN_INF_KEY or best == arithmetic.NAN_KEY:
                token = Int32(FAILED)
            tokens[request, column] = Int64(token)

    def allocate(self) -> Smem:
        """The shared memory of a CTA."""
        smem = SmemAllocator()

        def tensor(count: int, dtype: type = Int32) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

        ranks = self.tiling.ranks
        return Smem(
            tensor(WARPS), tensor(WARPS, Float32), tensor(WARPS), tensor(WARPS),
            tensor(ranks), tensor(ranks), tensor(ranks),
            self.truncation.allocate() if self.config.truncates else None,
        )  # fmt: skip

    # ---- logits ----

    @cute.jit
    def load(self, address: Int64, first: Int32, end: Int32) -> cute.Tensor:
        """The thread's logits, [VECTOR, held]; minus infinity where there are none."""
        thread = cute.arch.thread_idx()[0]
        x = cute.make_rmem_tensor((VECTOR, self.tiling.held), Float32)
        x.fill(-Float32.inf)
        for j in cutlass.range_constexpr(self.tiling.held):
            place = first + j * THREADS + thread
            if place < end:
                cute.autovec_copy(self.vector(address, place), x[None, j])
        return x

    def vector(self, address: Int64, place: Int32) -> cute.Tensor:
        """A vector of the row, in memory."""
        return vector_at(address + Int64(place) * VECTOR_BYTES, Float32, 0, VECTOR)

    @cute.jit
    def largest(self, smem: Smem, x: cute.Tensor, rank: Int32) -> Int32:
        """Order key of the row's largest logit, NaN where one is."""
        ranks = self.tiling.ranks
        thread = cute.arch.thread_idx()[0]
        most = tree(
            lambda a, b: cute.arch.fmax(a, b, nan=True),
            [x[i, j] for j in range(self.tiling.held) for i in range(VECTOR)],
        )
        key = cute.arch.warp_redux_sync(arithmetic.order_key(most), "max")
        if thread % WARP == 0:
            smem.keys[thread // WARP] = key
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            key = cutlass.max(key, smem.keys[warp])
        if cutlass.const_expr(ranks > 1):
            cute.arch.cluster_wait()
            if thread < ranks:
                store_remote(smem.rank_keys.iterator + rank, thread, key)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            for other in cutlass.range_constexpr(ranks):
                key = cutlass.max(key, smem.rank_keys[other])
        return key

    @cute.jit
    def find_best(self, row: Row, x: cute.Tensor) -> tuple[Int32, Int32]:
        """The thread's first token with the row's largest logit, of score 1."""
        score, token = Int32(0), Int32(NO_TOKEN)
        for j in cutlass.range_constexpr(self.tiling.held - 1, -1, -1):
            at = self.token_of(row, Int32(j))
            for i in cutlass.range_constexpr(VECTOR - 1, -1, -1):
                if x[i, j] == row.best:
                    score, token = Int32(1), at + i
        return score, token

    def token_of(self, row: Row, j: Int32) -> Int32:
        """First token of a vector of the thread."""
        return (row.first + j * THREADS + cute.arch.thread_idx()[0]) * VECTOR

    # ---- what is left ----

    @cute.jit
    def draw_kept(
        self, smem: Smem, row: Row, x: cute.Tensor, options: tuple, request: Int32, rank: Int32
    ) -> tuple[Int32, Int32]:
        """The best of the thread's candidates that the options leave; as `draw`."""
        keep, share = self.truncate(smem, row, x, options, request, rank)
        score, token = self.draw(smem, row, x, keep)
        # Of the row's best token: whether those before it have less than the share.
        is_found = share == 0
        while not is_found:
            winner = self.best_of_cluster(smem, score, token, rank)
            logit = vector_at(row.address, Float32, winner, 1)[0]
            p = self.rounded(keep, self.probability(row, logit))
            cut = Cut(truncation.key_of(p), winner - 1)
            board, first = smem.board, row.first
            is_found = self.truncation.mass(board, x, first, cut, rank) < share
            if not is_found:
                self.truncation.drop(x, first, cut)
                keep = Keep(keep.min_p, keep.is_cut, cut)
                score, token = self.draw(smem, row, x, keep)
        return score, token

    @cute.jit
    def truncate(
        self, smem: Smem, row: Row, x: cute.Tensor, options: tuple, request: Int32, rank: Int32
    ) -> tuple[Keep, Int64]:
        """Make the thread's logits probabilities, 0 where min_p or top_k leave none, and maybe
        where top_p does; and the mass that it leaves, 0 where all are left."""
        least, top_p, top_k = Float32(0.0), Float32(1.0), Int32(0)
        if request < options[0].shape[0]:
            top_p = options[0][request]
        if request < options[1].shape[0]:
            top_k = Int32(cutlass.min(options[1][request], Int64(MOST_TOP_K)))
        if request < options[2].shape[0]:
            least = options[2][request]
        is_cut = Int32(cutlass.select_(top_p < 1 or top_k > 0, Int32(1), Int32(0)))
        keep = Keep(least, is_cut, Cut(Int32(0), Int32(truncation.LAST_TOKEN)))
        for j in cutlass.range_constexpr(self.tiling.held):
            for i in cutlass.range_constexpr(VECTOR):
                x[i, j] = self.rounded(keep, self.probability(row, x[i, j]))
        key, token, share = keep.cut.key, keep.cut.token, Int64(0)
        board, first = smem.board, row.first
        # First by number, then by share of what is left.
        if top_k > 0:
            cut = self.truncation.cut(board, x, first, top_k, rank)
            key, token = cut.key, cut.token
        if top_p < 1:
            mass = self.truncation.mass(board, x, first, keep.cut, rank)
            share = truncation.share_of(mass, top_p)
            lowest = self.truncation.least_key(mass - share)
            if lowest > key:
                key, token = lowest, Int32(truncation.LAST_TOKEN)
                self.truncation.drop(x, first, Cut(key, token))
        return Keep(least, is_cut, Cut(key, token)), share

    def probability(self, row: Row, logit: Float32) -> Float32:
        """Of a token, relative to the best one's."""
        return arithmetic.probability(arithmetic.product(logit - row.best, row.rate))

    @cute.jit
    def rounded(self, keep: Keep, p: Float32) -> Float32:
        """A probability in the units of the row, 0 where it is too small."""
        p = Float32(cutlass.select_(p >= keep.min_p, p, Float32(0.0)))
        return Float32(cutlass.select_(keep.is_cut != 0, truncation.in_units(p), p))

    @cute.jit
    def kept(self, keep: Keep, p: Float32, token: Int32) -> Float32:
        """The same of one token, 0 where it is not left."""
        p = self.rounded(keep, p)
        is_kept = keep.is_cut == 0 or keep.cut.keeps(truncation.key_of(p), token)
        return Float32(cutlass.select_(is_kept, p, Float32(0.0)))

    # ---- draws ----

    @cute.jit
    def draw(self, smem: Smem, row: Row, x: cute.Tensor, keep: Keep) -> tuple[Int32, Int32]:
        """The best of the thread's candidates: bits of p / e, and the token.

        Args:
            x: logits, or the probabilities that are left of them.
        """
        most, second, place, least = self.bounds(row, x)
        least = self.least_best(smem, most, least)
        score, token = Float32(0.0), Int32(NO_TOKEN)
        if most >= least:
            j, end = place, place + 1
            if second >= least:
                # Rarely: which of its other vectors have some is not known.
                j, end = Int32(0), Int32(self.tiling.held)
            while j < end:
                if row.first + j * THREADS + cute.arch.thread_idx()[0] < row.end:
                    score, token = self.compare(row, keep, j, score, token)
                j += 1
        return score.bitcast(Int32), token

    @cute.jit
    def bounds(self, row: Row, x: cute.Tensor) -> tuple[Float32, Float32, Int32, Float32]:
        """The largest bounds of two vectors of the thread, the place of the first, and a lower
        bound of the best quotient, where no word is 0."""
        scale = row.rate * Float32(numbers.LOG2_E)
        most, second, place, least = Float32(0.0), Float32(0.0), Int32(0), Float32(LEAST_BEST)
        for j in cutlass.range_constexpr(self.tiling.held):
            p = [x[i, j] for i in range(VECTOR)]
            if cutlass.const_expr(not self.config.truncates):
                p = [cute.math.exp2((each - row.best) * scale, fastmath=True) for each in p]
            # Of the token with the largest bound, p is at most the vector's largest.
            largest, bound = tree(cute.arch.fmax, p), Float32(0.0)
            if cutlass.const_expr(not self.config.truncates):  # noqa: SIM114 static, then dynamic
                bound = self.bound_of(row, j, p)
            elif largest > 0:
                bound = self.bound_of(row, j, p)
            lower = bound * Float32(SLACK * 4 / 9) - largest * Float32(2.0**-32)
            least = cute.arch.fmax(least, lower)
            second = cute.arch.fmax(second, cute.arch.fmin(most, bound))
            place = Int32(cutlass.select_(bound > most, Int32(j), place))
            most = cute.arch.fmax(most, bound)
        return most, second, place, least

    def bound_of(self, row: Row, j: int, p: list[Float32]) -> Float32:
        """The largest bound of a vector of the thread."""
        inverses = [arithmetic.inverse_bound(Float32(word)) for word in self.words(row, Int32(j))]
        return tree(cute.arch.fmax, [a * b for a, b in zip(p, inverses)])

    @cute.jit
    def least_best(self, smem: Smem, most: Float32, least: Float32) -> Float32:
        """What bounds of the CTA's candidates must reach: its best quotient does, at least."""
        thread = cute.arch.thread_idx()[0]
        # A word 0 is refined: u is under 2^-32.
        of_zero = cute.arch.fmax(most * Float32(SLACK * 2.0**-127), Float32(LEAST_BEST))
        least = Float32(cutlass.select_(most > Float32(ZERO_WORD), of_zero, least))
        # Positive floats are ordered as their bits.
        bits = cute.arch.warp_redux_sync(least.bitcast(Int32), "max")
        if thread % WARP == 0:
            smem.bounds[thread // WARP] = bits.bitcast(Float32)
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            least = cute.arch.fmax(least, smem.bounds[warp])
        return least * Float32(SLACK)

    @cute.jit
    def compare(
        self, row: Row, keep: Keep, j: Int32, score: Float32, token: Int32
    ) -> tuple[Float32, Int32]:
        """The better of a token and those of a vector of the thread; of equals the first."""
        # From memory: the place of a register cannot be a variable.
        x = cute.make_rmem_tensor(VECTOR, Float32)
        place = row.first + j * THREADS + cute.arch.thread_idx()[0]
        cute.autovec_copy(self.vector(row.address, place), x)
        words = self.words(row, j)
        for i in cutlass.range_constexpr(VECTOR):
            p = self.probability(row, x[i])
            if cutlass.const_expr(self.config.truncates):
                p = self.kept(keep, p, place * VECTOR + i)
            e = arithmetic.exponential(words[i], words[(i + 1) % VECTOR])
            found = arithmetic.product(p, arithmetic.inverse(e))
            if found > score:
                score, token = found, place * VECTOR + i
        return score, token

    def words(self, row: Row, j: Int32) -> tuple:
        """Random words of a vector of the thread."""
        place = row.first + j * THREADS + cute.arch.thread_idx()[0]
        low, high = row.position
        return arithmetic.philox((Uint32(place), low, high, Uint32(0)), row.key)

    # ---- the best of all ----

    @cute.jit
    def best_of_warp(self, score: Int32, token: Int32) -> tuple[Int32, Int32]:
        """The best score of the warp's threads, and the first token that has it."""
        best = cute.arch.warp_redux_sync(score, "max")
        token = Int32(cutlass.select_(score == best, token, Int32(NO_TOKEN)))
        return best, cute.arch.warp_redux_sync(token, "min")

    @cute.jit
    def best_of_row(self, smem: Smem, score: Int32, token: Int32, rank: Int32) -> Int32:
        """The row's best token, in the first warp of the first CTA."""
        ranks = self.tiling.ranks
        thread = cute.arch.thread_idx()[0]
        if thread % WARP == 0:
            smem.scores[thread // WARP], smem.tokens[thread // WARP] = score, token
        cute.arch.sync_threads()
        if thread < WARP:
            score, token = self.best_of_warp(*self.listed(smem.scores, smem.tokens, thread))
        if cutlass.const_expr(ranks > 1):
            if thread == 0:
                store_remote(smem.rank_scores.iterator + rank, Int32(0), score)
                store_remote(smem.rank_tokens.iterator + rank, Int32(0), token)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if rank == 0 and thread < WARP:
                found = self.listed(smem.rank_scores, smem.rank_tokens, thread)
                score, token = self.best_of_warp(*found)
        return token

    @cute.jit
    def best_of_cluster(self, smem: Smem, score: Int32, token: Int32, rank: Int32) -> Int32:
        """The row's best token so far, in all threads of the cluster."""
        ranks = self.tiling.ranks
        thread = cute.arch.thread_idx()[0]
        score, token = self.best_of_warp(score, token)
        if thread % WARP == 0:
            smem.scores[thread // WARP], smem.tokens[thread // WARP] = score, token
        cute.arch.sync_threads()
        score, token = self.best_of_warp(*self.listed(smem.scores, smem.tokens, thread % WARP))
        if cutlass.const_expr(ranks > 1):
            if thread < ranks:
                store_remote(smem.rank_scores.iterator + rank, thread, score)
                store_remote(smem.rank_tokens.iterator + rank, thread, token)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            found = self.listed(smem.rank_scores, smem.rank_tokens, thread % WARP)
            score, token = self.best_of_warp(*found)
        return token

    @cute.jit
    def listed(self, scores: cute.Tensor, tokens: cute.Tensor, lane: Int32) -> tuple[Int32, Int32]:
        """The lane's entry of lists, or one that is no better."""
        score, token = Int32(0), Int32(NO_TOKEN)
        if lane < cute.size(scores):
            score, token = scores[lane], tokens[lane]
        return score, token


def build(config: SampleTokensConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(SampleTokens(config), ARGS, values(config), options)
