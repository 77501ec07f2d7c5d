"""Files that a command writes at its end, checked when its arguments are read."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from dsv4.quoting import quoted


def output_file(text: str) -> Path:
    """Type of an argparse option that names a file to write.

    Minutes of simulation or of measurement come before the writing: a path that cannot be written
    is an error before them. It is tried, not asked for permissions: root may write wherever these
    are read, and yet not into /proc. Nothing is left behind, and a file that exists keeps its
    content until it is replaced.
    """
    path = Path(text)
    try:
        if not text:
            raise ValueError("is empty, needs a name")
        if path.is_dir():
            raise IsADirectoryError("is a folder, needs the name of a file")
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # what exists and is no file is a device or a pipe: left alone
            if not path.parent.is_dir():
                raise NotADirectoryError(f"{path.parent} is not a folder")
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                # The name too: it may be too long.
                (Path(folder) / path.name).write_bytes(b"\n")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: {_reason(error)}") from None
    return path


def output_folder(text: str) -> Path:
    """Type of an argparse option that names a folder to write files into, new or not; tried as
    `output_file` is."""
    path = Path(text)
    try:
        if not text:
            raise ValueError("is empty, needs a name")
        existing = path if path.exists() else path.parent
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is not a folder")
        with tempfile.TemporaryDirectory(dir=existing) as folder:
            # The name too: it may be too long.
            (Path(folder) / path.name).mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)}: {_reason(error)}") from None
    return path


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
