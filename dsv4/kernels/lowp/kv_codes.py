"""Codes of tiles of keys and values, a CTA for each tile of a head and of either."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit import pdl
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.config import QuantizeKvConfig
from dsv4.kernels.lowp.groups import V_ALIGN, V_ORDER, first_block
from dsv4.kernels.lowp.kv_statistics import THREADS, TILE, WARP, Operands, partial_of
from dsv4.kernels.lowp.plan import K_LARGEST, V_FACTOR
from dsv4.kernels.lowp.rounding import (
    abs_of,
    across_lanes,
    fmax_nan,
    pack_e4m3,
    row_scale,
)
from dsv4.kernels.lowp.sequences import VECTOR, Tile, load_rows, rows_of, tile_of_rows

QUAD = 4  # keys whose codes of a channel are a word: positions 4 q to 4 q + 3 of 16


class Shared(NamedTuple):
    """Shared memory of a CTA: largest magnitudes of parts of a tile of keys, codes of values."""

    maxima: cute.Tensor
    words: cute.Tensor


class Codes:
    """Codes of all tiles."""

    def __init__(self, config: QuantizeKvConfig):
        self.config = config
        self.dim = config.padded_dim
        self.tile = config.tiles.block_k
        self.vectors = self.dim // VECTOR  # of a row
        self.rows = THREADS // self.vectors  # that are loaded at a time
        self.scale = row_scale(config)

    @cute.jit
    def launch(self, operands: Operands, stream):
        """Code all tiles, and clear what belongs to no sequence."""
        batch, heads = operands.k.shape[0], operands.k.shape[1]
        self.kernel(operands).launch(
            grid=[2 * operands.k_scale.shape[2], heads, batch],
            block=[THREADS, 1, 1],
            stream=stream,
            # With 256 channels the rows of a thread are twice as many.
            min_blocks_per_mp=2 if self.dim * self.tile > 1 << 14 else 3,
            # Given, because the compiler would ask a driver for the capacity.
            preferred_smem_carveout=50,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        pdl.launch_dependents()
        pdl.wait_for_previous_launch()
        index, head, batch = cute.arch.block_idx()
        # The heads whose statistics came last are in L2.
        head = operands.k.shape[1] - 1 - head
        batch = operands.k.shape[0] - 1 - batch
        number = index // 2
        ends, size = operands.ends, operands.k.shape[2]
        tile = tile_of_rows(ends, size, batch, number, self.tile, self.config.is_varlen)
        shared = self.allocate(SmemAllocator())
        if index % 2 == 0:
            self.code_keys(operands, tile, (batch, head, number), shared)
        else:
            if cutlass.const_expr(self.config.pv == "fp16"):
                self.round_values(operands, tile, (batch, head, number))
            else:
                self.code_values(operands, tile, (batch, head, number), shared)

    def allocate(self, smem: SmemAllocator) -> Shared:
        """What both kinds of CTAs need."""
        maxima = smem.allocate_tensor(Float32, cute.make_layout(THREADS // 16), 16)
        words = smem.allocate_tensor(Uint32, cute.make_layout((self.tile // QUAD, self.dim)), 16)
        return Shared(maxima, words)

    # ---- keys ----

    @cute.jit
    def code_keys(self, operands: Operands, tile: Tile, place, shared: Shared):
        """Codes and scales of a tile's rows.

        A thread has the rows whose numbers are its own modulo 16 or 32.
        """
        batch, head, number = place
        thread, count = cute.arch.thread_idx()[0], self.tile // self.rows
        channel, first = thread % self.vectors * VECTOR, thread // self.vectors
        means = self.key_means(operands, tile, head, channel)
        rows = [first + self.rows * i for i in range(count)]
        x = load_rows(operands.k, tile, batch, head, channel, rows, self.config.head_dim)
        scales = operands.k_scale[batch, head, number, None]
        if cutlass.const_expr(self.config.is_per_head):
            found = [self.scale_of_head(operands, tile, place, scales, thread)] * count
        else:
            largest = [self.largest_of(x, means, i, rows[i] < tile.rows) for i in range(count)]
            found = self.scales_of(largest, rows, tile, scales, shared.maxima, thread)
        for i in cutlass.range_constexpr(count):
            _, divisor, inverse = found[i]
            if rows[i] < tile.rows:
                words = cute.make_rmem_tensor(2, Uint32)
                for h in cutlass.range_constexpr(2):
                    four = [
                        self.smoothed(x[j, i], means[j]) for j in range(QUAD * h, QUAD * h + QUAD)
                    ]
                    words[h] = self.scale.pack(
                        [self.scale.code(value, divisor, inverse) for value in four]
                    )
                self.store_row(operands, batch, head, tile.first + rows[i], channel, words)
        if cutlass.const_expr(self.config.is_varlen):
            self.clear_rest(operands, batch, head, number, first, channel)

    @cute.jit
    def key_means(self, operands: Operands, tile: Tile, head, channel) -> cute.Tensor:
        """Means of eight channels of a tile's sequence, zeros where nothing is taken off."""
        means = cute.make_rmem_tensor(VECTOR, Float32)
        means.fill(0.0)
        if cutlass.const_expr(self.config.smooth_k):  # noqa: SIM102 static, then dynamic
            if channel < self.config.head_dim:
                for j in cutlass.range_constexpr(VECTOR):
                    means[j] = operands.km[tile.sequence, head, channel + j].to(Float32)
        return means

    def largest_of(self, x: cute.Tensor, means: cute.Tensor, i: int, exists) -> Float32:
        """Largest magnitude of a thread's part of a row."""
        amax = Float32(0.0)
        for j in range(VECTOR):
            value = abs_of(self.smoothed(x[j, i], means[j]))
            value = cutlass.select_(exists, value, Float32(0.0))
            amax = fmax_nan(amax, value)
        return amax

    @cute.jit
    def scale_of_head(
        self, operands: Operands, tile: Tile, place, scales: cute.Tensor, thread
    ) -> tuple[Float32, Float32, Float32]:
        """Scale that all keys of a head and sequence share, and what codes need of it."""
        batch, head, _ = place
        amax = Float32(0.0)
        if tile.rows > 0:
            start = self.statistics_of(operands, tile, batch, head)
            amax = operands.partials[start + K_LARGEST * self.dim]
        found = self.scale.of(amax)
        if thread == 0:
            scales[0] = self.of_tile(found, tile)
        return found

    @cute.jit
    def scales_of(
        self, largest, rows, tile: Tile, scales: cute.Tensor, maxima: cute.Tensor, thread
    ) -> list:
        """Scale of each of a thread's rows, and what codes need of it; scales of the tile written.

        Args:
            largest: of its channels, by row.
        """
        if cutlass.const_expr(self.config.qk_quant_gran == "per_row"):
            found = [self.scale.of(across_lanes(fmax_nan, x, self.vectors)) for x in largest]
            if thread % self.vectors == 0:
                for i in cutlass.range_constexpr(len(rows)):
                    scales[rows[i]] = self.of_tile(found[i], tile)
            return found
        if cutlass.const_expr(self.config.qk_quant_gran == "per_64" and self.tile > 64):
            return self.scales_of_halves(largest, tile, scales, maxima, thread)
        # The lanes of a pair of neighbouring rows are a unit: all its rows are of one group, as are
        # those of the units that are four apart; or all units of a tile.
        lanes = min(2 * self.vectors, WARP)
        unit, units, groups = thread // lanes, THREADS // lanes, self.config.key_scales
        amax = across_lanes(fmax_nan, tree(fmax_nan, largest), lanes)
        if thread % lanes == 0:
            maxima[unit] = amax
        cute.arch.sync_threads()
        # With 256 channels a warp has a row: units of a group are neighbours.
        is_row = self.vectors == WARP
        each = units // groups
        group = unit // each if is_row else unit % groups
        for i in cutlass.range_constexpr(units // groups):
            member = group * each + i if is_row else group + groups * i
            amax = fmax_nan(amax, maxima[member])
        found = self.scale.of(amax)
        place = group if is_row else unit
        is_first = unit % each == 0 if is_row else unit < groups
        if thread % lanes == 0 and is_first:
            scales[place] = self.of_tile(found, tile)
        return [found] * len(rows)

    @cute.jit
    def scales_of_halves(
        self, largest, tile: Tile, scales: cute.Tensor, maxima: cute.Tensor, thread
    ) -> list:
        """The same where each half of a tile's rows has one scale: the first rows of all threads
        are the first half."""
        warps, size = THREADS // 32, len(largest) // 2
        found = []
        for half in cutlass.range_constexpr(2):
            own = tree(fmax_nan, list(largest[half * size : half * size + size]))
            own = across_lanes(fmax_nan, own, 32)
            if thread % 32 == 0:
                maxima[half * warps + thread // 32] = own
        cute.arch.sync_threads()
        for half in cutlass.range_constexpr(2):
            amax = tree(fmax_nan, [maxima[half * warps + i] for i in range(warps)])
            found.append(self.scale.of(amax))
            if thread == 0:
                scales[half] = self.of_tile(found[half], tile)
        return [found[0]] * size + [found[1]] * size

    def of_tile(self, scale, tile: Tile) -> Float32:
        """A scale as it is written: 0 of no rows."""
        return cutlass.select_(tile.rows == 0, Float32(0.0), Float32(scale[0]))

    def smoothed(self, x, mean: Float32) -> Float32:
        """A key without its mean, in the precision of the quantiser; computed where it is needed
        rather than held."""
        wide = x.to(Float32)
        if not self.config.smooth_k:
            return wide
        wide = wide - mean
        return wide if self.config.quantizer == "cuda" else wide.to(x.dtype).to(Float32)

    @cute.jit
    def store_row(self, operands: Operands, batch, head, row, channel, words: cute.Tensor):
        """Eight codes of a row."""
        strides = operands.k_codes.stride
        offset = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(row) * strides[2]
        target = pointer_to(address_of(operands.k_codes, offset + channel), Uint32, 8)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))

    @cute.jit
    def clear_rest(self, operands: Operands, batch, head, number, first, channel):
        """Zeros in the rows behind the last sequence, by the CTA of the last tile."""
        if number == operands.k_scale.shape[2] - 1:
            size = Int32(operands.k.shape[2])
            begin = operands.ends[operands.ends.shape[0] - 1]
            begin = cutlass.max(cutlass.min(begin, size), 0)
            for row in cutlass.range(begin + first, size, self.rows, unroll=1):
                self.clear_row(operands, batch, head, row, channel)

    @cute.jit
    def clear_row(self, operands: Operands, batch, head, row, channel):
        """Zeros in place of eight codes of a row."""
        zeros = cute.make_rmem_tensor(2, Uint32)
        zeros.fill(0)
        self.store_row(operands, batch, head, row, channel, zeros)

    # ---- values ----

    @cute.jit
    def round_values(self, operands: Operands, tile: Tile, place):
        """A tile's rows in fp16, zeros where there are none."""
        batch, head, number = place
        thread, count = cute.arch.thread_idx()[0], self.tile // self.rows
        channel, first = thread % self.vectors * VECTOR, thread // self.vectors
        means = self.value_means(operands, tile, head, channel)
        rows = [first + self.rows * i for i in range(count)]
        x = load_rows(operands.v, tile, batch, head, channel, rows, self.config.head_dim)
        strides = operands.v_codes.stride
        start = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(number) * strides[2]
        for i in cutlass.range_constexpr(count):
            found = cute.make_rmem_tensor(VECTOR, Float16)
            for j in cutlass.range_constexpr(VECTOR):
                value = x[j, i].to(Float32) - means[j]
                value = cutlass.select_(rows[i] < tile.rows, value, Float32(0.0))
                found[j] = Float32(value).to(Float16)
            address = address_of(operands.v_codes, start + Int64(rows[i]) * strides[3] + channel)
            target = pointer_to(address, Float16, 16)
            cute.autovec_copy(found, cute.make_tensor(target, cute.make_layout(VECTOR)))

    @cute.jit
    def value_means(self, operands: Operands, tile: Tile, head, channel) -> cute.Tensor:
        """Means of eight channels of a tile's sequence, zeros where nothing is taken off."""
        means = cute.make_rmem_tensor(VECTOR, Float32)
        means.fill(0.0)
        if cutlass.const_expr(self.config.smooth_v):  # noqa: SIM102 static, then dynamic
            if tile.rows > 0 and channel < self.config.head_dim:
                for j in cutlass.range_constexpr(VECTOR):
                    means[j] = operands.vm[tile.sequence, head, channel + j]
        return means

    @cute.jit
    def code_values(self, operands: Operands, tile: Tile, place, shared: Shared):
        """Codes of a tile's columns, keys innermost and in the tensor core's order.

        A thread codes eight channels of four keys at a time, whose codes are a word of a column.
        Words lie exchanged by the vector of the column, so that the lanes of a warp, which are
        apart by eight columns, reach all banks, or half of them with 64 keys.
        """
        batch, head, number = place
        thread, words = cute.arch.thread_idx()[0], shared.words
        vector, quad = thread % self.vectors, thread // self.vectors
        if cutlass.const_expr(self.rows > self.tile // QUAD):
            if quad < self.tile // QUAD:
                self.code_quads(operands, tile, (batch, head, vector), [quad], words)
        else:
            quads = [quad + i for i in range(0, self.tile // QUAD, self.rows)]
            self.code_quads(operands, tile, (batch, head, vector), quads, words)
        cute.arch.sync_threads()
        self.store_columns(operands, batch, head, number, words, thread)

    @cute.jit
    def code_quads(self, operands: Operands, tile: Tile, place, quads, words: cute.Tensor):
        """Words of a vector of channels, of some fours of keys."""
        batch, head, vector = place
        channel = vector * VECTOR
        start = Int64(0)
        factors = cute.make_rmem_tensor(VECTOR, Float32)
        factors.fill(0.0)
        if tile.rows > 0:
            start = self.statistics_of(operands, tile, batch, head)
            start += V_FACTOR * self.dim + channel
            for j in cutlass.range_constexpr(VECTOR):
                factors[j] = operands.partials[start + j]
        means = self.value_means(operands, tile, head, channel)
        # Positions 4 q to 4 q + 3 hold keys 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of 16.
        rows = [q // 4 * V_ALIGN + V_ORDER[i] + q % 4 * 2 for q in quads for i in range(QUAD)]
        x = load_rows(operands.v, tile, batch, head, channel, rows, self.config.head_dim)
        for step in cutlass.range_constexpr(len(quads)):
            for j in cutlass.range_constexpr(VECTOR):
                four = [x[j, QUAD * step + i].to(Float32) for i in range(QUAD)]
                words[quads[step] ^ self.turn(vector), channel + j] = pack_e4m3(
                    *((value - means[j]) * factors[j] for value in four)
                )

    def turn(self, vector):
        """What places of words are exchanged by, in the columns of a vector of channels."""
        return vector % (self.tile // V_ALIGN) * QUAD

    @cute.jit
    def statistics_of(self, operands: Operands, tile: Tile, batch, head) -> Int64:
        """Offset of the statistics of a tile's sequence: those of its first 128 rows."""
        first = Int32(0)
        if cutlass.const_expr(self.config.is_varlen):
            rows = rows_of(operands.ends, tile.sequence, operands.k.shape[2])
            first = first_block(rows.first, tile.sequence, TILE)
        return partial_of(operands, batch, head, first, self.config)

    @cute.jit
    def store_columns(self, operands: Operands, batch, head, number, words: cute.Tensor, thread):
        """Sixteen codes of a column at a time."""
        strides = operands.v_codes.stride
        offset = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(number) * strides[2]
        chunks = self.tile // V_ALIGN
        for i in cutlass.range_constexpr(self.dim * chunks // THREADS):
            place = thread + i * THREADS
            column, chunk = place // chunks, place % chunks
            source = words.iterator + column * (self.tile // QUAD)
            source = source + (chunk * QUAD ^ self.turn(column // VECTOR))
            four = cute.make_rmem_tensor(QUAD, Uint32)
            cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(QUAD)), four)
            address = address_of(
                operands.v_codes, offset + Int64(column) * strides[3] + chunk * V_ALIGN
            )
            target = pointer_to(address, Uint32, 16)
            cute.autovec_copy(four, cute.make_tensor(target, cute.make_layout(QUAD)))
