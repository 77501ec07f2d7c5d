"""`HeadRotation`: an epilogue of linears whose outputs are heads, and its torch implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.gemm import epilogues
from dsv4.kernels.kit.head_squares import CHANNELS, parts
from dsv4.kernels.kit.kv_entry import ROPE_DIM
from dsv4.ops.index_rounding import IndexRounding
from dsv4.ops.kv_insert import rotate_rows_
from dsv4.quoting import quoted


class HeadRotation(NamedTuple):
    """RoPE of the heads that a linear gives, before they are stored, and what their norm needs.

    y [T, H * head_dim], rounded to its dtype, is H heads a token. Sums of squares of the channels
    are written to `squares`, 16 neighbours each; then pairs of neighbours of the last 64 channels
    of each head are turned by the token's position, (x cos - y sin, x sin + y cos) in fp32, and
    rounded again. `sparse_fmha_paged` takes the squares as they are, and makes the weightless norm
    of queries of them: the rotation leaves a head's norm as it is, but for rounding.

    Attributes:
        rope: [R, 64] float32, cosines, then sines, per position.
        positions: [T] int32, clamped to 0..R - 1.
        head_dim: channels of a head, a multiple of 64 up to 4,096.
        squares: [T, H, head_dim / 16] float32, written; None: not wanted.
    """

    rope: Tensor
    positions: Tensor
    head_dim: int
    squares: Tensor | None = None

    @property
    def config(self) -> str:
        """What the configuration of a linear has of it."""
        if isinstance(self.head_dim, bool) or not isinstance(self.head_dim, int):
            raise TypeError(f"head_dim: got {quoted(self.head_dim)}, needs an integer")
        return str(epilogues.HeadRotation(self.head_dim))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """In the order of the operators."""
        return self.rope, self.positions, self.squares, None

    def apply_(self, y: Tensor) -> Tensor:
        """Do to y [T, H * head_dim] in place what the epilogue does, in torch, for rotations of
        any width; return y."""
        rotate_heads_(y, self.head_dim, self.rope, self.positions, self.squares)
        return y


def head_squares(tokens: int, heads: int, head_dim: int, device: torch.device | str) -> Tensor:
    """Room for the sums of squares of `HeadRotation`, uninitialised: [tokens, heads, head_dim / 16]
    float32."""
    return torch.empty((tokens, heads, parts(head_dim)), dtype=torch.float32, device=device)


def takes_heads(head_dim: int, rope_dim: int) -> bool:
    """Whether linears have the epilogue for such heads."""
    return rope_dim == ROPE_DIM and head_dim % ROPE_DIM == 0 and head_dim <= epilogues.MAX_HEAD_DIM


def epilogue_config(epilogue: object, rows: int, name: str = "epilogue") -> str:
    """What the configuration of a linear of so many rows has of its epilogue.

    Raises:
        TypeError, ValueError: what is none, or does not fit, under this name.
    """
    if epilogue is None:
        return ""
    if not isinstance(epilogue, HeadRotation | IndexRounding):
        raise TypeError(
            f"{name}: got {quoted(epilogue)}, needs a dsv4.ops.HeadRotation, a "
            "dsv4.ops.IndexRounding or None"
        )
    try:
        text = epilogue.config
        epilogues.check(text, rows)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    return text


def check_heads(
    config: epilogues.HeadEpilogue,
    rows: int,
    rope: Tensor | None,
    positions: Tensor | None,
    squares: Tensor | None,
    scales: Tensor | None,
) -> None:
    """Refuse what an epilogue's kernel would read or write past the end of: ValueError.

    Numbers of tokens are checked where the other optional tensors' are.
    """
    needed = {"rope": rope, "positions": positions}
    if isinstance(config, epilogues.IndexRounding):
        needed["head_scales"] = scales
    for what, tensor in needed.items():
        if tensor is None:
            raise ValueError(f"{what}: got None, the epilogue {config} needs it")
    check_table(rope)
    try:
        heads = config.heads(rows)
    except ValueError as error:
        raise ValueError(f"weight: {error}") from None
    for what, tensor in (("squares", squares), ("head_scales", scales)):
        if tensor is not None and tensor.shape[1] != heads:
            raise ValueError(
                f"{what}: got {tensor.shape[1]} heads, a weight of {rows} rows has {heads} of "
                f"{config.head_dim}"
            )


def check_table(rope: Tensor) -> None:
    """Refuse a table of no position: ValueError."""
    if rope.shape[0] == 0:
        raise ValueError("rope: got no rows, needs one per position")


# ---- torch implementation ------------------------------------------------------------------------


def rotate_heads_(
    y: Tensor, head_dim: int, rope: Tensor, positions: Tensor, squares: Tensor | None
) -> None:
    """Write the sums of squares of y [T, H * head_dim], and rotate its heads in place."""
    heads = y.unflatten(1, (-1, head_dim))
    if squares is not None:
        squares.copy_(_group_squares(heads))
    rotation = rope[positions.clamp(0, rope.shape[0] - 1)]
    rotate_rows_(heads, rotation.unsqueeze(1))


def _group_squares(x: Tensor) -> Tensor:
    """Sums of squares [..., d / 16] of x [..., d], added in the order of the kernels: halves."""
    missing = -x.shape[-1] % CHANNELS
    groups = F.pad(x.float().square(), (0, missing)).unflatten(-1, (-1, CHANNELS))
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups[..., 0]


def norm_factor(squares: Tensor, head_dim: int, eps: float) -> Tensor:
    """1 / rms of heads [..., H], of their sums of squares [..., H, N]: 1 / sqrt(sum / head_dim +
    eps)."""
    return torch.rsqrt(tree_sum(squares) / head_dim + eps)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, neighbours pair by pair."""
    while x.shape[-1] > 1:
        whole = x.shape[-1] // 2 * 2
        pairs = x[..., 0:whole:2] + x[..., 1:whole:2]
        x = torch.cat((pairs, x[..., whole:]), -1) if whole < x.shape[-1] else pairs
    return x[..., 0]
