"""Activations as sums of two e4m3 codes, in rows as grouped linears read them.

x = scale * (c0 + c1 / 16), one power of two for each 128 elements, as `dsv4.kernels.gemm.quantize`
has it: exact where |x| is at least 2^-14 of the largest of them. Codes [C, n] of T tokens lie in
groups of 16 rows: the first terms of eight tokens, then their second ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import (
    K_BLOCK,
    TERM_ROWS,
    TERMS,
    TERMS_AMAX_FLOOR,
    num_code_rows,
)
from dsv4.ops.quantize import decode_e4m3, split_e4m3


def num_term_rows(tokens: int) -> int:
    """C of so many tokens."""
    return num_code_rows(tokens, TERMS)


def own_rows(tokens: int) -> Tensor:
    """[C] bool: which rows of codes are those of a token."""
    rows = torch.arange(num_term_rows(tokens))
    groups, place = rows // (TERMS * TERM_ROWS), rows % TERM_ROWS
    return groups * TERM_ROWS + place < tokens


def empty_terms(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of so many tokens of `width` elements, to be written."""
    codes = torch.empty((num_term_rows(tokens), width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((tokens, width // K_BLOCK), dtype=torch.float8_e8m0fnu, device=device)
    return codes, scales


def to_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [C, n] float8_e4m3fn of x [T, n] in bfloat16, and scales [T, n / 128] float8_e8m0fnu;
    rows of no token are zeros."""
    tokens, width = x.shape
    first, second, scales = split_e4m3(x, K_BLOCK, TERMS_AMAX_FLOOR)
    terms = torch.stack((first, second), 1).view(torch.uint8)  # [T, terms, n]
    groups = num_term_rows(tokens) // (TERMS * TERM_ROWS)
    padded = terms.new_zeros(groups * TERM_ROWS, TERMS, width)
    padded[:tokens] = terms
    rows = padded.unflatten(0, (groups, TERM_ROWS)).transpose(1, 2).flatten(0, 2).contiguous()
    return rows.view(torch.float8_e4m3fn), scales


def decode_codes(codes: Tensor, scales: Tensor, terms: int = TERMS) -> Tensor:
    """Values [T, n] bfloat16 of codes [C, n] in one term or two, exactly; scales [T, n / 128]."""
    x = decode_e4m3(codes)
    if terms == TERMS:
        first, second = x.unflatten(0, (-1, TERMS, TERM_ROWS)).unbind(1)
        x = (first + second / 16).flatten(0, 1)[: scales.shape[0]]
    blocks = x.unflatten(1, (-1, K_BLOCK)) * scales.float().unsqueeze(-1)
    return blocks.flatten(1).bfloat16()
