"""Warming up: everything that a first call does, done before it."""

from __future__ import annotations

import torch

from dsv4.ops.runtime.backend import find_kernel
from dsv4.ops.runtime.runner import find_runner


def warmup(runner_id: int, max_tokens: int, device: torch.device | str | None = None) -> None:
    """Compile or load a runner and allocate its workspace, as a CUDA graph capture requires.

    One call of the operator with tensors of the captured sizes does the same, for these sizes.

    Args:
        runner_id: of any operator, from `fmha_runner_id` for attention.
        max_tokens: largest T that calls will bring.
        device: default the current CUDA device, or the CPU (nothing to do) where there is none.
    """
    op, config = find_runner(runner_id)
    if max_tokens < 0:
        raise ValueError(f"max_tokens: must not be negative, got {max_tokens}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found = find_kernel(op.name, op.kernels, index) if op.has_kernel(config) else None
        if found is not None and op.serves(config, found.arch):
            op.warmup(config, max_tokens, torch.device("cuda", index))
