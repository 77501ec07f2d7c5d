"""Attention inputs whose values are of unequal magnitude, and what is expected of them.

Partial rows may pass between CTAs in fewer bits than accumulators have: what shares a scale is
right to the rounding of its largest value, and what does not is independent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.testing.attention import Inputs, assert_attention_close

COLUMNS = ("tiny", "huge", "columns", "pieces")
Attention = Callable[[Inputs], tuple[Tensor, Tensor]]  # o and lse of inputs


def column_factors(magnitude: str, head_dim: int, seed: int) -> Tensor:
    """Factors [head_dim] of a kind in `COLUMNS`, powers of 2."""
    generator = torch.Generator().manual_seed(seed)

    def exponents(most: int, count: int) -> Tensor:
        return torch.randint(-most, most + 1, (count,), generator=generator)

    if magnitude == "tiny":
        return torch.full((head_dim,), 2.0**-100)
    if magnitude == "huge":
        return torch.full((head_dim,), 2.0**100)
    if magnitude == "columns":
        return 2.0 ** exponents(12, head_dim)
    return (2.0 ** exponents(60, head_dim // 128)).repeat_interleave(128)


def check_columns(inputs: Inputs, magnitude: str, seed: int, attention: Attention) -> None:
    """Compare `attention` with the oracle where the columns of keys are scaled, and those of q are
    divided so that scores remain; each column relative to its own magnitude."""
    factors = column_factors(magnitude, inputs.q.shape[2], seed).to(inputs.q.device)
    scaled = inputs.replaced(
        q=(inputs.q / factors).bfloat16(),
        compressed_kv=(inputs.compressed_kv * factors).bfloat16(),
        swa_kv=(inputs.swa_kv * factors).bfloat16(),
    )
    o, lse = attention(scaled)
    expected_o, expected_lse = scaled.expected()
    _check(o.float() / factors, expected_o / factors, lse, expected_lse)


def check_rows(inputs: Inputs, seed: int, attention: Attention) -> None:
    """Compare `attention` with the oracle where every 64 compressed rows are of another magnitude
    and equally weighted; o relative to the largest of its row."""
    generator = torch.Generator().manual_seed(seed)
    tokens, rows, _ = inputs.compressed_kv.shape
    exponents = torch.randint(-30, 31, (tokens, -(-rows // 64)), generator=generator)
    magnitudes = (2.0**exponents).repeat_interleave(64, 1)[:, :rows, None]
    compressed_kv = inputs.compressed_kv * magnitudes.to(inputs.q.device).bfloat16()
    compressed_kv[0, :128] = 0
    changed = inputs.replaced(q=torch.zeros_like(inputs.q), compressed_kv=compressed_kv)
    o, lse = attention(changed)
    expected_o, expected_lse = changed.expected()
    largest = expected_o.abs().amax(-1, keepdim=True)
    _check(o.float() / largest, expected_o / largest, lse, expected_lse)


def _check(o: Tensor, expected_o: Tensor, lse: Tensor, expected_lse: Tensor) -> None:
    assert_attention_close(o, expected_o, lse, expected_lse, dtype=torch.bfloat16)
