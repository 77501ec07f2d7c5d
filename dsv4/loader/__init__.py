"""Checkpoint I/O and weight-layout conversion."""

from __future__ import annotations

from typing import Any

from dsv4.loader.errors import CheckpointError
from dsv4.loader.layout import TensorSpec, inventory
from dsv4.loader.reader import load_tensors
from dsv4.loader.writer import save

__all__ = ["CheckpointError", "TensorSpec", "inventory", "load", "load_tensors", "save"]


def __getattr__(name: str) -> Any:
    """Load the model's modules when `load` is first asked for; the rest does not need them."""
    if name == "load":
        from dsv4.loader.assemble import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
