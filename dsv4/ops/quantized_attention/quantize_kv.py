"""`quantize_kv`: keys and values as codes for attention, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.kit.args import tensors_of
from dsv4.kernels.lowp.args import CODES, QUANTIZE_KV_ARGS, needs, values
from dsv4.kernels.lowp.config import QuantizeKvConfig, has_codes_kernel
from dsv4.kernels.lowp.groups import num_blocks
from dsv4.kernels.lowp.plan import STATISTICS
from dsv4.ops.quantized_attention.backends import check_device
from dsv4.ops.quantized_attention.codes import encode_kv, key_means
from dsv4.ops.quantized_attention.knobs import is_set
from dsv4.ops.quantized_attention.layouts import aligned, check_layout, check_rank, heads_first
from dsv4.ops.quantized_attention.options import FORMAT_OPTIONS, complete
from dsv4.ops.quantized_attention.probes import probes_of
from dsv4.ops.quantized_attention.sequences import check_count, check_ends, sequences_of
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.calls import tensors_of_call
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.runner import config_of
from dsv4.ops.runtime.state import State
from dsv4.ops.runtime.tensors import empty


@dataclass(frozen=True)
class QuantizedKV:
    """Keys and values as codes, what `quantized_attention` takes in place of both.

    Attributes:
        config: formats, groups of scales, smoothing.
        cu_seqlens_k: [N + 1] int32 ends of packed sequences, or None.
        k_codes: [b, Hk, S, dk] int8, float8_e4m3fn, or two FP4 a byte.
        k_scale: [b, Hk, tiles, scales] float32, of FP4 float8_e4m3fn.
        v_codes: [b, Hk, tiles, d, n] float8_e4m3fn, or two FP4 a byte; float16 [b, Hk, tiles, n,
            d].
        v_scale: [N, Hk, d] float32, of FP8.
        v_block_scale: [b, Hk, tiles, d * n / 16] float8_e4m3fn, of FP4; as `k_scale` of FP4 in the
            order of `quantizers.in_scale_order`.
        km, vm: [N, Hk, d] means that were taken off.
        k_smooth: [b, Hk, S, d] keys without their mean, where queries are to be smoothed.
    """

    config: QuantizeKvConfig
    cu_seqlens_k: Tensor | None
    k_codes: Tensor
    k_scale: Tensor
    v_codes: Tensor
    v_scale: Tensor | None = None
    v_block_scale: Tensor | None = None
    km: Tensor | None = None
    vm: Tensor | None = None
    k_smooth: Tensor | None = None

    @property
    def codes(self) -> dict[str, Tensor | None]:
        """The tensors by the names of the operators' tables."""
        return {name: getattr(self, name) for name in CODES}


class QuantizeKv(KernelOp):
    """Codes, scales and means of keys and values."""

    name = "quantize_kv"
    config = QuantizeKvConfig
    args = QUANTIZE_KV_ARGS
    kernels: ClassVar = dict.fromkeys(("sm_90a", "sm_100a"), "dsv4.kernels.lowp.quantize_kv")

    def values(self, config: QuantizeKvConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: QuantizeKvConfig) -> bool:
        return any(self.serves(config, arch) for arch in self.kernels)

    def serves(self, config: QuantizeKvConfig, arch: str) -> bool:
        return has_codes_kernel(config, arch)

    def workspace_size(
        self, config: QuantizeKvConfig, sizes: Sizes, scalars: tuple[int, ...]
    ) -> int:
        """Statistics of every tile."""
        return sizes["b"] * sizes["Hk"] * sizes["Gk"] * STATISTICS * config.padded_dim

    def max_workspace_size(self, config: QuantizeKvConfig, rows: int, device: Device) -> int:
        """Enough for a capture to know that it needs one: the lengths are not known."""
        return 1

    def probes(
        self, config: QuantizeKvConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        return probes_of(self, config, target, device)

    def make_launch(self, state: State) -> Launch:
        """The launch that follows from the table, of sizes that fit each other: the compiled
        functions do not know what tiles and sequences are."""
        launch, config = super().make_launch(state), state.config

        def checked(*arguments: Any) -> None:
            self.check_sizes(config, *tensors_of_call(self, arguments))
            launch(*arguments)

        return checked

    def check_sizes(self, config: QuantizeKvConfig, *tensors: Tensor | None) -> None:
        check_codes(config, dict(zip((arg.name for arg in self.tensors), tensors)))

    def check_values(self, config: QuantizeKvConfig, *tensors: Tensor | None) -> None:
        if config.is_varlen:
            given = dict(zip((arg.name for arg in self.tensors), tensors))
            check_ends("cu_seqlens_k", given["cu_seqlens_k"], tensors[0].shape[2])

    def torch(self, config: QuantizeKvConfig, *tensors: Tensor | None) -> None:
        """Write all that is there; packed sequences one after the other, which synchronises."""
        given = dict(zip((arg.name for arg in self.tensors), tensors))
        k, v, ends = given["k"], given["v"], given["cu_seqlens_k"]
        outputs = {name: given[name] for name in CODES if given[name] is not None}
        if ends is None:
            _write(outputs, encode_kv(config, k, v))
            return
        shared = key_means(k) if config.km_scope == "packed" and config.smooth_k else None
        # Tiles between the sequences, which nothing reads, get one value on all devices.
        for tensor in outputs.values():
            tensor.view(torch.uint8).zero_() if tensor.element_size() == 1 else tensor.zero_()
        for one in sequences_of(ends, config.tiles.block_k):
            rows = (slice(None), slice(None), one.rows)
            part = encode_kv(config, k[rows], v[rows], shared)
            _write({name: place(name, x, one) for name, x in outputs.items()}, part)

    def needs(self, config: QuantizeKvConfig, name: str) -> bool | None:
        return needs(config, name)

    def aot(self) -> Mapping[str, QuantizeKvConfig]:
        """As `quantized_attention`."""
        fp8 = {"qk": "fp8", "qk_quant_gran": "per_64", "quantizer": ""}
        fp4 = {"qk": "nvfp4", "pv": "nvfp4", "qk_quant_gran": "per_16", "quantizer": ""}
        fp4 |= {"pv_accum_dtype": "fp32", "smooth_q": True}
        return {
            f"{codes}, d {dim}": QuantizeKvConfig(dim, **formats)
            for codes, formats in (
                ("INT8 keys, FP8 values", {}),
                ("FP8 keys, FP8 values", fp8),
                ("FP4, keys without their mean, too", fp4),
            )
            for dim in (128, 64)
        }

    def aot_for(self, arch: str) -> Mapping[str, QuantizeKvConfig]:
        found = self.aot().items()
        return {label: config for label, config in found if self.serves(config, arch)}


QUANTIZE_KV = QuantizeKv()
_op = QUANTIZE_KV.overload


def place(name: str, tensor: Tensor, one: Any) -> Tensor:
    """The part of a tensor of `CODES` that belongs to one of the packed sequences."""
    if name in ("k_codes", "k_smooth"):
        return tensor[:, :, one.rows]
    if name in ("v_scale", "km", "vm"):
        return tensor[one.number : one.number + 1]
    return tensor[:, :, one.tiles]


def _write(outputs: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        if tensor.dtype == torch.float8_e4m3fn:
            tensor, source = tensor.view(torch.uint8), found[name].view(torch.uint8)
        else:
            source = found[name]
        tensor.copy_(source)


def check_codes(config: QuantizeKvConfig, given: Mapping[str, Tensor | None]) -> None:
    """Check what the tables of both operators cannot say: which optional tensors are there, and how
    many tiles and sequences: ValueError."""
    for name, tensor in given.items():
        needed = needs(config, name)
        if needed is True and tensor is None:
            raise ValueError(f"{name}: got None, the configuration needs it")
        if needed is False and tensor is not None:
            raise ValueError(f"{name}: got a tensor, the configuration has none")
    codes, ends = given["k_codes"], given["cu_seqlens_k"]
    sequences = None
    if config.is_varlen:
        check_count("cu_seqlens_k", ends)
        sequences = len(ends) - 1
        if codes.shape[0] != 1:
            raise ValueError(f"k_codes: got {codes.shape[0]} batches, packed sequences need one")
    tiles = num_blocks(codes.shape[2], config.tiles.block_k, sequences)
    if given["k_scale"].shape[2] != tiles:
        raise ValueError(
            f"k_scale: got {given['k_scale'].shape[2]} tiles, {codes.shape[2]} keys need {tiles}"
        )
    rows = codes.shape[0] if sequences is None else sequences
    for name in ("v_scale", "km", "vm"):
        tensor = given.get(name)
        if tensor is not None and tensor.shape[0] != rows:
            raise ValueError(f"{name}: got {tensor.shape[0]} rows, {rows} sequences need {rows}")


def quantize_kv(
    k: Tensor,
    v: Tensor,
    *,
    tensor_layout: str = "HND",
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
) -> QuantizedKV:
    """Code keys and values once, for any number of calls of `quantized_attention`.

    Args:
        k, v: [B, Hk, S, d] ("HND") or [B, S, Hk, d] ("NHD"), packed sequences [S, Hk, d]; bfloat16,
            float16, or float32. d is at most 256, channels are contiguous.
        tensor_layout: "HND" or "NHD".
        cu_seqlens_k: [N + 1] int32 ends of packed sequences.
        qk, pv, qk_quant_gran, geometry, quantizer, pv_accum_dtype, smooth_k, smooth_v, smooth_q,
            km_scope: as in `quantized_attention`.

    Returns:
        The codes with all that they mean.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    check_layout(tensor_layout)
    for name, tensor in (("k", k), ("v", v)):
        check_is_tensor(name, tensor)
        check_rank(name, tensor, cu_seqlens_k is not None)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        QUANTIZE_KV.check_no_gradients(k, v)
    given = (
        qk, pv, qk_quant_gran, geometry, quantizer, pv_accum_dtype, smooth_k, smooth_v, smooth_q,
        km_scope,
    )  # fmt: skip
    identity = quantize_kv_runner_id(
        index(k.shape[-1]), _name(k.dtype), cu_seqlens_k is not None, *given
    )
    return encode(
        heads_first(k, tensor_layout), heads_first(v, tensor_layout), cu_seqlens_k, identity
    )


def encode(k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, identity: int) -> QuantizedKV:
    """`quantize_kv` of keys and values [b, Hk, S, d] by the id of its configuration."""
    config = config_of(QUANTIZE_KV, identity)
    if is_set("host_codes") and k.is_cuda:
        ends = None if cu_seqlens_k is None else cu_seqlens_k.cpu()
        found = encode(k.cpu(), v.cpu(), ends, identity)
        moved = (x if x is None else x.to(k.device) for x in found.codes.values())
        return QuantizedKV(config, cu_seqlens_k, *moved)
    check_device(QUANTIZE_KV, identity, k.device)
    k, v = aligned(k), aligned(v)
    if cu_seqlens_k is not None:
        check_is_tensor("cu_seqlens_k", cu_seqlens_k)
    batch, heads, rows = k.shape[:3]
    sequences = None if cu_seqlens_k is None else max(cu_seqlens_k.shape[0] - 1, 0)
    sizes = {
        "b": batch,
        "Hk": heads,
        "S": rows,
        "Gk": num_blocks(rows, config.tiles.block_k, sequences),
        "N": batch if sequences is None else sequences,
    }
    dims = values(config)
    outputs = [
        empty(arg, dims, sizes, k.device) if needs(config, arg.name) in (None, True) else None
        for arg in tensors_of(QUANTIZE_KV_ARGS)
        if arg.name in CODES
    ]
    if is_set("serial_heads"):
        for head in range(heads):
            of_head = [one_head(x, head) for x in (k, v, *outputs)]
            _op(*of_head[:5], identity, *of_head[5:], cu_seqlens_k)
    else:
        _op(k, v, *outputs[:3], identity, *outputs[3:], cu_seqlens_k)
    return QuantizedKV(config, cu_seqlens_k, *outputs)


def one_head(x: Tensor | None, head: int | None) -> Tensor | None:
    """The part of a tensor [b, H, ..] that belongs to a head; all of it without one."""
    return x if x is None or head is None else x[:, head : head + 1]


@torch.compiler.assume_constant_result
def quantize_kv_runner_id(head_dim: int, dtype: str, is_varlen: bool = False, *options: Any) -> int:
    """Id of a configuration, what `torch.ops.dsv4.quantize_kv` takes.

    Args:
        head_dim: channels of a head.
        dtype: of keys and values.
        is_varlen: whether sequences are packed.
        options: `qk`, `pv`, `qk_quant_gran`, `geometry`, `quantizer`, `pv_accum_dtype`, `smooth_k`,
            `smooth_v`, `smooth_q`, `km_scope`, in this order; None or nothing for defaults.
    """
    found = complete(dict(zip(FORMAT_OPTIONS, options)))
    return QUANTIZE_KV.runner_id(
        head_dim, dtype, *(found[name] for name in FORMAT_OPTIONS), is_varlen
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
