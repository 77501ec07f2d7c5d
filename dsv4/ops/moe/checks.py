"""Checks of `moe`'s arguments beside those of its table: ValueError or TypeError, by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.ops.moe.weights import MATRICES, GatedWeights
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.quoting import quoted


def check_choice(config: MoeConfig, tokens: int, bias: int, table: int, ids: int) -> None:
    """Refuse rows of what does not choose experts, or too few of what does: ValueError."""
    if not config.is_hashed:
        for name, rows in (("table", table), ("input_ids", ids)):
            if rows:
                raise ValueError(f"{name}: got {rows} rows, experts are chosen by scores")
        return
    if bias:
        raise ValueError(f"bias: got {bias} rows, experts are chosen by a table")
    if not table:
        raise ValueError("table: got no rows, experts are chosen by it")
    if ids != tokens:
        raise ValueError(f"input_ids: got {ids} ids, x has {tokens} tokens")


def check_plain(**rows: int) -> None:
    """Refuse rows of scales of weights that have none: ValueError."""
    for name, found in rows.items():
        if found:
            raise ValueError(f"{name}: got {found} rows, the weights are bfloat16")


def check_codes(codes: Tensor | None, scale: Tensor | None) -> None:
    """Refuse codes without scales, and scales without codes: ValueError."""
    if (codes is None) != (scale is None):
        name, other = ("x_codes", "x_scale") if codes is None else ("x_scale", "x_codes")
        raise ValueError(f"{name}: got nothing beside {other}")


def check_kinds(x: object, experts: object, shared: object, block: object) -> None:
    """Refuse what the first lines of a call cannot look into: TypeError."""
    check_is_tensor("x", x)
    for name, unit in (("experts", experts), ("shared", shared)):
        if not isinstance(unit, GatedWeights):
            raise TypeError(f"{name}: got a {type(unit).__name__}, needs GatedWeights")
        check_is_tensor(f"{name}.w1", unit.w1)
        for field, tensor in zip(MATRICES, unit.scales):
            if tensor is not None:
                check_is_tensor(f"{name}.{field}_scale", tensor)
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"block: got {quoted(block)}, needs rows and columns")


def check_rows(tokens: int, given: Mapping[str, Tensor | None]) -> None:
    """Refuse arguments that have not a row for each token: a part of them might."""
    for name, tensor in given.items():
        if tensor is None:
            continue
        check_is_tensor(name, tensor)
        if tensor.shape[:1] != (tokens,):
            raise ValueError(f"{name}: got shape {quoted(tensor.shape)}, x has {tokens} tokens")
