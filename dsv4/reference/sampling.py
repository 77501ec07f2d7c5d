"""Sampling of a token: quotients of probabilities and noise, token by token, in fp64."""

from __future__ import annotations

import math

_WORD = (1 << 32) - 1


def sampling_scores(
    logits: list[float],
    position: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> list[float] | None:
    """Scores of the tokens of a row, the largest of which (the first of equals) is its token.

    At temperature 0, and where a logit is infinite, they are the logits. Else they are p / e, of
    the probability of each token that is left and noise e ~ Exp(1); 0 of the others.

    Args:
        logits: of all tokens.
        position: of the token that is chosen.
        temperature, seed, top_p, top_k, min_p: see `dsv4.ops.sample_tokens`.

    Returns:
        A score each; None where a logit is NaN, or every one is minus infinity.
    """
    best = max(logits)
    if any(map(math.isnan, logits)) or best == -math.inf:
        return None
    if temperature <= 0 or best == math.inf:
        return logits
    rate = 1 / max(temperature, 1e-5)
    masses = [math.exp((x - best) * rate) for x in logits]
    left = [token for token, mass in enumerate(masses) if mass >= min_p]
    left.sort(key=lambda token: (-masses[token], token))
    left = left[: top_k or None]
    share = top_p * math.fsum(masses[token] for token in left)
    kept: list[int] = []
    while len(kept) < len(left):
        if kept and top_p < 1 and math.fsum(masses[token] for token in kept) >= share:
            break
        kept.append(left[len(kept)])
    scores = [0.0] * len(logits)
    for token in kept:
        scores[token] = masses[token] / _noise(seed, position, token)
    return scores


def _noise(seed: int, position: int, token: int) -> float:
    """-log(1 - u) of a uniform number: the token's word of a Philox block, and the next one as its
    digits behind."""
    block = _philox(
        [token // 4, position & _WORD, (position >> 32) & _WORD, 0],
        [seed & _WORD, (seed >> 32) & _WORD],
    )
    u = (block[token % 4] + block[(token + 1) % 4] / 2**32) / 2**32
    return -math.log1p(-min(max(u, 2.0**-64), 1 - 2.0**-24))


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10."""
    for number in range(10):
        k0 = (key[0] + number * 0x9E3779B9) & _WORD
        k1 = (key[1] + number * 0xBB67AE85) & _WORD
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ k0,
            second & _WORD,
            (first >> 32) ^ counter[3] ^ k1,
            first & _WORD,
        ]
    return counter
