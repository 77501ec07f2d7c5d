"""Which kernel serves which GPU architecture, and how to compile it.

A kernel module offers `build(config: FmhaConfig, options: str) -> compiled`; it imports the kernel
compiler, so it is loaded only when something has to be compiled.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import TILED_HEADS

# Compute capability of a device -> architecture its kernels are compiled for.
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

# Architecture -> (name in the cache, module with `build`).
KERNELS = {
    "sm_90a": ("fmha_sm90", "dsv4.kernels.attention.sm90.fmha"),
    "sm_100a": ("fmha", "dsv4.kernels.attention.sm100.fmha"),
    "sm_103a": ("fmha", "dsv4.kernels.attention.sm100.fmha"),
}

# What the released models ask for: Flash has 64 heads, Pro 128, and the ranks of a tensor-parallel
# engine hold a part of them.
MODEL_HEADS = (128, 64, 32, 16, 8)
MODEL_HEAD_DIM = 512
MODEL_WINDOW = 128

# Stands for "any": compiled code takes the number of compressed rows at run time.
_ANY_TOP_K = 1024
# The same for "any, but fixed".
_ANY_FIXED_SPLITS = 1


@dataclass(frozen=True)
class RunnerKey:
    """Identity of one compiled kernel: everything its machine code depends on but its sources."""

    kernel: str
    arch: str
    config: FmhaConfig


def has_two_kernels(heads: int, arch: str) -> bool:
    """Whether the size of a launch decides which kernel serves so many heads."""
    return arch == "sm_90a" and heads in TILED_HEADS


def runner_key(config: FmhaConfig, arch: str) -> RunnerKey:
    """Key of the kernel that serves `config` on `arch`.

    Fields that the kernel takes at run time are blanked: a growing context, another number of
    splits or, without a causal mask, another window does not compile again. Of a fixed number of
    splits remains that it is fixed, where the kernel is otherwise one of two, by the launch's size.

    Raises:
        ValueError: no kernel for `arch`.
    """
    if arch not in KERNELS:
        raise ValueError(f"arch: got {arch!r}, needs one of {', '.join(KERNELS)}")
    is_fixed = config.num_splits is not None and has_two_kernels(config.num_query_heads, arch)
    compiled = replace(
        config,
        top_k=_ANY_TOP_K,
        num_splits=_ANY_FIXED_SPLITS if is_fixed else None,
        softmax_scale=config.scale,
        sliding_window=config.sliding_window if config.is_causal else 0,
    )
    return RunnerKey(KERNELS[arch][0], arch, compiled)


def build(key: RunnerKey, options: str = "") -> Any:
    """Compile the kernel of `key`; the process must target `key.arch`. Needs no GPU."""
    module = importlib.import_module(KERNELS[key.arch][1])
    return module.build(key.config, options)


def model_configurations() -> dict[str, FmhaConfig]:
    """What Flash and Pro need on one GPU and under tensor parallelism, by readable label.

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
