"""Reading of JSON objects from foreign files: regular, bounded, valid."""

from __future__ import annotations

import json
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any

from dsv4.quoting import printable

MAX_BYTES = 1 << 28
"""Largest file that is parsed. The index of the largest release has 12 MB."""


def check_regular_file(path: str | PathLike[str]) -> os.stat_result:
    """Return the status of a file that can be read to its end.

    Raises:
        ValueError: it is a folder, FIFO, socket or device: reading could wait for ever.
        OSError: there is none, or its name cannot be looked up.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{printable(path)} is not a regular file")
    return status


def read_object(path: str | PathLike[str]) -> dict[str, Any]:
    """Parse the JSON object in a file.

    Raises:
        ValueError: not a regular file, too large, not UTF-8, not JSON, nested too deeply, or
            another JSON value than an object; the message starts with the path.
        OSError: the file cannot be read.
    """
    size = check_regular_file(path).st_size
    if size > MAX_BYTES:
        raise ValueError(f"{printable(path)} has {size:,} bytes, expected at most {MAX_BYTES:,}")
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{printable(path)} is not valid JSON: nested too deeply") from None
    except ValueError as error:  # bad JSON, bytes that are not UTF-8, integers of 5,000 digits
        raise ValueError(f"{printable(path)} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{printable(path)} must hold a JSON object, got {type(data).__name__}")
    return data
