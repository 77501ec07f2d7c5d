"""Compressed KV entries of CSA (overlapping blocks) and HCA (disjoint), over whole sequences.

Technical report section 2.3.1; official `Compressor.forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compress(x: Tensor, wkv: Tensor, wgate: Tensor, ape: Tensor, *, overlap: bool) -> Tensor:
    """Pool every complete block of tokens into one entry, a softmax over tokens per channel.

    Args:
        x: [..., T, hidden], the sublayer's normed input.
        wkv, wgate: [c * d, hidden] with c = 2 when blocks overlap, else 1.
        ape: [m, c * d], added to the gate by position within the block; m is the rate.
        overlap: CSA: block n also covers the m tokens before it. Those contribute the first d
            columns, the block's own tokens the last d; before the sequence there is nothing (weight
            0).

    Returns:
        [..., T // m, d] FP32, before norm, RoPE and quantisation.
    """
    rate, columns = ape.shape
    dim = columns // 2 if overlap else columns
    blocks = x.shape[-2] // rate
    x = x[..., : blocks * rate, :].float()
    kv = (x @ wkv.float().T).unflatten(-2, (blocks, rate))
    gate = (x @ wgate.float().T).unflatten(-2, (blocks, rate)) + ape.float()
    if overlap:
        pad = (0, 0, 0, 0, 1, 0)
        before_kv = torch.nn.functional.pad(kv[..., :dim], pad)[..., :-1, :, :]
        before_gate = torch.nn.functional.pad(gate[..., :dim], pad, value=-torch.inf)
        before_gate = before_gate[..., :-1, :, :]
        kv = torch.cat((before_kv, kv[..., dim:]), -2)
        gate = torch.cat((before_gate, gate[..., dim:]), -2)
    return (torch.softmax(gate, -2) * kv).sum(-2)


def visible_entries(positions: Tensor, entries: int, rate: int) -> Tensor:
    """bool [..., entries]: entry n is visible from position t once its block is complete.

    That is n < (t + 1) // rate: the block that ends at t is visible at t.
    """
    return torch.arange(entries, device=positions.device) < ((positions + 1) // rate)[..., None]
