"""Selection of the k best entries of each token by scores in fp32, for sm_90a and sm_100a.

A CTA takes a token. The scores' kernel has counted scores by the upper bits of their order keys,
which have 32; what is left of the k-th best key is found five bits at a time, by counts of the keys
that begin as it does. Tokens that see no more than k entries choose all, and read no scores.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dsv4.kernels.indexer.config import FP32_BIN_SHIFT, LOW_KEYS
from dsv4.kernels.indexer.context import Operands, order_key_fp32
from dsv4.kernels.indexer.select import Row, Select
from dsv4.kernels.indexer.selection import HELD, VECTOR, WARP, Board, Choice, Share
from dsv4.kernels.kit.vectors import vector_at

DIGIT_BITS = 5
LOADED = 4  # scores of a load
# Lowest bit of each digit below the bin; the last one has what is left.
SHIFTS = (16, 11, 6, 1, 0)


class SelectFp32(Select):
    """Kernel of one configuration; a cluster is one CTA."""

    @cute.jit
    def select(
        self, operands: Operands, source: Row, smem: Board, token: Int32, request: Int32,
        share: Share, rank: Int32, thread: Int32,
    ):  # fmt: skip
        """See `Selection`."""
        words = cute.make_rmem_tensor((VECTOR, HELD), Uint32)
        words.fill(0)
        self.load(source, share, share.first, self.vectors_of(share), words, thread)
        bin_, above = self.find_bin(source, smem, thread)
        key, needed = Uint32(bin_), self.config.topk - above
        known = FP32_BIN_SHIFT  # bits of a key below what is found of it
        for shift in SHIFTS:
            self.count_digits(source, smem, share, words, (key, known), shift, thread)
            digit, needed = self.find_digit(smem, needed, thread)
            key = (key << (known - shift)) | Uint32(digit)
            known = shift
        choice = Choice(key, needed)
        row, counted = (token, request, thread), (Int32(0), Int32(0))
        self.name_chosen(operands, source, smem, row, share, words, choice, counted)

    @cute.jit
    def count_digits(
        self, source: Row, smem: Board, share: Share, words: cute.Tensor, start: tuple,
        shift: cutlass.Constexpr, thread: Int32,
    ):  # fmt: skip
        """Count keys by their digit from bit `shift` on, if they begin as the k-th best does.

        Args:
            words: the thread's keys, if the share is held.
            start: how that begins; how many bits are below.
        """
        begins, known = start
        span, per_thread = self.threads * HELD * VECTOR, self.vectors_of(share)
        is_held = share.end - share.first <= span
        if cutlass.const_expr(shift != SHIFTS[0]):
            # All have read the counts of the digit before.
            cute.arch.sync_threads()
            if thread < LOW_KEYS:
                smem.own[thread] = Int32(0)
            cute.arch.sync_threads()
        for first in cutlass.range(share.first, share.end, span, unroll=1):
            if not is_held:
                self.load(source, share, first, per_thread, words, thread)
            for v in cutlass.range_constexpr(HELD):
                if v < per_thread:
                    for i in cutlass.range_constexpr(VECTOR):
                        key = self.key_of(words, v, i)
                        if key >> known == begins:
                            digit = Int32(key >> shift) & ((1 << (known - shift)) - 1)
                            cute.arch.atomic_add(smem.own.iterator + digit, Int32(1))
        cute.arch.sync_threads()

    @cute.jit
    def find_digit(self, smem: Board, needed: Int32, thread: Int32) -> tuple[Int32, Int32]:
        """Digit of the k-th best key, and how many keys with it are still needed.

        Each warp computes it, a lane for each digit, the uppermost first.
        """
        lane = thread % WARP
        own = smem.own[LOW_KEYS - 1 - lane]
        inclusive = own
        for step in cutlass.range_constexpr(DIGIT_BITS):
            below = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                inclusive += below
        # The first lane whose keys are enough.
        enough = cute.arch.vote_ballot_sync(inclusive >= needed)
        winner = Int32(cute.arch.popc(~Uint32(enough)))
        before = cute.arch.shuffle_sync(inclusive - own, winner)
        return LOW_KEYS - 1 - winner, needed - before

    @cute.jit
    def load(
        self, source: Row, share: Share, first: Int32, per_thread: Int32, words: cute.Tensor,
        thread: Int32,
    ):  # fmt: skip
        """See `Selection`; a key is a word."""
        begin = first + thread * per_thread * VECTOR
        at = source.scores + Int64(begin) * (Float32.width // 8)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                for i in cutlass.range_constexpr(0, VECTOR, LOADED):
                    if begin + v * VECTOR + i < share.end:
                        vector = vector_at(at, Uint32, v * VECTOR + i, LOADED)
                        part = cute.make_rmem_tensor(LOADED, Uint32)
                        cute.autovec_copy(vector, part)
                        for j in cutlass.range_constexpr(LOADED):
                            words[i + j, v] = part[j]
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread:
                left = share.end - begin - v * VECTOR
                for i in cutlass.range_constexpr(VECTOR):
                    key = order_key_fp32(words[i, v])
                    words[i, v] = Uint32(cutlass.select_(i < left, key, Uint32(0)))

    def key_of(self, words: cute.Tensor, vector: int, i: int) -> Uint32:
        """See `Selection`."""
        return words[i, vector]
