"""Statistics of keys and values: of every tile of rows, then of every sequence."""

from __future__ import annotations

import operator
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.lowp.config import QuantizeKvConfig
from dsv4.kernels.lowp.groups import V_ALIGN, first_block
from dsv4.kernels.lowp.plan import (
    K_LARGEST,
    K_MAX,
    K_MIN,
    K_SUM,
    STATISTICS,
    V_FACTOR,
    V_MAX,
    V_MIN,
    V_SUM,
)
from dsv4.kernels.lowp.rounding import abs_of, across_lanes, fmax_nan
from dsv4.kernels.lowp.sequences import VECTOR, Tile, load_rows, rows_of, tile_of_rows

TILE = 128  # rows
CHAINS = 8  # of sums of tiles: see `column_sums`
THREADS = 256
WARP = 32


class Operands(NamedTuple):
    """Tensors of a launch."""

    k: cute.Tensor
    v: cute.Tensor
    k_codes: cute.Tensor
    k_scale: cute.Tensor
    v_codes: cute.Tensor
    v_scale: cute.Tensor
    km: cute.Tensor
    vm: cute.Tensor
    ends: cute.Tensor
    partials: (
        cute.Tensor
    )  # [b, Hk, tiles, STATISTICS, dp], flat; of a sequence those of its first tile
    v_block_scale: cute.Tensor
    k_smooth: cute.Tensor


def count_tiles(operands: Operands, is_varlen: bool) -> Int32:
    """Tiles of a head: `groups.num_blocks`."""
    rows = Int32(operands.k.shape[2])
    if is_varlen:
        return rows // TILE + Int32(operands.ends.shape[0]) - 1
    return (rows + TILE - 1) // TILE


def partial_of(operands: Operands, batch, head, tile, config: QuantizeKvConfig) -> Int64:
    """Offset of a tile's first partial result."""
    heads, tiles = operands.k.shape[1], count_tiles(operands, config.is_varlen)
    place = (Int64(batch) * heads + head) * tiles + tile
    return place * (STATISTICS * config.padded_dim)


class TileStatistics:
    """Sums and extremes of a tile's channels, a CTA for each tile of a head."""

    def __init__(self, config: QuantizeKvConfig):
        self.config = config
        self.vectors = config.padded_dim // VECTOR  # of a row
        self.rows = THREADS // self.vectors  # at a time

    @cute.jit
    def launch(self, operands: Operands, stream):
        """Statistics of all tiles."""
        batch, heads = operands.k.shape[0], operands.k.shape[1]
        self.kernel(operands).launch(
            grid=[count_tiles(operands, self.config.is_varlen), heads, batch],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        number, head, batch = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        dim = self.config.padded_dim
        ends, size = operands.ends, operands.k.shape[2]
        tile = tile_of_rows(ends, size, batch, number, TILE, self.config.is_varlen)
        smem = SmemAllocator()
        exchanged = smem.allocate_tensor(Float32, cute.make_layout((dim, self.rows)), 16)
        start = partial_of(operands, batch, head, number, self.config)
        if cutlass.const_expr(self.config.smooth_k or self.config.is_per_head):
            x = self.load(operands.k, tile, batch, head, thread)
        if cutlass.const_expr(self.config.smooth_k):
            self.reduce(x, exchanged, operands.partials, start + K_SUM * dim, operator.add)
        if cutlass.const_expr(self.config.is_per_head):
            for sign, name, choose in ((-1, K_MAX, fmax_nan), (1, K_MIN, fmin_nan)):
                y = self.bounded(x, tile.rows, sign, thread)
                self.reduce(y, exchanged, operands.partials, start + name * dim, choose)
        if cutlass.const_expr(self.config.pv == "fp8" or self.config.smooth_v):
            x = self.load(operands.v, tile, batch, head, thread)
        if cutlass.const_expr(self.config.smooth_v):
            self.reduce(x, exchanged, operands.partials, start + V_SUM * dim, operator.add)
        if cutlass.const_expr(self.config.pv != "fp8"):
            return
        if cutlass.const_expr(self.config.smooth_v):
            # Zeros fill the last 16 rows, and count.
            counted = (tile.rows + V_ALIGN - 1) // V_ALIGN * V_ALIGN
            for limit, name, choose in ((-1, V_MAX, fmax_nan), (1, V_MIN, fmin_nan)):
                y = self.bounded(x, counted, limit, thread)
                self.reduce(y, exchanged, operands.partials, start + name * dim, choose)
        else:
            for i in cutlass.range_constexpr(TILE // self.rows):
                for j in cutlass.range_constexpr(VECTOR):
                    x[j, i] = abs_of(x[j, i])
            self.reduce(x, exchanged, operands.partials, start + V_MAX * dim, fmax_nan)

    @cute.jit
    def load(self, tensor: cute.Tensor, tile: Tile, batch, head, thread) -> cute.Tensor:
        """Rows thread // vectors + rows * i of a tile as float32 [8, i]."""
        rows = [thread // self.vectors + self.rows * i for i in range(TILE // self.rows)]
        channel = thread % self.vectors * VECTOR
        loaded = load_rows(tensor, tile, batch, head, channel, rows, self.config.head_dim)
        found = cute.make_rmem_tensor((VECTOR, len(rows)), Float32)
        found.store(loaded.load().to(Float32))
        return found

    def bounded(self, x: cute.Tensor, counted, sign: int, thread) -> cute.Tensor:
        """The same, infinite where rows do not count."""
        found = cute.make_rmem_tensor((VECTOR, TILE // self.rows), Float32)
        for i in range(TILE // self.rows):
            is_counted = thread // self.vectors + self.rows * i < counted
            for j in range(VECTOR):
                other = Float32.inf if sign > 0 else -Float32.inf
                found[j, i] = cutlass.select_(is_counted, x[j, i], Float32(other))
        return found

    @cute.jit
    def reduce(
        self, x: cute.Tensor, exchanged: cute.Tensor, partials: cute.Tensor, offset,
        choose: cutlass.Constexpr,
    ):  # fmt: skip
        """Reduce the rows of a tile, halves with halves, and write a row of partial results."""
        thread = cute.arch.thread_idx()[0]
        row, channel = thread // self.vectors, thread % self.vectors * VECTOR
        for j in cutlass.range_constexpr(VECTOR):
            own = halves(choose, [x[j, i] for i in range(TILE // self.rows)])
            exchanged[channel + j, row] = own
        cute.arch.sync_threads()
        if thread < self.config.padded_dim:
            found = halves(choose, [exchanged[thread, i] for i in range(self.rows)])
            partials[offset + thread] = found
        # What follows writes there again.
        cute.arch.sync_threads()


class SequenceStatistics:
    """Means and scales of a sequence's channels, a thread each."""

    def __init__(self, config: QuantizeKvConfig):
        self.config = config

    @cute.jit
    def launch(self, operands: Operands, stream):
        """Statistics of all sequences."""
        sequences = operands.k.shape[0]
        if cutlass.const_expr(self.config.is_varlen):
            sequences = operands.ends.shape[0] - 1
        self.kernel(operands).launch(
            grid=[operands.k.shape[1], sequences, 1],
            block=[self.config.padded_dim, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        head, sequence, _ = cute.arch.block_idx()
        channel, config = cute.arch.thread_idx()[0], self.config
        batch, first, rows = Int32(sequence), Int32(0), Int32(operands.k.shape[2])
        if cutlass.const_expr(config.is_varlen):
            found = rows_of(operands.ends, sequence, rows)
            batch, rows = Int32(0), found.count
            first = first_block(found.first, sequence, TILE)
        start = partial_of(operands, batch, head, first, config) + channel
        tiles = (rows + TILE - 1) // TILE
        is_fp8 = config.pv == "fp8"
        wanted = [(V_MAX, fmax_nan, -Float32.inf)] if is_fp8 else []
        if cutlass.const_expr(config.is_per_head):
            wanted += [(K_MAX, fmax_nan, -Float32.inf), (K_MIN, fmin_nan, Float32.inf)]
        if cutlass.const_expr(config.smooth_k):
            wanted.append((K_SUM, operator.add, 0.0))
        if cutlass.const_expr(config.smooth_v):
            wanted += [(V_MIN, fmin_nan, Float32.inf)] if is_fp8 else []
            wanted += [(V_SUM, operator.add, 0.0)]
        found = self.fold(operands, start, tiles, wanted)
        key_mean = Float32(0.0)
        if cutlass.const_expr(config.smooth_k):
            mean = (found[K_SUM] / divisor_of(rows)).to(operands.km.element_type)
            key_mean = mean.to(Float32)
            if channel < config.head_dim:
                operands.km[sequence, head, channel] = mean
        if cutlass.const_expr(config.is_per_head):
            # No rounding changes an order: the largest key is the largest one without its mean.
            dtype = operands.k.element_type
            ends = [(found[name] - key_mean).to(dtype).to(Float32) for name in (K_MAX, K_MIN)]
            amax = fmax_nan(*(abs_of(x) for x in ends))
            if tiles > 0:
                self.store_largest(operands, start - channel, channel, amax)
        if cutlass.const_expr(config.smooth_v):
            counted = (rows + V_ALIGN - 1) // V_ALIGN * V_ALIGN if is_fp8 else rows
            mean = found[V_SUM] / divisor_of(counted)
            if cutlass.const_expr(is_fp8):
                found[V_MAX] = fmax_nan(abs_of(found[V_MAX] - mean), abs_of(found[V_MIN] - mean))
            if channel < config.head_dim:
                operands.vm[sequence, head, channel] = mean
        if cutlass.const_expr(is_fp8):
            self.store_scale(operands, sequence, head, channel, tiles, start, found[V_MAX])

    @cute.jit
    def store_scale(self, operands: Operands, sequence, head, channel, tiles, start, amax: Float32):
        """Write a channel's scale, and the factor that codes are made with."""
        config, dim = self.config, self.config.padded_dim
        if tiles == 0:
            amax = Float32(0.0)
        operands.v_scale[sequence, head, channel] = amax / Float32(config.v_max)
        divisor = cutlass.select_(amax == 0.0, Float32(1.0), Float32(amax))
        factor = Float32(config.v_max) / divisor
        factor = cutlass.select_(amax == 0.0, Float32(0.0), Float32(factor))
        if tiles > 0:
            operands.partials[start + V_FACTOR * dim] = factor

    @cute.jit
    def store_largest(self, operands: Operands, start, channel, amax: Float32):
        """Write the largest of all channels' magnitudes."""
        count = self.config.padded_dim // WARP
        maxima = SmemAllocator().allocate_tensor(Float32, cute.make_layout(count), 16)
        amax = across_lanes(fmax_nan, amax, WARP)
        if channel % WARP == 0:
            maxima[channel // WARP] = amax
        cute.arch.sync_threads()
        if channel == 0:
            amax = tree(fmax_nan, [maxima[i] for i in range(count)])
            operands.partials[start + K_LARGEST * self.config.padded_dim] = amax

    @cute.jit
    def fold(self, operands: Operands, start, tiles, wanted: cutlass.Constexpr):
        """Statistics of tiles as those of their sequence, by name: of every eighth tile one after
        the other, then halves.

        Args:
            wanted: name, operation and its neutral element of each.
        """
        dim = self.config.padded_dim
        found = [cute.make_rmem_tensor(CHAINS, Float32) for _ in wanted]
        for chains, (_, _, neutral) in zip(found, wanted):
            chains.fill(neutral)
        for tile in cutlass.range(0, tiles, CHAINS, unroll=4):
            for i in cutlass.range_constexpr(CHAINS):
                # No branch, so that all loads are in flight.
                place = start + Int64(cutlass.min(tile + i, tiles - 1)) * (STATISTICS * dim)
                for chains, (name, choose, neutral) in zip(found, wanted):
                    partial = operands.partials[place + name * dim]
                    partial = cutlass.select_(tile + i < tiles, partial, Float32(neutral))
                    chains[i] = choose(chains[i], partial)
        return {
            name: halves(choose, [chains[i] for i in range(CHAINS)])
            for chains, (name, choose, _) in zip(found, wanted)
        }


def fmin_nan(a: Float32, b: Float32) -> Float32:
    """The smaller one; NaN wins."""
    return -fmax_nan(-a, -b)


def divisor_of(rows) -> Float32:
    """A number of rows, at least 1."""
    return Float32(cutlass.max(rows, Int32(1)))


def halves(choose, values: list):
    """Reduce a power of two of values, the first half with the second."""
    while len(values) > 1:
        middle = len(values) // 2
        values = [choose(a, b) for a, b in zip(values[:middle], values[middle:])]
    return values[0]
