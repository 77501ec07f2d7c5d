"""What whole kernels wrote on a Hopper GPU: digests, and the kept elements of each output.

kernels.json names the machine and each case's inputs; kernels.npz holds the elements.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.simulator.hardware.goldens import FOLDER, outside
from tests.simulator.hardware.kernel_cases import KernelCase, Output

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class KernelGolden:
    """The hardware's outputs of one case: digests of the exact ones, of the others the bytes of the
    kept elements."""

    identity: str
    digests: dict[str, str]
    kept: dict[str, np.ndarray]


def golden_of(case: KernelCase, results: dict[str, Tensor]) -> KernelGolden:
    """Condense the outputs."""
    return KernelGolden(
        case.identity(),
        {
            name: _digest(results[name])
            for name, output in case.outputs.items()
            if not output.tolerance
        },
        {
            name: _kept(results[name], output)
            for name, output in case.outputs.items()
            if output.tolerance
        },
    )


def differences(case: KernelCase, golden: KernelGolden, results: dict[str, Tensor]) -> list[str]:
    """One line per output that is not what the hardware wrote."""
    found = []
    for name, output in case.outputs.items():
        result = results[name]
        if output.tolerance:
            kind = _KINDS[result.dtype]
            wrong = outside(kind, output.tolerance, golden.kept[name], _kept(result, output))
            if wrong:
                found.append(f"{name}: {wrong}")
        elif _digest(result) != golden.digests[name]:
            found.append(f"{name}: not the same bits")
    return found


def _kept(result: Tensor, output: Output) -> np.ndarray:
    return result.flatten()[:: output.every].contiguous().view(torch.uint8).numpy()


def _digest(result: Tensor) -> str:
    raw = result.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def save(folder: Path, machine: dict[str, str], goldens: dict[str, KernelGolden]) -> None:
    """Write kernels.json and kernels.npz."""
    listed = {
        name: {"identity": golden.identity, "digests": golden.digests}
        for name, golden in goldens.items()
    }
    text = json.dumps({"machine": machine, "cases": listed}, indent=1)
    (folder / "kernels.json").write_text(text + "\n")
    arrays = {
        f"{name}/{output}": kept
        for name, golden in goldens.items()
        for output, kept in golden.kept.items()
    }
    np.savez_compressed(folder / "kernels.npz", **arrays)


def load(folder: Path = FOLDER) -> dict[str, KernelGolden]:
    """The committed results by case."""
    listed = json.loads((folder / "kernels.json").read_text())["cases"]
    with np.load(folder / "kernels.npz") as stored:
        arrays = dict(stored)
    return {
        name: KernelGolden(
            entry["identity"],
            entry["digests"],
            {key.rpartition("/")[2]: kept for key, kept in arrays.items()
             if key.rpartition("/")[0] == name},
        )
        for name, entry in listed.items()
    }  # fmt: skip
