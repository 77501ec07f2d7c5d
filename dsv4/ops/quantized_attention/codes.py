"""Keys and values as codes: the quantisers of `quantize_kv`, and their inverse."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.lowp.config import (
    LOG2E,
    SMOOTH_Q_ROWS,
    QuantizedAttentionConfig,
    QuantizeKvConfig,
)
from dsv4.ops.quantize import decode_e4m3
from dsv4.ops.quantized_attention import quantizers as q8

Codes = Mapping[str, Tensor]


def encode_kv(
    config: QuantizeKvConfig, k: Tensor, v: Tensor, km: Tensor | None = None
) -> dict[str, Tensor]:
    """Codes of one batch of keys and values, by the names of the operator's table.

    Args:
        k, v: [b, Hk, S, d].
        km: [b, Hk, d], instead of the mean of these keys.
    """
    found: dict[str, Tensor] = {}
    wide = k.float()
    if config.smooth_k:
        if km is None:
            km = key_means(k)
        found["km"] = km
        wide = wide - km.float().unsqueeze(-2)
        if config.quantizer != "cuda":
            # The official Triton quantisers get keys that were smoothed in their own dtype.
            wide = wide.to(k.dtype).float()
    if config.smooth_q:
        found["k_smooth"] = wide.to(k.dtype)
    return found | _encode_keys(config, wide) | _encode_values(config, v)


def key_means(k: Tensor) -> Tensor:
    """Means of keys [b, Hk, S, d] -> [b, Hk, d]: summed in float32, rounded to the keys' dtype."""
    return q8.divided(q8.column_sums(k.float()), max(k.shape[-2], 1)).to(k.dtype)


def _encode_keys(config: QuantizeKvConfig, k: Tensor) -> dict[str, Tensor]:
    k = _pad_channels(config, k)
    if config.qk == "nvfp4":
        codes, scale = q8.quantize_fp4(q8.pad_rows(k, config.tiles.block_k))
        scale = q8.in_scale_order(scale.unflatten(-2, (-1, config.tiles.block_k)))
        return {"k_codes": q8.pack_fp4(codes[..., : k.shape[-2], :]), "k_scale": scale}
    codes, scale = _encode_rows(config, k, config.key_groups)
    return {"k_codes": codes, "k_scale": scale}


def _encode_rows(config: QuantizeKvConfig, x: Tensor, groups) -> tuple[Tensor, Tensor]:
    """Codes and scales of queries or keys, but for FP4."""
    if config.qk == "fp8":
        return q8.quantize_rows_fp8(x, groups, config.qk_quant_gran == "per_head")
    folds = config.folds_scale and config.quantizer == "triton"
    return q8.quantize_rows(x, groups, "block" if folds else config.quantizer)


def _encode_values(config: QuantizeKvConfig, v: Tensor) -> dict[str, Tensor]:
    rows, block = v.shape[-2], config.tiles.block_k
    wide, found = _pad_channels(config, v.float()), {}
    if config.pv == "fp16":
        if config.smooth_v:
            mean = q8.divided(q8.column_sums(v.float()), max(rows, 1))
            found["vm"] = mean
            wide = wide - _pad_channels(config, mean.unsqueeze(-2))
        tiles = q8.pad_rows(wide, block).to(torch.float16)
        return found | {"v_codes": tiles.unflatten(-2, (-1, block))}
    wide = q8.pad_rows(wide, block)
    if config.pv == "nvfp4":
        tiles = wide.unflatten(-2, (-1, block)).transpose(-1, -2)
        codes, scale = q8.quantize_fp4(tiles)
        return {"v_codes": q8.pack_fp4(codes), "v_block_scale": q8.in_scale_order(scale)}
    codes, scale, mean = q8.quantize_columns(wide, rows, config.v_max, config.smooth_v)
    tiles = q8.in_v_order(codes.view(torch.uint8)).unflatten(-2, (-1, block)).transpose(-1, -2)
    found["v_scale"] = scale
    if mean is not None:
        found["vm"] = mean[..., : config.head_dim]
    return found | {"v_codes": tiles.contiguous().view(torch.float8_e4m3fn)}


def decode_keys(config: QuantizeKvConfig, codes: Codes) -> tuple[Tensor, Tensor]:
    """Values of the codes [b, Hk, S, dp] float32, and each key's scale [b, Hk, S].

    FP4 keys come with their scales multiplied in, and scales of 1.
    """
    packed, scale = codes["k_codes"], codes["k_scale"]
    rows = packed.shape[-2]
    if config.qk == "nvfp4":
        per_key = q8.out_of_scale_order(scale, config.tiles.block_k).flatten(-3, -2)
        values = q8.decode_fp4(packed, per_key[..., :rows, :])
        return values, values.new_ones(values.shape[:-1])
    values = decode_e4m3(packed.contiguous()) if config.qk == "fp8" else packed.float()
    return values, q8.group_scales(scale, config.key_groups, rows)


def decode_values(config: QuantizeKvConfig, codes: Codes) -> Tensor:
    """Values of the codes [b, Hk, S', dp] float32, without the channels' scales and means."""
    tiles = codes["v_codes"]
    if config.pv == "fp16":
        return tiles.float().flatten(-3, -2)
    if config.pv == "nvfp4":
        scale = q8.out_of_scale_order(codes["v_block_scale"], config.padded_dim)
        return q8.decode_fp4(tiles, scale).transpose(-1, -2).flatten(-3, -2)
    tokens = tiles.transpose(-1, -2).flatten(-3, -2)
    return decode_e4m3(q8.out_of_v_order(tokens.view(torch.uint8)).view(torch.float8_e4m3fn))


def encode_queries(config: QuantizedAttentionConfig, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of queries [b, Hq, L, d] as tensors to store: codes, scales, and what was taken off.

    Returns:
        codes [b, Hq, L, dk]; scales [b, Hq, warps, groups], of FP4 [b, Hq, L, dp / 16]; means
        [b, Hq, ceil(L / 128), d] in the dtype of q, empty without smoothing.
    """
    wide, mean = q.float(), q.new_empty(0)
    if config.smooth_q:
        mean = query_means(q)
        spread = mean.float().repeat_interleave(SMOOTH_Q_ROWS, -2)
        wide = wide - spread[..., : q.shape[-2], :]
    if config.folds_scale:
        wide = wide * (config.sm_scale * LOG2E)
    wide = _pad_channels(config, wide)
    if config.qk == "nvfp4":
        codes, scale = q8.quantize_fp4(wide)
        return q8.pack_fp4(codes), scale, mean
    if config.qk == "int8" and wide.shape[-2]:
        # The official kernels have scales for all warps of a tile.
        rows = -(-wide.shape[-2] // config.tiles.block_q) * config.tiles.block_q
        padded = F.pad(wide, (0, 0, 0, rows - wide.shape[-2]))
        codes, scale = _encode_rows(config, padded, config.query_groups)
        return codes[..., : wide.shape[-2], :], scale, mean
    return (*_encode_rows(config, wide, config.query_groups), mean)


def decode_queries(
    config: QuantizedAttentionConfig, codes: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """As `decode_keys`, of queries."""
    if config.qk == "nvfp4":
        values = q8.decode_fp4(codes, scale)
        return values, values.new_ones(values.shape[:-1])
    values = decode_e4m3(codes.contiguous()) if config.qk == "fp8" else codes.float()
    return values, q8.group_scales(scale, config.query_groups, codes.shape[-2])


def query_means(q: Tensor) -> Tensor:
    """Means of every 128 queries [b, Hq, L, d] -> [b, Hq, ceil(L / 128), d], in their dtype."""
    rows = q.shape[-2]
    blocks = q8.pad_rows(q.float(), SMOOTH_Q_ROWS).unflatten(-2, (-1, SMOOTH_Q_ROWS))
    starts = torch.arange(0, rows, SMOOTH_Q_ROWS, device=q.device)
    counts = (rows - starts).clamp(max=SMOOTH_Q_ROWS)
    return (q8.column_sums(blocks) / counts[:, None]).to(q.dtype)


def _pad_channels(config: QuantizeKvConfig, x: Tensor) -> Tensor:
    return F.pad(x, (0, config.padded_dim - config.head_dim))
