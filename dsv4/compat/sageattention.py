"""SageAttention's functions over `quantized_attention`: names, order and defaults of the originals.

`from dsv4.compat.sageattention import sageattn` stands for the package (https://github.com/thu-ml/
SageAttention, 2.2). A name says which numerics are meant, not which GPU: each runs on the CPU, and
on GPUs but for formats that their tensor cores do not multiply (FP4 on Hopper). What the originals
swallow is refused: an unknown keyword is a TypeError. Functions of queries, keys and values take
those of `torch.nn.functional.scaled_dot_product_attention`, so that
`F.scaled_dot_product_attention = sageattn` works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.lowp.groups import Geometry, key_groups, query_groups
from dsv4.ops import quantized_attention
from dsv4.ops.quantized_attention import quantizers as q8
from dsv4.ops.quantized_attention.codes import key_means
from dsv4.ops.quantized_attention.layouts import check_layout, check_rank, heads_first
from dsv4.ops.quantized_attention.op import spread_mask
from dsv4.ops.runtime.checks import check_flag, check_is_tensor
from dsv4.quoting import quoted

LOG2E = 1.44269504


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **sdpa: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with int8 scores and FP8 values: the numerics of `..._pv_fp8_cuda_sm90`.

    Args:
        q: [B, Hq, L, d] ("HND") or [B, L, Hq, d] ("NHD"), as `quantized_attention` takes it.
        k, v: the same with Hk heads and S rows.
        tensor_layout: "HND" or "NHD".
        is_causal: whether query i sees keys up to i alone.
        sm_scale: factor on q . k; default d^-0.5.
        return_lse: also return the log-sum-exp [B, Hq, L] float32, natural.
        sdpa: `attn_mask`, `dropout_p` (0 alone), `scale`, `enable_gqa`.

    Returns:
        out as q, or (out, lse).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    return sageattn_qk_int8_pv_fp8_cuda_sm90(
        q, k, v, tensor_layout, is_causal, sm_scale=sm_scale, return_lse=return_lse, **sdpa
    )


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **sdpa: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with int8 scores, one scale per tile, and fp16 values.

    Args:
        quantization_backend: rounding of int8, "triton" or "cuda".
        attn_mask: bool or floating-point, broadcast to [B, Hq, L, S].
        others: as `sageattn`.
    """
    if quantization_backend not in ("triton", "cuda"):
        raise ValueError(
            f"quantization_backend: got {quoted(quantization_backend)}, needs 'triton' or 'cuda'"
        )
    formats = {
        "pv": "fp16", "qk_quant_gran": "per_block", "geometry": "sm89",
        "quantizer": quantization_backend, "pv_accum_dtype": "fp16+fp32", "smooth_k": smooth_k,
    }  # fmt: skip
    call = {"attn_mask": attn_mask, "sm_scale": sm_scale, "return_lse": return_lse}
    return _attend(q, k, v, tensor_layout, is_causal, call, formats, sdpa)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **sdpa: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with int8 scores and fp16 values.

    Args:
        qk_quant_gran: "per_warp" or "per_thread".
        pv_accum_dtype: "fp32", "fp16" or "fp16+fp32".
        smooth_k, smooth_v: whether keys and values are coded without their means.
        others: as `sageattn`.
    """
    formats = _fine(qk_quant_gran) | {
        "pv": "fp16", "geometry": "sm89", "pv_accum_dtype": pv_accum_dtype, "smooth_k": smooth_k,
        "smooth_v": smooth_v,
    }  # fmt: skip
    call = {"sm_scale": sm_scale, "return_lse": return_lse}
    return _attend(q, k, v, tensor_layout, is_causal, call, formats, sdpa)


def sageattn_qk_int8_pv_fp8_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **sdpa: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with int8 scores and FP8 values, groups of 32 queries and 64 keys.

    Args:
        qk_quant_gran: "per_warp" or "per_thread".
        pv_accum_dtype: "fp32", "fp32+fp32" or "fp32+fp16".
        smooth_k, smooth_v: whether keys and values are coded without their means.
        others: as `sageattn`.
    """
    formats = _fine(qk_quant_gran) | {
        "geometry": "sm89", "pv_accum_dtype": pv_accum_dtype, "smooth_k": smooth_k,
        "smooth_v": smooth_v,
    }  # fmt: skip
    call = {"sm_scale": sm_scale, "return_lse": return_lse}
    return _attend(q, k, v, tensor_layout, is_causal, call, formats, sdpa)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **sdpa: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with int8 scores and FP8 values, groups of 16 queries and 128 keys.

    Args:
        qk_quant_gran: "per_warp" or "per_thread".
        pv_accum_dtype: "fp32" (which the original documents and refuses), "fp32+fp32", "fp32+fp16".
        smooth_k: whether keys are coded without their mean.
        others: as `sageattn`.
    """
    formats = _fine(qk_quant_gran) | {
        "geometry": "sm90", "pv_accum_dtype": pv_accum_dtype, "smooth_k": smooth_k,
    }  # fmt: skip
    call = {"sm_scale": sm_scale, "return_lse": return_lse}
    return _attend(q, k, v, tensor_layout, is_causal, call, formats, sdpa)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **sdpa: Any,
) -> Tensor:
    """Attention of packed sequences with int8 scores and fp16 values.

    Keys are coded without the mean of their own sequence; the original takes one mean of all.

    Args:
        q: [L, Hq, d], k, v: [S, Hk, d].
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32 ends of the sequences.
        max_seqlen_q, max_seqlen_k: not needed.
        is_causal, sm_scale: as `sageattn`.
        smooth_k: whether keys are coded without their mean.
    """
    formats = {
        "pv": "fp16", "qk_quant_gran": "per_block", "geometry": "sm89", "quantizer": "triton",
        "pv_accum_dtype": "fp16+fp32", "smooth_k": smooth_k,
    }  # fmt: skip
    call = {"sm_scale": sm_scale, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _attend(q, k, v, "NHD", is_causal, call, formats, sdpa)


def sageattn3_blackwell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    per_block_mean: bool = True,
    **sdpa: Any,
) -> Tensor:
    """Attention in FP4: queries and keys without their means, 16 elements a scale.

    Keys stay as they are, which the original overwrites.

    Args:
        q, k, v: [B, H, L, d].
        attn_mask: bool or floating-point, broadcast to [B, Hq, L, S].
        is_causal: whether query i sees keys up to i alone.
        per_block_mean: whether 128 queries share a mean, or all of a head.
    """
    check_flag("per_block_mean", per_block_mean)
    formats = {"qk": "nvfp4", "pv": "nvfp4", "smooth_k": True, "smooth_q": per_block_mean}
    call = {"attn_mask": attn_mask, "sm_scale": sdpa.pop("scale", None)}
    if not per_block_mean:
        q, call["attn_mask"] = _without_mean(q, k, **call)
    return _attend(q, k, v, "HND", is_causal, call, formats, sdpa)


# ---- quantisers ----------------------------------------------------------------------------------


def per_block_int8(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    BLKQ: int = 128,
    BLKK: int = 64,
    sm_scale: float | None = None,
    tensor_layout: str = "HND",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, times softmax scale and log2(e), and keys in int8, one scale per block.

    Args:
        q, k: [B, H, L, d] or [B, L, H, d].
        km: mean of the keys, a row for each head, to be taken off.
        BLKQ, BLKK: rows of a block.

    Returns:
        q codes, q scales [B, Hq, blocks], k codes, k scales.
    """
    scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * LOG2E
    queries, keys = _rows(q, "q", tensor_layout) * scale, _smoothed(k, km, tensor_layout)
    tiles = Geometry(BLKQ, BLKQ, BLKK)
    return _pair(queries, keys, tiles, "per_block", "cuda", tensor_layout)


def per_warp_int8(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    BLKQ: int = 128,
    WARPQ: int = 32,
    BLKK: int = 64,
    tensor_layout: str = "HND",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries in int8, one scale per warp, and keys, one per block; as `per_block_int8`."""
    queries, keys = _rows(q, "q", tensor_layout), _smoothed(k, km, tensor_layout)
    return _pair(queries, keys, Geometry(BLKQ, WARPQ, BLKK), "per_warp", "cuda", tensor_layout)


def per_thread_int8(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    BLKQ: int = 128,
    WARPQ: int = 32,
    BLKK: int = 64,
    WARPK: int = 64,
    sm_scale: float | None = None,
    tensor_layout: str = "HND",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys in int8, one scale for what a thread of the kernel holds of a tile.

    `sm_scale` is ignored, as by the original.
    """
    if WARPK != BLKK:
        raise ValueError(f"WARPK: got {WARPK}, needs BLKK ({BLKK})")
    keys = _smoothed(k, km, tensor_layout)
    keys = keys if km is None else keys.to(k.dtype).float()
    queries, tiles = _rows(q, "q", tensor_layout), Geometry(BLKQ, WARPQ, BLKK)
    return _pair(queries, keys, tiles, "per_thread", "triton", tensor_layout)


def per_channel_fp8(
    v: Tensor, tensor_layout: str = "HND", scale_max: float = 448.0, smooth_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values in FP8, one scale per channel, transposed and in the order of the kernels.

    Args:
        v: [B, H, S, d] or [B, S, H, d].
        scale_max: largest code.
        smooth_v: whether the mean is taken off.

    Returns:
        codes [B, H, d, S'] or [B, d, H, S'], S' a multiple of 64; scales [B, H, d] and means or
        None. A channel of zeros has scale 0 and codes 0, where the original has NaN.
    """
    rows = _rows(v, "v", tensor_layout)
    padded = q8.pad_rows(rows, 64)
    codes, scale, mean = q8.quantize_columns(padded, rows.shape[-2], scale_max, smooth_v)
    stored = q8.in_v_order(codes.view(torch.uint8)).transpose(-1, -2)
    stored = stored.transpose(1, 2) if tensor_layout == "NHD" else stored
    return stored.contiguous().view(torch.float8_e4m3fn), scale, mean


def sub_mean(v: Tensor, tensor_layout: str = "HND") -> tuple[Tensor, Tensor]:
    """Values without their mean over the rows, in fp16, and the mean [B, H, d]."""
    rows = _rows(v, "v", tensor_layout)
    mean = (q8.column_sums(rows) / max(rows.shape[-2], 1)).to(v.dtype)
    off = (rows - mean.float().unsqueeze(-2)).to(v.dtype).to(torch.float16)
    return _back(off, tensor_layout), mean


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str,
    is_causal: bool,
    call: dict[str, Any],
    formats: dict[str, Any],
    sdpa: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`quantized_attention` with keywords of torch's attention."""
    for name, value in sdpa.items():
        if name == "dropout_p":
            if value != 0:
                raise ValueError(f"dropout_p: got {value}, needs 0")
        elif name == "enable_gqa":
            if not isinstance(value, bool):
                raise TypeError(f"enable_gqa: got a {type(value).__name__}, needs True or False")
        elif name in ("attn_mask", "scale"):
            own = "sm_scale" if name == "scale" else name
            if value is not None and call.get(own) is not None:
                raise ValueError(f"{name}: got a second value for {own}")
            call = {**call, own: call.get(own) if value is None else value}
        else:
            raise TypeError(
                f"{name}: got an unknown keyword, needs attn_mask, dropout_p, scale, or enable_gqa"
            )
    # SDPA's fourth argument is its mask: a tensor there is meant as one.
    if isinstance(tensor_layout, Tensor):
        raise TypeError("tensor_layout: got a tensor; a mask is given as attn_mask=")
    align = "top_left" if is_causal else None
    return quantized_attention(
        q, k, v, tensor_layout=tensor_layout, is_causal=is_causal, causal_align=align,
        **call, **formats,
    )  # fmt: skip


def _without_mean(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, sm_scale: float | None
) -> tuple[Tensor, Tensor]:
    """Queries without the mean of a head's, and a mask that adds the scores of that mean: one row
    for all queries, with what was given."""
    queries, keys = _rows(q, "q", "HND"), _rows(k, "k", "HND")
    if not keys.shape[1] or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"q: got {queries.shape[1]} heads, k has {keys.shape[1]}")
    mean = (q8.column_sums(queries) / max(queries.shape[-2], 1)).to(q.dtype).float()
    keys = (keys - key_means(k).float().unsqueeze(-2)).to(k.dtype).double()
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    added = ((keys @ mean.double().unsqueeze(-1)).mT * scale).float()
    if attn_mask is not None:
        check_is_tensor("attn_mask", attn_mask)
        # Checked alone: a mask of one row for all queries stays one.
        spread_mask(attn_mask, (*queries.shape[:3], keys.shape[2]))
        if attn_mask.dtype == torch.bool:
            added = added.masked_fill(~attn_mask, -torch.inf)
        else:
            added = added + attn_mask
    return (queries - mean.unsqueeze(-2)).to(q.dtype), added


def _fine(qk_quant_gran: str) -> dict[str, str]:
    if qk_quant_gran not in ("per_warp", "per_thread"):
        raise ValueError(
            f"qk_quant_gran: got {quoted(qk_quant_gran)}, needs 'per_warp' or 'per_thread'"
        )
    return {"qk_quant_gran": qk_quant_gran}


def _rows(x: Tensor, name: str, tensor_layout: str) -> Tensor:
    """[B, H, rows, d] float32."""
    check_layout(tensor_layout)
    check_is_tensor(name, x)
    check_rank(name, x, False)
    return heads_first(x, tensor_layout).float()


def _smoothed(k: Tensor, km: Tensor | None, tensor_layout: str) -> Tensor:
    keys = _rows(k, "k", tensor_layout)
    return keys if km is None else keys - _rows(km, "km", tensor_layout)


def _pair(
    queries: Tensor, keys: Tensor, tiles: Geometry, granularity: str, rule: str, tensor_layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of queries and keys in their layout, with scales."""
    rows = queries.shape[-2]
    padded = q8.pad_rows(queries, tiles.block_q)
    q_codes, q_scale = q8.quantize_rows(padded, query_groups(granularity, tiles), rule)
    k_codes, k_scale = q8.quantize_rows(keys, key_groups(granularity, tiles), rule)
    return (
        _back(q_codes[..., :rows, :], tensor_layout), q_scale.flatten(-2),
        _back(k_codes, tensor_layout), k_scale.flatten(-2),
    )  # fmt: skip


def _back(x: Tensor, tensor_layout: str) -> Tensor:
    return (x.transpose(1, 2) if tensor_layout == "NHD" else x).contiguous()
