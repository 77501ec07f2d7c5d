"""Configuration that an attention kernel is compiled for.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.quoting import quoted

SINK_MODES = ("swa_gate", "softmax")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class FmhaConfig:
    """Identity of a `sparse_fmha_with_swa` runner.

    `top_k` is the row capacity the caller promises at most; kernels take the real capacity as a
    runtime size, so that a growing context does not recompile. `softmax_scale=None` means
    `head_dim ** -0.5`; `num_splits=None` lets the launcher choose the number of KV splits from the
    size of the launch.
    """

    head_dim: int
    num_query_heads: int
    sliding_window: int
    top_k: int
    is_causal: bool = False
    sink_mode: str = "swa_gate"
    softmax_scale: float | None = None
    num_splits: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("head_dim", "num_query_heads"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("sliding_window", "top_k"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.sink_mode not in SINK_MODES:
            raise ValueError(f"sink_mode must be one of {SINK_MODES}, got {quoted(self.sink_mode)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {quoted(self.dtype)}")
        if self.num_splits is not None and self.num_splits < 1:
            raise ValueError(f"num_splits must be at least 1 or None, got {self.num_splits}")

    @property
    def scale(self) -> float:
        """Factor applied to q . k before the softmax."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


def check_kernel_config(
    config: FmhaConfig, operand_types: tuple[type, ...], accumulator_types: tuple[type, ...]
) -> None:
    """What the GPU kernels refuse beyond `FmhaConfig`'s own checks; types are told by name.

    Args:
        operand_types: of q, KV and o.
        accumulator_types: of both products.
    """
    if any(_name(kind) != "BFloat16" for kind in operand_types):
        raise ValueError(f"q, KV and o must be BFloat16, got {_names(operand_types)}")
    if any(_name(kind) != "Float32" for kind in accumulator_types):
        raise ValueError(f"accumulators must be Float32, got {_names(accumulator_types)}")
    if config.scale <= 0:
        raise ValueError(f"softmax_scale must be positive, got {config.scale}")


def _name(kind: type) -> str:
    return getattr(kind, "__name__", str(kind))


def _names(kinds: tuple[type, ...]) -> str:
    return ", ".join(map(_name, kinds))
