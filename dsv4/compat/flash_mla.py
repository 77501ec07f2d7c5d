"""FlashMLA's sparse entry points for DeepSeek-V4 over `sparse_fmha_with_swa`.

Same arguments, same results: https://github.com/deepseek-ai/FlashMLA. Keys are gathered and, for
decode, dequantised in torch before the attention; engines that write this library's own inputs
save that pass over memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from dsv4.compat.kv_entry import HEAD_DIM, check_cache, gather_entries
from dsv4.kernels.kit.fields import MAX_FLOAT
from dsv4.ops import sparse_fmha_with_swa
from dsv4.ops.runtime.checks import check_flag, check_is_tensor

_GATHERED_BYTES = 1 << 28
"""Bound on the keys that are gathered at once: more query tokens are processed in parts."""


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """Stands in for FlashMLA's tile schedule; the operator makes its own."""


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return what `flash_mla_with_kvcache` takes as tile schedule; arguments are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = HEAD_DIM,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    return_max_logits: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of prefill tokens over chosen rows of one pool of keys; values are the keys.

    Args:
        q: [s_q, h_q, d] bfloat16 (float32 too on the CPU).
        kv: [s_kv, 1, d], dtype of q.
        indices: [s_q, 1, topk] int32 rows of kv; those below 0 or from s_kv on are no keys.
        sm_scale: factor on q . k.
        d_v: must be d.
        attn_sink: [h_q] float32, adds e^sink to the softmax's denominator; None = none.
        topk_length: [s_q] int32, leading columns of `indices` in use; None = all.
        return_max_logits: False saves the second product that `max_logits` costs here.

    Returns:
        out [s_q, h_q, d]; max_logits [s_q, h_q] float32, or None; lse [s_q, h_q] float32, natural
        and without the sink. A token without keys gets out 0, max_logits -inf and lse +inf.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    _check_sparse(q, d_v, "d_v", dims=3)
    if sm_scale is None:
        raise TypeError("sm_scale: got NoneType, needs a float")
    _check_scale("sm_scale", sm_scale)
    check_flag("return_max_logits", return_max_logits)
    _check("kv", kv, q.dtype, q, (None, 1, q.shape[2]))
    if kv.shape[0] == 0:
        raise ValueError("kv: got no rows, needs at least one")
    _check("indices", indices, torch.int32, q, (q.shape[0], 1, None))
    if topk_length is not None:
        _check("topk_length", topk_length, torch.int32, q, (q.shape[0],))
    rows, counts = _front(indices.squeeze(1), kv.shape[0], topk_length)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    highest = torch.empty_like(lse) if return_max_logits else None
    no_window = q.new_zeros(1, 1, q.shape[2])
    no_rows = torch.zeros(1, dtype=torch.int32, device=q.device)
    for part in _parts(q.shape[0], rows.shape[1] * q.shape[2] * q.element_size()):
        keys = kv[:, 0][rows[part]]
        _, lse[part] = sparse_fmha_with_swa(
            q[part],
            keys,
            no_window,
            no_rows,
            _sink(attn_sink, q),
            no_rows.expand(keys.shape[0]).contiguous(),
            sink_mode="softmax",
            compressed_lens=counts[part],
            softmax_scale=sm_scale,
            out=out[part],
            return_lse=True,
        )
        if highest is not None:
            highest[part] = _max_logits(q[part], keys, counts[part], sm_scale)
    return out, highest, lse.masked_fill_(lse == -math.inf, math.inf)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of decode tokens over chosen entries of one or two paged FP8 caches.

    Only what DeepSeek-V4 uses: sparse, not causal, 584-byte entries (see `kv_entry`). The softmax
    is one over both caches.

    Args:
        q: [b, s_q, h_q, 512] bfloat16.
        k_cache: [pages, P, 1, 584], one-byte dtype, each page contiguous; the sliding window.
        block_table, cache_seqlens: not used by sparse attention.
        head_dim_v: 512.
        tile_scheduler_metadata: from `get_mla_metadata`; ignored.
        num_splits: must be None.
        softmax_scale: factor on q . k; default 512 ** -0.5.
        causal: must be False.
        is_fp8_kvcache: must be True.
        indices: [b, s_q, topk] int32, page * P + entry; other values are no keys.
        attn_sink: [h_q] float32, adds e^sink to the softmax's denominator; None = none.
        extra_k_cache, extra_indices_in_kvcache: a second cache, the compressed entries, and its
            indices [b, s_q, extra_topk]; its pages may hold another number of entries.
        topk_length, extra_topk_length: [b] int32, leading columns in use; None = all.

    Returns:
        out [b, s_q, h_q, 512] and lse [b, h_q, s_q] float32, natural and without the sink. A token
        without keys gets out 0 and lse +inf.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    _check_sparse(q, head_dim_v, "head_dim_v", dims=4)
    for name, got, needs in (
        ("num_splits", num_splits, None),
        ("causal", causal, False),
        ("is_fp8_kvcache", is_fp8_kvcache, True),
    ):
        if got is not needs:
            raise ValueError(f"{name}: got {got!r}, sparse attention needs {needs}")
    if indices is None:
        raise ValueError("indices: got None, only sparse attention is offered")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache: got one without the other")
    if extra_topk_length is not None and extra_k_cache is None:
        raise ValueError("extra_topk_length: got one without extra_k_cache")
    _check_scale("softmax_scale", softmax_scale)
    batch, length, heads, head_dim = q.shape
    window = _Keys(q, k_cache, indices, topk_length, ("k_cache", "indices", "topk_length"))
    if extra_k_cache is None:
        extra_k_cache, extra_indices_in_kvcache = k_cache, indices[..., :0]
    names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    extra = _Keys(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, names)
    flat = q.reshape(batch * length, heads, head_dim)
    out = flat.new_empty(flat.shape)
    lse = flat.new_empty(flat.shape[:2], dtype=torch.float32)
    columns = window.rows.shape[1] + extra.rows.shape[1]
    for part in _parts(flat.shape[0], columns * head_dim * q.element_size()):
        request_ids = torch.arange(part.stop - part.start, dtype=torch.int32, device=q.device)
        _, lse[part] = sparse_fmha_with_swa(
            flat[part],
            extra.gather(part),
            window.gather(part),
            window.counts[part],
            _sink(attn_sink, q),
            request_ids,
            sink_mode="softmax",
            compressed_lens=extra.counts[part],
            softmax_scale=softmax_scale,
            out=out[part],
            return_lse=True,
        )
    lse.masked_fill_(lse == -math.inf, math.inf)
    return out.view(q.shape), lse.view(batch, length, heads).transpose(1, 2)


class _Keys:
    """The entries of one paged cache that each query token attends to, valid ones in front."""

    def __init__(
        self,
        q: Tensor,
        cache: Tensor,
        indices: Tensor,
        lengths: Tensor | None,
        names: tuple[str, str, str],
    ) -> None:
        batch, length = q.shape[:2]
        self.name, indices_name, lengths_name = names
        _check(indices_name, indices, torch.int32, q, (batch, length, None))
        if lengths is not None:
            _check(lengths_name, lengths, torch.int32, q, (batch,))
            lengths = lengths[:, None].expand(batch, length).flatten()
        check_cache(self.name, cache, q.device)
        self.cache = cache
        entries = cache.shape[0] * cache.shape[1]
        self.rows, self.counts = _front(indices.flatten(0, 1), entries, lengths)

    def gather(self, part: slice) -> Tensor:
        """Return the keys of some query tokens, [tokens, topk, 512] bfloat16."""
        return gather_entries(self.cache, self.rows[part])


def _front(indices: Tensor, limit: int, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move each token's valid indices to the front, in order: the operator takes a count of keys.

    Args:
        indices: [T, k] integers, valid within 0..limit - 1.
        limit: number of keys there are.
        lengths: [T], leading columns in use; None = all.

    Returns:
        rows [T, k] int64, 0 behind the valid ones; their number [T] int32.
    """
    valid = (indices >= 0) & (indices < limit)
    if lengths is not None:
        columns = torch.arange(indices.shape[1], device=indices.device)
        valid &= columns < lengths.unsqueeze(1)
    order = torch.argsort(valid.to(torch.uint8), dim=1, descending=True, stable=True)
    rows = torch.where(valid, indices, 0).gather(1, order)
    return rows.long(), valid.sum(1, dtype=torch.int32)


def _parts(tokens: int, bytes_per_token: int) -> list[slice]:
    size = max(1, _GATHERED_BYTES // max(1, bytes_per_token))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _max_logits(q: Tensor, keys: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Return max over each token's keys of scale * q . k, [T, n_h] float32; -inf without keys."""
    if keys.shape[1] == 0:
        return q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    logits = torch.bmm(q.float(), keys.float().mT) * scale
    unused = torch.arange(keys.shape[1], device=q.device) >= counts[:, None, None]
    return logits.masked_fill_(unused, -math.inf).amax(-1)


def _sink(attn_sink: Tensor | None, q: Tensor) -> Tensor:
    if attn_sink is not None:
        _check("attn_sink", attn_sink, torch.float32, q, (q.shape[-2],))
        return attn_sink.contiguous()
    return q.new_full((q.shape[-2],), -math.inf, dtype=torch.float32)


def _check_sparse(q: Tensor, value_dim: int, name: str, *, dims: int) -> None:
    check_is_tensor("q", q)
    _check_no_gradient("q", q)
    if q.dim() != dims:
        raise ValueError(f"q: got shape {tuple(q.shape)}, needs {dims} dimensions")
    if isinstance(value_dim, bool) or not isinstance(value_dim, Integral):
        raise TypeError(f"{name}: got {type(value_dim).__name__}, needs an integer")
    if value_dim != q.shape[-1]:
        raise ValueError(
            f"{name}: got {value_dim}, needs the head dimension of q ({q.shape[-1]}): the values "
            "of DeepSeek-V4 are its keys"
        )


def _check(
    name: str, tensor: Tensor, dtype: torch.dtype, q: Tensor, shape: tuple[int | None, ...]
) -> None:
    """Check an argument beside q; None in `shape` is any size."""
    check_is_tensor(name, tensor)
    _check_no_gradient(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, needs {dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, q is on {q.device}")
    matches = tensor.dim() == len(shape) and all(
        need is None or got == need for got, need in zip(tensor.shape, shape)
    )
    if not matches:
        wanted = ", ".join("any" if need is None else str(need) for need in shape)
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, needs [{wanted}]")


def _check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: requires grad, but there is no backward pass; call it under torch.no_grad() "
            "or pass a detached tensor"
        )


def _check_scale(name: str, scale: float | None) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name}: got {type(scale).__name__}, needs a float")
    if not abs(scale) <= MAX_FLOAT:
        raise ValueError(f"{name}: got {scale}, needs a finite number")
