"""Entry point of the `dsv4` command: subcommands, and the rule that errors are one line."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from dsv4 import __version__
from dsv4.cli import bench, compile, demo, doctor, generate, sage, sim
from dsv4.cli.arguments import Parser
from dsv4.quoting import printable

COMMANDS = (demo, generate, doctor, compile, sim, sage, bench)
USAGE_ERROR = 2
# What a user can cause: wrong paths, damaged checkpoints, impossible arguments, a missing extra.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, NotImplementedError)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line: one module per subcommand, each with `add_parser` and `run`."""
    parser = Parser(
        prog="dsv4", description="DeepSeek-V4 attention kernels, and the model around them."
    )
    parser.add_argument("--version", action="version", version=f"dsv4 {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(subparsers)
    _add_debug(subparsers)
    return parser


def _add_debug(subparsers: argparse._SubParsersAction) -> None:
    """Give every subcommand, nested ones too, its `--debug`."""
    for parser in dict.fromkeys(subparsers.choices.values()):
        parser.add_argument(
            "--debug",
            action="store_true",
            # No default: a nested parser's False would overwrite its parent's True.
            default=argparse.SUPPRESS,
            help="show the traceback of an error instead of one line",
        )
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                _add_debug(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error is one line on stderr and status 2."""
    _repair_streams()
    args = build_parser().parse_args(argv)
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed")
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("dsv4: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `dsv4 doctor | head`: the reader left.
        _point_at_nothing(sys.stdout)
        return 0
    except Exception as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        elif isinstance(error, USER_ERRORS):
            print(f"dsv4: error: {_one_line(error)}", file=sys.stderr)
        else:
            name = type(error).__name__
            print(
                f"dsv4: internal error: {name}: {_one_line(error)} (--debug shows where)",
                file=sys.stderr,
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF):
            _point_at_nothing(sys.stdout)
        return USAGE_ERROR


def _repair_streams() -> None:
    """Make every later write to a standard stream possible.

    A closed stderr is None in Python, and print() would write errors to stdout. Text that the
    locale cannot express is replaced: it may be a model's.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _point_at_nothing(stream: TextIO | None) -> None:
    """Drop what a stream that cannot be written still holds: the flush at exit would fail again."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__
