"""Selection of the k best entries of each token, from scores in memory, for sm_90a and sm_100a.

A CTA, or a cluster for long lists, takes a token. The scores' kernel has counted scores by the
upper bits of their order keys. Tokens that see no more than k entries choose all, and read no
scores.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Int32, Int64, Uint32, cute

from dsv4.kernels.indexer.config import BINS, IndexTopkConfig
from dsv4.kernels.indexer.context import Operands, order_keys, visible
from dsv4.kernels.indexer.selection import BOARD_WORDS, HELD, VECTOR, Selection, Share
from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.vectors import address_of, vector_at

THREADS = 512


class Row(NamedTuple):
    """Scores and counts of a token."""

    scores: Int64  # address
    counts: Int64  # address


class Select(Selection):
    """Kernel of one configuration.

    Args:
        cluster: CTAs of a token.
    """

    def __init__(self, config: IndexTopkConfig, cluster: int):
        super().__init__(config, THREADS, cluster)

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
            row = Row(
                address_of(operands.scores, Int64(token) * operands.scores.stride[0]),
                address_of(operands.counts, Int64(token) * BINS),
            )
            share = self.share(count, rank)
            self.select(operands, row, smem, token, request, share, rank, thread)
            # All CTAs have read them before they have exchanged what they counted.
            if rank == 0:
                for i in cutlass.range(thread, BINS, THREADS, unroll=1):
                    operands.counts[token, i] = Int32(0)
        else:
            self.name_all(operands, token, (count, request), rank, thread)

    def share(self, count: Int32, rank: Int32) -> Share:
        """This CTA's entries of a token, whole vectors."""
        if self.cluster == 1:
            return Share(Int32(0), count)
        vectors = (count + VECTOR - 1) // VECTOR
        size = (vectors + self.cluster - 1) // self.cluster * VECTOR
        return Share(cutlass.min(rank * size, count), cutlass.min((rank + 1) * size, count))

    @cute.jit
    def load(
        self, source: Row, share: Share, first: Int32, per_thread: Int32, words: cute.Tensor,
        thread: Int32,
    ):  # fmt: skip
        """See `Selection`."""
        begin = first + thread * per_thread * VECTOR
        at = source.scores + Int64(begin) * (BFloat16.width // 8)
        for v in cutlass.range_constexpr(HELD):
            if v < per_thread and begin + v * VECTOR < share.end:
                vector = vector_at(at, BFloat16, v * VECTOR)
                cute.autovec_copy(cute.recast_tensor(vector, Uint32), words[None, v])
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

    def load_bins(self, source: Row, lowest: Int32, bins: cute.Tensor) -> None:
        """See `Selection`."""
        at = source.counts + Int64(lowest) * (Int32.width // 8)
        cute.autovec_copy(vector_at(at, Int32, 0, self.thread_bins), bins)
