"""Axes that weights are cut into, and their order."""

from __future__ import annotations

from torch import Tensor

from dsv4.kernels.moe.layout import K_BLOCK, PANEL_ROWS


def check_whole(rows: int, columns: int, group_rows: int = PANEL_ROWS) -> None:
    """Refuse a weight [rows, columns] that has parts of groups of rows or of k blocks."""
    for name, size, group in (("rows", rows, group_rows), ("columns", columns, K_BLOCK)):
        if size % group:
            raise ValueError(f"weight: {name} must be a multiple of {group}, got {size}")


def cut_into(matrix: Tensor, axes: tuple[int, ...]) -> Tensor:
    """[..., M, K] as [..., *axes]."""
    return matrix.reshape(*matrix.shape[:-2], *axes)


def reordered(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last axes."""
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + axis for axis in order))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """What puts reordered axes back."""
    return tuple(order.index(axis) for axis in range(len(order)))
