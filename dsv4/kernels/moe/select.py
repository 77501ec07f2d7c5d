"""Selection of experts and sort of tokens by expert, for sm_90a and sm_100a.

A warp takes a token: it adds the gate's partial sums in order, turns logits into scores
sqrt(softplus), and finds the k best by score + bias, the lower id of equals, in k rounds of a
maximum over keys that order as the scores do. The ids of a token are stored in ascending order,
their weights beside them.

The last CTA to finish then sorts all (token, slot) pairs by expert, stably: each warp counts the
experts of a run of pairs, the counts are added up over warps and experts, and each warp puts its
pairs in their places. Nothing is read back by the host; every shape is that of the launch.

What is not a number: a NaN score ranks below every other. An id of the table outside 0 .. E - 1, a
token id outside the table and padding tokens have no expert: id -1, weight 0, no pair.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.math import RoundingMode
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.pointers import pointer_at
from dsv4.kernels.kit.scan import sums_before
from dsv4.kernels.moe.routing import (
    GROUP_WORDS,
    SELECT_WARPS,
    VECTOR,
    RoutingConfig,
)
from dsv4.kernels.moe.team import Team

NEAREST = RoundingMode.NEAREST_EVEN
SIGN = 1 << 31
TAKEN, NAN_KEY = 0, 1  # below the key of -inf
NO_EXPERT = -1
LAST_ID = 1 << 30  # sorts behind every expert
FULL_MASK = 0xFFFFFFFF
BATCH = 8  # loads of a thread under way in the sort
BOARD_WORDS = 2  # of a warp
WORD_BITS = 32
SUM_BITS = 16  # of a sum of rows, below that of entries, in a word
SOFTPLUS_THRESHOLD = 20.0


class Lists(NamedTuple):
    """Tensors that the selection reads and writes."""

    partials: cute.Tensor  # [splits, T, E] fp32
    bias: cute.Tensor  # [E] fp32; no rows where a table routes
    table: cute.Tensor  # [V, k] int64; no rows where scores do
    input_ids: cute.Tensor  # [T] int64; the same
    live_tokens: cute.Tensor  # [1] int32, or no rows: all are live
    ids: cute.Tensor  # [T, k] int32, written
    weights: cute.Tensor  # [T, k] fp32, written
    pairs: cute.Tensor  # [T * k] int32, written
    groups: cute.Tensor  # [.., 4] int32, written
    counts: cute.Tensor  # [2] int32, written
    arrivals: cute.Tensor  # [2] int32, 0
    run_counts: cute.Tensor  # [runs, E] int32, written where tokens are many


class SelectSmem(NamedTuple):
    """Views of shared memory."""

    scores: cute.Tensor  # [expert, warp]
    counts: cute.Tensor  # the same place: scores are of no more use where the sort begins
    bits: cute.Tensor  # [expert, word]: one for each pair of the CTA's tokens
    board: cute.Tensor
    # ids of the CTA's tokens: where there is no other CTA, the sort reads no global memory.
    own_ids: cute.Tensor
    is_last: cute.Tensor


class Select:
    """Kernel: experts and weights of each token, and the list of pairs by expert.

    Args:
        warps: of a CTA.
        takes_several: whether a warp takes more than one token where there are fewer CTAs than
            `ctas`: at least two of them, since one sorts the tokens of its warps alone.
        own_tokens: of which a CTA keeps the ids, so that it sorts them alone; default one a warp.
        team: the threads of these warps, where a CTA has others, too.
    """

    def __init__(
        self,
        config: RoutingConfig,
        warps: int = SELECT_WARPS,
        takes_several: bool = False,
        own_tokens: int | None = None,
        team: Team | None = None,
    ):
        self.config = config
        self.warps = warps
        self.team = Team(32 * warps) if team is None else team
        assert self.team.threads == 32 * warps, team
        self.own_tokens = warps if own_tokens is None else own_tokens
        self.threads = 32 * warps
        assert self.own_pairs <= self.threads, own_tokens
        self.takes_several = takes_several

    @cute.jit
    def launch(self, lists: Lists, stream, group_tokens: Int32):
        """A warp for each token; groups have up to `group_tokens` rows."""
        self.kernel(lists, group_tokens).launch(
            grid=[self.ctas(lists), 1, 1], block=[self.threads, 1, 1], stream=stream,
            use_pdl=True,
        )  # fmt: skip

    def ctas(self, lists: Lists) -> Int32:
        """CTAs with a warp for each token."""
        return cute.ceil_div(lists.ids.shape[0], self.warps)

    @cute.kernel
    def kernel(self, lists: Lists, group_tokens: Int32):
        smem = SmemAllocator()
        storage = smem.allocate(self.smem_bytes, byte_alignment=16)
        ctas = Int32(cute.arch.grid_dim()[0])
        self.run(lists, storage, Int32(cute.arch.block_idx()[0]), ctas, group_tokens)

    @property
    def smem_bytes(self) -> int:
        """Of shared memory: scores, bits of pairs, sums of the sort, ids, and whether the CTA is
        the last."""
        words = self.warps * BOARD_WORDS + (self.warps + self.bit_words) * self.config.experts
        return 4 * (words + self.own_pairs + 1)

    @property
    def own_pairs(self) -> int:
        """Pairs of the tokens that a CTA sorts alone."""
        return self.own_tokens * self.config.top_k

    @property
    def bit_words(self) -> int:
        """Words with a bit for each of these pairs."""
        return -(-self.own_pairs // WORD_BITS)

    def views(self, storage: cute.Pointer) -> SelectSmem:
        """Views of `smem_bytes` of shared memory."""
        words = cute.recast_ptr(storage, dtype=Int32)
        by_expert = cute.make_layout((self.config.experts, self.warps))
        scores = cute.make_tensor(cute.recast_ptr(storage, dtype=Float32), by_expert)
        counts = cute.make_tensor(words, by_expert)
        words += self.warps * self.config.experts
        by_word = cute.make_layout((self.config.experts, self.bit_words))
        bits = cute.make_tensor(cute.recast_ptr(words, dtype=Uint32), by_word)
        words += self.bit_words * self.config.experts
        board = cute.make_tensor(words, cute.make_layout((self.warps, BOARD_WORDS)))
        words += self.warps * BOARD_WORDS
        shape = (self.own_tokens, self.config.top_k)
        own_ids = cute.make_tensor(words, cute.make_layout(shape, stride=(self.config.top_k, 1)))
        is_last = cute.make_tensor(words + self.own_pairs, cute.make_layout(1))
        return SelectSmem(scores, counts, bits, board, own_ids, is_last)

    @cute.jit
    def clear(self, bits: cute.Tensor) -> None:
        """Set the bits of all pairs to 0, for `sort_few` behind a barrier of the CTA."""
        thread = cute.arch.thread_idx()[0]
        words = cute.make_tensor(bits.iterator, cute.make_layout(cute.size(bits)))
        for i in cutlass.range(thread, cute.size(bits), self.threads, unroll=1):
            words[i] = Uint32(0)

    @cute.jit
    def run(
        self, lists: Lists, storage: cute.Pointer, cta: Int32, ctas: Int32, group_tokens: Int32
    ) -> None:
        """The part of one of `ctas` CTAs of `threads` threads, in a launch of these or of others,
        too.

        Args:
            storage: `smem_bytes` of shared memory.
        """
        config, views = self.config, self.views(storage)
        own_ids, is_last = views.own_ids, views.is_last
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        pdl.launch_dependents()
        self.clear(views.bits)
        # The bias is not an output of the launch before.
        bias = None
        if cutlass.const_expr(not config.is_hashed):
            bias = load_bias(lists.bias, config)
        pdl.wait_for_previous_launch()
        tokens = lists.ids.shape[0]
        live = live_count(lists.live_tokens, tokens)
        scores, own = views.scores[None, warp], own_ids[warp, None]
        first = cta * self.warps + warp
        if cutlass.const_expr(self.takes_several):
            for token in cutlass.range(first, tokens, ctas * self.warps, unroll=1):
                self.select(lists, scores, bias, own, token, token < live)
                # The next token's scores come where lanes may still read this one's.
                cute.arch.sync_warp()
        else:
            if first < tokens:
                self.select(lists, scores, bias, own, first, first < live)
        cute.arch.sync_threads()
        if thread == 0:
            is_last[0] = Int32(arrive(lists.arrivals, ctas))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            if ctas == 1:
                self.sort_few(lists, views, own_ids, group_tokens, live)
            else:
                self.sort(lists, views.counts, views.board, group_tokens, live)

    # ---- one token, one warp ---------------------------------------------------------------------

    @cute.jit
    def select(
        self,
        lists: Lists,
        scores: cute.Tensor,
        bias,
        own_ids: cute.Tensor,
        token: Int32,
        is_live: Boolean,
    ) -> None:
        """Write ids[token] and weights[token]."""
        config = self.config
        lane = cute.arch.lane_idx()
        logits = add_partials(lists.partials, token, config)
        values = [score(logits[i]) for i in range(config.lane_vectors * VECTOR)]
        for v in cutlass.range_constexpr(config.lane_vectors):
            expert = (v * 32 + lane) * VECTOR
            if expert < config.experts:
                for i in cutlass.range_constexpr(VECTOR):
                    scores[expert + i] = values[v * VECTOR + i]
        cute.arch.sync_warp()
        mine = Int32(LAST_ID)
        if cutlass.const_expr(config.is_hashed):
            if is_live and lane < config.top_k:
                mine = table_entry(lists, token, lane, config.experts)
        else:
            keys = keys_of(values, bias, config)
            for slot in cutlass.range_constexpr(config.top_k):
                winner = self.take_best(keys)
                if is_live and lane == slot:
                    mine = winner
        chosen = Float32(0.0)
        if mine != LAST_ID:
            chosen = scores[mine]
        self.store(lists, own_ids, token, mine, chosen)

    @cute.jit
    def take_best(self, keys: cute.Tensor) -> Int32:
        """The expert of the largest key in the warp, the lowest of equals; its key becomes
        TAKEN."""
        config = self.config
        lane = cute.arch.lane_idx()
        best, place = keys[0], Int32(0)
        for i in cutlass.range_constexpr(1, config.lane_vectors * VECTOR):
            if keys[i] > best:
                best, place = keys[i], Int32(i)
        largest = cute.arch.warp_redux_sync(best, "max")
        expert = (place // VECTOR * 32 + lane) * VECTOR + place % VECTOR
        candidate = cutlass.select_(best == largest, expert, Int32(LAST_ID))
        winner = cute.arch.warp_redux_sync(candidate, "min")
        for i in cutlass.range_constexpr(config.lane_vectors * VECTOR):
            if (i // VECTOR * 32 + lane) * VECTOR + i % VECTOR == winner:
                keys[i] = Uint32(TAKEN)
        return winner

    @cute.jit
    def store(
        self, lists: Lists, own_ids: cute.Tensor, token: Int32, mine: Int32, score: Float32
    ) -> None:
        """Normalise the scores of the first lanes, and write them in ascending order of ids."""
        config = self.config
        lane = cute.arch.lane_idx()
        total, place = Float32(0.0), Int32(0)
        for slot in cutlass.range_constexpr(config.top_k):
            total += cute.arch.shuffle_sync(score, slot)
            other = cute.arch.shuffle_sync(mine, slot)
            if other < mine or (other == mine and slot < lane):
                place += 1
        factor = cute.math.div(Float32(config.scaling), total, rounding=NEAREST)
        if lane < config.top_k:
            has_expert = mine != LAST_ID
            expert = cutlass.select_(has_expert, mine, Int32(NO_EXPERT))
            own_ids[place] = expert
            lists.ids[token, place] = expert
            lists.weights[token, place] = cutlass.select_(has_expert, score * factor, Float32(0.0))

    # ---- all pairs, one CTA ----------------------------------------------------------------------

    @cute.jit
    def sort_few(
        self, lists: Lists, views: SelectSmem, ids: cute.Tensor, group_tokens: Int32, live: Int32
    ) -> None:
        """Write `pairs`, `groups` and `counts` of one CTA's tokens: a thread sets the bit of a pair
        in the words of its expert, whose thread finds them there in their order.

        Args:
            ids: with rows behind each other.
        """
        config, bits = self.config, views.bits
        thread = cute.arch.thread_idx()[0]
        flat = cute.make_tensor(ids.iterator, cute.make_layout(self.own_pairs))
        if thread < lists.ids.shape[0] * config.top_k:
            expert = flat[thread]
            if expert >= 0:
                word = bits.iterator + (thread // WORD_BITS * config.experts + expert)
                cute.arch.atomic_or(word, Uint32(1) << (thread % WORD_BITS))
        cute.arch.sync_threads()
        scanned = -(-config.experts // self.threads)
        words = cute.make_rmem_tensor((self.bit_words, scanned), Uint32)
        words.fill(0)
        counts = cute.make_rmem_tensor(scanned, Int32)
        counts.fill(0)
        sums = Int32(0)
        for i in cutlass.range_constexpr(scanned):
            own = thread * scanned + i
            if own < config.experts:
                for word in cutlass.range_constexpr(self.bit_words):
                    words[word, i] = bits[own, word]
            for word in cutlass.range_constexpr(self.bit_words):
                counts[i] += Int32(cute.arch.popc(words[word, i]))
            sums += counts[i] + (cute.ceil_div(counts[i], group_tokens) << SUM_BITS)
        before, total = sums_before(sums, views.board[None, 0])
        if thread == 0:
            lists.counts[0] = total >> SUM_BITS
            lists.counts[1] = live
        row, entry = before & ((1 << SUM_BITS) - 1), before >> SUM_BITS
        for i in cutlass.range_constexpr(scanned):
            entry = self._store_groups(
                lists, thread * scanned + i, row, counts[i], entry, group_tokens
            )
            for word in cutlass.range_constexpr(self.bit_words):
                left = words[word, i]
                while left != 0:
                    lists.pairs[row] = word * WORD_BITS + lowest_bit(left)
                    left &= left - 1
                    row += 1

    @cute.jit
    def _store_groups(
        self, lists: Lists, expert: Int32, row: Int32, count: Int32, entry: Int32,
        group_tokens: Int32,
    ) -> Int32:  # fmt: skip
        """Write the groups of an expert's pairs, from `entry` on; returns the next one."""
        for start in cutlass.range(0, count, group_tokens, unroll=1):
            group = (expert, row + start, cutlass.min(count - start, group_tokens), 0)
            for word in cutlass.range_constexpr(GROUP_WORDS):
                lists.groups[entry, word] = Int32(group[word])
            entry += 1
        return entry

    def masks_bytes(self, tokens: int) -> int:
        """Of shared memory that `sort_some` has for so many tokens."""
        words = -(-tokens // WORD_BITS) * self.config.experts
        return 4 * (2 * words + self.warps * BOARD_WORDS)

    @cute.jit
    def sort_some(
        self,
        lists: Lists,
        storage: cute.Pointer,
        most_tokens: cutlass.Constexpr,
        group_tokens: Int32,
        live: Int32,
    ) -> None:
        """Write `pairs`, `groups` and `counts` of up to `most_tokens` tokens of all CTAs: a thread
        sets the bit of a pair's token in a word of its expert, and finds the pair's place by the
        bits below it. A token has an expert once.

        Args:
            storage: `masks_bytes` of shared memory.
        """
        config, team = self.config, self.team
        experts, top_k = config.experts, config.top_k
        thread, tokens = team.thread(), lists.ids.shape[0]
        size = -(-most_tokens // WORD_BITS) * experts
        # Both [word, expert]: bits of tokens, and the place of the first of these.
        masks, places = (cute.recast_ptr(storage, dtype=Int32) + i * size for i in range(2))
        board = cute.make_tensor(places + size, cute.make_layout((self.warps, BOARD_WORDS)))
        words = cute.ceil_div(tokens, WORD_BITS)
        count = -(-most_tokens * top_k // team.threads)
        ids = load_every(lists.ids, top_k, thread, tokens * top_k, team.threads, count)
        for i in cutlass.range(thread, words * experts, team.threads, unroll=1):
            (masks + i).store(Int32(0))
        team.meet()
        for i in cutlass.range_constexpr(count):
            if ids[i] >= 0:
                word, bit = self._word_and_bit(thread + i * team.threads, ids[i])
                cute.arch.atomic_or(masks + word, bit)
        team.meet()
        scanned = -(-experts // team.threads)
        counts = cute.make_rmem_tensor(scanned, Int32)
        counts.fill(0)
        rows, entries = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(scanned):
            own = thread * scanned + i
            if own < experts:
                for word in cutlass.range(words, unroll=1):
                    counts[i] += Int32(cute.arch.popc((masks + (word * experts + own)).load()))
            rows += counts[i]
            entries += cute.ceil_div(counts[i], group_tokens)
        row, entry = exclusive_sums(rows, entries, board, team)
        if thread == team.threads - 1:
            lists.counts[0] = entry + entries
            lists.counts[1] = live
        for i in cutlass.range_constexpr(scanned):
            own = thread * scanned + i
            entry = self._store_groups(lists, own, row, counts[i], entry, group_tokens)
            if own < experts:
                for word in cutlass.range(words, unroll=1):
                    (places + (word * experts + own)).store(row)
                    row += Int32(cute.arch.popc((masks + (word * experts + own)).load()))
        team.meet()
        for i in cutlass.range_constexpr(count):
            if ids[i] >= 0:
                pair = thread + i * team.threads
                word, bit = self._word_and_bit(pair, ids[i])
                below = (masks + word).load() & (bit - 1)
                lists.pairs[(places + word).load() + Int32(cute.arch.popc(below))] = pair

    def _word_and_bit(self, pair: Int32, expert: Int32) -> tuple[Int32, Int32]:
        """Index of the word that a pair's token has a bit in, and that bit."""
        token = pair // self.config.top_k
        word = token // WORD_BITS * self.config.experts + expert
        return word, Int32(1) << (token % WORD_BITS)

    @cute.jit
    def sort(
        self,
        lists: Lists,
        counts: cute.Tensor,
        board: cute.Tensor,
        group_tokens: Int32,
        live: Int32,
    ) -> None:
        """Write `pairs`, `groups` and `counts`."""
        config = self.config
        thread = self.team.thread()
        warp = cute.arch.make_warp_uniform(thread // 32)
        for i in cutlass.range(thread, config.experts * self.warps, self.threads, unroll=1):
            counts[i % config.experts, i // config.experts] = Int32(0)
        self.team.meet()
        total = lists.ids.shape[0] * config.top_k
        run = cute.ceil_div(cute.ceil_div(total, self.warps), 32) * 32
        begin = warp * run
        end = cutlass.min(begin + run, total)
        own = counts[None, warp]
        # A run of pairs that one batch holds is read once.
        held = load_ids(lists.ids, config.top_k, begin, end)
        count_run(lists, own, held, config.top_k, begin, end)
        self.team.meet()
        self.add_counts(lists, counts, board, group_tokens, live)
        self.team.meet()
        place_run(lists, own, held, config.top_k, begin, end)

    @cute.jit
    def add_counts(
        self,
        lists: Lists,
        counts: cute.Tensor,
        board: cute.Tensor,
        group_tokens: Int32,
        live: Int32,
    ) -> None:
        """counts[expert, warp] = first place of a warp's pairs of an expert; write `groups`."""
        config = self.config
        thread = self.team.thread()
        scanned = -(-config.experts // self.threads)
        first = thread * scanned
        found = cute.make_rmem_tensor(scanned, Int32)
        found.fill(0)
        rows, entries = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(scanned):
            if first + i < config.experts:
                for warp in cutlass.range_constexpr(self.warps):
                    found[i] += counts[first + i, warp]
            rows += found[i]
            entries += cute.ceil_div(found[i], group_tokens)
        row, entry = exclusive_sums(rows, entries, board, self.team)
        if thread == self.threads - 1:
            lists.counts[0] = entry + entries
            lists.counts[1] = live
        for i in cutlass.range_constexpr(scanned):
            entry = self._store_groups(lists, first + i, row, found[i], entry, group_tokens)
            if first + i < config.experts:
                for warp in cutlass.range_constexpr(self.warps):
                    count = counts[first + i, warp]
                    counts[first + i, warp] = row
                    row += count


# ---- scores ----------------------------------------------------------------------------------


@cute.jit
def add_partials(partials: cute.Tensor, token: Int32, config: RoutingConfig) -> cute.Tensor:
    """Logits of this lane's experts: partial sums added in order."""
    lane = cute.arch.lane_idx()
    sums = cute.make_rmem_tensor((VECTOR, config.lane_vectors), Float32)
    sums.fill(0.0)
    if partials.shape[0] == 1:
        add_partial(partials, 0, token, lane, config, sums)
    else:
        # All loads of a slice are under way before the sums of the first are needed.
        for s in cutlass.range_constexpr(config.slices):
            add_partial(partials, s, token, lane, config, sums)
    return sums


@cute.jit
def add_partial(
    partials: cute.Tensor, split, token: Int32, lane: Int32, config: RoutingConfig, sums
) -> None:
    """sums += partials[split, token]."""
    row = (Int64(split) * partials.shape[1] + token) * config.experts
    for v in cutlass.range_constexpr(config.lane_vectors):
        expert = (v * 32 + lane) * VECTOR
        if expert < config.experts:
            source = pointer_at(partials.iterator, row + expert, Float32)
            found = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), found)
            for i in cutlass.range_constexpr(VECTOR):
                sums[i, v] += found[i]


def score(logit: Float32) -> Float32:
    """sqrt(softplus(logit)); from the threshold on, softplus is the identity, as in torch."""
    soft = cute.math.log1p(cute.math.exp(logit))
    soft = cutlass.select_(logit > SOFTPLUS_THRESHOLD, logit, soft)
    return cute.math.sqrt(soft, rounding=NEAREST)


@cute.jit
def load_bias(bias: cute.Tensor, config: RoutingConfig) -> cute.Tensor:
    """The biases of this lane's experts."""
    lane = cute.arch.lane_idx()
    found = cute.make_rmem_tensor((VECTOR, config.lane_vectors), Float32)
    found.fill(0.0)
    for v in cutlass.range_constexpr(config.lane_vectors):
        expert = (v * 32 + lane) * VECTOR
        if expert < config.experts:
            for i in cutlass.range_constexpr(VECTOR):
                found[i, v] = bias[expert + i]
    return found


def order_key(value: Float32) -> Uint32:
    """A key that orders as values do, -0 as 0; that of NaN is below all others."""
    bits = (value + Float32(0.0)).bitcast(Uint32)
    flipped = cutlass.select_(bits >= Uint32(SIGN), ~bits, bits | Uint32(SIGN))
    return cutlass.select_(value == value, flipped, Uint32(NAN_KEY))


@cute.jit
def keys_of(values: list, bias: cute.Tensor, config: RoutingConfig) -> cute.Tensor:
    """Keys of this lane's scores with their biases; TAKEN past the last expert."""
    lane = cute.arch.lane_idx()
    keys = cute.make_rmem_tensor(config.lane_vectors * VECTOR, Uint32)
    for i in cutlass.range_constexpr(config.lane_vectors * VECTOR):
        expert = (i // VECTOR * 32 + lane) * VECTOR + i % VECTOR
        key = order_key(values[i] + bias[i])
        keys[i] = cutlass.select_(expert < config.experts, key, Uint32(TAKEN))
    return keys


@cute.jit
def table_entry(lists: Lists, token: Int32, slot: Int32, experts: int) -> Int32:
    """The expert that the table has for a slot of a token; LAST_ID where there is none."""
    found = Int32(LAST_ID)
    row = lists.input_ids[token]
    if row >= 0 and row < lists.table.shape[0]:
        expert = lists.table[row, slot]
        if expert >= 0 and expert < experts:
            found = Int32(expert)
    return found


# ---- sort ------------------------------------------------------------------------------------


def lowest_bit(word: Uint32) -> Int32:
    """Place of the lowest bit of a word that has some."""
    return Int32(cute.arch.clz(cute.arch.brev(word)))


@cute.jit
def live_count(live_tokens: cute.Tensor, tokens: Int32) -> Int32:
    """Number of tokens that are not padding."""
    live = Int32(tokens)
    if live_tokens.shape[0] > 0:
        live = cutlass.max(cutlass.min(live_tokens[0], live), Int32(0))
    return live


@cute.jit
def arrive(arrivals: cute.Tensor, ctas: Int32) -> Boolean:
    """Publish what the CTA wrote before its last barrier; whether all others have done so.

    The atomic releases and acquires at GPU scope; the CTA's next barrier extends that to its other
    threads.
    """
    before = ctas - 1
    if ctas > 1:
        pointer = pointer_at(arrivals.iterator, Int64(0), Int32, align=4)
        before = cute.arch.atomic_add(pointer, Int32(1), sem="acq_rel", scope="gpu")
    return before == ctas - 1


@cute.jit
def load_ids(ids: cute.Tensor, top_k: int, start: Int32, end: Int32) -> cute.Tensor:
    """Experts of this lane's pairs, every 32nd from `start`; NO_EXPERT past `end`."""
    return load_every(ids, top_k, start + cute.arch.lane_idx(), end, 32, BATCH)


@cute.jit
def load_every(
    ids: cute.Tensor, top_k: int, first: Int32, end: Int32, step: int, count: int
) -> cute.Tensor:
    """Experts of so many pairs, every `step`-th from `first`; NO_EXPERT past `end`."""
    found = cute.make_rmem_tensor(count, Int32)
    found.fill(NO_EXPERT)
    flat = cute.make_tensor(ids.iterator, cute.make_layout(ids.shape[0] * top_k))
    for i in cutlass.range_constexpr(count):
        pair = first + i * step
        if pair < end:
            found[i] = flat[pair]
    return found


@cute.jit
def count_run(
    lists: Lists, counts: cute.Tensor, held: cute.Tensor, top_k: int, begin: Int32, end: Int32
) -> None:
    """Count the experts of a warp's run of pairs, of which `held` is the first batch."""
    count_batch(counts, held)
    for start in cutlass.range(begin + 32 * BATCH, end, 32 * BATCH, unroll=1):
        count_batch(counts, load_ids(lists.ids, top_k, start, end))


@cute.jit
def place_run(
    lists: Lists, places: cute.Tensor, held: cute.Tensor, top_k: int, begin: Int32, end: Int32
) -> None:
    """Put a warp's run of pairs, of which `held` is the first batch, in their places."""
    place_batch(lists.pairs, places, held, begin)
    for start in cutlass.range(begin + 32 * BATCH, end, 32 * BATCH, unroll=1):
        place_batch(lists.pairs, places, load_ids(lists.ids, top_k, start, end), start)


@cute.jit
def count_batch(counts: cute.Tensor, ids: cute.Tensor) -> None:
    """Count the experts of a batch of pairs."""
    for i in cutlass.range_constexpr(BATCH):
        if cute.arch.vote_any_sync(ids[i] >= 0):
            count_pairs(counts, ids[i])


@cute.jit
def place_batch(pairs: cute.Tensor, places: cute.Tensor, ids: cute.Tensor, start: Int32) -> None:
    """Put a batch of pairs, every 32nd from `start`, in their places."""
    for i in cutlass.range_constexpr(BATCH):
        if cute.arch.vote_any_sync(ids[i] >= 0):
            place = next_place(places, ids[i])
            if ids[i] >= 0:
                pairs[place] = start + i * 32 + cute.arch.lane_idx()


@cute.jit
def count_pairs(counts: cute.Tensor, expert: Int32) -> None:
    """counts[expert] += lanes of the warp that have it."""
    same = cute.arch.match_sync(FULL_MASK, expert)
    if expert >= 0 and same & cute.arch.lanemask_lt() == 0:
        counts[expert] += Int32(cute.arch.popc(same))
    cute.arch.sync_warp()


@cute.jit
def next_place(places: cute.Tensor, expert: Int32) -> Int32:
    """Place of this lane's pair: `places` of its expert, which then counts the lanes that have
    it."""
    same = cute.arch.match_sync(FULL_MASK, expert)
    before = same & cute.arch.lanemask_lt()
    first = Int32(0)
    if expert >= 0:
        first = places[expert]
    cute.arch.sync_warp()
    if expert >= 0 and before == 0:
        places[expert] = first + Int32(cute.arch.popc(same))
    cute.arch.sync_warp()
    return first + Int32(cute.arch.popc(before))


@cute.jit
def exclusive_sums(
    rows: Int32, entries: Int32, board: cute.Tensor, team: Team
) -> tuple[Int32, Int32]:
    """Sums of both over the threads of a team before this one."""
    thread = team.thread()
    lane, warp = thread % 32, thread // 32
    row_sum, entry_sum = rows, entries
    for step in cutlass.range_constexpr(5):
        row_below = cute.arch.shuffle_sync_up(row_sum, 1 << step, mask_and_clamp=0)
        entry_below = cute.arch.shuffle_sync_up(entry_sum, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            row_sum += row_below
            entry_sum += entry_below
    if lane == 31:
        board[warp, 0] = row_sum
        board[warp, 1] = entry_sum
    team.meet()
    row, entry = row_sum - rows, entry_sum - entries
    for other in cutlass.range_constexpr(board.shape[0] - 1):
        if other < warp:
            row += board[other, 0]
            entry += board[other, 1]
    return row, entry
