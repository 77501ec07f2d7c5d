"""`IndexRounding`: an epilogue of linears whose outputs are index queries, and its torch
implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.gemm import epilogues
from dsv4.kernels.kit.index_entry import MODEL_DIM
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.ops.index_keys import encode_index
from dsv4.ops.kv_insert import rotate_rows_


class IndexRounding(NamedTuple):
    """Index queries of what a linear gives, as `index_topk` takes them in codes.

    y [T, H * 128], rounded to bfloat16, is H heads a token. Pairs of neighbours of the last 64
    channels of each are turned by the token's position, and rounded again; heads are Hadamard-
    transformed and rounded to FP4 per 32 channels, and are stored as e4m3 codes, which hold that
    without loss, with a scale for each head: what `index_topk` makes of y, bit for bit. A head that
    is not finite has any codes.

    Attributes:
        rope: [R, 64] float32, cosines, then sines, per position.
        positions: [T] int32, clamped to 0..R - 1.
        scales: [T, H] float32, written: powers of two.
    """

    rope: Tensor
    positions: Tensor
    scales: Tensor

    @property
    def config(self) -> str:
        """What the configuration of a linear has of it."""
        return str(epilogues.IndexRounding())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, None, Tensor]:
        """In the order of the operators."""
        return self.rope, self.positions, None, self.scales


def index_scales(tokens: int, heads: int, device: torch.device | str) -> Tensor:
    """Room for the scales of `IndexRounding`, uninitialised: [tokens, heads] float32."""
    return torch.empty((tokens, heads), dtype=torch.float32, device=device)


def takes_index_heads(dim: int, rope_dim: int) -> bool:
    """Whether linears have the epilogue for such heads."""
    return (dim, rope_dim) == (MODEL_DIM, ROPE_DIM)


# ---- torch implementation ------------------------------------------------------------------------


def round_heads(y: Tensor, rope: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, H * 128] float8_e4m3fn and scales [T, H] of index queries y [T, H * 128] in
    bfloat16."""
    codes, scales = encode_index(rotated_heads(y, MODEL_DIM, rope, positions))
    return codes.flatten(1), scales


def rotated_heads(y: Tensor, dim: int, rope: Tensor, positions: Tensor) -> Tensor:
    """A copy [T, H, dim] of queries y [T, H * dim], the last channels of each turned."""
    heads = y.unflatten(1, (-1, dim)).clone()
    rotation = rope[positions.clamp(0, rope.shape[0] - 1)]
    rotate_rows_(heads, rotation[:, None])
    return heads
