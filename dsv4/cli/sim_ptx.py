"""`dsv4 sim ptx`: one kernel of a PTX file, from any compiler, simulated and checked."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from dsv4.cli import sim_output
from dsv4.cli.arguments import input_path
from dsv4.cli.output_file import output_folder
from dsv4.quoting import quoted

_PARAMETER = re.compile(r"(\w+)(?:\[([\d,]+)\])?(?:=(.+))?")
_FORM = (
    "TYPE[SIZES], TYPE[SIZES]=random, =arange or =FILE.npy for a tensor, TYPE=NUMBER for a scalar"
)


def add_parser(kernels: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = kernels.add_parser(
        "ptx",
        help="a kernel of a PTX file",
        description="Simulate one kernel of a PTX module, of nvcc, Triton or any other compiler. "
        "Exit status 1 for a finding or a fault, 2 where the inputs leave synchronisation "
        "unchecked.",
    )
    parser.add_argument("file", type=input_path, metavar="FILE")
    parser.add_argument("--entry", metavar="NAME", help="the kernel (default: the only one)")
    for name, default in (("grid", [1]), ("block", None), ("cluster", None)):
        shown = "1" if default else f"as compiled, else {32 if name == 'block' else 1}"
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            default=default,
            metavar="N",
            help=f"x, y, z (default: {shown})",
        )
    parser.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic ones")
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="SPEC",
        help=f"one for each parameter, in order: {_FORM}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of =random and of the schedule random")
    parser.add_argument(
        "--save",
        type=output_folder,
        metavar="FOLDER",
        help="write tensors there as they are afterwards",
    )
    sim_output.add_options(parser)
    parser.set_defaults(run=run)


def _text(path: Path) -> str:
    """Contents of a file of PTX; a pipe would be waited for."""
    if not path.is_file():
        raise ValueError(f"FILE: no file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"FILE: {path} is not text") from None


def run(args: argparse.Namespace) -> int:
    """Simulate in each schedule, from the same tensors, and report."""
    import torch

    from dsv4.simulator import Report, SimulatorError, simulate_ptx
    from dsv4.simulator.all_schedules import run_schedules
    from dsv4.simulator.formats import finding_of
    from dsv4.simulator.merged import MergedReport
    from dsv4.simulator.ptx.parser import parse_module

    schedules = sim_output.schedules_of(args.schedules)
    torch.manual_seed(args.seed)
    entries = parse_module(text := _text(args.file)).entries
    if not entries:
        raise ValueError(f"FILE: no kernel in {args.file}")
    name = args.entry
    if name is None and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        raise ValueError(f"--entry: got {quoted(name)}, needs one of {', '.join(entries)}")
    params = tuple(parameter(spec) for spec in args.param)
    report = MergedReport()

    def call(schedule: str) -> Report:
        return simulate_ptx(
            text, name, grid=tuple(args.grid), cluster=args.cluster and tuple(args.cluster),
            block=tuple(args.block or entries[name].threads or (32,)), shared=args.shared,
            params=params, schedule=schedule, seed=args.seed, races=args.races,
        )  # fmt: skip

    try:
        tensors = [value for value in params if isinstance(value, torch.Tensor)]
        run_schedules(call, tensors, schedules, report)
    except SimulatorError as error:
        report.findings.append(finding_of(error))
    if args.save is not None:
        save(args.save, params)
    return sim_output.finish(report, args)


def parameter(spec: str) -> Any:
    """A kernel parameter from its description."""
    import numpy as np
    import torch

    match = _PARAMETER.fullmatch(spec)
    dtype = getattr(torch, match.group(1), None) if match else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--param: got {quoted(spec)}, needs {_FORM}")
    _, sizes, value = match.groups()
    if sizes is None:
        if value is None:
            raise ValueError(f"--param: got {quoted(spec)}, needs {_FORM}")
        return float(value) if dtype.is_floating_point else int(value, 0)
    shape = [int(n) for n in sizes.split(",")]
    if value is None:
        return torch.zeros(shape, dtype=dtype)
    count = int(np.prod(shape))
    if value == "arange":
        return torch.arange(count).to(dtype).reshape(shape)
    if value == "random":
        if dtype.is_floating_point:
            return torch.randn(count).to(dtype).reshape(shape)
        return torch.randint(0, 100, (count,)).to(dtype).reshape(shape)
    return torch.from_numpy(np.load(value)).to(dtype).reshape(shape)


def save(folder: Path, params: tuple[Any, ...]) -> None:
    """Write each tensor as param0.npy and so on; types that numpy lacks as their bytes."""
    import numpy as np
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for i, value in enumerate(params):
        if isinstance(value, torch.Tensor):
            plain = value.dtype in (torch.bfloat16,) or value.dtype.itemsize == 1
            array = value.view(torch.uint8).numpy() if plain else value.numpy()
            np.save(folder / f"param{i}.npy", array)
