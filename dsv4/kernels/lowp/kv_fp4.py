"""Codes of tiles of keys and values in FP4: a scale for 16 channels of a key, or 16 keys of a
channel.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int64, Uint8, Uint32, cute
from cutlass.memory import SmemAllocator

from dsv4.kernels.kit.fp4 import pack_e2m1
from dsv4.kernels.kit.reduce import tree
from dsv4.kernels.kit.vectors import address_of, pointer_to
from dsv4.kernels.lowp.fp4 import block_scale, scale_place
from dsv4.kernels.lowp.groups import FP4_BLOCK as BLOCK
from dsv4.kernels.lowp.kv_codes import Codes
from dsv4.kernels.lowp.kv_statistics import THREADS, Operands
from dsv4.kernels.lowp.rounding import abs_of, across_lanes, fmax_nan, pack_e4m3
from dsv4.kernels.lowp.sequences import VECTOR, Tile, load_rows

OCTET = 8  # keys whose codes of a channel are a word
CHUNK = 4  # words of a store
WORD_BLOCKS = 4  # blocks whose scales are a word
PAD = 4  # words between columns: lanes that write columns side by side reach all banks


class Fp4Shared(NamedTuple):
    """Shared memory of a CTA of values: their codes [octet, vector, channel of it], and their
    scales as they are stored."""

    words: cute.Tensor
    scales: cute.Tensor


class Fp4Codes(Codes):
    """Codes of all tiles. Zeros have scale 0 and codes 0, as have keys that there are not."""

    @property
    def octets(self) -> int:
        """Words of codes of a channel of a tile."""
        return self.tile // OCTET

    def allocate(self, smem: SmemAllocator) -> Fp4Shared:
        shape, column = (self.octets, self.vectors, VECTOR), self.octets + PAD
        layout = cute.make_layout(shape, stride=(1, column, column * self.vectors))
        words = smem.allocate_tensor(Uint32, layout, 16)
        scales = smem.allocate_tensor(Uint8, cute.make_layout(self.tile * self.dim // BLOCK), 16)
        return Fp4Shared(words, scales)

    # ---- keys ----

    @cute.jit
    def code_keys(self, operands: Operands, tile: Tile, place, shared: Fp4Shared):
        """Codes and scales of a tile's rows, eight channels a thread: two lanes have a block, and
        eight a word of scales."""
        batch, head, number = place
        thread, count = cute.arch.thread_idx()[0], self.tile // self.rows
        channel, first = thread % self.vectors * VECTOR, thread // self.vectors
        means = self.key_means(operands, tile, head, channel)
        rows = [first + self.rows * i for i in range(count)]
        x = load_rows(operands.k, tile, batch, head, channel, rows, self.config.head_dim)
        for i in cutlass.range_constexpr(count):
            amax = self.largest_of(x, means, i, rows[i] < tile.rows)
            scale, inverse = block_scale(across_lanes(fmax_nan, amax, BLOCK // VECTOR))
            if rows[i] < tile.rows:
                values = [self.smoothed(x[j, i], means[j]) for j in range(VECTOR)]
                row = tile.first + rows[i]
                self.store_codes(operands, batch, head, row, channel, [y * inverse for y in values])
                if cutlass.const_expr(self.config.smooth_q):
                    self.store_smooth(operands, batch, head, row, channel, values)
            self.store_scales(operands, place, rows[i], channel, scale)
        if cutlass.const_expr(self.config.is_varlen):
            self.clear_rest(operands, batch, head, number, first, channel)

    @cute.jit
    def store_codes(self, operands: Operands, batch, head, row, channel, values):
        """Eight codes of a row."""
        strides = operands.k_codes.stride
        offset = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(row) * strides[2]
        pointer_to(address_of(operands.k_codes, offset + channel // 2), Uint32, 4).store(
            pack_e2m1(values)
        )

    @cute.jit
    def store_smooth(self, operands: Operands, batch, head, row, channel, values):
        """Eight channels of a key without its mean."""
        if channel < self.config.head_dim:
            strides, dtype = operands.k_smooth.stride, operands.k_smooth.element_type
            found = cute.make_rmem_tensor(VECTOR, dtype)
            for j in cutlass.range_constexpr(VECTOR):
                found[j] = values[j].to(dtype)
            offset = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(row) * strides[2]
            target = pointer_to(address_of(operands.k_smooth, offset + channel), dtype, 16)
            cute.autovec_copy(found, cute.make_tensor(target, cute.make_layout(VECTOR)))

    @cute.jit
    def store_scales(self, operands: Operands, place, row, channel, scale):
        """A row's word of scales, by the first of its lanes."""
        step = BLOCK // VECTOR
        others = [
            cute.arch.shuffle_sync_bfly(scale, offset=step * i) for i in range(1, WORD_BLOCKS)
        ]
        word_channels = WORD_BLOCKS * BLOCK
        if channel % word_channels == 0:
            words = self.dim // word_channels
            word = scale_place(row, channel // word_channels, self.tile, words)
            start = offset_of(operands.k_scale, place)
            target = pointer_to(address_of(operands.k_scale, start), Uint32, 4)
            (target + word).store(pack_e4m3(scale, *others))

    @cute.jit
    def clear_row(self, operands: Operands, batch, head, row, channel):
        zeros = [cutlass.Float32(0.0)] * VECTOR
        self.store_codes(operands, batch, head, row, channel, zeros)
        if cutlass.const_expr(self.config.smooth_q):
            self.store_smooth(operands, batch, head, row, channel, zeros)

    # ---- values ----

    @cute.jit
    def code_values(self, operands: Operands, tile: Tile, place, shared: Fp4Shared):
        """Codes and scales of a tile's columns, keys innermost: a thread has eight channels of
        eight keys, and of a block a lane of the same warp the other eight."""
        thread = cute.arch.thread_idx()[0]
        vector, octet = thread % self.vectors, thread // self.vectors
        if cutlass.const_expr(self.rows > self.octets):
            if octet < self.octets:
                self.code_octet(operands, tile, place, vector, octet, shared)
        else:
            self.code_octet(operands, tile, place, vector, octet, shared)
        cute.arch.sync_threads()
        self.store_values(operands, place, shared, thread)

    @cute.jit
    def code_octet(self, operands: Operands, tile: Tile, place, vector, octet, shared: Fp4Shared):
        """Words of a vector of channels."""
        batch, head, _ = place
        channel = vector * VECTOR
        rows = [octet * OCTET + i for i in range(OCTET)]
        x = load_rows(operands.v, tile, batch, head, channel, rows, self.config.head_dim)
        for j in cutlass.range_constexpr(VECTOR):
            eight = [x[j, i].to(cutlass.Float32) for i in range(OCTET)]
            amax = tree(fmax_nan, [abs_of(y) for y in eight])
            other = cute.arch.shuffle_sync_bfly(amax, offset=self.vectors)
            scale, inverse = block_scale(fmax_nan(amax, other))
            shared.words[octet, vector, j] = pack_e2m1([y * inverse for y in eight])
            if octet % 2 == 0:
                block, words = octet // 2, self.tile // (WORD_BLOCKS * BLOCK)
                word = scale_place(channel + j, block // WORD_BLOCKS, self.dim, words)
                byte = pack_e4m3(scale, scale, scale, scale) & Uint32(0xFF)
                shared.scales[word * WORD_BLOCKS + block % WORD_BLOCKS] = byte.to(Uint8)

    @cute.jit
    def store_values(self, operands: Operands, place, shared: Fp4Shared, thread):
        """Codes of 32 keys of a column at a time, and scales, as they lie in shared memory."""
        codes, scales = operands.v_codes, operands.v_block_scale
        start = offset_of(codes, place)
        chunks, column_words = self.octets // CHUNK, self.octets + PAD
        count = self.dim * chunks
        for first in cutlass.range_constexpr(0, count, THREADS):
            index = first + thread
            if index < count:
                line, chunk = index // chunks, index % chunks
                source = shared.words.iterator + (line * column_words + chunk * CHUNK)
                four = cute.make_tensor(source.align(16), cute.make_layout(CHUNK))
                column = line % self.vectors * VECTOR + line // self.vectors
                offset = start + Int64(column) * codes.stride[3] + chunk * (4 * CHUNK)
                self.store_vector(codes, offset, four)
        if thread < self.tile * self.dim // BLOCK // 16:
            source = cute.recast_ptr(shared.scales.iterator + thread * 16, dtype=Uint32)
            four = cute.make_tensor(source.align(16), cute.make_layout(CHUNK))
            self.store_vector(scales, offset_of(scales, place) + thread * 16, four)

    @cute.jit
    def store_vector(self, tensor: cute.Tensor, offset: Int64, source: cute.Tensor):
        """16 bytes of shared memory."""
        four = cute.make_rmem_tensor(CHUNK, Uint32)
        cute.autovec_copy(source, four)
        target = pointer_to(address_of(tensor, offset), Uint32, 16)
        cute.autovec_copy(four, cute.make_tensor(target, cute.make_layout(CHUNK)))


def offset_of(tensor: cute.Tensor, place) -> Int64:
    """Offset of a tile of a head."""
    return sum(Int64(i) * stride for i, stride in zip(place, tensor.stride))
