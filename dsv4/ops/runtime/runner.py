"""Runner ids: the integers by which `torch.ops.dsv4.sparse_fmha_with_swa` names a configuration."""

from __future__ import annotations

import hashlib
from dataclasses import astuple

import torch

from dsv4.kernels.attention.config import FmhaConfig

_CONFIGS: dict[int, FmhaConfig] = {}
_IDS: dict[tuple, int] = {}


def runner_id(*fields) -> int:
    """Id of `FmhaConfig(*fields)`.

    A hash of the configuration: the same in every process, so that a graph which holds the id as a
    constant stays valid wherever the configuration has been registered.
    """
    known = _IDS.get(fields)
    if known is not None:
        return known
    config = FmhaConfig(*fields)
    digest = hashlib.sha256(repr(astuple(config)).encode()).digest()
    identity = int.from_bytes(digest[:7], "big")
    # The first object stays: launchers keep state by its identity.
    _CONFIGS.setdefault(identity, config)
    _IDS[fields] = identity
    return identity


def runner_config(identity: int) -> FmhaConfig:
    """Configuration behind an id; ValueError when `fmha_runner_id` never gave it."""
    try:
        return _CONFIGS[identity]
    except KeyError:
        raise ValueError(
            f"runner_id: {identity} names no runner of this process; "
            "get one from dsv4.ops.fmha_runner_id(...)"
        ) from None


def warmup_call(config: FmhaConfig) -> str:
    """The Python expression that warms up `config`, for error messages."""
    optional = "".join(
        f", {name}={getattr(config, name)!r}"
        for name in ("is_causal", "sink_mode", "softmax_scale", "num_splits")
    )
    return (
        f"dsv4.ops.warmup(dsv4.ops.fmha_runner_id({config.head_dim}, {config.num_query_heads}, "
        f"{config.sliding_window}, {config.top_k}{optional}), max_tokens)"
    )


def refuse_cold_capture(config: FmhaConfig) -> None:
    """Raise when the current stream is being captured: a cold runner cannot start then.

    Compiling, loading a module and allocating a workspace are all illegal during a capture, and
    would end in an opaque CUDA error or an empty graph.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "sparse_fmha_with_swa: this runner is cold and a CUDA graph is being captured; "
            f"call {warmup_call(config)} before the capture"
        )
