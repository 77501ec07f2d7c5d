"""Exponential noise of the sampler: a pure function of seed, position and candidate."""

from __future__ import annotations

import torch
from torch import Tensor


def _int64(value: int) -> int:
    """Reinterpret 64 bits as signed: torch has no arithmetic on uint64."""
    return value - (1 << 64) if value >> 63 else value


# Constants of SplitMix64 (Steele, Lea, Flood 2014).
_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX_1 = _int64(0xBF58476D1CE4E5B9)
_MIX_2 = _int64(0x94D049BB133111EB)


def exponential(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) noise, [B, C, vocab_size] fp32, for seed [B, 1] and positions [B, C] int64.

    Candidate v of a (seed, position) is output v of the SplitMix64 stream that starts at their
    hash. Noise is positive and finite, so that no quotient by it is NaN, and none of a positive
    probability is 0.
    """
    start = mix(mix(seed) + positions * _GAMMA)
    counters = torch.arange(1, vocab_size + 1, device=seed.device) * _GAMMA
    bits = _shift(mix(start[..., None] + counters), 11)
    # 53 bits rounded to fp32 keep their relative precision near 0, where small noise lets rare
    # tokens win; near 1 they may round up to it, whose logarithm is infinite.
    uniform = (bits.float() * 2.0**-53).clamp_(2.0**-54, 1 - 2.0**-24)
    return -torch.log1p(-uniform)


def mix(z: Tensor) -> Tensor:
    """Finaliser of SplitMix64 on int64, wrapping around."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
