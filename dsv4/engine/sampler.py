"""Choosing tokens from logits: greedy, temperature, top-p, repeatable per request.

Sampling draws `argmax(p / e)` with `e ~ Exp(1)` per candidate, the exponential form of the Gumbel
trick that the official inference/generate.py uses. Here `e` is a pure function of (seed, position,
candidate) instead of a generator's state: a request draws the same tokens in any batch,
whether or not it was speculated, and after being recomputed, and the whole step stays free of host
work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.engine.arguments import check_integer, check_number, check_token_ids

TEMPERATURE_FLOOR = 1e-5  # official inference/generate.py
MAX_TEMPERATURE = 1e6  # far beyond what leaves anything of the logits; finite in float32


def _int64(value: int) -> int:
    """Reinterpret 64 bits as signed: torch has no arithmetic on uint64."""
    return value - (1 << 64) if value >> 63 else value


# Constants of SplitMix64 (Steele, Lea, Flood 2014).
_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX_1 = _int64(0xBF58476D1CE4E5B9)
_MIX_2 = _int64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of a request.

    Attributes:
        max_new_tokens: tokens to generate, at most.
        temperature: 0 takes the likeliest token; above 0 samples, values under 1e-5 counting as
            1e-5; at most 1e6.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this much;
            in (0, 1].
        seed: repeats a sampled continuation; None draws a fresh one from torch's default generator.
        stop_tokens: ids that end the continuation (and are part of it); None means the model's
            end-of-sequence ids.

    Raises:
        TypeError: a field is of another type; the message names it.
        ValueError: a field is out of range; the message names it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError(f"top_p must be above 0, got {self.top_p}")
        if self.seed is not None:
            check_integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.stop_tokens is not None:
            check_token_ids("stop_tokens", self.stop_tokens)


class RowSampling(NamedTuple):
    """Sampling options of one row of a forward."""

    temperature: float  # 0 = greedy
    top_p: float
    seed: int


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the B rows of a forward, on the device.

    The two flags are host knowledge that picks the code to run; rows get the same tokens whatever
    the flags are, as long as `greedy` is set only when no row samples and `nucleus` is unset only
    when every top_p is 1.
    """

    temperature: Tensor  # [B] fp32, 0 = greedy
    top_p: Tensor  # [B] fp32
    seed: Tensor  # [B] int64
    greedy: bool  # no row samples
    nucleus: bool  # some row has top_p < 1


def sample(logits: Tensor, positions: Tensor, batch: SamplingBatch) -> Tensor:
    """Choose one token per row and column.

    Args:
        logits: [B, C, V] fp32.
        positions: [B, C] int64, position each chosen token will take in its request's sequence.
        batch: parameters of the B rows.

    Returns:
        [B, C] int64 token ids. Depends on a row's own logits, positions and parameters alone.
    """
    likeliest = logits.argmax(-1)
    if batch.greedy:
        return likeliest
    temperature = batch.temperature.clamp_min(TEMPERATURE_FLOOR)
    probabilities = torch.softmax(logits / temperature[:, None, None], dim=-1)
    if batch.nucleus:
        probabilities = _nucleus(probabilities, batch.top_p[:, None, None])
    noise = _exponential(batch.seed[:, None], positions, logits.shape[-1])
    drawn = (probabilities / noise).argmax(-1)
    return torch.where(batch.temperature[:, None] > 0, drawn, likeliest)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens with mass >= top_p, at least one.

    Not renormalised: a common factor does not change an argmax.
    """
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    # In fp64: in fp32 the sum over a large vocabulary depends on how the device splits the scan.
    mass_before = ranked.cumsum(-1, dtype=torch.float64) - ranked
    # A sum may round up to 1 before the last token, and top_p = 1 means every token. A top_p that
    # is 0 in fp32 would keep none, and all zeros have their maximum at token 0.
    kept = (mass_before < top_p.clamp_min(torch.finfo(top_p.dtype).tiny)) | (top_p >= 1)
    return torch.zeros_like(probabilities).scatter_(-1, order, ranked * kept)


def _exponential(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) noise, [B, C, vocab_size] fp32, for seed [B, 1] and positions [B, C].

    Candidate v of a (seed, position) is output v of the SplitMix64 stream that starts at their
    hash.
    """
    start = _mix(_mix(seed) + positions * _GAMMA)
    counters = torch.arange(1, vocab_size + 1, device=seed.device) * _GAMMA
    bits = _shift(_mix(start[..., None] + counters), 11)
    # 53 bits rounded to fp32 keep their relative precision near 0, where small noise lets rare
    # tokens win. The clamp keeps 0 / 0 and x / 0 out; u = 1 gives infinite noise, so that the
    # candidate loses.
    uniform = (bits.float() * 2.0**-53).clamp_min(2.0**-54)
    return -torch.log1p(-uniform)


def _mix(z: Tensor) -> Tensor:
    """Finaliser of SplitMix64 on int64, wrapping around."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
