"""`quantized_attention`: attention over codes of keys and values, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.lowp.args import ATTENTION_ARGS, CODES, needs, values
from dsv4.kernels.lowp.config import QuantizedAttentionConfig, has_kernel
from dsv4.kernels.lowp.groups import num_blocks
from dsv4.kernels.lowp.plan import MAXIMA_ROWS, SMALLEST_WORK, choose_launch, work_queries
from dsv4.ops.quantized_attention.backends import check_device
from dsv4.ops.quantized_attention.dump import report_scales, write_dumps
from dsv4.ops.quantized_attention.knobs import is_set, reports_scales, wants_stages
from dsv4.ops.quantized_attention.layouts import aligned, check_layout, check_rank, heads_first
from dsv4.ops.quantized_attention.options import FORMAT_OPTIONS
from dsv4.ops.quantized_attention.probes import probes_of
from dsv4.ops.quantized_attention.quantize_kv import (
    QuantizedKV,
    check_codes,
    encode,
    one_head,
    place,
    quantize_kv_runner_id,
)
from dsv4.ops.quantized_attention.sequences import check_count, check_ends, sequences_of
from dsv4.ops.quantized_attention.torch_path import attend
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.calls import tensors_of_call
from dsv4.ops.runtime.checks import check_flag, check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.runner import config_of
from dsv4.ops.runtime.state import State
from dsv4.quoting import quoted


class QuantizedAttention(KernelOp):
    """Softmax attention whose products are of int8, FP8, fp16 or FP4 codes."""

    name = "quantized_attention"
    config = QuantizedAttentionConfig
    args = ATTENTION_ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.lowp.sm90.attention",
        "sm_100a": "dsv4.kernels.lowp.sm100.attention",
    }

    def values(self, config: QuantizedAttentionConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: QuantizedAttentionConfig) -> bool:
        return any(self.serves(config, arch) for arch in self.kernels)

    def serves(self, config: QuantizedAttentionConfig, arch: str) -> bool:
        return has_kernel(config, arch)

    def compiled_config(
        self, config: QuantizedAttentionConfig, arch: str
    ) -> QuantizedAttentionConfig:
        # How keys were smoothed is in their codes and in `km`.
        found = replace(config, sm_scale=1.0, smooth_k=False, km_scope="sequence")
        # Blackwell's tensor cores sum in fp32: two levels are one.
        is_one = arch == "sm_100a" and config.pv_accum_dtype == "fp32+fp32"
        return replace(found, pv_accum_dtype="fp32") if is_one else found

    def plan(
        self, config: QuantizedAttentionConfig, sizes: Sizes, device: Device
    ) -> tuple[int, ...]:
        """Bits of the factor on scores, heads of a section, CTAs."""
        heads, key_heads = sizes["b"] * sizes["Hq"], sizes["b"] * sizes["Hk"]
        queries = work_queries(config, device.arch)
        lengths = sizes["L"], sizes["S"]
        return choose_launch(config, heads, key_heads, *lengths, device.num_sms, queries)

    def workspace_size(
        self, config: QuantizedAttentionConfig, sizes: Sizes, scalars: tuple[int, ...]
    ) -> int:
        """What launches before the attention find: maxima of blocks of queries, and which tiles of
        keys a mask lets a work tile see."""
        heads, words = sizes["b"] * sizes["Hq"], 0
        if config.has_query_maxima:
            # As many sequences as the tiles of keys are made for.
            tiles = sizes["S"] // config.tiles.block_k
            sequences = sizes["Gk"] - tiles if config.is_varlen else None
            words += heads * num_blocks(sizes["L"], MAXIMA_ROWS, sequences)
        if config.mask != "none":
            lists = num_blocks(sizes["L"], SMALLEST_WORK)
            words += heads * lists * (num_blocks(sizes["S"], config.tiles.block_k) + 1)
        return words

    def max_workspace_size(
        self, config: QuantizedAttentionConfig, rows: int, device: Device
    ) -> int:
        """Enough for a capture to know that it needs one: the lengths are not known."""
        return int(config.has_query_maxima or config.mask != "none")

    def probes(
        self, config: QuantizedAttentionConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        return probes_of(self, config, target, device)

    def make_launch(self, state: State) -> Launch:
        """The launch that follows from the table, of sizes that fit each other: the compiled
        function does not know what tiles and sequences are."""
        launch, config = super().make_launch(state), state.config

        def checked(*arguments: Any) -> None:
            self.check_sizes(config, *tensors_of_call(self, arguments))
            launch(*arguments)

        return checked

    def needs(self, config: QuantizedAttentionConfig, name: str) -> bool | None:
        return needs(config, name)

    def check_sizes(self, config: QuantizedAttentionConfig, *tensors: Tensor | None) -> None:
        given = dict(zip((arg.name for arg in self.tensors), tensors))
        check_codes(config, given)
        heads, key_heads = given["q"].shape[1], given["k_codes"].shape[1]
        if heads % key_heads if key_heads else heads:
            raise ValueError(
                f"q: got {heads} heads, needs a multiple of the {key_heads} heads of the keys"
            )
        if given["lse"] is not None and config.smooth_k and given["km"] is None:
            raise ValueError("km: got None, the lse of smoothed keys needs their mean")
        if config.is_varlen:
            check_count("cu_seqlens_q", given["cu_seqlens_q"])

    def check_values(self, config: QuantizedAttentionConfig, *tensors: Tensor | None) -> None:
        if config.is_varlen:
            given = dict(zip((arg.name for arg in self.tensors), tensors))
            check_ends("cu_seqlens_q", given["cu_seqlens_q"], given["q"].shape[2])
            check_ends("cu_seqlens_k", given["cu_seqlens_k"], given["k_codes"].shape[2])

    def torch(self, config: QuantizedAttentionConfig, *tensors: Tensor | None) -> None:
        """Write out and lse; packed sequences one after the other, which synchronises."""
        given = dict(zip((arg.name for arg in self.tensors), tensors))
        q, out, lse = given["q"], given["out"], given["lse"]
        codes = {name: given[name] for name in CODES if given[name] is not None}
        if not config.is_varlen:
            found, found_lse = attend(config, q, codes, given["attn_mask"])
            out.copy_(found)
            if lse is not None:
                lse.copy_(found_lse)
            return
        # Rows behind the last sequence belong to none: zeros, not what the memory held.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        keys = sequences_of(given["cu_seqlens_k"], config.tiles.block_k)
        for of_q, of_k in zip(sequences_of(given["cu_seqlens_q"], config.tiles.block_q), keys):
            part = {name: place(name, x, of_k) for name, x in codes.items()}
            found, found_lse = attend(config, q[:, :, of_q.rows], part)
            out[:, :, of_q.rows] = found.to(out.dtype)
            if lse is not None:
                lse[:, :, of_q.rows] = found_lse

    def aot(self) -> Mapping[str, QuantizedAttentionConfig]:
        """SageAttention's defaults on Hopper; FP8 scores, which every Blackwell has; and those of
        SageAttention3."""
        fp8 = {"qk": "fp8", "qk_quant_gran": "per_64", "quantizer": ""}
        fp4 = {"qk": "nvfp4", "pv": "nvfp4", "qk_quant_gran": "per_16", "quantizer": ""}
        fp4 |= {"pv_accum_dtype": "fp32", "smooth_q": True}
        return {
            f"{formats_of}, d {dim}{', causal' * is_causal}": QuantizedAttentionConfig(
                dim, sm_scale=dim**-0.5, causal="top_left" if is_causal else "none", **formats
            )
            for formats_of, formats in (
                ("INT8 and FP8", {}),
                ("FP8 and FP8", fp8),
                ("FP4, smoothed queries", fp4),
            )
            for dim in (128, 64)
            for is_causal in (False, True)
        }

    def aot_for(self, arch: str) -> Mapping[str, QuantizedAttentionConfig]:
        found = self.aot().items()
        return {label: config for label, config in found if self.serves(config, arch)}


QUANTIZED_ATTENTION = QuantizedAttention()
_op = QUANTIZED_ATTENTION.overload


def quantized_attention(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None = None,
    *,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    causal_align: str | None = None,
    attn_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    qk: str | None = None,
    pv: str | None = None,
    qk_quant_gran: str | None = None,
    geometry: str | None = None,
    quantizer: str | None = None,
    pv_accum_dtype: str | None = None,
    smooth_k: bool | None = None,
    smooth_v: bool | None = None,
    smooth_q: bool | None = None,
    km_scope: str | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(sm_scale q k^T) v with codes of few bits in both products.

    Formats and groups are SageAttention's (https://github.com/thu-ml/SageAttention, versions 2, 2++
    and 3) and plain FP8; docs/design/lowp.md has them element by element. Nothing that is given is
    changed, and a row's bits depend on neither the batch nor the other rows of its tile's heads.

    Args:
        q: [B, Hq, L, d] ("HND") or [B, L, Hq, d] ("NHD"), packed sequences [L, Hq, d]; bfloat16,
            float16, or float32. d is at most 256, channels are contiguous.
        k, v: the same with Hk heads and S rows, where Hk divides Hq; or as `k` alone what
            `quantize_kv` made of them, which then says all about formats.
        tensor_layout: "HND" or "NHD".
        is_causal: whether a query sees the keys up to its own.
        causal_align: which key is its own where L is not S: "top_left", that of its index, or
            "bottom_right", so that the last query sees all keys.
        attn_mask: broadcast to [B, Hq, L, S]: bool (True: seen), or floating-point, added to scores
            that are scaled.
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32 ends of packed sequences.
        qk: format of q and k: "int8" (default), "fp8", "nvfp4".
        pv: format of weights and v: "fp8" (default), "fp16"; "nvfp4" with and only with that of qk.
        qk_quant_gran: rows that share a scale: of int8 "per_thread" (default), "per_warp",
            "per_block"; of fp8 "per_head" (default), "per_row", "per_64"; of nvfp4 "per_16".
        geometry: tiles whose threads and warps are meant: "sm90" (64 x 128, default), "sm89"
            (128 x 64).
        quantizer: rounding of int8: "triton", or "cuda" (default, and the only one, per warp).
        pv_accum_dtype: sums of weighted values: of fp8 "fp32+fp32" (default), "fp32+fp16", "fp32";
            of fp16 "fp32" (default), "fp16+fp32", "fp16".
        smooth_k: whether keys are coded without their mean over a sequence; default True.
        smooth_v: the same of values; with pv_accum_dtype "fp32" (fp8) or "fp16" (fp16) alone, else
            ignored with a warning.
        smooth_q: whether queries are coded without the mean of 128 of them, whose scores are added
            from keys that are not coded.
        km_scope: keys that share a mean: of a "sequence" (default), or "packed", all of them.
        sm_scale: factor on q . k; default d^-0.5.
        return_lse: also return the log-sum-exp.
        out: in shape and dtype of q, to write into; default a new tensor.

    Returns:
        out as q; or (out, lse), lse [B, Hq, L], of packed sequences [Hq, L], float32, natural. A
        row without keys has out 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    formats = (
        qk, pv, qk_quant_gran, geometry, quantizer, pv_accum_dtype, smooth_k, smooth_v, smooth_q,
        km_scope,
    )  # fmt: skip
    _check_call(q, k, v, tensor_layout, cu_seqlens_q, out)
    check_flag("return_lse", return_lse)
    if isinstance(k, QuantizedKV):
        _check_nothing_else(v, cu_seqlens_k, formats)
        codes = k
    else:
        codes = _encode(k, v, tensor_layout, cu_seqlens_k, formats)
    _check_varlen(q, codes, cu_seqlens_q)
    queries = aligned(heads_first(q, tensor_layout))
    causal = _causal(queries, codes, is_causal, causal_align, cu_seqlens_q)
    mask, kind = _mask(attn_mask, queries, codes)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        QUANTIZED_ATTENTION.check_no_gradients(q, None, None, None, out)
    identity = _runner_id(codes.config, index(q.shape[-1]), causal, kind, _scale(sm_scale, q))
    check_device(QUANTIZED_ATTENTION, identity, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    shape = queries.shape[:3]
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if return_lse else None
    tensors = tuple(codes.codes.values())
    written = heads_first(out, tensor_layout)
    operands = (queries, *tensors[:3], written)
    optional = (*tensors[3:], mask, cu_seqlens_q, codes.cu_seqlens_k, lse)
    if is_set("serial_heads"):
        _run_by_heads(identity, operands, optional)
    else:
        _run(identity, operands, optional)
    if reports_scales(q.device):
        report_scales(codes.codes)
    if not torch.compiler.is_compiling() and wants_stages():
        inputs = (q, k, v) if isinstance(k, Tensor) else (q, None, None)
        config = config_of(QUANTIZED_ATTENTION, identity)
        write_dumps(config, inputs, tensor_layout, queries, codes, mask, written)
    if not return_lse:
        return out
    return out, lse if q.dim() == 4 else lse[0]


def _run(identity: int, operands: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]) -> None:
    """Run the operator, or its torch code where the environment says so."""
    if is_set("torch_code"):
        QUANTIZED_ATTENTION.torch(config_of(QUANTIZED_ATTENTION, identity), *operands, *optional)
    else:
        _op(*operands, identity, *optional)


def _run_by_heads(
    identity: int, operands: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]
) -> None:
    """The same, a head of queries after the other."""
    given = dict(zip((arg.name for arg in QUANTIZED_ATTENTION.tensors), (*operands, *optional)))
    heads, key_heads = operands[0].shape[1], operands[1].shape[1]
    for head in range(heads):
        key_head = head * key_heads // heads
        places = {**dict.fromkeys(CODES, key_head), "cu_seqlens_q": None, "cu_seqlens_k": None}
        found = [one_head(x, places.get(name, head)) for name, x in given.items()]
        _run(identity, tuple(found[: len(operands)]), tuple(found[len(operands) :]))


def _encode(
    k: Tensor, v: Tensor, tensor_layout: str, cu_seqlens_k: Tensor | None, formats: tuple
) -> QuantizedKV:
    """Keys and values as codes, as `quantize_kv` makes them."""
    identity = quantize_kv_runner_id(
        index(k.shape[-1]),
        str(k.dtype).removeprefix("torch."),
        cu_seqlens_k is not None,
        *formats,
    )
    keys, its_values = heads_first(k, tensor_layout), heads_first(v, tensor_layout)
    return encode(keys, its_values, cu_seqlens_k, identity)


@torch.compiler.assume_constant_result
def quantized_attention_runner_id(*fields: Any) -> int:
    """Id of a configuration, what `torch.ops.dsv4.quantized_attention` takes.

    Args:
        fields: of `QuantizedAttentionConfig`, in order.
    """
    return QUANTIZED_ATTENTION.runner_id(*fields)


def _runner_id(config: Any, head_dim: int, causal: str, mask: str, sm_scale: float) -> int:
    if head_dim != config.head_dim:
        raise ValueError(f"q: got {head_dim} channels, k has {config.head_dim}")
    options = (getattr(config, name) for name in FORMAT_OPTIONS)
    return quantized_attention_runner_id(
        head_dim, config.dtype, *options, config.is_varlen, causal, mask, sm_scale
    )


def _check_call(
    q: object, k: object, v: object, tensor_layout: object, cu_seqlens_q: object, out: object
) -> None:
    """Refuse what the rest of a call cannot look into: TypeError, ValueError."""
    check_layout(tensor_layout)
    is_varlen = cu_seqlens_q is not None
    given = [("q", q)] + ([] if isinstance(k, QuantizedKV) else [("k", k), ("v", v)])
    for name, tensor in given + ([] if out is None else [("out", out)]):
        check_is_tensor(name, tensor)
        check_rank(name, tensor, is_varlen)
    if is_varlen:
        check_is_tensor("cu_seqlens_q", cu_seqlens_q)
    if isinstance(k, QuantizedKV):
        return
    for name, tensor in (("k", k), ("v", v)):
        for wanted, got, what in (
            (q.dtype, tensor.dtype, "dtype"),
            (q.device, tensor.device, "device"),
            (q.shape[-1], tensor.shape[-1], "head_dim"),
        ):
            if wanted != got:
                raise (TypeError if what == "dtype" else ValueError)(
                    f"{name}: got {what} {got}, q has {wanted}"
                )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires grad, but quantized_attention has no backward pass; call it "
                "under torch.no_grad() or pass a detached tensor"
            )


def _check_nothing_else(v: object, cu_seqlens_k: object, formats: tuple) -> None:
    """Refuse what quantised keys and values say already: ValueError."""
    for name, value in zip(("v", "cu_seqlens_k", *FORMAT_OPTIONS), (v, cu_seqlens_k, *formats)):
        if value is not None:
            raise ValueError(f"{name}: got a value, k is quantised already and needs None")


def _check_varlen(q: Tensor, codes: QuantizedKV, cu_seqlens_q: Tensor | None) -> None:
    """Refuse packed queries beside keys that are not packed, and the other way: ValueError."""
    if (cu_seqlens_q is None) != (codes.cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing}: got None, packed sequences need it for queries and keys")


def _causal(
    queries: Tensor,
    codes: QuantizedKV,
    is_causal: object,
    causal_align: object,
    cu_seqlens_q: Tensor | None,
) -> str:
    """The configuration's word for a causal mask."""
    check_flag("is_causal", is_causal)
    if causal_align not in (None, "top_left", "bottom_right"):
        raise ValueError(
            f"causal_align: got {quoted(causal_align)}, needs 'top_left' or 'bottom_right'"
        )
    if not is_causal:
        if causal_align is not None:
            raise ValueError(f"causal_align: got {quoted(causal_align)}, is_causal is False")
        return "none"
    rows, keys = queries.shape[2], codes.k_codes.shape[2]
    is_square = rows == keys if cu_seqlens_q is None else cu_seqlens_q is codes.cu_seqlens_k
    if causal_align is None and not is_square:
        what = f"{rows} queries and {keys} keys"
        if cu_seqlens_q is not None:
            what = "two tensors of sequences' ends"
        raise ValueError(f"causal_align: got None for {what}, needs 'top_left' or 'bottom_right'")
    return str(causal_align or "top_left")


def _mask(
    attn_mask: Tensor | None, queries: Tensor, codes: QuantizedKV
) -> tuple[Tensor | None, str]:
    """The mask [b, Hq, L, S] as the operator takes it, and the configuration's word for it."""
    if attn_mask is None:
        return None, "none"
    check_is_tensor("attn_mask", attn_mask)
    if queries.dim() != 4 or codes.config.is_varlen:
        raise ValueError("attn_mask: got a tensor, packed sequences have none")
    if attn_mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("attn_mask: requires grad, but quantized_attention has no backward pass")
    spread = spread_mask(attn_mask, (*queries.shape[:3], codes.k_codes.shape[2]))
    if attn_mask.dtype == torch.bool:
        spread, kind = spread.view(torch.uint8), "bool"
    else:
        spread, kind = spread.float(), "float"
    return (spread if spread.stride(-1) == 1 else spread.contiguous()), kind


def spread_mask(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask broadcast to [b, Hq, L, S].

    Raises:
        ValueError, TypeError: it has another dtype than bool or a float one, or does not broadcast.
    """
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask: got {attn_mask.dtype}, needs torch.bool or a float dtype")
    try:
        return attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask: got shape {quoted(attn_mask.shape)}, needs one that broadcasts to "
            f"{quoted(shape)}"
        ) from None


def _scale(sm_scale: object, q: Tensor) -> float:
    if sm_scale is None:
        return max(q.shape[-1], 1) ** -0.5
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, Real):
        raise TypeError(f"sm_scale: got a {type(sm_scale).__name__}, needs a real number")
    return float(sm_scale)
