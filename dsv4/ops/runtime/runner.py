"""Runner ids: the integers by which operators of `torch.ops.dsv4` name a configuration."""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from dsv4.kernels.kit.fields import checked_fields
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.ops.runtime.kernel_op import KernelOp

_RUNNERS: dict[int, tuple[KernelOp, Any]] = {}
_IDS: dict[tuple, int] = {}


def runner_id(op: KernelOp, *fields: Any) -> int:
    """Id of an operator's configuration `op.config(*fields)`.

    A hash: the same in every process, so that a graph which holds the id as a constant stays valid
    wherever the configuration has been registered. One configuration has one object.
    """
    try:
        known = _IDS.get((op.name, *fields))
    except TypeError:  # a field that cannot be hashed: named below
        known = None
    if known is not None:
        return known
    config = op.config(*checked_fields(op.config, fields))
    digest = hashlib.sha256(repr((op.name, astuple(config))).encode()).digest()
    identity = int.from_bytes(digest[:7], "big")
    _RUNNERS.setdefault(identity, (op, config))
    _IDS[op.name, *fields] = identity
    return identity


def find_runner(identity: int) -> tuple[KernelOp, Any]:
    """Operator and configuration behind an id; ValueError when `runner_id` never gave it."""
    try:
        return _RUNNERS[identity]
    except (KeyError, TypeError):
        raise ValueError(
            f"runner_id: {quoted(identity)} names no runner of this process; get one from the "
            "operator's own function, dsv4.ops.fmha_runner_id(...) for sparse_fmha_with_swa"
        ) from None


def runner_config(identity: int) -> Any:
    """Configuration behind an id; ValueError when there is none."""
    return find_runner(identity)[1]


def config_of(op: KernelOp, identity: int) -> Any:
    """Configuration of an operator; ValueError for an id that is unknown or another operator's."""
    owner, config = find_runner(identity)
    if owner is not op:
        raise ValueError(f"runner_id: {identity} is a runner of {owner.name}, not of {op.name}")
    return config
