"""`sparse_fmha_with_swa`: the attention of every DeepSeek-V4 layer, as function and operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.args import ARGS, sizes
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention import checks, launch, torch_path
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_flag
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.ops.runtime.launch import Launch
from dsv4.ops.runtime.state import State, smallest_call
from dsv4.quoting import quoted

# What the released models ask for: Flash has 64 heads, Pro 128, and the ranks of a tensor-parallel
# engine hold a part of them.
MODEL_HEADS = (128, 64, 32, 16, 8)
MODEL_HEAD_DIM = 512
MODEL_WINDOW = 128

# Stands for "any": compiled code takes the number of compressed rows at run time.
_ANY_TOP_K = 1024
# The same for "any, but fixed".
_ANY_FIXED_SPLITS = 1


class SparseFmha(KernelOp):
    """Attention over compressed entries and a sliding window of keys, with a sink."""

    name = "sparse_fmha_with_swa"
    config = FmhaConfig
    args = ARGS
    kernels: ClassVar = {
        "sm_90a": "dsv4.kernels.attention.sm90.fmha",
        "sm_100a": "dsv4.kernels.attention.sm100.fmha",
        "sm_103a": "dsv4.kernels.attention.sm100.fmha",
    }

    def values(self, config: FmhaConfig) -> Mapping[str, int]:
        return sizes(config)

    def compiled_config(self, config: FmhaConfig, arch: str) -> FmhaConfig:
        """Blank what the kernel takes at run time.

        A growing context, another number of splits or, without a causal mask, another window does
        not compile again. Of a fixed number of splits remains that it is fixed, where the kernel is
        otherwise one of two, by the launch's size.
        """
        has_two = launch_plan.has_two_kernels(config.num_query_heads, arch)
        is_fixed = config.num_splits is not None and has_two
        return replace(
            config,
            top_k=_ANY_TOP_K,
            num_splits=_ANY_FIXED_SPLITS if is_fixed else None,
            softmax_scale=config.scale,
            sliding_window=config.sliding_window if config.is_causal else 0,
        )

    def plan(self, config: FmhaConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Number of KV splits, and of SMs."""
        size = (sizes["T"], sizes["top_k"], sizes["W"])
        splits = launch_plan.num_splits(config, *size, device.num_sms, device.arch)
        return splits, device.num_sms

    def workspace_size(self, config: FmhaConfig, sizes: Sizes, scalars: tuple[int, ...]) -> int:
        splits = scalars[0]
        return 0 if splits == 1 else launch_plan.workspace_size(config, sizes["T"], splits)

    def max_workspace_size(self, config: FmhaConfig, rows: int, device: Device) -> int:
        return launch_plan.max_workspace_size(config, rows, device.num_sms)

    def check_sizes(self, config: FmhaConfig, q: Tensor, compressed_kv: Tensor, *_: object) -> None:
        checks.check_top_k(config, compressed_kv)

    def check_values(self, config: FmhaConfig, *tensors: Tensor | None) -> None:
        checks.check_requests(config, swa_kv=tensors[2], request_ids=tensors[5])

    def torch(self, config: FmhaConfig, *tensors: Tensor | None) -> None:
        torch_path.sparse_fmha(config, *tensors)

    def make_launch(self, state: State) -> Launch:
        launch_plan.check_splits(state.config)
        return launch.make_launch(state)

    def probes(
        self, config: FmhaConfig, target: Device, device: torch.device
    ) -> Iterator[tuple[Tensor | int, ...]]:
        """A padding token without and with splits: a configuration has a kernel for each."""
        for num_splits in (1, 2):
            call = smallest_call(self, config, (num_splits, target.num_sms), device)
            call[5].fill_(-1)
            yield call

    def aot(self) -> Mapping[str, FmhaConfig]:
        """What Flash and Pro need on one GPU and under tensor parallelism.

        Decoding reads the window as a ring, prefill and drafts read it causally.
        """
        return {
            f"{heads} heads, {window}": FmhaConfig(
                head_dim=MODEL_HEAD_DIM,
                num_query_heads=heads,
                sliding_window=MODEL_WINDOW,
                top_k=_ANY_TOP_K,
                is_causal=window == "causal",
                sink_mode="softmax",
            )
            for heads in MODEL_HEADS
            for window in ("ring", "causal")
        }

    def warmup_hint(self, config: FmhaConfig) -> str:
        """The Python expression that warms up `config`."""
        optional = "".join(
            f", {name}={getattr(config, name)!r}"
            for name in ("is_causal", "sink_mode", "softmax_scale", "num_splits")
        )
        return (
            "call the operator once with tensors of these sizes, or "
            f"dsv4.ops.warmup(dsv4.ops.fmha_runner_id({config.head_dim}, "
            f"{config.num_query_heads}, {config.sliding_window}, {config.top_k}{optional}), "
            "max_tokens)"
        )


SPARSE_FMHA = SparseFmha()
_op = SPARSE_FMHA.overload


def sparse_fmha_with_swa(
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    *,
    sink_mode: str,
    compressed_lens: Tensor | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T tokens over their own compressed keys and their request's window of keys.

    Keys and values are the same latent rows. The backend follows the device of the tensors.

    With lse_c, o_c (lse_w, o_w) the log-sum-exp and the output of the compressed (window) branch:

    - "swa_gate": o = (e^lse_c o_c + e^sink e^lse_w o_w) / (e^lse_c + e^sink e^lse_w), and lse is
      the logarithm of that denominator; beside an empty branch the sink counts as 0.
    - "softmax", what released DeepSeek-V4 checkpoints mean (technical report, section 2.3.3):
      o = (e^lse_c o_c + e^lse_w o_w) / (e^lse_c + e^lse_w + e^sink), and lse leaves the sink out.

    A token without any key gets o = 0 and lse = -inf. Rows past a length are never read into the
    result, whatever they hold.

    Args:
        q: [T, n_h, head_dim] bfloat16; or float32, computed without rounding, on GPUs too by the
            torch implementation.
        compressed_kv: [T, top_k, head_dim], dtype of q; top_k may be 0.
        swa_kv: [batch, W, head_dim], dtype of q.
        swa_lens: [batch] int32, rows in use, clamped to 0..W.
        sink_logits: [n_h] float32, natural-log domain, not scaled by `softmax_scale`.
        request_ids: [T] int32, row of swa_kv that a token uses; -1 marks a padding token (o = 0).
        sink_mode: "softmax" or "swa_gate"; no default, because the two differ silently.
        compressed_lens: [T] int32, rows of compressed_kv in use, clamped to 0..top_k; default all.
        is_causal: False: a token sees the first swa_lens rows of its request, in any order. True:
            rows are chronological, the tokens of a request consecutive, and the j-th of c tokens
            sits at p = swa_len - c + j and sees p - sliding_window < i <= p.
        sliding_window: default W.
        softmax_scale: factor on q . k; default head_dim ** -0.5.
        num_splits: KV splits of the GPU kernel; default chosen by size. A fixed number makes a
            token's result independent of the rest of the batch, bit for bit.
        out: [T, n_h, head_dim] to write into; default a new tensor.
        return_lse: also return lse [T, n_h] float32.

    Returns:
        o [T, n_h, head_dim] in the dtype of q, or (o, lse).

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            SPARSE_FMHA.check_no_gradients(*tensors, out)
        tokens, heads, head_dim = q.shape
        # index(): under torch.compile sizes may be symbolic, and a runner's are constants.
        identity = fmha_runner_id(
            index(head_dim),
            index(heads),
            index(swa_kv.shape[1] if sliding_window is None else sliding_window),
            fmha_capacity(compressed_kv.shape[1]),
            is_causal=is_causal,
            sink_mode=sink_mode,
            softmax_scale=softmax_scale,
            num_splits=None if num_splits is None else index(num_splits),
        )
        if out is None:
            out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
        lse = None
        if return_lse:
            lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
        _op(*tensors, out, identity, compressed_lens, lse)
    except Exception:
        SPARSE_FMHA.explain(*tensors, out, compressed_lens)
        _check_integer("sliding_window", sliding_window)
        _check_integer("num_splits", num_splits)
        check_flag("return_lse", return_lse)
        raise
    return out if lse is None else (out, lse)


def _check_integer(name: str, value: object) -> None:
    if value is None:
        return
    try:
        index(value)
    except TypeError:
        raise TypeError(f"{name}: got {quoted(value)}, needs an integer or None") from None


@torch.compiler.assume_constant_result
def fmha_runner_id(
    head_dim: int,
    num_query_heads: int,
    sliding_window: int,
    top_k: int,
    *,
    is_causal: bool = False,
    sink_mode: str = "swa_gate",
    softmax_scale: float | None = None,
    num_splits: int | None = None,
) -> int:
    """Id of the runner for a configuration: what `torch.ops.dsv4.sparse_fmha_with_swa` takes.

    The same configuration gives the same id, in every process. `top_k` is the most compressed rows
    per token that calls will bring; other arguments as in `sparse_fmha_with_swa`. Compiles nothing.
    """
    return SPARSE_FMHA.runner_id(
        head_dim,
        num_query_heads,
        sliding_window,
        top_k,
        is_causal,
        sink_mode,
        softmax_scale,
        num_splits,
    )


def fmha_capacity(top_k: int) -> int:
    """Capacity of the runner that `sparse_fmha_with_swa` takes for `top_k` rows per token.

    A power of two, so that a growing context keeps its runner.

    Found by comparing, so that torch.compile guards on the range of a dynamic size, not its value.
    """
    if top_k == 0:
        return 0
    capacity = 64
    while capacity < top_k:
        capacity *= 2
    return capacity
