#!/usr/bin/env python3
"""Runs the simulator's whole-kernel cases on a Hopper GPU and records what they wrote.

    scripts/tools/simulator_kernel_goldens.py [--output tests/simulator/hardware]

The kernels are compiled where they run (sm_90a, nvidia-cutlass-dsl). Each runs twice: a case whose
two runs differ in a bit is not recorded and ends the script with status 1.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.simulator.hardware.goldens import FOLDER  # noqa: E402
from tests.simulator.hardware.kernel_cases import KernelCase, kernel_cases  # noqa: E402
from tests.simulator.hardware.kernel_goldens import golden_of, save  # noqa: E402


def machine() -> dict[str, str]:
    """What the results are recorded on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl"),
        "date": datetime.date.today().isoformat(),
    }


def run(case: KernelCase) -> dict[str, torch.Tensor]:
    """The outputs of one run on the GPU, as CPU tensors."""
    call = case.make().to("cuda")
    case.compile()(*call.args, **call.options)
    torch.cuda.synchronize()
    return {name: result.cpu() for name, result in call.outputs.items()}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the golden files")
    arguments = parser.parse_args()
    goldens, unsteady = {}, []
    for name, case in kernel_cases().items():
        first, second = run(case), run(case)
        if all(_same_bits(first[output], second[output]) for output in first):
            goldens[name] = golden_of(case, first)
        else:
            unsteady.append(name)
    arguments.output.mkdir(parents=True, exist_ok=True)
    save(arguments.output, machine(), goldens)
    print(f"{len(goldens)} kernel cases recorded on {machine()}")
    for name in unsteady:
        print(f"not recorded, two runs differ: {name}")
    return 1 if unsteady else 0


if __name__ == "__main__":
    raise SystemExit(main())
