"""Choice of the k best of a token's entries by a CTA or a cluster, exact and in order.

Scores order as 16-bit keys. Their counts by upper bits give the bin of the k-th best; the keys of
that bin are counted by their lower bits, the counts of the cluster's CTAs exchanged, and the k-th
best key and how many of its equals are chosen are known. Each entry's place among the chosen ones
is the number of chosen entries before it: indices come out ascending, and of equals those of the
lowest indices. A CTA's chosen entries are neighbours there; it lists them in shared memory first,
so that all threads look up what they are called.

A thread holds up to 32 neighbouring entries in registers, so that a scan of 512 places 16,384.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.indexer.config import BINS, LOW_KEYS, IndexTopkConfig
from dsv4.kernels.indexer.context import Operands
from dsv4.kernels.indexer.plan import BOARD_STRIDE, BOARD_WORDS
from dsv4.kernels.kit.remote import store_remote
from dsv4.kernels.kit.scan import sums_before

WARP = 32
VECTOR = 8  # entries of a load
HELD = 4  # vectors of a thread
EQUAL_SHIFT = 16  # of equals in a pair of counts, above the number of better ones


class Board(NamedTuple):
    """Shared memory of a choice, int32."""

    board: cute.Tensor  # [BOARD_STRIDE, CTAs of the cluster]
    own: cute.Tensor  # [BOARD_STRIDE], zeros at first
    sums: cute.Tensor  # [warps]
    found: cute.Tensor  # [2]: bin, keys above it
    chosen: cute.Tensor  # [k]: the CTA's chosen entries


class Choice(NamedTuple):
    """Choice among a token's entries: keys above `key`, and of its equals the first ones."""

    key: Int32  # Uint32 of scores in fp32
    equals: Int32


class Share(NamedTuple):
    """Entries of a CTA."""

    first: Int32
    end: Int32


class Selection:
    """Choice by the threads of a CTA, or of a cluster of them; where order keys and counts lie is
    a subclass's.

    Args:
        threads: of a CTA; all call `select`.
        cluster: CTAs of a token.
    """

    def __init__(self, config: IndexTopkConfig, threads: int, cluster: int):
        self.config = config
        self.threads = threads
        self.cluster = cluster
        # Threads that have a part of the bins each.
        self.thread_bins = BINS >> (threads.bit_length() - 1)

    # ---- of a subclass, from where its `source` says ----

    def load(self, source, share: Share, first: Int32, per_thread: Int32, words, thread: Int32):
        """Order keys of the thread's `per_thread` vectors from entry `first` on, two a word; those
        past the end are 0, less than any score's."""
        raise NotImplementedError

    def load_bins(self, source, lowest: Int32, bins) -> None:
        """Counts of the token's order keys in neighbouring bins."""
        raise NotImplementedError

    def key_of(self, words: cute.Tensor, vector: int, i: int) -> Int32:
        """An order key of a vector of them."""
        word = words[i // 2, vector]
        return Int32(word >> 16 if i % 2 else word & Uint32(0xFFFF))

    # ---- shared memory ----

    def allocate(self) -> Board:
        """The shared memory of a CTA that does nothing else."""
        smem = SmemAllocator()

        def tensor(*shape: int) -> cute.Tensor:
            return smem.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=16)

        return Board(
            board=tensor(BOARD_STRIDE, self.cluster),
            own=tensor(BOARD_STRIDE),
            sums=tensor(self.threads // WARP),
            found=tensor(2),
            chosen=tensor(self.config.topk),
        )

    # ---- names ----

    def page(self, source, operands: Operands, request: Int32, number: Int32) -> Int32:
        """A page of the token's entries, by its number."""
        return operands.block_table[request, number]

    def slot(self, entry: Int32, page: Int32) -> Int32:
        """Slot of an entry."""
        slot = page * self.config.page + entry % self.config.page
        return Int32(cutlass.select_(page < 0, Int32(-1), slot))

    @cute.jit
    def name_all(self, operands: Operands, token: Int32, seen: tuple, rank: Int32, thread: Int32):
        """Choose all of no more than k entries."""
        count, request = seen
        step = self.threads * self.cluster
        for i in cutlass.range(rank * self.threads + thread, self.config.topk, step, unroll=1):
            name = Int32(-1)
            if i < count:
                name = Int32(i)
                if cutlass.const_expr(self.config.gives_slots):
                    name = self.slot(i, operands.block_table[request, i // self.config.page])
            operands.indices[token, i] = name

    # ---- choice ----

    @cute.jit
    def select(
        self, operands: Operands, source, smem: Board, token: Int32, request: Int32, share: Share,
        rank: Int32, thread: Int32,
    ):  # fmt: skip
        """Choose among more than k entries, of which this CTA has a share."""
        span = self.threads * HELD * VECTOR
        words = cute.make_rmem_tensor((VECTOR // 2, HELD), Uint32)
        words.fill(0)
        per_thread = self.vectors_of(share)
        self.load(source, share, share.first, per_thread, words, thread)
        bin_, above = self.find_bin(source, smem, thread)
        # ---- keys of the bin, by their lower bits ----
        higher = Int32(0)
        for first in cutlass.range(share.first, share.end, span, unroll=1):
            if first > share.first:
                self.load(source, share, first, per_thread, words, thread)
            higher += self.count_bin(smem, words, per_thread, bin_ * LOW_KEYS)
        higher = cute.arch.warp_redux_sync(higher, "add")
        if thread % WARP == 0:
            cute.arch.atomic_add(smem.own.iterator + LOW_KEYS, higher)
        self.exchange(source, smem, rank, thread)
        choice, better, equal = self.find_key(smem, bin_, above, rank, thread)
        row = token, request, thread
        self.name_chosen(operands, source, smem, row, share, words, choice, (better, equal))

    @cute.jit
    def name_chosen(
        self, operands: Operands, source, smem: Board, row: tuple, share: Share,
        words: cute.Tensor, choice: Choice, counted: tuple,
    ):  # fmt: skip
        """Write what a CTA's chosen entries are called, from their first place on.

        Args:
            row: token, its request, and the thread.
            words: room for the thread's order keys; they are there if the share is held.
            counted: better and equal keys in the CTAs before this one.
        """
        token, request, thread = row
        better, equal = counted
        span, per_thread = self.threads * HELD * VECTOR, self.vectors_of(share)
        begin = better + cutlass.min(equal, choice.equals)
        is_held = share.end - share.first <= span
        for first in cutlass.range(share.first, share.end, span, unroll=1):
            if not is_held:
                self.load(source, share, first, per_thread, words, thread)
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
        for i in cutlass.range(thread, number, self.threads, unroll=1):
            entry = smem.chosen[i]
            name = entry
            if cutlass.const_expr(self.config.gives_slots):
                page = self.page(source, operands, request, entry // self.config.page)
                name = self.slot(entry, page)
            operands.indices[token, begin + i] = name

    def vectors_of(self, share: Share) -> Int32:
        """Vectors that each thread holds: as few as the share needs, at most `HELD`."""
        vectors = (share.end - share.first + VECTOR - 1) // VECTOR
        return cutlass.min((vectors + self.threads - 1) // self.threads, HELD)

    @cute.jit
    def count_bin(self, smem: Board, words: cute.Tensor, per_thread: Int32, lowest: Int32) -> Int32:
        """Count the thread's keys of a bin by their lower bits; how many lie above the bin."""
        higher = Int32(0)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for i in cutlass.range_constexpr(VECTOR):
                    past = self.key_of(words, v, i) - lowest
                    higher += Int32(cutlass.select_(past >= LOW_KEYS, Int32(1), Int32(0)))
                    if past >= 0 and past < LOW_KEYS:
                        cute.arch.atomic_add(smem.own.iterator + past, Int32(1))
        return higher

    @cute.jit
    def marks(self, words: cute.Tensor, per_thread: Int32, key: Int32) -> tuple[Uint32, Uint32]:
        """Bits of the thread's entries above a key, and of its equals."""
        above, equal = Uint32(0), Uint32(0)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for i in cutlass.range_constexpr(VECTOR):
                    bit, found = Uint32(1 << (v * VECTOR + i)), self.key_of(words, v, i)
                    above |= Uint32(cutlass.select_(found > key, bit, Uint32(0)))
                    equal |= Uint32(cutlass.select_(found == key, bit, Uint32(0)))
        return above, equal

    @cute.jit
    def list_chosen(
        self, smem: Board, entry: Int32, marks: tuple, place: Int32, ties: Int32, equals: Int32
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
    def find_bin(self, source, smem: Board, thread: Int32) -> tuple[Int32, Int32]:
        """Bin of the k-th best key, and how many keys lie above it."""
        # Thread 0 has the uppermost bins.
        lowest = BINS - (thread + 1) * self.thread_bins
        bins = cute.make_rmem_tensor(self.thread_bins, Int32)
        bins.fill(0)
        if lowest >= 0:
            self.load_bins(source, lowest, bins)
        own = Int32(0)
        for i in cutlass.range_constexpr(self.thread_bins):
            own += bins[i]
        above, _ = sums_before(own, smem.sums)
        topk = self.config.topk
        if above < topk and above + own >= topk:
            bin_ = Int32(-1)
            for i in cutlass.range_constexpr(self.thread_bins - 1, -1, -1):
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
    def exchange(self, source, smem: Board, rank: Int32, thread: Int32):
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
            words = BOARD_WORDS * self.cluster
            for i in cutlass.range(thread, words, self.threads, unroll=1):
                word = i % BOARD_WORDS
                target = smem.board.iterator + (rank * BOARD_STRIDE + word)
                store_remote(target, (rank + i // BOARD_WORDS) % self.cluster, smem.own[word])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def find_key(
        self, smem: Board, bin_: Int32, above: Int32, rank: Int32, thread: Int32
    ) -> tuple[Choice, Int32, Int32]:
        """What is chosen; and how many better and equal keys lie in the CTAs before this one.

        Each warp computes it, a lane for each key of the bin, the uppermost first.
        """
        lane = thread % WARP
        low = LOW_KEYS - 1 - lane
        total, earlier, higher = Int32(0), Int32(0), Int32(0)
        for other in cutlass.range_constexpr(self.cluster):
            found, above_bin = smem.board[low, other], smem.board[LOW_KEYS, other]
            is_earlier = other < rank
            total += found
            earlier += cutlass.select_(is_earlier, found, Int32(0))
            higher += cutlass.select_(is_earlier, above_bin, Int32(0))
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
