"""Selection of the k best entries of each token, exact and in order, for sm_90a and sm_100a.

A CTA, or a cluster for long lists, takes a token. Scores order as 16-bit keys. Their counts by
upper bits, which the scores' kernel made, give the bin of the k-th best; the keys of that bin are
counted by their lower bits, the counts of the cluster's CTAs exchanged, and the k-th best key and
how many of its equals are chosen are known. Each entry's place among the chosen ones is the number
of chosen entries before it: indices come out ascending, and of equals those of the lowest indices.

A thread holds up to 32 neighbouring entries in registers, so that one scan places 16,384 entries.
Tokens that see no more than k entries choose all, and read no scores.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.indexer.config import BINS, IndexTopkConfig
from dsv4.kernels.indexer.context import BIN_SHIFT, LOW_KEYS, Operands, order_keys, visible
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.remote import store_remote
from dsv4.kernels.kit.scan import sums_before
from dsv4.kernels.kit.vectors import address_of, vector_at

THREADS = 512
WARP = 32
WARPS = THREADS // WARP
VECTOR = 8  # entries of a load
HELD = 4  # vectors of a thread
THREAD_BINS = BINS // THREADS
BOARD_WORDS = LOW_KEYS + 1  # of a CTA: counts of the bin's keys, of keys above it
EQUAL_SHIFT = 16  # of equals in a pair of counts, above the number of better ones


class Smem(NamedTuple):
    """Views of shared memory."""

    board: cute.Tensor  # [BOARD_WORDS, CTAs of the cluster]
    own: cute.Tensor  # [BOARD_WORDS]
    sums: cute.Tensor  # [warps]
    found: cute.Tensor  # [2]: bin, keys above it
    chosen: cute.Tensor  # [k]: the CTA's chosen entries


class Choice(NamedTuple):
    """Choice among a token's entries: keys above `key`, and of its equals the first ones."""

    key: Int32
    equals: Int32


class Share(NamedTuple):
    """Entries of a CTA."""

    first: Int32
    end: Int32


class Select:
    """Kernel of one configuration.

    Args:
        cluster: CTAs of a token.
    """

    def __init__(self, config: IndexTopkConfig, cluster: int):
        self.config = config
        self.cluster = cluster

    @cute.jit
    def launch(self, operands: Operands, stream):
        """A cluster for each token."""
        self.kernel(operands).launch(
            grid=[operands.indices.shape[0] * self.cluster, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        thread = cute.arch.thread_idx()[0]
        rank = Int32(0)
        if cutlass.const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        token = cute.arch.block_idx()[0] // self.cluster
        smem = self.allocate()
        pdl.launch_dependents()
        if thread < BOARD_WORDS:
            smem.own[thread] = Int32(0)
        count, request = visible(operands, token)
        pdl.wait_for_previous_launch()
        if count > self.config.topk:
            self.select(operands, smem, token, (count, request), rank, thread)
        else:
            step = THREADS * self.cluster
            for i in cutlass.range(rank * THREADS + thread, self.config.topk, step, unroll=1):
                name = Int32(-1)
                if i < count:
                    name = self.name(operands, request, i)
                operands.indices[token, i] = name

    def allocate(self) -> Smem:
        """The CTA's shared memory."""
        smem = SmemAllocator()

        def tensor(*shape: int) -> cute.Tensor:
            return smem.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)

        return Smem(
            board=tensor(BOARD_WORDS, self.cluster),
            own=tensor(BOARD_WORDS),
            sums=tensor(WARPS),
            found=tensor(2),
            chosen=tensor(self.config.topk),
        )

    def name(self, operands: Operands, request: Int32, entry: Int32) -> Int32:
        """What a chosen entry is called: its number, or its slot."""
        if not self.config.gives_slots:
            return entry
        page = operands.block_table[request, entry // self.config.page]
        slot = page * self.config.page + entry % self.config.page
        return Int32(cutlass.select_(page < 0, Int32(-1), slot))

    @cute.jit
    def select(
        self, operands: Operands, smem: Smem, token: Int32, seen: tuple, rank: Int32, thread: Int32
    ):
        """Choose among more than k entries."""
        count, request = seen
        share = self.share(count, rank)
        span = THREADS * HELD * VECTOR
        words = cute.make_rmem_tensor((VECTOR // 2, HELD), Uint32)
        words.fill(0)
        per_thread = self.vectors_of(share)
        self.load(operands, token, share, share.first, per_thread, words, thread)
        bin_, above = self.find_bin(operands, smem, token, thread)
        # ---- keys of the bin, by their lower bits ----
        higher = Int32(0)
        for first in cutlass.range(share.first, share.end, span, unroll=1):
            if first > share.first:
                self.load(operands, token, share, first, per_thread, words, thread)
            higher += self.count_bin(smem, words, per_thread, bin_ * LOW_KEYS)
        higher = cute.arch.warp_redux_sync(higher, "add")
        if thread % WARP == 0:
            cute.arch.atomic_add(smem.own.iterator + LOW_KEYS, higher)
        self.exchange(smem, rank, thread)
        choice, better, equal = self.find_key(smem, bin_, above, rank, thread)
        if rank == 0:
            for i in cutlass.range(thread, BINS, THREADS, unroll=1):
                operands.counts[token, i] = Int32(0)
        # ---- places, from this CTA's first one on ----
        begin = better + cutlass.min(equal, choice.equals)
        is_held = share.end - share.first <= span
        for first in cutlass.range(share.first, share.end, span, unroll=1):
            if not is_held:
                self.load(operands, token, share, first, per_thread, words, thread)
            above_it, at_it = self.marks(words, per_thread, choice.key)
            pair = cute.arch.popc(above_it) + (cute.arch.popc(at_it) << EQUAL_SHIFT)
            before, total = sums_before(pair, smem.sums)
            place = better + before % (1 << EQUAL_SHIFT) - begin
            ties = equal + (before >> EQUAL_SHIFT)
            self.list_chosen(
                smem, first + thread * per_thread * VECTOR, (above_it, at_it), place, ties,
                choice.equals,
            )  # fmt: skip
            better += total % (1 << EQUAL_SHIFT)
            equal += total >> EQUAL_SHIFT
            # The next scan writes where this one is read.
            cute.arch.sync_threads()
        number = better + cutlass.min(equal, choice.equals) - begin
        for i in cutlass.range(thread, number, THREADS, unroll=1):
            operands.indices[token, begin + i] = self.name(operands, request, smem.chosen[i])

    def share(self, count: Int32, rank: Int32) -> Share:
        """This CTA's entries of a token, whole vectors."""
        if self.cluster == 1:
            return Share(Int32(0), count)
        vectors = (count + VECTOR - 1) // VECTOR
        size = (vectors + self.cluster - 1) // self.cluster * VECTOR
        return Share(cutlass.min(rank * size, count), cutlass.min((rank + 1) * size, count))

    def vectors_of(self, share: Share) -> Int32:
        """Vectors that each thread holds: as few as the share needs, at most `HELD`."""
        vectors = (share.end - share.first + VECTOR - 1) // VECTOR
        return cutlass.min((vectors + THREADS - 1) // THREADS, HELD)

    @cute.jit
    def load(
        self, operands: Operands, token: Int32, share: Share, first: Int32, per_thread: Int32,
        words: cute.Tensor, thread: Int32,
    ):  # fmt: skip
        """Order keys of the thread's entries from entry `first` on, two a word; those past the end
        are 0, less than any score's."""
        begin = first + thread * per_thread * VECTOR
        at = address_of(operands.scores, Int64(token) * operands.scores.stride[0] + begin)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread and begin + v * VECTOR < share.end:
                source = vector_at(at, BFloat16, v * VECTOR)
                cute.autovec_copy(cute.recast_tensor(source, Uint32), words[None, v])
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for w in cutlass.range_constexpr(VECTOR // 2):
                    words[w, v] = order_keys(words[w, v])
                left = share.end - begin - v * VECTOR
                if left < VECTOR:
                    for w in cutlass.range_constexpr(VECTOR // 2):
                        low = cutlass.select_(left > 2 * w, Uint32(0xFFFF), Uint32(0))
                        both = cutlass.select_(left > 2 * w + 1, Uint32(0xFFFFFFFF), low)
                        words[w, v] = words[w, v] & both

    @cute.jit
    def count_bin(
        self, smem: Smem, words: cute.Tensor, per_thread: Int32, lowest: Int32
    ) -> Int32:
        """Count the thread's keys of a bin by their lower bits; how many lie above the bin."""
        higher = Int32(0)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for i in cutlass.range_constexpr(VECTOR):
                    past = key_of(words, v, i) - lowest
                    higher += Int32(cutlass.select_(past >= LOW_KEYS, Int32(1), Int32(0)))
                    if past >= 0 and past < LOW_KEYS:
                        cute.arch.atomic_add(smem.own.iterator + past, Int32(1))
        return higher

    @cute.jit
    def marks(
        self, words: cute.Tensor, per_thread: Int32, key: Int32
    ) -> tuple[Uint32, Uint32]:
        """Bits of the thread's entries above a key, and of its equals."""
        above, equal = Uint32(0), Uint32(0)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for i in cutlass.range_constexpr(VECTOR):
                    bit, found = Uint32(1 << (v * VECTOR + i)), key_of(words, v, i)
                    above |= Uint32(cutlass.select_(found > key, bit, Uint32(0)))
                    equal |= Uint32(cutlass.select_(found == key, bit, Uint32(0)))
        return above, equal

    @cute.jit
    def list_chosen(
        self, smem: Smem, entry: Int32, marks: tuple, place: Int32, ties: Int32, equals: Int32
    ):
        """Write the thread's chosen entries, of bit 0 on `entry`, to their places in the list.

        Args:
            place: better entries before the thread's, less the places before this CTA's.
            ties: equals before the thread's, of which the first `equals` are chosen.
        """
        above, equal = marks
        left = above | equal
        while left != 0:
            bit = left & (~left + 1)
            number = ties + cute.arch.popc(equal & (bit - 1))
            if (above & bit) != 0 or number < equals:
                at = place + cute.arch.popc(above & (bit - 1)) + cutlass.min(number, equals)
                smem.chosen[at] = entry + cute.arch.popc(bit - 1)
            left &= left - 1

    @cute.jit
    def find_bin(
        self, operands: Operands, smem: Smem, token: Int32, thread: Int32
    ) -> tuple[Int32, Int32]:
        """Bin of the k-th best key, and how many keys lie above it."""
        # Thread 0 has the uppermost bins.
        lowest = BINS - (thread + 1) * THREAD_BINS
        bins = cute.make_rmem_tensor(THREAD_BINS, Int32)
        at = address_of(operands.counts, Int64(token) * BINS + lowest)
        cute.autovec_copy(vector_at(at, Int32, 0, THREAD_BINS), bins)
        own = Int32(0)
        for i in cutlass.range_constexpr(THREAD_BINS):
            own += bins[i]
        above, _ = sums_before(own, smem.sums)
        topk = self.config.topk
        if above < topk and above + own >= topk:
            bin_ = Int32(-1)
            for i in cutlass.range_constexpr(THREAD_BINS - 1, -1, -1):
                if bin_ < 0:
                    if above + bins[i] >= topk:
                        bin_ = lowest + i
                    else:
                        above += bins[i]
            smem.found[0] = bin_
            smem.found[1] = above
        cute.arch.sync_threads()
        return smem.found[0], smem.found[1]

    @cute.jit
    def exchange(self, smem: Smem, rank: Int32, thread: Int32):
        """Counts of all CTAs of the cluster into the board of each."""
        cute.arch.sync_threads()
        if cutlass.const_expr(self.cluster == 1):
            if thread < BOARD_WORDS:
                smem.board[thread, 0] = smem.own[thread]
            cute.arch.sync_threads()
        else:
            # The others have begun: their shared memory exists.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            share = THREADS // self.cluster
            word, other = thread % share, thread // share
            if word < BOARD_WORDS:
                target = smem.board.iterator + (rank * BOARD_WORDS + word)
                store_remote(target, other, smem.own[word])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def find_key(
        self, smem: Smem, bin_: Int32, above: Int32, rank: Int32, thread: Int32
    ) -> tuple[Choice, Int32, Int32]:
        """What is chosen; and how many better and equal keys lie in the CTAs before this one.

        Each warp computes it, a lane for each key of the bin, the uppermost first.
        """
        lane = thread % WARP
        low = LOW_KEYS - 1 - lane
        total, earlier, higher = Int32(0), Int32(0), Int32(0)
        for other in cutlass.range_constexpr(self.cluster):
            found = smem.board[low, other]
            total += found
            if other < rank:
                earlier += found
                higher += smem.board[LOW_KEYS, other]
        inclusive, inclusive_earlier = total, earlier
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
            below_earlier = cute.arch.shuffle_sync_up(
                inclusive_earlier, 1 << step, mask_and_clamp=0
            )
            if lane >= 1 << step:
                inclusive += below
                inclusive_earlier += below_earlier
        needed = self.config.topk - above
        # The first lane whose keys are enough.
        enough = cute.arch.vote_ballot_sync(inclusive >= needed)
        winner = Int32(cute.arch.popc(~Uint32(enough)))
        before = cute.arch.shuffle_sync(inclusive - total, winner)
        better = higher + cute.arch.shuffle_sync(inclusive_earlier - earlier, winner)
        equal = cute.arch.shuffle_sync(earlier, winner)
        key = bin_ * LOW_KEYS + (LOW_KEYS - 1 - winner)
        return Choice(key, needed - before), better, equal


def key_of(words: cute.Tensor, vector: int, i: int) -> Int32:
    """An order key of a vector of them."""
    word = words[i // 2, vector]
    return Int32(word >> 16 if i % 2 else word & Uint32(0xFFFF))
