"""Arguments of `quantize_kv` and `quantized_attention`.

b batches of S keys and L queries, or b = 1 and N packed sequences; Hk heads of keys and values, Hq
of queries; d channels, `dp` of codes; Gk tiles of n keys.
"""

from __future__ import annotations

from dsv4.kernels.kit.args import In, OptIn, OptOut, Out, Scalar, Workspace
from dsv4.kernels.lowp.config import QuantizedAttentionConfig, QuantizeKvConfig
from dsv4.kernels.lowp.groups import FP4_BLOCK

# Beside `k_codes` and so on: what the codes mean.
_SCALES = {
    "v_scale": ("N Hk dp", "float32"),  # FP8: of each channel
    "v_block_scale": ("b Hk Gk sv", "float8_e4m3fn"),  # FP4: of 16 keys of a channel
    "km": ("N Hk d", "dtype"),
    "vm": ("N Hk d", "float32"),
    "k_smooth": ("b Hk S d", "dtype"),  # keys without their mean, not coded
}
# Those that are stored and loaded in whole vectors.
_ALIGNED = {"v_scale": 16, "v_block_scale": 16, "k_smooth": "row_align"}
CODES = ("k_codes", "k_scale", "v_codes", *_SCALES)

QUANTIZE_KV_ARGS = (
    In("k", "b Hk S d", "dtype", align="row_align"),
    In("v", "b Hk S d", "dtype", align="row_align"),
    Out("k_codes", "b Hk S dk", "k_dtype", align=16),
    Out("k_scale", "b Hk Gk sk", "k_scale_dtype", align="k_scale_align"),
    Out("v_codes", "b Hk Gk v0 v1", "v_dtype", align=16),
    *(
        OptOut(name, dims, dtype, align=_ALIGNED.get(name))
        for name, (dims, dtype) in _SCALES.items()
    ),
    OptIn("cu_seqlens_k", "N1", "int32"),
    Workspace(),
)

ATTENTION_ARGS = (
    In("q", "b Hq L d", "dtype", align="row_align"),
    In("k_codes", "b Hk S dk", "k_dtype", align=16, differentiable=False),
    In("k_scale", "b Hk Gk sk", "k_scale_dtype", align="k_scale_align", differentiable=False),
    In("v_codes", "b Hk Gk v0 v1", "v_dtype", align=16, differentiable=False),
    Out("out", "b Hq L d", "dtype", align="row_align"),
    *(
        OptIn(name, dims, dtype, align=_ALIGNED.get(name))
        for name, (dims, dtype) in _SCALES.items()
    ),
    OptIn("attn_mask", "b Hq L S", "mask_dtype"),
    OptIn("cu_seqlens_q", "N1", "int32"),
    OptIn("cu_seqlens_k", "N1", "int32"),
    OptOut("lse", "b Hq L", "float32"),
    Workspace(),
    Scalar("factor"),  # on scores, times log2(e): the bits of a float32
    Scalar("section"),  # heads that pass a tile of queries together
    Scalar("num_ctas"),
)

_CODE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn", "nvfp4": "uint8", "fp16": "float16"}


def values(config: QuantizeKvConfig) -> dict[str, int | str]:
    """Sizes and dtypes that a kernel is compiled for."""
    n, dim = config.tiles.block_k, config.padded_dim
    packed = 2 if config.qk == "nvfp4" else 1
    v_shape = (n, dim) if config.pv == "fp16" else (dim, n // packed)
    found: dict[str, int | str] = {
        "d": config.head_dim,
        "dp": dim,
        "dk": dim // packed,
        "sk": config.key_scales,
        "v0": v_shape[0],
        "v1": v_shape[1],
        "sv": dim * n // FP4_BLOCK,
        "dtype": config.dtype,
        "k_dtype": _CODE_DTYPES[config.qk],
        "k_scale_dtype": "float8_e4m3fn" if config.qk == "nvfp4" else "float32",
        # What comes with a tile of keys is loaded whole.
        "k_scale_align": 16 if config.qk == "nvfp4" else 4,
        "v_dtype": _CODE_DTYPES[config.pv],
        "mask_dtype": "float32",
        "row_align": config.row_align,
    }
    if isinstance(config, QuantizedAttentionConfig) and config.mask == "bool":
        found["mask_dtype"] = "uint8"
    return found


def needs(config: QuantizeKvConfig, name: str) -> bool | None:
    """Whether an optional tensor of either table has to be there, or must not be."""
    found = {
        "v_scale": config.pv == "fp8",
        "v_block_scale": config.pv == "nvfp4",
        "vm": config.smooth_v,
        "k_smooth": config.smooth_q,
        "cu_seqlens_q": config.is_varlen,
        "cu_seqlens_k": config.is_varlen,
    }
    if isinstance(config, QuantizedAttentionConfig):
        # Attention needs the mean of the keys for its lse alone.
        found |= {"attn_mask": config.mask != "none", "km": None if config.smooth_k else False}
    else:
        found["km"] = config.smooth_k
    return found.get(name)
