"""A lane's four neighbouring columns of a token: loaded, written to the streams, mixed, normalised
and stored. What the kernels of seams share, so that their bits are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute

from dsv4.kernels.kit import quant
from dsv4.kernels.kit.rms import inverse_rms_approx
from dsv4.kernels.kit.vectors import (
    address_of,
    in_registers,
    pointer_to,
    prefetch_l2,
    vector_at,
)
from dsv4.kernels.seam.config import GROUP, LANE_COLUMNS, STREAMS, WARP, SeamConfig
from dsv4.kernels.seam.mixing import sigmoid

PAIRS = LANE_COLUMNS // 2
GROUP_LINES = 2  # of L2, of 128 bytes, that a group's columns of a stream take


@dataclass(frozen=True)
class Operands:
    """Tensors of a launch; those that the configuration lacks have no rows."""

    streams: cute.Tensor
    base: cute.Tensor
    scale: cute.Tensor
    norm_weight: cute.Tensor
    x: cute.Tensor
    y: cute.Tensor
    post: cute.Tensor
    comb: cute.Tensor
    rows: cute.Tensor
    ids: cute.Tensor
    counts: cute.Tensor
    streams_out: cute.Tensor
    post_out: cute.Tensor
    comb_out: cute.Tensor
    codes: cute.Tensor
    scale_out: cute.Tensor


@dataclass(frozen=True)
class Held:
    """Parameters in registers: read before the launch before has ended.

    Attributes:
        scale: of pre.
        base: [4], of pre.
    """

    scale: Float32
    base: cute.Tensor


@dataclass(frozen=True)
class Loaded:
    """A lane's columns of several tokens, as they were loaded.

    Attributes:
        words: [pair, stream, token], of the streams.
        outputs: [pair, row, token], of the sublayer before.
        weights: [target, source, token] of comb, which `Combs` makes, the last source post.
        experts: [token], below 0 where the lane's row is no result: lane i looks at row i.
    """

    words: cute.Tensor
    outputs: cute.Tensor
    weights: cute.Tensor
    experts: cute.Tensor


class Columns:
    """Arithmetic of one configuration."""

    def __init__(self, config: SeamConfig):
        self.config = config

    # ---- streams ---------------------------------------------------------------------------------

    def registers(self, tokens: int) -> Loaded:
        """Room for so many tokens; their streams are zeros."""
        words = cute.make_rmem_tensor((PAIRS, STREAMS, tokens), Uint32)
        words.fill(0)
        return Loaded(
            words,
            cute.make_rmem_tensor((PAIRS, self.config.top_k + 1, tokens), Uint32),
            cute.make_rmem_tensor((STREAMS, STREAMS + 1, tokens), Float32),
            cute.make_rmem_tensor(tokens, Int32),
        )

    @cute.jit
    def prefetch(self, operands: Operands, token, group, lane) -> None:
        """Ask for a group's columns of a token's streams, and for post, to be brought into L2, a
        line a lane: the weights of the sublayer in between have passed through L2."""
        streams, lines = operands.streams, STREAMS * GROUP_LINES
        at = Int64(token) * streams.stride[0] + lane // GROUP_LINES % STREAMS * Int64(
            streams.stride[1]
        )
        at += group * GROUP + lane % GROUP_LINES * (GROUP // GROUP_LINES)
        address = address_of(streams, at)
        if cutlass.const_expr(self.config.expands):
            post = address_of(operands.post, Int64(token) * operands.post.stride[0])
            address = cutlass.select_(lane == lines, post, address)
            lines += 1
        if lane < lines:
            prefetch_l2(address)

    @cute.jit
    def load(
        self,
        operands: Operands,
        token,
        column,
        lane,
        loaded: Loaded,
        i: cutlass.Constexpr,
    ) -> None:
        """The lane's columns of a token, and post, as number i of what is loaded."""
        streams, outputs = self.addresses(operands, token, column)
        for j in cutlass.range_constexpr(STREAMS):
            load_words(streams[j], loaded.words[None, j, i])
        for row in cutlass.range_constexpr(len(outputs)):
            load_words(outputs[row], loaded.outputs[None, row, i])
        if cutlass.const_expr(self.config.top_k > 0):
            loaded.experts[i] = self.load_expert(operands, token, lane)
        if cutlass.const_expr(self.config.expands):
            at = address_of(operands.post, Int64(token) * operands.post.stride[0])
            source = vector_at(at, Float32, 0, STREAMS)
            cute.autovec_copy(source, loaded.weights[None, STREAMS, i])

    def addresses(self, operands: Operands, token, column) -> tuple[list[Int64], list[Int64]]:
        """Of the lane's columns of a token's streams, and of the sublayer's rows."""
        outputs = []
        if self.config.top_k:
            outputs = rows_at(operands.rows, self.config.top_k + 1, token, column)
        elif self.config.expands:
            at = Int64(token) * operands.y.stride[0] + column
            outputs = [address_of(operands.y, at)]
        return rows_at(operands.streams, STREAMS, token, column), outputs

    @cute.jit
    def load_expert(self, operands: Operands, token, lane) -> Int32:
        """Below 0 in the lanes whose row of the token is no result."""
        expert = operands.ids[token, cutlass.min(lane, self.config.top_k - 1)]
        return self.used_expert(expert, lane, token < operands.counts[1])

    def used_expert(self, expert: Int32, lane, is_live) -> Int32:
        """Below 0 in the lanes whose row is no result, of the experts of a token's rows."""
        expert = cutlass.select_(lane >= self.config.top_k, Int32(0), expert)
        return cutlass.select_(is_live, expert, Int32(-1))

    @cute.jit
    def write(
        self, operands: Operands, token, column, loaded: Loaded, i: cutlass.Constexpr
    ) -> None:
        """Write the sublayer's output to the streams, in registers and in memory."""
        words, output = loaded.words[None, None, i], loaded.outputs[None, None, i]
        if cutlass.const_expr(self.config.top_k > 0):
            add_rows(output, cute.arch.vote_ballot_sync(loaded.experts[i] >= 0))
        expand(words, output[None, 0], loaded.weights[None, None, i])
        out = operands.streams_out
        for k in cutlass.range_constexpr(STREAMS):
            at = Int64(token) * out.stride[0] + k * Int64(out.stride[1]) + column
            target = vector_at(address_of(out, at), BFloat16, 0, LANE_COLUMNS)
            cute.autovec_copy(words[None, k], cute.recast_tensor(target, Uint32))

    # ---- the sublayer's input --------------------------------------------------------------------

    @cute.jit
    def load_parameters(self, operands: Operands) -> Held:
        """Parameters of pre."""
        base = cute.make_rmem_tensor(STREAMS, Float32)
        for j in cutlass.range_constexpr(STREAMS):
            base[j] = operands.base[j]
        return Held(operands.scale[0], base)

    def inverse_rms(self, squares: Float32, rows: int) -> Float32:
        """1 over the root mean square of so many rows of a stream."""
        return inverse_rms_approx(squares, rows * self.config.dim, self.config.norm_eps)

    def pre(self, held: Held, sums: Sequence[Float32], squares: Float32) -> list[Float32]:
        """Weights of the streams, from the products with their rows of fn."""
        factor, eps = self.inverse_rms(squares, STREAMS), Float32(self.config.eps)
        logits = [cute.math.fma(s * factor, held.scale, held.base[j]) for j, s in enumerate(sums)]
        return [sigmoid(logit) + eps for logit in logits]

    @cute.jit
    def store(
        self,
        operands: Operands,
        token,
        column,
        lane,
        mixed: cute.Tensor,
        gains: cute.Tensor,
        factor,
    ) -> None:
        """Normalise mixed columns and write them, and their codes where wanted."""
        pairs = []
        for p in cutlass.range_constexpr(PAIRS):
            low, high = quant.unpack_bf16(mixed[p])
            low, high = low * factor * gains[2 * p], high * factor * gains[2 * p + 1]
            pairs.append(quant.pack_bf16(low, high))
        at = address_of(operands.x, Int64(token) * operands.x.stride[0] + column)
        target = vector_at(at, BFloat16, 0, LANE_COLUMNS)
        cute.autovec_copy(in_registers(pairs), cute.recast_tensor(target, Uint32))
        if token < operands.codes.shape[0]:
            scale = quant.e8m0_scale_e4m3(quant.amax_bf16(pairs, WARP))
            codes = quant.quantize_e4m3(pairs, scale)
            out, scales = operands.codes, operands.scale_out
            at = address_of(out, Int64(token) * out.stride[0] + column)
            cute.autovec_copy(codes, vector_at(at, codes.element_type, 0, LANE_COLUMNS))
            if lane == 0:
                at = address_of(scales, Int64(token) * scales.stride[0] + column // GROUP)
                pointer_to(at, Uint8, 1).store(Uint8(scale))


@cute.jit
def add_rows(rows: cute.Tensor, used: Int32) -> None:
    """rows[pair, 0] = the sum, rounded to bf16, of the rows[pair, i] that have bit i of `used`."""
    pairs, places = rows.shape
    for p in cutlass.range_constexpr(pairs):
        total = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(places):
            is_used = used & (1 << i) != 0
            row = quant.unpack_bf16(rows[p, i])
            total = [cutlass.select_(is_used, t + v, t) for t, v in zip(total, row)]
        rows[p, 0] = quant.pack_bf16(*total)


@cute.jit
def expand(words: cute.Tensor, output: cute.Tensor, weights: cute.Tensor) -> None:
    """words[pair, k] = post_k output + sum_j comb[j, k] words[pair, j], rounded to bf16."""
    for p in cutlass.range_constexpr(PAIRS):
        written = quant.unpack_bf16(output[p])
        kept = [quant.unpack_bf16(words[p, j]) for j in range(STREAMS)]
        for k in cutlass.range_constexpr(STREAMS):
            pair = []
            for c in cutlass.range_constexpr(2):
                total = weights[k, 0] * kept[0][c]
                for j in cutlass.range_constexpr(1, STREAMS):
                    total = cute.math.fma(weights[k, j], kept[j][c], total)
                pair.append(cute.math.fma(weights[k, STREAMS], written[c], total))
            words[p, k] = quant.pack_bf16(*pair)


def squares_of(*rows: cute.Tensor) -> Float32:
    """Sum of squares of the lane's columns, words [pair] of each row."""
    total = Float32(0.0)
    for words in rows:
        for p in range(PAIRS):
            for value in quant.unpack_bf16(words[p]):
                total = cute.math.fma(value, value, total)
    return total


def mix(words: cute.Tensor, pre: Sequence[Float32], mixed: cute.Tensor) -> None:
    """mixed[pair] = sum_j pre_j words[pair, j], rounded to bf16."""
    for p in range(PAIRS):
        pair = [pre[0] * value for value in quant.unpack_bf16(words[p, 0])]
        for j in range(1, STREAMS):
            values = quant.unpack_bf16(words[p, j])
            pair = [cute.math.fma(pre[j], values[c], pair[c]) for c in range(2)]
        mixed[p] = quant.pack_bf16(*pair)


def butterfly(offsets: Sequence[int], *found: Float32) -> list[Float32]:
    """Sums over lanes at these distances, one distance after the other."""
    sums = list(found)
    for offset in offsets:
        # Side by side: each shuffle takes as long as several.
        others = [cute.arch.shuffle_sync_bfly(value, offset=offset) for value in sums]
        sums = [value + other for value, other in zip(sums, others)]
    return sums


def load_gains(operands: Operands, column, gains: cute.Tensor) -> None:
    """Gains of the norm in the lane's columns."""
    at = address_of(operands.norm_weight, Int64(column))
    cute.autovec_copy(vector_at(at, Float32, 0, LANE_COLUMNS), gains)


def rows_at(tensor: cute.Tensor, rows: int, token, column) -> list[Int64]:
    """Addresses of the lane's columns of a token's rows."""
    at = Int64(token) * tensor.stride[0] + column
    return [address_of(tensor, at + i * Int64(tensor.stride[1])) for i in range(rows)]


def load_words(address: Int64, target: cute.Tensor) -> None:
    """The lane's columns of a row of bf16."""
    source = vector_at(address, BFloat16, 0, LANE_COLUMNS)
    cute.autovec_copy(cute.recast_tensor(source, Uint32), target)
