"""Steps that both variants of the Blackwell attention kernel share: views of global memory, the
keys of a work tile, the epilogue of a row, tiles in shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from dsv4.kernels.attention import sink_merge
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.key_span import KeyRules, KeySpan, span_of_lengths, window_len_of
from dsv4.kernels.attention.sm100.combine import partial_stats
from dsv4.kernels.attention.sm100.context import KernelParams, WorkTile
from dsv4.kernels.attention.sm100.plan_1cta import KEYS
from dsv4.kernels.attention.split_kv import STATS

PRODUCER = pipeline.PipelineUserType.Producer
CONSUMER = pipeline.PipelineUserType.Consumer

COLUMNS = 64  # of one access: a 128-byte swizzle row of bf16


def row_layout(tile: tuple[int, int], stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages) as a K-major operand lies in shared memory: boxes of 64 columns,
    128-byte swizzled, one behind the other; 32 columns are a box with a 64-byte swizzle.
    """
    return sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, tile, stages)


@cute.jit
def tma_row_view(x: cute.Tensor, fallback: cute.Pointer) -> cute.Tensor:
    """[batch, row, d] seen as (row, d, batch): three dimensions in the TMA descriptor.

    A ragged tile then ends at the last row of its batch, it cannot run into the next one. A
    descriptor of an empty tensor is invalid: it claims one row, at an address that exists, which no
    tile reads.
    """
    batch, rows, dim = x.shape
    batch, rows = Int32(batch), Int32(rows)
    address = x.iterator.toint()
    if cutlass.min(batch, rows) == 0:
        address = fallback.toint()
        batch, rows = Int32(1), Int32(1)
    layout = cute.make_layout((rows, dim, batch), stride=(x.stride[1], 1, x.stride[0]))
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, layout)


def make_output_tma(
    o: cute.Tensor,
    fallback: cute.Pointer,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int] = COLUMNS,
) -> cpasync.TmaInfo:
    """TMA descriptor of stores of `rows` heads x `columns` columns of a token."""
    tile = (rows, columns)
    box = cute.select(row_layout(tile, 1), mode=[0, 1])
    store = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(store, tma_row_view(o, fallback), box, tile)


@cute.jit
def find_keys(config: FmhaConfig, params: KernelParams, work: WorkTile) -> KeySpan:
    """Keys of a work tile. Every role finds them by itself: cheaper than sending them."""
    token = work.token
    # With a uniform request the compiler keeps the warp converged in what depends on it. Otherwise
    # it prepares each vote of the search for absent lanes, and runs out of registers.
    request = cute.arch.make_warp_uniform(params.request_ids[token])
    seqlens = params.seqlens()
    compressed_len = Int32(params.compressed_rows)
    if token < params.compressed_lens.shape[0]:
        compressed_len = params.compressed_lens[token]
    window_len = window_len_of(seqlens, request)
    lengths = (compressed_len, window_len)
    rules = KeyRules(KEYS, config.is_causal, config.sliding_window)
    return span_of_lengths(seqlens, token, request, lengths, work.split, params.by_splits, rules)


@cute.jit
def row_epilogue(
    config: FmhaConfig,
    params: KernelParams,
    work: WorkTile,
    head: Int32,
    final_max: tuple[Float32, Float32],
    row_sum: Float32,
    sink: Float32,
) -> Float32:
    """Write the lse of a row, or with several splits its statistics; the factor from accumulated
    row to what is written of it.

    Args:
        head: query head of the row; past the last one nothing is written.
        final_max: of `sink_merge.final_row_max`, with the offset.
        row_sum: sum of P of the row relative to its maximum.
        sink: of the head, natural log.
    """
    row_max, offset = final_max
    factor = Float32(1.0)
    if params.num_splits == 1:
        factor = sink_merge.output_scale(row_max, row_sum, sink, config.sink_mode == "softmax")
        if head < config.num_query_heads and work.token < params.lse.shape[0]:
            params.lse[work.token, head] = sink_merge.row_lse(row_max, row_sum, offset)
    elif head < config.num_query_heads:
        rows = params.tokens * config.num_query_heads
        stats = partial_stats(params.workspace, rows, params.num_splits, config.head_dim)
        values = cute.make_rmem_tensor(STATS, Float32)
        for i, value in enumerate((row_max, row_sum, offset, Float32(0.0))):
            values[i] = value
        cute.autovec_copy(values, stats[None, partial_index(config, params, work, head)])
    return factor


def partial_index(config: FmhaConfig, params: KernelParams, work: WorkTile, head: Int32) -> Int32:
    """Index of a row's partial result in the workspace."""
    row = work.token * config.num_query_heads + head
    return row * params.num_splits + work.split


@cute.jit
def store_pairs(target: cute.Pointer, rows: cute.Tensor, row: cutlass.Constexpr[int]):
    """Write a row of (row, (2, pairs)) values to every fourth pair of fp32: a quad fills 32 bytes
    at a time.

    Args:
        target: address of the first pair, a multiple of 8 bytes.
    """
    for i in cutlass.range_constexpr(cute.size(rows, mode=[1, 1])):
        pair = cute.make_tensor(target + 8 * i, cute.make_layout(2))
        cute.autovec_copy(rows[row, (None, i)], pair)


@cute.jit
def zero_rows(tile: cute.Pointer, columns: cutlass.Constexpr[int], valid: Int32, thread: Int32):
    """Zero the rows of a partial KV tile past its keys, with the 128 softmax threads: they may hold
    NaN, and 0 * NaN is NaN in P V.

    Swizzling permutes 16-byte units within the 128-byte row of a 64-column box, so rows can be
    cleared by address.

    Args:
        tile: boxes of `KEYS` rows x 64 columns in shared memory, one behind the other.
        columns: of the tile.
        valid: rows that are keys.
    """
    units = columns // 8
    unit, first_row = thread % units, valid + thread // units
    zeros = cute.make_rmem_tensor(8, BFloat16)
    zeros.fill(0.0)
    start = unit // 8 * 64 * KEYS + unit % 8 * 8
    for row in cutlass.range(first_row, KEYS, 128 // units, unroll=1):
        pointer = tile + cute.assume(start + row * 64, divby=8)
        pointer = cute.recast_ptr(pointer, dtype=BFloat16)
        cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(8)))
