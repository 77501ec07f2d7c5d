#!/usr/bin/env python3
"""Models Blackwell attention by number of KV splits, and fits the costs that choose them.

    scripts/tools/simulator_split_costs.py FILE           # models all launches of FILE anew
    scripts/tools/simulator_split_costs.py FILE --fit     # prints costs that fit FILE best

FILE is `tests/kernels/attention/sm100/modelled_splits.json`, and the costs are those of
`dsv4/kernels/attention/sm100/costs.py`. Needs no GPU; the launches take five minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsv4.arch import SM_100A  # noqa: E402
from dsv4.cli.sim_attention import Workload  # noqa: E402
from dsv4.cli.sim_table import Subject, rows  # noqa: E402
from dsv4.kernels.attention import launch_plan  # noqa: E402
from dsv4.kernels.attention.sm100 import costs  # noqa: E402
from dsv4.testing.attention import Case  # noqa: E402

HEAD_DIM, WINDOW = 512, 128
STEPS = (0.3, 0.1, 0.03, 0.01)  # by which a cost is changed, as a part of it


def model(path: Path) -> None:
    """Replace the times of every launch in the file by what the time model says now."""
    record = json.loads(path.read_text())
    shapes = [(shape, int(splits)) for shape in record["shapes"] for splits in shape["splits"]]
    subjects = []
    for shape, splits in shapes:
        case = Case.decode(shape["tokens"], shape["heads"], shape["rows"])
        subjects.append(Subject("", Workload(SM_100A.name, case, splits)))
    for (shape, splits), row in zip(shapes, rows(subjects), strict=True):
        shape["splits"][str(splits)] = round(row.prediction.microseconds, 2)
        print(row.subject.workload, shape["splits"][str(splits)], flush=True)
        write(path, record)


def write(path: Path, record: dict) -> None:
    """One shape a line."""
    listed = ",\n  ".join(json.dumps(shape) for shape in record["shapes"])
    path.write_text(f'{{\n "machine": "{record["machine"]}",\n "shapes": [\n  {listed}\n ]\n}}\n')


def error(shapes: list[dict]) -> float:
    """Mean relative error of the costs."""
    errors = []
    for shape in shapes:
        tiles = launch_plan.key_tiles(shape["rows"], WINDOW)
        for splits, modelled in shape["splits"].items():
            size = (HEAD_DIM, shape["heads"], shape["tokens"], int(splits), tiles)
            errors.append(abs(costs.microseconds(*size, SM_100A.num_sms) / modelled - 1))
    return sum(errors) / len(errors)


def fit(path: Path) -> None:
    """Change one cost at a time while that lowers the error, by smaller and smaller steps."""
    shapes = json.loads(path.read_text())["shapes"]
    best = error(shapes)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for get, put in _figures():
                old = get()
                for factor in (1 + step, 1 - step):
                    put(old * factor)
                    found = error(shapes)
                    if found < best:
                        best, improved = found, True
                        break
                    put(old)
    print(f"mean error {best:.1%}")
    for variant, found in costs.COSTS.items():
        print(variant, {name: round(value, 2) for name, value in vars(found).items()})
    print(f"COMBINE_FREE {costs.COMBINE_FREE:.2f}, COMBINE_BUSY {costs.COMBINE_BUSY:.2f}")


def _figures() -> list[tuple[Callable[[], float], Callable[[float], None]]]:
    """How to read and to set each cost that is not zero."""

    def of_variant(variant: str, name: str) -> tuple:
        def put(value: float) -> None:
            costs.COSTS[variant] = replace(costs.COSTS[variant], **{name: value})

        return lambda: getattr(costs.COSTS[variant], name), put

    def of_module(name: str) -> tuple:
        return lambda: getattr(costs, name), lambda value: setattr(costs, name, value)

    own = [
        of_variant(variant, name)
        for variant, found in costs.COSTS.items()
        for name, value in vars(found).items()
        if value
    ]
    return [*own, of_module("COMBINE_FREE"), of_module("COMBINE_BUSY")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="modelled times; rewritten without --fit")
    parser.add_argument("--fit", action="store_true", help="print the costs that fit best")
    arguments = parser.parse_args()
    (fit if arguments.fit else model)(arguments.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
