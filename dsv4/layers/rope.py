"""Rotary position embedding: interleaved pairs on the last dimensions, two bases, YaRN."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig, RopeScaling

MIN_TABLE = 4096  # positions of the smallest table


@dataclass(frozen=True)
class Rope:
    """The rotation of one kind of layer.

    Pair i of the last `dim` channels turns by position * f_i, f_i = theta^(-2i / dim), blended by
    YaRN if `scaling` is given. YaRN changes no magnitude: neither the rotation nor the softmax
    scale knows of it.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    @classmethod
    def of_layer(cls, config: ModelConfig, spec: LayerSpec) -> Rope:
        """Return the rotation of a layer: a compressor changes the base of everything in it."""
        if spec.ratio:
            return cls(config.compress_rope_theta, config.qk_rope_head_dim, config.rope_scaling)
        return cls(config.rope_theta, config.qk_rope_head_dim)

    def at(self, positions: Tensor) -> Tensor:
        """Return e^(i * angle) of integer positions [...]: [..., dim / 2] complex64."""
        angles = positions[..., None].float() * _frequencies(self, positions.device)
        return torch.polar(torch.ones_like(angles), angles)

    def table(self, positions: int, device: torch.device) -> Tensor:
        """Return cosines, then sines, of at least so many positions: [R, dim] fp32.

        Made once per power of two and kept: captured graphs hold its address.
        """
        return _table(self, max(MIN_TABLE, 1 << (positions - 1).bit_length()), device)


@functools.cache
def _table(rope: Rope, length: int, device: torch.device) -> Tensor:
    # Outlives the inference mode that it may be made in.
    with torch.inference_mode(False):
        rotation = rope.at(torch.arange(length, device=device))
        return torch.cat((rotation.real, rotation.imag), -1)


@functools.lru_cache(maxsize=64)
def _frequencies(rope: Rope, device: torch.device) -> Tensor:
    """[dim / 2] fp32 on `device`. Kept, so that a decode step copies nothing from the host."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling is not None:
        keep = 1 - _yarn_ramp(rope, rope.scaling)
        frequencies = frequencies * keep + frequencies / rope.scaling.factor * (1 - keep)
    return frequencies.to(device)


def _yarn_ramp(rope: Rope, scaling: RopeScaling) -> Tensor:
    """How far each pair is interpolated: 0 for pairs that turn often enough to be left alone."""

    def pair_turning(times: float) -> float:
        period = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return rope.dim * math.log(period) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), rope.dim - 1)
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu")
    # Equal bounds would divide 0 by 0.
    return ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
