"""Tensors of the experts' launches, whatever the architecture."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Boolean, Int32, Uint8, cute

from dsv4.kernels.moe.gate import GateTensors
from dsv4.kernels.moe.packed_rows import PackedRows, PackedTokens
from dsv4.kernels.moe.select import Lists
from dsv4.kernels.moe.wide_plan import SCALE_COPIES


class ExpertTensors(NamedTuple):
    """Tensors of `args.ARGS`, but the sum of the rows; and what products in bf16 and in NVFP4 take,
    too."""

    x_codes: cute.Tensor
    x_scale: cute.Tensor
    w1: cute.Tensor
    s1: cute.Tensor
    w3: cute.Tensor
    s3: cute.Tensor
    w2: cute.Tensor
    s2: cute.Tensor
    shared_w1: cute.Tensor
    shared_s1: cute.Tensor
    shared_w3: cute.Tensor
    shared_s3: cute.Tensor
    shared_w2: cute.Tensor
    shared_s2: cute.Tensor
    groups: cute.Tensor
    counts: cute.Tensor
    taken: cute.Tensor
    pairs: cute.Tensor
    ids: cute.Tensor
    weights: cute.Tensor
    h: cute.Tensor
    h_codes: cute.Tensor
    h_scale: cute.Tensor
    rows: cute.Tensor
    x: cute.Tensor | None = None  # [T, D] bf16
    global_scales: cute.Tensor | None = None  # [3, E], or [6, E] with those of inputs
    packed: PackedTokens | None = None
    packed_h: PackedRows | None = None

    @property
    def h_scale_bytes(self) -> cute.Tensor:
        """[P + T, I / 128] E8M0 bytes, instead."""
        start = cute.recast_ptr(self.h_scale.iterator, dtype=Uint8)
        blocks = self.h_scale.shape[0] // SCALE_COPIES
        layout = cute.make_layout((self.h.shape[0], blocks), stride=(blocks, 1))
        return cute.make_tensor(start, layout)


class Selection(NamedTuple):
    """Arguments of a router's launches."""

    lists: Lists
    group_tokens: Int32
    gate: GateTensors
    token_tiles: Int32  # of the gate
    leads: Boolean  # whether the whole router is part of the experts' first launch
    has_codes: Boolean  # whether that launch is given codes of x
    counter: cute.Tensor  # [4] int32, 0 between launches
