"""Which implementation of `sparse_fmha_with_swa` a CUDA device gets."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention import checks, torch_path
from dsv4.ops.runtime.registry import ARCHITECTURES

# launch(q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o, compressed_lens, lse,
# workspace) -> None, with unchecked arguments: it must refuse by itself whatever it cannot run.
Launch = Callable[..., None]


@dataclass(frozen=True)
class Launcher:
    """One implementation.

    Attributes:
        bind: `bind(config, device) -> Launch`.
        warmup: `warmup(config, max_tokens, device) -> None`.
        passes_on: whether its launches serve every call of their configuration: they give tensors
            of another device, or of float32, to `launch_for`.
    """

    bind: Callable[[FmhaConfig, torch.device], Launch]
    warmup: Callable[[FmhaConfig, int, torch.device], None]
    passes_on: bool = False


_LAUNCHERS: dict[int, Launcher] = {}  # by device index


def launcher(index: int | None) -> Launcher:
    """Launcher of the CUDA device `index` (None: the current one), chosen once; without a kernel
    it is the torch implementation."""
    known = _LAUNCHERS.get(index)
    if known is None:
        index = torch.cuda.current_device() if index is None else index
        if index not in _LAUNCHERS:
            _LAUNCHERS[index] = _choose(torch.device("cuda", index))
        known = _LAUNCHERS[index]
    return known


def launch_for(config: FmhaConfig, q: Tensor) -> Launch:
    """What runs a configuration's calls with a q of this device and dtype."""
    # Kernels are for bfloat16. A model loaded in float32 is there to be exact, not fast.
    bind = bind_torch if q.dtype == torch.float32 else launcher(q.get_device()).bind
    return bind(config, q.device)


def _choose(device: torch.device) -> Launcher:
    capability = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if capability not in ARCHITECTURES:
        return _fallback(f"there is no kernel for {name} (sm_{capability[0]}{capability[1]})")
    try:
        # What compiles and loads kernels takes seconds to import: only once a GPU is really used.
        importlib.import_module("cutlass")
    except ImportError as error:
        return _fallback(f"the kernels for {name} cannot be loaded ({error})")
    from dsv4.ops.attention import launch as fmha_cuda

    return Launcher(fmha_cuda.bind, fmha_cuda.warmup, passes_on=True)


def _fallback(reason: str) -> Launcher:
    warnings.warn(
        f"sparse_fmha_with_swa: {reason}; the slower torch implementation is used",
        RuntimeWarning,
        stacklevel=2,
    )
    return Launcher(bind_torch, lambda config, max_tokens, device: None)


def bind_torch(config: FmhaConfig, device: torch.device) -> Launch:
    """The torch implementation, which checks its arguments."""
    return partial(_launch_torch, config)


def _launch_torch(config: FmhaConfig, *tensors: Tensor | None) -> None:
    checks.check_arguments(config, *tensors)
    # The last tensor is the split-KV workspace, which this implementation does not need.
    torch_path.sparse_fmha(config, *tensors[:-1])
