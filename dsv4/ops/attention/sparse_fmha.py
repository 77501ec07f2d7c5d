"""`sparse_fmha_with_swa`: the attention of every DeepSeek-V4 layer, as function and operator."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor, is_grad_enabled

from dsv4.ops.attention import checks, torch_path
from dsv4.ops.attention.backend import Launch, launch_for, launcher
from dsv4.ops.runtime.library import register
from dsv4.ops.runtime.runner import runner_config, runner_id

# `workspace` has the size that `fmha_splits.workspace_size` says, float32, zeros when new; launches
# that may run at the same time need one each.
SCHEMA = (
    "sparse_fmha_with_swa(Tensor q, Tensor compressed_kv, Tensor swa_kv, Tensor swa_lens, "
    "Tensor sink_logits, Tensor request_ids, Tensor(a!) o, int runner_id, "
    "Tensor? compressed_lens=None, Tensor(b!)? lse=None, Tensor(c!)? workspace=None) -> ()"
)


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
    checks.check_ranks(q, compressed_kv, swa_kv)
    if torch.is_grad_enabled():
        checks.check_no_grad(q, compressed_kv, swa_kv, sink_logits, out)
    tokens, heads, head_dim = q.shape
    # index(): under torch.compile sizes may be symbolic, and a runner's are constants.
    identity = fmha_runner_id(
        index(head_dim),
        index(heads),
        index(swa_kv.shape[1] if sliding_window is None else sliding_window),
        _bucket(compressed_kv.shape[1]),
        is_causal=is_causal,
        sink_mode=sink_mode,
        softmax_scale=softmax_scale,
        num_splits=None if num_splits is None else index(num_splits),
    )
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    _op(
        q,
        compressed_kv,
        swa_kv,
        swa_lens,
        sink_logits,
        request_ids,
        out,
        identity,
        compressed_lens,
        lse,
    )
    return out if lse is None else (out, lse)


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
    return runner_id(
        head_dim,
        num_query_heads,
        sliding_window,
        top_k,
        is_causal,
        sink_mode,
        softmax_scale,
        num_splits,
    )


def warmup(runner_id: int, max_tokens: int, device: torch.device | str | None = None) -> None:
    """Compile or load a runner and allocate its workspace, as a CUDA graph capture requires.

    Args:
        runner_id: from `fmha_runner_id`.
        max_tokens: largest T that calls will bring.
        device: default the current CUDA device, or the CPU (nothing to do) where there is none.
    """
    config = runner_config(runner_id)
    if max_tokens < 0:
        raise ValueError(f"max_tokens: must not be negative, got {max_tokens}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        launcher(device.index).warmup(config, max_tokens, device)


def _bucket(top_k: int) -> int:
    """Capacity promised for `top_k` rows, a power of two: a growing context keeps its runner.

    Found by comparing, so that torch.compile guards on the range of a dynamic size, not its value.
    """
    if top_k == 0:
        return 0
    capacity = 64
    while capacity < top_k:
        capacity *= 2
    return capacity


def _cpu(
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    o: Tensor,
    runner_id: int,
    compressed_lens: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    config = runner_config(runner_id)
    tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o)
    checks.check_arguments(config, *tensors, compressed_lens, lse, workspace)
    checks.check_values(config, swa_kv, request_ids)
    torch_path.sparse_fmha(config, *tensors, compressed_lens, lse)


def _cuda(
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    o: Tensor,
    runner_id: int,
    compressed_lens: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    if is_grad_enabled():
        checks.check_no_grad(q, compressed_kv, swa_kv, sink_logits, o)
    launch = _LAUNCHES.get(runner_id)
    if launch is None:
        launch = _bind(runner_id, q)
    try:
        launch(
            q,
            compressed_kv,
            swa_kv,
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
        )
    except Exception:
        # Compiled kernels check their arguments for free but name them tersely; checking here
        # before every launch would cost more than the launch.
        inputs = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids)
        tensors = (*inputs, o, compressed_lens, lse, workspace)
        checks.check_arguments(runner_config(runner_id), *tensors)
        checks.check_kernel_layout(*tensors)
        raise


# By runner id; launches that pass on what is not theirs, so that nothing else need be looked up.
_LAUNCHES: dict[int, Launch] = {}


def _bind(runner_id: int, q: Tensor) -> Launch:
    """What runs a runner's calls with tensors like q; remembered where it serves all others."""
    launch = launch_for(runner_config(runner_id), q)
    if q.dtype != torch.float32 and launcher(q.get_device()).passes_on:
        _LAUNCHES[runner_id] = launch
    return launch


def _fake(
    q: Tensor,
    compressed_kv: Tensor,
    swa_kv: Tensor,
    swa_lens: Tensor,
    sink_logits: Tensor,
    request_ids: Tensor,
    o: Tensor,
    runner_id: int,
    compressed_lens: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    config = runner_config(runner_id)
    tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o)
    checks.check_arguments(config, *tensors, compressed_lens, lse, workspace)


_op = register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)
