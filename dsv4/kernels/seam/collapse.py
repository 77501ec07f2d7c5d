"""Second of two launches for many tokens: the streams of a token mixed, normalised, quantised.

A CTA takes a token. It adds the products of the groups of columns in the order of a cluster's CTAs
(`SeamTiling`), so that its bits are those of the launch for few tokens. A warp of its own computes
post and comb.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.vectors import address_of, vector_at
from dsv4.kernels.seam.columns import (
    PAIRS,
    Columns,
    Held,
    Operands,
    butterfly,
    load_gains,
    load_words,
    mix,
    rows_at,
    squares_of,
)
from dsv4.kernels.seam.config import (
    GROUP,
    LANE_COLUMNS,
    MIX_ROWS,
    PARTIAL_ROWS,
    SQUARES_ROW,
    STREAMS,
    WARP,
    SeamConfig,
    tiling_of,
)
from dsv4.kernels.seam.mixing import Mixing

WARP_GROUPS = 4  # of columns that a warp takes, if there are enough warps
MAX_WARPS = 16
QUAD = 4  # floats of a load
PITCH = PARTIAL_ROWS + QUAD  # of the sums of a group in shared memory: lanes read other groups
COMPUTING = 1  # named barrier of the computing warps


@dataclass(frozen=True)
class Buffers:
    """Shared memory of a CTA; the leading index is contiguous.

    Attributes:
        partials: [row, group] fp32, products and squares of the streams.
        totals: [row] fp32.
        squares: [group] fp32, of the mixed columns.
        starts: [16, 1] fp32, what comb's iteration starts with.
    """

    partials: cute.Tensor
    totals: cute.Tensor
    squares: cute.Tensor
    starts: cute.Tensor


@dataclass(frozen=True)
class Place:
    """A thread's place: its CTA's token, its warp and lane."""

    token: Int32
    thread: Int32
    warp: Int32
    lane: Int32


class Collapse:
    """Kernel of one configuration."""

    def __init__(self, config: SeamConfig, columns: Columns, all_warps: int | None = None):
        """`all_warps`: of a CTA, the mixing one among them; default one for every four groups."""
        self.config = config
        self.columns = columns
        self.tiling = tiling_of(config)
        self.mixing = None if config.is_head else Mixing(config)
        groups, mixes = self.tiling.groups, self.mixing is not None
        self.warps = min(MAX_WARPS, -(-groups // WARP_GROUPS))
        if all_warps is not None:
            self.warps = all_warps - mixes
        self.warp_groups = -(-groups // self.warps)
        self.all_warps = self.warps + mixes

    @cute.jit
    def launch(self, operands: Operands, partials: cute.Tensor, stream):
        self.kernel(operands, partials).launch(
            grid=[operands.x.shape[0], 1, 1],
            block=[self.all_warps * WARP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands, partials: cute.Tensor):
        buffers = self.allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = Place(
            cute.arch.block_idx()[0], cute.arch.thread_idx()[0], warp, cute.arch.lane_idx()
        )
        pdl.launch_dependents()
        # The parameters are no outputs of the launch before.
        parameters = self.load_parameters(operands, place.lane)
        pdl.wait_for_previous_launch()
        self.take(operands, partials, buffers, place, parameters)

    @cute.jit
    def load_parameters(self, operands: Operands, lane: Int32) -> tuple:
        """Parameters of pre, and of the row that the lane mixes."""
        mix_row = None
        if cutlass.const_expr(self.mixing is not None):
            mix_row = self.mixing.load_parameters(operands, lane)
        return self.columns.load_parameters(operands), mix_row

    @cute.jit
    def take(
        self,
        operands: Operands,
        partials: cute.Tensor,
        buffers: Buffers,
        place: Place,
        parameters: tuple,
    ) -> None:
        """Everything of a token."""
        held, mix_row = parameters
        # First what is needed first; all loads are under way before one is waited for.
        sums = self.load_partials(partials, place)
        words = self.load_streams(operands, place)
        self.share_partials(sums, buffers, place)
        cute.arch.sync_threads()
        self.add_groups(buffers, place)
        cute.arch.sync_threads()
        if place.warp < self.warps:
            self.write_row(operands, buffers, place, held, words)
        elif cutlass.const_expr(self.mixing is not None):
            self.mix(operands, buffers, place, mix_row)

    def allocate(self) -> Buffers:
        """The CTA's shared memory."""
        smem = SmemAllocator()

        def tensor(*shape: int) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)

        groups = self.tiling.groups
        return Buffers(
            tensor(PITCH, groups), tensor(PARTIAL_ROWS), tensor(groups), tensor(STREAMS**2, 1)
        )

    @cute.jit
    def load_streams(self, operands: Operands, place: Place) -> cute.Tensor:
        """Words [pair, stream, group] of the warp's groups: warp, warp + warps, ..."""
        words = cute.make_rmem_tensor((PAIRS, STREAMS, self.warp_groups), Uint32)
        words.fill(0)
        streams = operands.streams_out if self.config.expands else operands.streams
        for i in cutlass.range_constexpr(self.warp_groups):
            group = place.warp + i * self.warps
            if (group < self.tiling.groups) & (place.warp < self.warps):
                column = column_of(group, place.lane)
                sources = rows_at(streams, STREAMS, place.token, column)
                for j in cutlass.range_constexpr(STREAMS):
                    load_words(sources[j], words[None, j, i])
        return words

    @property
    def quads(self) -> list[int]:
        """Quads of rows of the partial sums that there are."""
        return sorted({row // QUAD for row in (*range(self.config.rows), SQUARES_ROW)})

    @cute.jit
    def load_partials(self, partials: cute.Tensor, place: Place) -> cute.Tensor:
        """[4, item] of the token's sums by group: thread, thread + threads, ..."""
        count, threads = len(self.quads) * self.tiling.groups, self.all_warps * WARP
        found = cute.make_rmem_tensor((QUAD, -(-count // threads)), Float32)
        at = address_of(partials, Int64(place.token) * partials.stride[0])
        for i in cutlass.range_constexpr(-(-count // threads)):
            item = place.thread + i * threads
            if item < count:
                group, quad = self.quad_of(item)
                source = vector_at(at, Float32, group * PARTIAL_ROWS + quad * QUAD, QUAD)
                cute.autovec_copy(source, found[None, i])
        return found

    @cute.jit
    def share_partials(self, found: cute.Tensor, buffers: Buffers, place: Place) -> None:
        """Hand loaded sums to the other threads."""
        count, threads = len(self.quads) * self.tiling.groups, self.all_warps * WARP
        for i in cutlass.range_constexpr(-(-count // threads)):
            item = place.thread + i * threads
            if item < count:
                group, quad = self.quad_of(item)
                target = buffers.partials[None, group].iterator + quad * QUAD
                target = cute.make_tensor(target.align(16), cute.make_layout(QUAD))
                cute.autovec_copy(found[None, i], target)

    def quad_of(self, item: Int32) -> tuple[Int32, Int32]:
        """Group and quad of rows of an item."""
        count, last = len(self.quads), self.quads[-1]
        group, quad = item // count, item % count
        if last != count - 1:
            quad = cutlass.select_(quad == count - 1, Int32(last), quad)
        return group, quad

    @cute.jit
    def add_groups(self, buffers: Buffers, place: Place) -> None:
        """totals of the rows of fn and of the squares, of every warp some."""
        count = self.config.rows + 1
        for i in cutlass.range_constexpr(-(-count // self.all_warps)):
            item = place.warp + i * self.all_warps
            if item < count:
                row = cutlass.select_(item < self.config.rows, item, Int32(SQUARES_ROW))
                total = self.over_groups(lambda group, row=row: buffers.partials[row, group], place)
                # What every CTA of a cluster adds, and what one does, have different orders.
                items = range(i * self.all_warps, min((i + 1) * self.all_warps, count))
                kinds = {item < STREAMS or item == count - 1 for item in items}
                if cutlass.const_expr(kinds == {True}):
                    (total,) = butterfly(self.descending, total)
                elif cutlass.const_expr(kinds == {False}):
                    (total,) = butterfly(self.descending[::-1], total)
                elif (row < STREAMS) | (row == SQUARES_ROW):
                    (total,) = butterfly(self.descending, total)
                else:
                    (total,) = butterfly(self.descending[::-1], total)
                if place.lane == 0:
                    buffers.totals[row] = total

    @property
    def descending(self) -> list[int]:
        """Distances of the lanes that are added, each of which has the sum of a rank's groups."""
        return [1 << i for i in reversed(range(self.tiling.ranks.bit_length() - 1))]

    def over_groups(self, value: Callable, place: Place) -> Float32:
        """Sum of value(group) over the groups of rank lane % ranks."""
        tiling = self.tiling
        rank, total = place.lane % tiling.ranks, None
        for g in range(tiling.rank_groups):
            group = rank + g * tiling.ranks
            found = value(cutlass.min(group, tiling.groups - 1))
            if (g + 1) * tiling.ranks > tiling.groups:
                found = cutlass.select_(group < tiling.groups, found, Float32(0.0))
            total = found if total is None else total + found
        return total

    @cute.jit
    def write_row(
        self, operands: Operands, buffers: Buffers, place: Place, held: Held, words: cute.Tensor
    ) -> None:
        """x of the token."""
        totals, groups = buffers.totals, self.tiling.groups
        pre = self.columns.pre(held, [totals[j] for j in range(STREAMS)], totals[SQUARES_ROW])
        mixed = cute.make_rmem_tensor((PAIRS, self.warp_groups), Uint32)
        squares = []
        for i in cutlass.range_constexpr(self.warp_groups):
            mix(words[None, None, i], pre, mixed[None, i])
            squares.append(squares_of(mixed[None, i]))
        squares = butterfly((16, 8, 4, 2, 1), *squares)
        gains = cute.make_rmem_tensor((LANE_COLUMNS, self.warp_groups), Float32)
        for i in cutlass.range_constexpr(self.warp_groups):
            group = place.warp + i * self.warps
            if group < groups:
                load_gains(operands, column_of(group, place.lane), gains[None, i])
                if place.lane == 0:
                    buffers.squares[group] = squares[i]
        cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=self.warps * WARP)
        total = self.over_groups(lambda group: buffers.squares[group], place)
        (total,) = butterfly(self.descending, total)
        factor = self.columns.inverse_rms(total, 1)
        for i in cutlass.range_constexpr(self.warp_groups):
            group = place.warp + i * self.warps
            if group < groups:
                where = (operands, place.token, column_of(group, place.lane), place.lane)
                self.columns.store(*where, mixed[None, i], gains[None, i], factor)

    @cute.jit
    def mix(self, operands: Operands, buffers: Buffers, place: Place, mix_row) -> None:
        """post and comb of the token."""
        factor = self.columns.inverse_rms(buffers.totals[SQUARES_ROW], STREAMS)
        row = cutlass.min(place.lane, MIX_ROWS - 1)
        projected = buffers.totals[STREAMS + row] * factor
        target = operands, buffers, place.token, 0
        self.mixing.store_post(target, place.lane, mix_row, projected)
        cute.arch.sync_warp()
        if place.lane == 0:
            self.mixing.store_comb(buffers.starts[None, 0], operands.comb_out, place.token)


def column_of(group, lane):
    """First column of a lane in a group."""
    return group * GROUP + lane * LANE_COLUMNS
