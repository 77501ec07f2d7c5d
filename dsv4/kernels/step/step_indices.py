"""Indices of a forward pass, for sm_90a and sm_100a: what all its layers derive from its requests.

A thread makes one index; nothing is exchanged but the largest of a warp. The launch takes the place
of some thirty elementwise ones, which are all that a step has beside its layers and its head.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.step.config import ARGS, StepIndicesConfig, values

WARP = 32
THREADS = 256
NONE = -1


class StepIndices:
    """Kernel of one configuration."""

    def __init__(self, config: StepIndicesConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,  # [B] int64
        starts: cute.Tensor,  # [B] int64
        lens: cute.Tensor,  # [B] int64
        block_table: cute.Tensor,  # [B, W] int64
        requests: cute.Tensor,  # [3, B] int32, written, as all that follow
        pages: cute.Tensor,  # [B, W]
        positions: cute.Tensor,  # [B, C]
        request_ids: cute.Tensor,  # [B, C]
        window_slots: cute.Tensor,  # [B, C]
        live_tokens: cute.Tensor,  # [1]
        stream,
        *,
        completed_0: cute.Tensor,  # [B, K_0], or no rows
        visible_0: cute.Tensor,  # [B, C], or no rows
        completed_1: cute.Tensor,
        visible_1: cute.Tensor,
        num_ctas: Int32,
        ring: Int32,
    ):
        self.kernel(
            (slots, starts, lens),
            block_table,
            requests,
            pages,
            (positions, request_ids, window_slots),
            live_tokens,
            ((completed_0, visible_0), (completed_1, visible_1)),
            ring,
        ).launch(grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        given: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        block_table: cute.Tensor,
        requests: cute.Tensor,
        pages: cute.Tensor,
        of_tokens: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        live_tokens: cute.Tensor,
        of_entries: tuple[tuple[cute.Tensor, cute.Tensor], tuple[cute.Tensor, cute.Tensor]],
        ring: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0] * THREADS + thread
        step = cute.arch.grid_dim()[0] * THREADS
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        self.requests(given, requests, first, step)
        seen = tuple(visible for _, visible in of_entries)
        self.tokens(given, of_tokens, seen, ring, first, step)
        for kind in cutlass.range_constexpr(len(self.config.ratios)):
            if cutlass.const_expr(self.config.ratios[kind] > 0):
                completed = of_entries[kind][0]
                self.completed(given, block_table, completed, self.config.ratios[kind], first, step)
        width = pages.shape[1]
        for index in cutlass.range(first, pages.shape[0] * width, step):
            row = index // width
            pages[row, index - row * width] = Int32(block_table[row, index - row * width])
        if first < WARP:
            self.live(given, of_tokens[0].shape[1], live_tokens, first)

    @cute.jit
    def requests(
        self,
        given: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        requests: cute.Tensor,
        first: Int32,
        step: Int32,
    ):
        """The requests' own numbers, as operators take them."""
        for row in cutlass.range(first, requests.shape[1], step):
            for place in cutlass.range_constexpr(3):
                requests[place, row] = Int32(given[place][row])

    @cute.jit
    def tokens(
        self,
        given: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        of_tokens: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        visible: tuple[cute.Tensor, cute.Tensor],
        ring: Int32,
        first: Int32,
        step: Int32,
    ):
        """Position, request and place in the window of each token, and the entries it sees."""
        slots, starts, lens = given
        positions, request_ids, window_slots = of_tokens
        chunk = positions.shape[1]
        for index in cutlass.range(first, positions.shape[0] * chunk, step):
            row = index // chunk
            offset = index - row * chunk
            slot, position = Int32(slots[row]), Int32(starts[row]) + offset
            is_valid = slot >= 0 and offset < Int32(lens[row])
            place = slot * ring + position % ring
            positions[row, offset] = position
            request_ids[row, offset] = cutlass.select_(is_valid, row, Int32(NONE))
            window_slots[row, offset] = cutlass.select_(is_valid, place, Int32(NONE))
            for kind in cutlass.range_constexpr(len(self.config.ratios)):
                if cutlass.const_expr(self.config.ratios[kind] > 0):
                    self.visible(visible[kind], row, offset, position, self.config.ratios[kind])

    @cute.jit
    def visible(
        self,
        visible: cute.Tensor,
        row: Int32,
        offset: Int32,
        position: Int32,
        ratio: cutlass.Constexpr,
    ):
        """Entries that are complete at a token."""
        # A launch that is not checked may come without the tensor.
        if row < visible.shape[0]:
            visible[row, offset] = (position + 1) // ratio

    @cute.jit
    def completed(
        self,
        given: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        block_table: cute.Tensor,
        completed: cute.Tensor,
        ratio: cutlass.Constexpr,
        first: Int32,
        step: Int32,
    ):
        """Slots of the entries that the step may complete."""
        _, starts, lens = given
        size, count = self.config.block // ratio, completed.shape[1]
        for index in cutlass.range(first, completed.shape[0] * count, step):
            row = index // count
            start, slot = Int32(starts[row]), Int32(NONE)
            number = start // ratio + index - row * count
            column = number // size
            is_complete = (number + 1) * ratio <= start + Int32(lens[row])
            if is_complete and number >= 0 and column < block_table.shape[1]:
                block = Int32(block_table[row, column])
                if block >= 0:
                    slot = block * size + number % size
            completed[row, index - row * count] = slot

    @cute.jit
    def live(
        self,
        given: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        chunk: Int32,
        live_tokens: cute.Tensor,
        lane: Int32,
    ):
        """Tokens up to the last that is valid, by one warp."""
        slots, _, lens = given
        last = Int32(0)
        for row in cutlass.range(lane, slots.shape[0], WARP):
            count = cutlass.min(Int32(lens[row]), chunk)
            if slots[row] >= 0 and count > 0:
                last = row * chunk + count
        last = cute.arch.warp_redux_sync(last, "max")
        if lane == 0:
            live_tokens[0] = last


def build(config: StepIndicesConfig, options: str = ""):
    """Compile the kernel of `config` for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(StepIndices(config), ARGS, values(config), options)
