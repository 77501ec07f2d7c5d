"""Selection of experts and sort of pairs of many tokens, in two launches, for sm_90a.

What `select` does in one launch, whose last CTA sorts alone. Here a CTA takes a run of tokens and
counts the pairs of each expert in it; then a CTA for each run adds the counts of the runs before
it, and puts its own pairs in their places. Lists and bits are the same.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.moe.routing import (
    GROUP_WORDS,
    MOST_RUNS,
    SELECT_WARPS,
    RoutingConfig,
    run_rounds,
)
from dsv4.kernels.moe.select import (
    BATCH,
    BOARD_WORDS,
    Lists,
    Select,
    count_run,
    exclusive_sums,
    live_count,
    load_bias,
    load_ids,
    place_run,
)
from dsv4.kernels.moe.team import Team

WARPS = SELECT_WARPS
THREADS = 32 * WARPS
ALL, BEFORE = 0, 1  # sums over runs


class SelectMany:
    """Both launches."""

    def __init__(self, config: RoutingConfig):
        self.runs = SelectRuns(config)
        self.sort = SortRuns(config)

    @cute.jit
    def launch(self, lists: Lists, stream, group_tokens: Int32, most_runs: Int32 = MOST_RUNS):
        """A CTA for each run, twice; groups have up to `group_tokens` rows."""
        tokens = lists.ids.shape[0]
        rounds = run_rounds(tokens, most_runs)
        options = {
            "grid": [cute.ceil_div(tokens, WARPS * rounds), 1, 1], "block": [THREADS, 1, 1],
            "stream": stream, "use_pdl": True,
        }  # fmt: skip
        self.runs.kernel(lists, rounds).launch(**options)
        self.sort.kernel(lists, rounds, group_tokens).launch(**options)


class SelectRuns:
    """Kernel: experts and weights of each token, and the pairs of each expert in a run."""

    def __init__(self, config: RoutingConfig):
        self.config = config
        self.one = Select(config)

    @cute.kernel
    def kernel(self, lists: Lists, rounds: Int32):
        """A run; each warp takes `rounds` tokens, one after the other."""
        config, smem = self.config, SmemAllocator()
        scores = smem.allocate_tensor(Float32, cute.make_layout((config.experts, WARPS)), 16)
        order = cute.make_layout((WARPS, config.top_k), stride=(config.top_k, 1))
        ids = smem.allocate_tensor(Int32, order, 4)
        counts = smem.allocate_tensor(Int32, cute.make_layout(config.experts), 4)
        thread, run = cute.arch.thread_idx()[0], Int32(cute.arch.block_idx()[0])
        warp, lane = cute.arch.make_warp_uniform(thread // 32), cute.arch.lane_idx()
        pdl.launch_dependents()
        for expert in cutlass.range(thread, config.experts, THREADS, unroll=1):
            counts[expert] = Int32(0)
        bias = None
        if cutlass.const_expr(not config.is_hashed):
            bias = load_bias(lists.bias, config)
        pdl.wait_for_previous_launch()
        cute.arch.sync_threads()
        tokens = lists.ids.shape[0]
        live = live_count(lists.live_tokens, tokens)
        for i in cutlass.range(rounds, unroll=1):
            token = (run * rounds + i) * WARPS + warp
            if token < tokens:
                own = ids[warp, None]
                self.one.select(lists, scores[None, warp], bias, own, token, token < live)
                cute.arch.sync_warp()
                if lane < config.top_k:
                    expert = own[lane]
                    if expert >= 0:
                        cute.arch.atomic_add(counts.iterator + expert, Int32(1))
                # The next token's scores and ids take their places.
                cute.arch.sync_warp()
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, config.experts, THREADS, unroll=1):
            lists.run_counts[run, expert] = counts[expert]


class SortRuns:
    """Kernel: `pairs`, `groups` and `counts`; a CTA for each run."""

    def __init__(self, config: RoutingConfig):
        self.config = config
        # Threads that have an expert of their own, or several, and how many share its runs.
        self.columns = min(config.experts, THREADS)
        self.parts = THREADS // self.columns
        self.scanned = -(-config.experts // self.columns)

    @cute.kernel
    def kernel(self, lists: Lists, rounds: Int32, group_tokens: Int32):
        """Sort the pairs of a run."""
        config, smem = self.config, SmemAllocator()
        places = smem.allocate_tensor(Int32, cute.make_layout((config.experts, WARPS)), 16)
        board = smem.allocate_tensor(Int32, cute.make_layout((WARPS, BOARD_WORDS)), 4)
        sums = smem.allocate_tensor(Int32, cute.make_layout((config.experts, 2, self.parts)), 4)
        thread, run = cute.arch.thread_idx()[0], Int32(cute.arch.block_idx()[0])
        warp = cute.arch.make_warp_uniform(thread // 32)
        pdl.launch_dependents()
        for i in cutlass.range(thread, config.experts * WARPS, THREADS, unroll=1):
            places[i % config.experts, i // config.experts] = Int32(0)
        cute.arch.sync_threads()
        pdl.wait_for_previous_launch()
        total, size = lists.ids.shape[0] * config.top_k, rounds * (WARPS * config.top_k)
        last = cutlass.min((run + 1) * size, total)
        share = cute.ceil_div(rounds * config.top_k, 32) * 32
        begin = cutlass.min(run * size + warp * share, last)
        end = cutlass.min(begin + share, last)
        own = places[None, warp]
        held = load_ids(lists.ids, config.top_k, begin, end)
        self.add_runs(lists.run_counts, sums, thread, run)
        count_run(lists, own, held, config.top_k, begin, end)
        cute.arch.sync_threads()
        self.set_places(lists, places, sums, board, group_tokens)
        cute.arch.sync_threads()
        place_run(lists, own, held, config.top_k, begin, end)

    @cute.jit
    def add_runs(self, run_counts: cute.Tensor, sums: cute.Tensor, thread: Int32, run: Int32):
        """sums[expert, ALL or BEFORE, part] = pairs of a part of all runs, and of those before."""
        part, column = thread // self.columns, thread % self.columns
        runs = Int32(cute.arch.grid_dim()[0])
        for i in cutlass.range_constexpr(self.scanned):
            expert = column + i * self.columns
            if part < self.parts and expert < self.config.experts:
                everything, before = Int32(0), Int32(0)
                for first in cutlass.range(part, runs, self.parts * BATCH, unroll=1):
                    found = cute.make_rmem_tensor(BATCH, Int32)
                    found.fill(0)
                    for j in cutlass.range_constexpr(BATCH):
                        if first + j * self.parts < runs:
                            found[j] = run_counts[first + j * self.parts, expert]
                    for j in cutlass.range_constexpr(BATCH):
                        everything += found[j]
                        is_before = first + j * self.parts < run
                        before += cutlass.select_(is_before, found[j], Int32(0))
                sums[expert, ALL, part] = everything
                sums[expert, BEFORE, part] = before

    @cute.jit
    def set_places(
        self, lists: Lists, places: cute.Tensor, sums: cute.Tensor, board: cute.Tensor,
        group_tokens: Int32,
    ) -> None:  # fmt: skip
        """places[expert, warp] = first place of a warp's pairs of an expert; write `counts`, and
        the `groups` of every so-many-th expert."""
        config = self.config
        thread, run = cute.arch.thread_idx()[0], Int32(cute.arch.block_idx()[0])
        runs = Int32(cute.arch.grid_dim()[0])
        scanned = -(-config.experts // THREADS)
        first = thread * scanned
        found = cute.make_rmem_tensor(scanned, Int32)
        found.fill(0)
        rows, entries = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(scanned):
            if first + i < config.experts:
                for part in cutlass.range_constexpr(self.parts):
                    found[i] += sums[first + i, ALL, part]
            rows += found[i]
            entries += cute.ceil_div(found[i], group_tokens)
        row, entry = exclusive_sums(rows, entries, board, Team(THREADS))
        if run == 0 and thread == THREADS - 1:
            lists.counts[0] = entry + entries
            lists.counts[1] = live_count(lists.live_tokens, lists.ids.shape[0])
        for i in cutlass.range_constexpr(scanned):
            expert = first + i
            if expert < config.experts:
                if expert % runs == run:
                    self.store_groups(lists.groups, expert, row, found[i], entry, group_tokens)
                place = row
                for part in cutlass.range_constexpr(self.parts):
                    place += sums[expert, BEFORE, part]
                for warp in cutlass.range_constexpr(WARPS):
                    count = places[expert, warp]
                    places[expert, warp] = place
                    place += count
            row += found[i]
            entry += cute.ceil_div(found[i], group_tokens)

    @cute.jit
    def store_groups(
        self, groups: cute.Tensor, expert: Int32, row: Int32, count: Int32, entry: Int32,
        group_tokens: Int32,
    ) -> None:  # fmt: skip
        """The groups of an expert, from an entry on."""
        for start in cutlass.range(0, count, group_tokens, unroll=1):
            size = cutlass.min(count - start, group_tokens)
            group = (expert, row + start, size, 0)
            for word in cutlass.range_constexpr(GROUP_WORDS):
                groups[entry + start // group_tokens, word] = Int32(group[word])
