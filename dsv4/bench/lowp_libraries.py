"""Peers of quantised attention that come as libraries: FlashAttention 3 of vLLM's wheel, cuDNN's
FP8 attention, SageAttention's kernel for Hopper.

Each takes codes that are made before the time is taken.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.lowp.config import QuantizedAttentionConfig
from dsv4.ops import quantize_kv
from dsv4.ops.quantized_attention.codes import encode_queries

Call = Callable[[], Tensor]  # out [B, Hq, L, d]
E4M3_MAX = 448.0
SCALE_S, SCALE_O = 448.0, 64.0  # of cuDNN's weights and outputs before they are FP8


def flash3(library: Path, is_fp8: bool, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    """FlashAttention 3 of vLLM's `_vllm_fa3_C.abi3.so`, which has packed sequences alone.

    Args:
        q, k, v: [B, H, L, d] bfloat16.
        is_fp8: whether they are coded in e4m3, a scale for each sequence and head of keys.
    """
    torch.ops.load_library(library)
    op = torch.ops._vllm_fa3_C.fwd
    batch, rows, dim = q.shape[0], q.shape[2], q.shape[3]
    out = q.new_empty(batch * rows, q.shape[1], dim)
    heads, scales = k.shape[1], [None] * 3
    packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v)]
    if is_fp8:
        coded = [by_group(x, heads) for x in (q, k, v)]
        packed = [codes.transpose(1, 2).flatten(0, 1).contiguous() for codes, _ in coded]
        scales = [scale for _, scale in coded]
    ends = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * rows

    def call() -> Tensor:
        # In vLLM's order: k_new, v_new and q_v; sequences' ends; what pages and rotary tables are;
        # no window, no cap; one split.
        found = op(
            *packed, None, None, None, out, ends, ends, None, None, None, rows, rows,
            *([None] * 6), *scales, dim**-0.5, is_causal, -1, -1, 0.0, True, None, 1, None, 0,
            None, 1, 0, None,
        )  # fmt: skip
        return found[0].unflatten(0, (batch, rows)).transpose(1, 2)

    return call


def by_group(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """e4m3 of [B, H, L, d], and a scale for each sequence and group of heads [B, groups]."""
    wide = x.unflatten(1, (groups, -1)).float()
    scale = wide.abs().amax((2, 3, 4)) / E4M3_MAX
    return (wide / scale[:, :, None, None, None]).flatten(1, 2).to(torch.float8_e4m3fn), scale


def cudnn_fp8(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    """cuDNN's FP8 attention by its frontend; a scale for each tensor, outputs in e4m3."""
    cudnn: Any = __import__("cudnn")
    kind, batch, heads, rows, dim = cudnn.data_type, *q.shape
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=kind.FP8_E4M3, intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT, handle=handle,
    )  # fmt: skip
    buffers: dict[Any, Tensor] = {}

    def number(name: str, value: float | Tensor) -> Any:
        tensor = torch.as_tensor(value, dtype=torch.float32, device=q.device).reshape(1, 1, 1, 1)
        node = graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=kind.FLOAT)
        buffers[node] = tensor
        return node

    operands = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        scale = x.abs().amax().float() / E4M3_MAX
        codes = (x.transpose(1, 2) / scale).to(torch.float8_e4m3fn).contiguous().transpose(1, 2)
        node = graph.tensor(
            name=name, dim=list(x.shape), stride=list(codes.stride()), data_type=kind.FP8_E4M3
        )
        operands[name], buffers[node] = node, codes
        operands[f"descale_{name}"] = number(f"descale_{name}", scale)
    operands["descale_s"] = number("descale_s", 1 / SCALE_S)
    operands["scale_s"] = number("scale_s", SCALE_S)
    operands["scale_o"] = number("scale_o", SCALE_O)
    found, *_, of_weights, of_out = graph.sdpa_fp8(
        **operands, is_inference=True, attn_scale=dim**-0.5, use_causal_mask=is_causal, name="sdpa"
    )
    shape = batch, rows, heads, dim
    out = torch.empty(shape, device=q.device, dtype=torch.float8_e4m3fn).transpose(1, 2)
    found.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    found.set_data_type(kind.FP8_E4M3)
    buffers[found] = out
    for node in (of_weights, of_out):
        node.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kind.FLOAT)
        buffers[node] = torch.zeros(1, 1, 1, 1, device=q.device)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.empty(size, device=q.device, dtype=torch.uint8)

    def call() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=handle, stream=stream)
        graph.execute(buffers, workspace, handle=handle)
        return out

    return call


def sage_kernel(library: Path, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    """SageAttention's kernel for Hopper, of a library that `scripts/sage_parity library` builds, on
    our codes, which are equal to its own: int8 per thread, FP8 values, fp32+fp32."""
    launch = _sage_launch(library)
    if q.shape[-1] not in (64, 128):
        raise ValueError(f"q: got {q.shape[-1]} channels, the kernel has 64 or 128")
    batch, heads, rows, dim = q.shape
    config, codes = QuantizedAttentionConfig(dim), quantize_kv(k, v).codes
    # One sequence at a time: the torch code holds several copies.
    of_q = [encode_queries(config, q[i : i + 1]) for i in range(batch)]
    values = codes["v_codes"].view(torch.uint8).transpose(2, 3).flatten(3).contiguous()
    operands = (
        torch.cat([x[0] for x in of_q]), codes["k_codes"], values, torch.cat([x[1] for x in of_q]),
        codes["k_scale"], codes["v_scale"], torch.empty_like(q),
    )  # fmt: skip

    def call() -> Tensor:
        status = launch(
            dim, is_causal, *(x.data_ptr() for x in operands), batch, heads, k.shape[1], rows,
            k.shape[2], dim**-0.5, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"SageAttention's launch failed: CUDA error {status}")
        return operands[-1]

    return call


@functools.cache
def _sage_launch(library: Path) -> Any:
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)  # which the library encodes tensor maps with
    launch = ctypes.CDLL(str(library)).sage
    integers, pointers = [ctypes.c_int], [ctypes.c_void_p]
    launch.argtypes = integers * 2 + pointers * 7 + integers * 5 + [ctypes.c_float] + pointers
    return launch
