"""FlashMLA's sparse entry points for DeepSeek-V4 over `sparse_fmha_paged`.

Same arguments, same results: https://github.com/deepseek-ai/FlashMLA. Indices and caches go to the
kernels as they are, with as many heads as there are. `import dsv4.compat.flash_mla as flash_mla`
stands for the package; for programs that import it themselves, `sys.modules["flash_mla"] =
dsv4.compat.flash_mla` before they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from dsv4.compat.kv_entry import HEAD_DIM, check_cache
from dsv4.kernels.attention.paged_config import MAX_TOP_K
from dsv4.kernels.kit.fields import MAX_FLOAT
from dsv4.ops import sparse_fmha_paged
from dsv4.ops.runtime.checks import check_flag, check_is_tensor
from dsv4.quoting import quoted

PLAIN_MLA_DIM = 576


@dataclass(frozen=True)
class FlashMLASchedMeta:
    """Stand-in for FlashMLA's tile schedule; the operator makes its own."""


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
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Attention of prefill tokens over chosen rows of one pool of keys; values are the keys.

    Args:
        q: [s_q, h_q, d] bfloat16 (float32 too on the CPU).
        kv: [s_kv, 1, d], dtype of q.
        indices: [s_q, 1, topk] int32 rows of kv, up to 16,384; those below 0 or from s_kv on are no
            keys.
        sm_scale: factor on q . k.
        d_v: must be d.
        attn_sink: [h_q] float32, adds e^sink to the softmax's denominator; None = none.
        topk_length: [s_q] int32, leading columns of `indices` in use; None = all.
        return_max_logits: False: no `max_logits`.
        out: [s_q, h_q, d] to write into, heads and tokens anywhere; default a new tensor.
        enable_batch_invariant: a token's bits do not depend on the rest of the batch.

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
    check_flag("enable_batch_invariant", enable_batch_invariant)
    _check_columns("indices", indices, 2 * MAX_TOP_K)
    if kv.stride(2) != 1:
        got = quoted(kv.stride())
        raise ValueError(f"kv: got strides {got}, the last dimension must be contiguous")
    out, lse, *highest = sparse_fmha_paged(
        q,
        *_lists(kv, _dense(indices.squeeze(1)), _dense(topk_length)),
        _sink(attn_sink, q),
        sink_mode="softmax",
        softmax_scale=sm_scale,
        batch_invariant=enable_batch_invariant,
        out=_output(out, q),
        return_lse=True,
        return_max_logits=return_max_logits,
    )
    return out, (highest[0] if highest else None), _without_keys_(lse)


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
    *,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of decode tokens over chosen entries of one or two paged FP8 caches.

    Only what DeepSeek-V4 uses: sparse, not causal, 584-byte entries (see `kv_entry`). The softmax
    is one over both caches.

    Args:
        q: [b, s_q, h_q, 512] bfloat16.
        k_cache: [pages, P, 1, 584], one-byte dtype, each page contiguous, pages at multiples of 16
            bytes; the sliding window.
        block_table, cache_seqlens: not used by sparse attention.
        head_dim_v: 512.
        tile_scheduler_metadata: from `get_mla_metadata`; ignored.
        num_splits: must be None.
        softmax_scale: factor on q . k; default 512 ** -0.5.
        causal: must be False.
        is_fp8_kvcache: must be True.
        indices: [b, s_q, topk] int32, page * P + entry; other values are no keys. Up to 8,192
            columns, or 16,384 without a second cache.
        attn_sink: [h_q] float32, adds e^sink to the softmax's denominator; None = none.
        extra_k_cache, extra_indices_in_kvcache: a second cache, the compressed entries, and its
            indices [b, s_q, extra_topk]; its pages may hold another number of entries.
        topk_length, extra_topk_length: [b] int32, leading columns in use; None = all.
        out: [b, s_q, h_q, 512] to write into, heads and tokens anywhere; default a new tensor.
        enable_batch_invariant: a token's bits do not depend on the rest of the batch.

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
            raise ValueError(f"{name}: got {quoted(got)}, sparse attention needs {needs}")
    if indices is None:
        raise ValueError("indices: got None, only sparse attention is offered")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache: got one without the other")
    if extra_topk_length is not None and extra_k_cache is None:
        raise ValueError("extra_topk_length: got one without extra_k_cache")
    _check_scale("softmax_scale", softmax_scale)
    check_flag("enable_batch_invariant", enable_batch_invariant)
    batch, length, heads, head_dim = q.shape
    names = ("k_cache", "indices", "topk_length")
    keys = _keys(q, k_cache, indices, topk_length, names)
    if extra_k_cache is None:
        _check_columns("indices", indices, 2 * MAX_TOP_K)
        keys = _lists(*keys)
    else:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        keys += _keys(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, names)
        _check_columns("indices", indices, MAX_TOP_K)
        _check_columns("extra_indices_in_kvcache", extra_indices_in_kvcache, MAX_TOP_K)
    if out is None:
        out = q.new_empty(q.shape)
    # Tokens lie apart by one stride unless each request has several and they are part of a wider
    # buffer.
    flat = _output(out, q).reshape(batch * length, heads, head_dim)
    _, lse = sparse_fmha_paged(
        q.flatten(0, 1),
        *keys,
        _sink(attn_sink, q),
        sink_mode="softmax",
        softmax_scale=softmax_scale,
        batch_invariant=enable_batch_invariant,
        out=flat,
        return_lse=True,
    )
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(out.shape))
    return out, _without_keys_(lse).view(batch, length, heads).transpose(1, 2)


def _keys(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    names: tuple[str, str, str],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pool, indices [b * s_q, topk] and lengths [b * s_q] of one cache, as the operator takes
    them."""
    batch, length = q.shape[:2]
    name, indices_name, lengths_name = names
    _check(indices_name, indices, torch.int32, q, (batch, length, None))
    if lengths is not None:
        _check(lengths_name, lengths, torch.int32, q, (batch,))
        lengths = lengths[:, None].expand(batch, length).flatten()
    check_cache(name, cache, q.device)
    return cache.squeeze(2), _dense(indices.flatten(0, 1)), _dense(lengths)


def _lists(pool: Tensor, indices: Tensor, lengths: Tensor | None) -> tuple[Tensor | None, ...]:
    """A pool's index lists as the operator's two: what is longer than one is a second list of the
    same pool."""
    if indices.shape[1] <= MAX_TOP_K:
        return pool, indices, lengths, None, None, None
    more = None if lengths is None else lengths.clamp(min=0) - MAX_TOP_K
    return pool, indices[:, :MAX_TOP_K], lengths, pool, indices[:, MAX_TOP_K:], more


def _without_keys_(lse: Tensor) -> Tensor:
    """lse as FlashMLA gives it: +inf without keys, in one launch; NaN stays."""
    return lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)


def _check_columns(name: str, indices: Tensor, most: int) -> None:
    if indices.shape[2] > most:
        raise ValueError(f"{name}: got {indices.shape[2]} columns, needs at most {most}")


def _dense(tensor: Tensor | None) -> Tensor | None:
    """The same integers with a contiguous last dimension."""
    if tensor is None or tensor.stride(-1) == 1:
        return tensor
    # Not contiguous(): of a tensor without elements that would keep the strides.
    return tensor.clone(memory_format=torch.contiguous_format)


def _output(out: Tensor | None, q: Tensor) -> Tensor | None:
    """The caller's output, checked."""
    if out is not None:
        _check("out", out, q.dtype, q, tuple(q.shape))
        if out.stride(-1) != 1:
            got = quoted(out.stride())
            raise ValueError(f"out: got strides {got}, the last dimension must be contiguous")
    return out


def _sink(attn_sink: Tensor | None, q: Tensor) -> Tensor:
    if attn_sink is not None:
        _check("attn_sink", attn_sink, torch.float32, q, (q.shape[-2],))
        return attn_sink.contiguous()
    return q.new_full((q.shape[-2],), -math.inf, dtype=torch.float32)


def _check_sparse(q: Tensor, value_dim: int, name: str, *, dims: int) -> None:
    check_is_tensor("q", q)
    _check_no_gradient("q", q)
    if q.dim() != dims:
        raise ValueError(f"q: got shape {quoted(q.shape)}, needs {dims} dimensions")
    if not q.shape[-2]:
        raise ValueError(f"q: got shape {quoted(q.shape)}, needs at least one head")
    if q.shape[-1] == PLAIN_MLA_DIM:
        raise ValueError(
            f"q: got a head dimension of {PLAIN_MLA_DIM}, that of plain MLA, which is not offered; "
            f"DeepSeek-V4 has {HEAD_DIM}"
        )
    if isinstance(value_dim, bool) or not isinstance(value_dim, Integral):
        raise TypeError(f"{name}: got {type(value_dim).__name__}, needs an integer")
    if value_dim != q.shape[-1]:
        raise ValueError(
            f"{name}: got {quoted(value_dim)}, needs the head dimension of q ({q.shape[-1]}): the "
            "values of DeepSeek-V4 are its keys"
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
        raise ValueError(f"{name}: got shape {quoted(tensor.shape)}, needs [{wanted}]")


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
        raise ValueError(f"{name}: got {quoted(scale)}, needs a finite number")
