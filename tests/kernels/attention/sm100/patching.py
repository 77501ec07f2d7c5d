"""Builds the kernel from changed source, to show that a test notices the change."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import dsv4.kernels.attention

PACKAGE = "dsv4.kernels.attention"
_serial = itertools.count()


def build_from_changed_source(folder: Path, changes: dict[str, tuple[str, str]]) -> Callable:
    """`build` of a copy of the attention kernels under another name.

    Args:
        folder: where the copy goes; importable while the process runs.
        changes: file name -> (text that occurs exactly once, its replacement).
    """
    name = f"changed_kernels_{next(_serial)}"
    copy = folder / name
    copy.mkdir()
    for path in Path(dsv4.kernels.attention.__file__).parent.glob("*.py"):
        source = path.read_text()
        if path.name in changes:
            old, new = changes[path.name]
            assert source.count(old) == 1, f"{path.name} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        (copy / path.name).write_text(source.replace(PACKAGE, name))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.fmha").build
    finally:
        sys.path.remove(str(folder))
