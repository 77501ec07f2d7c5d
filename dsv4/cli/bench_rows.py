"""`dsv4 bench` of a family whose results are rows of sizes: its options, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dsv4.cli.arguments import input_path
from dsv4.cli.output_file import output_file

if TYPE_CHECKING:
    from dsv4.bench.machine import Machine


def add_options(
    parser: argparse.ArgumentParser, parse_shape: Callable[[str], tuple], metavar: str, help: str
) -> None:
    """`--shape`, read by `parse_shape`, and `--json`."""
    parser.add_argument("--shape", action="append", type=parse_shape, metavar=metavar, help=help)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the results here"
    )


def add_vllm_option(parser: argparse.ArgumentParser, what: str) -> None:
    """`--vllm`, and `--no-peers`."""
    parser.add_argument(
        "--vllm", type=input_path, metavar="FOLDER",
        help=f"folder `vllm` of an unpacked vLLM wheel, which has {what}",
    )  # fmt: skip
    parser.add_argument("--no-peers", action="store_true", help="time our kernels alone")


@contextlib.contextmanager
def recorded(
    path: Path | None, family: str, machine: Machine, extra: Mapping[str, Any] | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Rows that a run appends to, written as a record when it is over, with what `extra` has then.

    Minutes of a GPU are in the rows of a run that fails or is interrupted: they are kept in a file
    beside `path`, which keeps what it has.
    """
    from dsv4.bench import report

    rows: list[dict[str, Any]] = []
    try:
        yield rows
    except BaseException:
        if path is not None and rows:
            path = path.with_name(f"{path.name}.part")
            report.write_record(path, report.record(family, machine, rows, **(extra or {})))
            print(f"not complete: what was measured is in {path}")
        raise
    if path is not None:
        report.write_record(path, report.record(family, machine, rows, **(extra or {})))


def measure(
    args: argparse.Namespace,
    family: str,
    bench: ModuleType,
    peers: Callable[[], Sequence] | None = None,
) -> int:
    """Time a family's operator; print the table while it grows.

    Args:
        peers: finds other packages that `bench.measure` times, too.
    """
    import torch

    from dsv4.bench import report
    from dsv4.bench.machine import Machine

    if not torch.cuda.is_available():
        raise RuntimeError("bench needs a CUDA GPU, none is available")
    shapes = [bench.Shape(*numbers) for numbers in args.shape or ()] or bench.model_shapes()
    more = () if peers is None else (peers(),)
    machine = Machine.measure()
    print(machine)
    print(report.table_head(bench.COLUMNS))
    with recorded(args.json, family, machine) as rows:
        for result in bench.measure(shapes, machine, *more):
            rows.append(bench.as_row(result))
            print(report.table_line(bench.cells(rows[-1])), flush=True)
    return 0
