"""Parser of the command line, and types of options that are not to be empty."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from dsv4.quoting import printable


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one printable line of bounded length: they repeat what was given.

    Its subparsers are of the same class.
    """

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and leave with status 2."""
        super().error(printable(message))


def some_text(text: str) -> str:
    """Type of an argparse option without a default of its own: empty text is not "not given"."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, needs some text")
    return text


def input_path(text: str) -> Path:
    """Type of an argparse option that names a file or folder to read.

    Not `Path` itself: that of an empty text, an unset variable of the shell's most often, is the
    current folder.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty, needs a path")
    return Path(text)
