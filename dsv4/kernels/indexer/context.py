"""Tensors of `index_topk` as its kernels take them, and what a token sees of the entries."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dsv4.kernels.indexer.config import BINS, TILE_KEYS, IndexTopkConfig
from dsv4.kernels.kit.pointers import pointer_at

SIGN = 0x8000  # of a bf16
FP32_SIGN = 0x8000_0000


class Operands(NamedTuple):
    """Tensors of a launch."""

    q: cute.Tensor  # [T, h d] bf16; or [T, h d / 2], pairs of codes
    weights: cute.Tensor  # [T, h] bf16
    rope: cute.Tensor  # [R, rope_dim] fp32
    positions: cute.Tensor  # [T] int32
    lens: cute.Tensor  # [T] int32
    request_ids: cute.Tensor  # [T] int32
    block_table: cute.Tensor  # [B, W] int32
    keys: cute.Tensor  # [pages, P, row] bytes
    indices: cute.Tensor  # [T, k] int32, written
    scores: cute.Tensor  # [T, N] bf16 or fp32, written
    counts: cute.Tensor  # [T, BINS] int32, zeros before and after
    q_scale: tuple[cute.Tensor, ...] = ()  # [T, h] fp32, of codes


def counts_of(workspace: cute.Tensor, tokens: Int32) -> cute.Tensor:
    """[T, BINS] int32 at the start of the workspace."""
    start = pointer_at(workspace.iterator, Int64(0), Int32)
    return cute.make_tensor(start, cute.make_layout((tokens, BINS), stride=(BINS, 1)))


def visible(operands: Operands, token: Int32) -> tuple[Int32, Int32]:
    """Entries that a token sees, none of a padding token; and its request, of padding any."""
    request = operands.request_ids[token]
    requests, pages = operands.block_table.shape
    most = cutlass.min(pages * operands.keys.shape[1], operands.scores.shape[1])
    count = cutlass.max(cutlass.min(operands.lens[token], most), 0)
    is_request = (request >= 0) & (request < requests)
    count = cutlass.select_(is_request, count, Int32(0))
    return count, cutlass.select_(is_request, request, Int32(0))


def tiles_of(config: IndexTopkConfig, count: Int32) -> Int32:
    """Tiles of keys that are scored for a token: none where all entries are chosen."""
    tiles = (count + TILE_KEYS - 1) // TILE_KEYS
    return cutlass.select_(count > config.topk, tiles, Int32(0))


def order_key(bits: Uint32) -> Uint32:
    """16 bits that order as the bf16 numbers do, which are not -0."""
    return (bits ^ cutlass.select_(bits >= SIGN, Uint32(2 * SIGN - 1), Uint32(SIGN))) & Uint32(
        2 * SIGN - 1
    )


def order_key_fp32(bits: Uint32) -> Uint32:
    """32 bits that order as the fp32 numbers do, which are not -0."""
    is_negative = bits >= Uint32(FP32_SIGN)
    flipped = cutlass.select_(is_negative, Uint32(2 * FP32_SIGN - 1), Uint32(FP32_SIGN))
    # What a choice of two gives has no sign: without it a shift would be an arithmetic one.
    return Uint32(bits ^ flipped)


def order_keys(pair: Uint32) -> Uint32:
    """`order_key` of two numbers in a word."""
    negative = (pair >> 15) & Uint32(0x00010001)
    return pair ^ (negative * Uint32(SIGN - 1) | Uint32(SIGN << 16 | SIGN))


def bits_of(pair: Uint32) -> Uint32:
    """The two numbers of a word of order keys."""
    positive = (pair >> 15) & Uint32(0x00010001)
    return ~pair ^ (positive * Uint32(SIGN - 1))
