"""Arithmetic of the sampler in torch, on any device: noise, probabilities, what is left of them.

`dsv4/kernels/sampling/numbers.py` has the definitions. The kernels' results are these, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.kernels.sampling import numbers

FAILED = -1  # in place of a token
_WORD = 0xFFFFFFFF


def tokens_of(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """[B, C] int64 tokens: see `dsv4.ops.sample_tokens`."""
    best, likeliest = logits.max(-1)
    floor = temperature.clamp_min(numbers.TEMPERATURE_FLOOR)
    rate = (1.0 / floor)[:, None, None]
    kept = probabilities((logits - best[..., None]) * rate)
    if min_p is not None:
        kept = torch.where(kept >= min_p[:, None, None], kept, 0.0)
    if top_p is not None or top_k is not None:
        kept = truncated(kept, top_p, top_k)
    words = philox_words(seed[:, None], positions, logits.shape[-1])
    drawn = (kept * (1.0 / exponential(*words))).argmax(-1)
    # An infinite logit leaves the others no probability; it is the best one.
    draws = (temperature[:, None] > 0) & (best < math.inf)
    # A maximum is NaN where any value is.
    return torch.where(best > -math.inf, torch.where(draws, drawn, likeliest), FAILED)


def probabilities(exponents: Tensor) -> Tensor:
    """e^x of x <= 0, 0 where it is under 2^-64: probabilities relative to that of the best."""
    t = exponents * numbers.LOG2_E
    is_none = t < numbers.LEAST_EXPONENT
    t = t.clamp_min(numbers.LEAST_EXPONENT)
    nearest = (t + numbers.ROUNDER) - numbers.ROUNDER
    part = t - nearest
    total = torch.full_like(part, numbers.EXP2_COEFFICIENTS[0])
    for coefficient in numbers.EXP2_COEFFICIENTS[1:]:
        total = total * part + coefficient
    power = ((nearest.int() + 127) << 23).view(torch.float32)
    return torch.where(is_none, 0.0, total * power)


def truncated(kept: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Zero all but the top_k likeliest tokens and, of these, all but the smallest set of likeliest
    ones with a share >= top_p of their mass, at least one; of equals the lower ids come first.

    Args:
        kept: [B, C, V] fp32 relative probabilities, in [0, 1].
        top_p, top_k: [B]; 1 and 0: all, as None.

    Returns:
        [B, C, V] fp32: rows with either option in units of 2^-44, rounded to nearest, the others
        as they are. Not renormalised: a common factor does not change an argmax.
    """
    rows = kept.shape[0]
    top_p = torch.ones(rows, device=kept.device) if top_p is None else top_p
    if top_k is None:
        top_k = torch.zeros(rows, dtype=torch.int64, device=kept.device)
    top_p, top_k = top_p[:, None, None], top_k[:, None, None]
    units = (kept + numbers.MASS_ROUNDER) - numbers.MASS_ROUNDER
    units = torch.where(kept < numbers.MASS_ROUNDER, units, kept)
    ranked, order = units.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    ranked = torch.where((rank < top_k) | (top_k == 0), ranked, 0.0)
    # Integers: their sums are exact, in whatever order a device takes them.
    mass = (ranked.double() * 2.0**numbers.MASS_BITS).long()
    before = mass.cumsum(-1) - mass
    total = mass.sum(-1, keepdim=True).double()
    # A top_p that is 0 in fp32 would keep none.
    share = (top_p.double() * total).ceil().long().clamp_min(1)
    left = torch.where((before < share) | (top_p >= 1), ranked, 0.0)
    left = torch.zeros_like(kept).scatter_(-1, order, left)
    return torch.where((top_p < 1) | (top_k > 0), left, kept)


def exponential(words: Tensor, next_words: Tensor) -> Tensor:
    """Exp(1) noise, fp32, of random words and of those that refine them.

    Noise is positive and finite, so that no quotient by it is NaN, and none of a positive
    probability is 0.

    Args:
        words, next_words: int64 in [0, 2^32), of one shape.
    """
    u = (words.float() + next_words.float() * 2.0**-32) * 2.0**-32
    u = u.clamp(numbers.LEAST_UNIFORM, numbers.MOST_UNIFORM)
    rest = 1.0 - u
    # Of rest = m 2^k, m in [2/3, 4/3).
    k = (rest.view(torch.int32) - numbers.TWO_THIRDS_BITS) >> 23
    m = (rest.view(torch.int32) - (k << 23)).view(torch.float32)
    # Not by 1 - u where that has lost digits of u.
    is_small = k == 0
    s = torch.where(is_small, u, 1.0 - m) * (1.0 / torch.where(is_small, 2.0 - u, 1.0 + m))
    square = s * s
    total = torch.full_like(square, numbers.ARTANH_COEFFICIENTS[0])
    for coefficient in numbers.ARTANH_COEFFICIENTS[1:]:
        total = total * square + coefficient
    return s * total - k.float() * numbers.LN_2


def philox_words(seed: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Random words of candidates 0 .. count - 1, and those that refine them.

    Args:
        seed, positions: int64 of shapes that broadcast, [B, 1] and [B, C].

    Returns:
        Two of [B, C, count] int64, in [0, 2^32).
    """
    block = torch.arange(-(-count // numbers.PHILOX_WORDS), device=seed.device)
    position = positions[..., None]
    counter = block, position & _WORD, (position >> 32) & _WORD, torch.zeros_like(block)
    key = seed[..., None] & _WORD, (seed[..., None] >> 32) & _WORD
    words = philox(torch.broadcast_tensors(*counter), key)
    return tuple(
        torch.stack([*words[shift:], *words[:shift]], -1).flatten(-2)[..., :count]
        for shift in (0, 1)
    )


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10: four words of a counter and two of a key give four, all int64 in
    [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(numbers.PHILOX_ROUNDS):
        # 64 bits that wrap around: the sign is one of them.
        first, second = (c * factor for c, factor in zip((c0, c2), numbers.PHILOX_FACTORS))
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = ((k + step) & _WORD for k, step in zip((k0, k1), numbers.PHILOX_STEPS))
    return c0, c1, c2, c3
