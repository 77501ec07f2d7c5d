"""Checkpoint I/O and weight-layout conversion."""

from __future__ import annotations

from dsv4.loader.assemble import load
from dsv4.loader.errors import CheckpointError
from dsv4.loader.layout import TensorSpec, inventory
from dsv4.loader.reader import load_tensors
from dsv4.loader.writer import save

__all__ = ["CheckpointError", "TensorSpec", "inventory", "load", "load_tensors", "save"]
