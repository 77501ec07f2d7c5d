"""Kernels compiled by nvcc, beside numpy: `nvcc_cases.py NAME --arch ARCH --json FILE`."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dsv4.simulator import SimulatorError, simulate_ptx
from dsv4.simulator.all_schedules import run_schedules
from dsv4.simulator.formats import as_json, finding_of
from dsv4.simulator.merged import MergedReport

SOURCE = Path(__file__).with_suffix(".cu")
RNG = np.random.default_rng(0)
Launch = Callable[..., None]


def compiled(arch: str) -> str:
    """The PTX of all kernels."""
    if shutil.which("nvcc") is None:
        sys.exit("nvcc is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        command = ["nvcc", "-ptx", "-lineinfo", "-std=c++17", f"-arch={arch}", "-o", str(out)]
        subprocess.run([*command, str(SOURCE)], check=True)
        return out.read_text()


def _floats(count: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(count).astype(np.float32))


def device_calls(launch: Launch) -> None:
    n = 100
    given, out = _floats(n), torch.zeros(n, dtype=torch.float64)
    launch(given, out, n, grid=2, block=64)
    x, i = given.double().numpy(), np.arange(n)
    by = i % 7
    second = np.stack((3 * i, i, 2 * i), 1)
    for row, count in zip(second, by):
        for step in range(count):
            row[step % 3] += step
    first = x * by
    kept = by == 3
    first[kept], second[kept] = x[kept], np.stack((i, 2 * i, 3 * i), 1)[kept]
    expected = first + second[i, i % 3] + 1 + x * x - 2 * x**2 + 0.5 * x**3
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)


def slow_paths(launch: Launch) -> None:
    n = 64
    given, out = _floats(n), torch.zeros(3 * n)
    launch(given, out, n, grid=1, block=64)
    x = given.numpy()
    wide = x.astype(np.float64)
    found = out.numpy().reshape(n, 3)
    scaled = (x * np.float32(1e6)).astype(np.float64)
    np.testing.assert_allclose(found[:, 0], np.sin(scaled) + np.cos(wide), atol=1e-5)
    np.testing.assert_allclose(found[:, 1], wide / (1 + wide**2), rtol=1e-6)
    last = wide / (2 + np.sin(wide)) + np.fmod(wide, 0.75) + np.abs(wide) ** 1.25
    np.testing.assert_allclose(found[:, 2], last, rtol=1e-5, atol=1e-6)


def _interpreted(code: int, lane: int) -> int:
    """What dense_switch computes for one number, in 32 bits."""
    stack, top, mask = [0] * 8, 0, 0xFFFFFFFF
    for step in range(6):
        op = (code >> (4 * step)) & 15
        pushed = {
            0: 1, 1: code & 255, 2: lane, 3: top * 3, 8: code.bit_count(),
            9: 32 - (code | 1).bit_length(),
        }.get(op, op)  # fmt: skip
        if op in (4, 5):
            if top:
                value = stack[(top - 1) & 7]
                stack[(top - 1) & 7] = (value * 5 if op == 4 else value - 7) & mask
        elif op in (6, 7):
            if top > 1:
                a, b = stack[(top - 2) & 7], stack[(top - 1) & 7]
                stack[(top - 2) & 7] = (a ^ b if op == 6 else a + b) & mask
                top -= 1
        else:
            stack[top & 7] = pushed
            top += 1
    total = top
    for value in stack[:top]:
        total = (total * 31 + value) & mask
    return total


def dense_switch(launch: Launch) -> None:
    n = 128
    codes = torch.from_numpy(RNG.integers(0, 1 << 24, n).astype(np.int32))
    out = torch.zeros(n, dtype=torch.int32)
    launch(codes, out, n, grid=1, block=128)
    expected = [_interpreted(code, lane) for lane, code in enumerate(codes.tolist())]
    assert (out.numpy().astype(np.uint32) == np.array(expected, np.uint32)).all()


def last_block(launch: Launch) -> None:
    n, blocks = 5000, 4
    given, partial, out = _floats(n), torch.zeros(blocks), torch.zeros(1)
    launch(given, partial, out, n, grid=blocks, block=256)
    np.testing.assert_allclose(out.item(), given.double().sum().item(), atol=1e-3)


def grid_barrier(launch: Launch) -> None:
    blocks, threads = 6, 64
    n = blocks * threads
    values = _floats(n)
    expected, out = values.numpy().copy(), torch.zeros(n)
    launch(values, out, n, grid=blocks, block=threads)
    for _ in range(3):
        expected = np.float32(0.5) * (expected + np.roll(expected, -threads))
    np.testing.assert_array_equal(out.numpy(), expected)


def staged_copies(launch: Launch) -> None:
    tiles = 5
    given = _floats(tiles * 128 * 4)
    out = torch.zeros_like(given)
    launch(given, out, tiles, grid=1, block=128)
    assert torch.equal(out.reshape(tiles, 512), given.reshape(tiles, 512).flip(1))


def tensor_cores(launch: Launch) -> None:
    a, b = (_floats(16 * 64).half() for _ in range(2))
    out = torch.zeros(16, 16)
    launch(a, b, out, grid=1, block=32)
    torch.testing.assert_close(out, a.reshape(16, 64).float() @ b.reshape(16, 64).float().T)


KERNELS = (
    device_calls, slow_paths, dense_switch, last_block, grid_barrier, staged_copies, tensor_cores,
)  # fmt: skip


def main() -> int:
    """Run one kernel in every schedule and check what it wrote."""
    kernels = {kernel.__name__: kernel for kernel in KERNELS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=kernels)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    text, report = compiled(options.arch), MergedReport()

    def launch(*params, grid: int, block: int) -> None:
        def call(schedule: str):
            return simulate_ptx(
                text, options.kernel, grid=grid, block=block, params=params, schedule=schedule
            )

        run_schedules(
            call, [p for p in params if isinstance(p, torch.Tensor)], ("eager", "lazy"), report
        )

    try:
        kernels[options.kernel](launch)
    except SimulatorError as error:
        report.findings.append(finding_of(error))
    finally:
        options.json.write_text(json.dumps(as_json(report)))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
