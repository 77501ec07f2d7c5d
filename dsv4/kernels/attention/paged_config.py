"""Configuration that a paged attention kernel is compiled for.

Imports neither cutlass nor torch, so that every layer may use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Integral, Real

from dsv4.kernels.attention.config import SINK_MODES
from dsv4.kernels.gemm.config import K_BLOCK
from dsv4.kernels.kit.kv_entry import KV_FORMATS, ROPE_DIM, Fp8Entry, row_elements
from dsv4.quoting import quoted

MAX_TOP_K = 8192  # index columns of a token in a pool
COMPUTE = ("bf16", "fp8", "fp8x2")
TERMS = {"fp8": 1, "fp8x2": 2}  # e4m3 numbers of a query, or a weight, where codes are multiplied
_INTEGERS = ("head_dim", "num_query_heads", "sliding_window", "ratio", "num_splits", "rope_dim")


@dataclass(frozen=True)
class PagedFmhaConfig:
    """Identity of a `sparse_fmha_paged` runner.

    Attributes:
        head_dim, num_query_heads: of q.
        kv_format: of both pools: "bf16" rows, "fp32" rows (torch implementation only), or "fp8"
            entries (`dsv4.kernels.kit.kv_entry`).
        sink_mode: "softmax" or "swa_gate".
        softmax_scale: factor on q . k; None: head_dim ** -0.5.
        sliding_window: positions that a token sees of a window that a table addresses.
        ratio: positions per compressed entry of a table; 0: none.
        num_splits: KV splits of every launch; None: chosen by the size of the launch.
        batch_invariant: whether splits follow from a token's own number of keys alone (`pieces`).
        compute: "bf16"; "fp8" or "fp8x2": products of FP8 codes, in one term or two, of entries
            whose groups share one scale.
        rope_dim: rotated channels, the last ones.
        q_eps: added to a query's mean square, where its squares come beside it; None: they do not.
        rounds_output: whether the output is two e4m3 codes for each bf16 value (`gemm.quantize`).
    """

    head_dim: int
    num_query_heads: int
    kv_format: str = "bf16"
    sink_mode: str = "softmax"
    softmax_scale: float | None = None
    sliding_window: int = 0
    ratio: int = 0
    num_splits: int | None = None
    batch_invariant: bool = False
    compute: str = "bf16"
    rope_dim: int = ROPE_DIM
    q_eps: float | None = None
    rounds_output: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("head_dim", "num_query_heads", "num_splits"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("sliding_window", "ratio"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, known in (
            ("kv_format", KV_FORMATS),
            ("sink_mode", SINK_MODES),
            ("compute", COMPUTE),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {quoted(value)}")
        if self.rope_dim < 0 or self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"rope_dim must be even and in 0..head_dim = {self.head_dim}, got {self.rope_dim}"
            )
        if self.kv_format == "fp8":
            Fp8Entry(self.head_dim, self.rope_dim)
        elif self.compute != "bf16":
            raise ValueError(f"compute {quoted(self.compute)} needs kv_format 'fp8'")
        if self.batch_invariant and self.num_splits is not None:
            raise ValueError("num_splits must be None with batch_invariant")
        if self.q_eps is not None and not 0 <= self.q_eps < inf:
            raise ValueError(f"q_eps must not be negative, got {self.q_eps}")
        if self.rounds_output and self.head_dim % K_BLOCK:
            raise ValueError(
                f"head_dim must be a multiple of {K_BLOCK} where the output is rounded, "
                f"got {self.head_dim}"
            )

    def _check_types(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if name == "num_splits" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: got {quoted(value)}, needs an integer")
        for name in ("softmax_scale", "q_eps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise TypeError(f"{name}: got {quoted(value)}, needs a real number or None")
        for name in ("batch_invariant", "rounds_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}: got {quoted(value)}, needs True or False")

    @property
    def scale(self) -> float:
        """Factor applied to q . k before the softmax."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def row(self) -> int:
        """Last dimension of the pools."""
        return row_elements(self.kv_format, self.head_dim, self.rope_dim)
