"""Sparse attention over pages of keys, token by token in FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.reference.attention import attention_with_lse, merge
from dsv4.reference.cache_entry import ROPE_DIM, unpack_pages


def listed_slots(indices: Tensor, length: int, slots: int) -> list[int]:
    """Slots that the first `length` of an index row name; others are no keys."""
    length = min(max(length, 0), indices.numel())
    return [slot for slot in indices[:length].tolist() if 0 <= slot < slots]


def tabled_slots(row: Tensor, numbers: range, page_size: int, pages: int) -> list[int]:
    """Slots of the entries `numbers`: entry n lies in column n // page_size of a request's row,
    which starts over behind its end."""
    found = []
    for n in numbers:
        page = int(row[n // page_size % row.numel()])
        if 0 <= page < pages:
            found.append(page * page_size + n % page_size)
    return found


def decoded(pool: Tensor, dim: int, rope_dim: int) -> Tensor:
    """Keys [slots, d] of a pool: rows [pages, P, d], or packed uint8 entries [pages, P, bytes]."""
    if pool.dtype == torch.uint8:
        pool = unpack_pages(pool.flatten(1), pool.shape[1], dim, rope_dim)
    return pool.flatten(0, 1)


def sparse_fmha_paged(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor | None,
    window_lens: Tensor | None,
    compressed_pool: Tensor | None,
    compressed_indices: Tensor | None,
    compressed_lens: Tensor | None,
    sink_logits: Tensor,
    *,
    sink_mode: str,
    q_factor: Tensor | None = None,
    q_squares: Tensor | None = None,
    q_eps: float | None = None,
    rope: Tensor | None = None,
    positions: Tensor | None = None,
    block_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    window_table: Tensor | None = None,
    sliding_window: int = 0,
    ratio: int = 0,
    softmax_scale: float | None = None,
    rope_dim: int = ROPE_DIM,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contract of `dsv4.ops.sparse_fmha_paged`, whose arguments these are.

    Returns:
        o [T, H, D], lse [T, H] and the largest score of a key [T, H], FP32.
    """
    tokens, heads, dim = q.shape
    if q_squares is not None:
        q_factor = (q_squares.sum(-1) / dim + q_eps) ** -0.5
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    o = torch.zeros(tokens, heads, dim, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, device=q.device)
    highest = lse.clone()

    window_rows = decoded(window_pool, dim, rope_dim)
    compressed_rows = window_rows
    if compressed_pool is not None:
        compressed_rows = decoded(compressed_pool, dim, rope_dim)

    def named(t: int, pool, indices, lens, table, numbers: range) -> list[int]:
        if pool is None or (request_ids is not None and request_ids[t] < 0):
            return []
        if table is None:
            length = indices.shape[1] if lens is None else int(lens[t])
            return listed_slots(indices[t], length, pool.shape[0] * pool.shape[1])
        if request_ids[t] >= len(table) or positions[t] < 0:
            return []
        return tabled_slots(table[request_ids[t]], numbers, pool.shape[1], pool.shape[0])

    for t in range(tokens):
        end = 0 if positions is None else int(positions[t]) + 1
        entries = 0
        if block_table is not None:
            entries = min(end // ratio, block_table.shape[1] * compressed_pool.shape[1])
        branches = []
        window = range(max(0, end - sliding_window), end)
        for rows, slots in (
            (
                compressed_rows,
                named(
                    *(t, compressed_pool, compressed_indices, compressed_lens),
                    *(block_table, range(entries)),
                ),
            ),
            (
                window_rows,
                named(t, window_pool, window_indices, window_lens, window_table, window),
            ),
        ):
            keys = rows[slots].float()
            factor = 1.0 if q_factor is None else q_factor[t].unsqueeze(-1)
            query = (q[t].float() * factor).unsqueeze(0)
            visible = torch.ones(1, len(slots), dtype=torch.bool, device=q.device)
            branches += attention_with_lse(query, keys, visible, scale)
            if slots:
                scores = (query[0] @ keys.T * scale).amax(-1)
                highest[t] = torch.maximum(highest[t], scores)
        merged, total = merge(*branches, sink_logits, sink_mode)
        o[t], lse[t] = merged[0], total[0]
        if rope is not None:
            o[t] = _rotate_back(o[t], rope[min(max(int(positions[t]), 0), len(rope) - 1)])
    return o, lse, highest


def _rotate_back(o: Tensor, row: Tensor) -> Tensor:
    """Turn the last channels of o [H, D] back by cosines and sines [R]."""
    cos, sin = row.chunk(2)
    plain, tail = o[:, : o.shape[1] - row.numel()], o[:, o.shape[1] - row.numel() :]
    even, odd = tail[:, ::2], tail[:, 1::2]
    back = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(1)
    return torch.cat((plain, back), 1)
