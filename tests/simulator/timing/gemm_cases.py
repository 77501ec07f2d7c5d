"""GEMMs that are timed on a GPU and predicted by the time model: kernels and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.simulator.timing import Prediction, predict
from tests.simulator.helpers.support import compile_kernel
from tests.simulator.kernels.gemm_sm90 import GemmSm90
from tests.simulator.kernels.gemm_sm90_pipelined import PipelinedGemmSm90

# What an H200 took; `scripts/tools/simulator_gemm_times.py [--held-out] --measure` writes them.
MEASURED = Path(__file__).parent / "h200_gemm.json"
MEASURED_HELD_OUT = Path(__file__).parent / "h200_gemm_held_out.json"

# Name -> kernel: one warpgroup and two stages that waits for every k block; warp-specialised ones,
# with each CTA loading its own tiles, and with pairs of CTAs that share B by multicast.
KERNELS = {
    "plain 64x128": GemmSm90(),
    "pipelined 128x128": PipelinedGemmSm90((128, 128, 64)),
    "pipelined 128x256": PipelinedGemmSm90((128, 256, 64)),
    "multicast 128x128": PipelinedGemmSm90((128, 128, 64), (2, 1)),
    "multicast 128x256": PipelinedGemmSm90((128, 256, 64), (2, 1)),
}
# M, N, K: less than a wave and many waves, shallow and deep, few rows as in decoding.
SIZES = (
    (256, 8192, 4096),
    (512, 4096, 7168),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 1024),
)
# Sizes that no figure of the model has been set by: the test of what it says of other GEMMs.
HELD_OUT_SIZES = (
    (512, 7168, 2048),
    (768, 3072, 5120),
    (1536, 6144, 1536),
    (3072, 3072, 3072),
    (5120, 2560, 6144),
)


@dataclass(frozen=True)
class Gemm:
    """C[m, n] fp32 = A[m, k] B[n, k]^T in bf16, by one of `KERNELS`."""

    kernel: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Operations of the product."""
        return 2 * self.m * self.n * self.k

    def operands(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """A, B and C without values."""
        a, b = (
            torch.empty(rows, self.k, dtype=torch.bfloat16, device=device)
            for rows in (self.m, self.n)
        )
        return a, b, torch.empty(self.m, self.n, device=device)

    def compile(self) -> Any:
        """The kernel for these sizes."""
        return compile_kernel(KERNELS[self.kernel], "sm_90a", *self.operands())

    def predict(self) -> Prediction:
        """The model's time on an H200."""
        return predict(self.compile(), *self.operands())

    def __str__(self) -> str:
        return f"{self.kernel}, {self.m} x {self.n} x {self.k}"


def gemms(sizes: Sequence[tuple[int, int, int]] = SIZES) -> Iterator[Gemm]:
    """Every kernel at every size."""
    for size in sizes:
        for kernel in KERNELS:
            yield Gemm(kernel, *size)


@dataclass(frozen=True)
class Measured:
    """A GEMM with its time on a GPU, and the clock of the SMs meanwhile."""

    gemm: Gemm
    microseconds: float
    clock_mhz: int


def load(path: Path = MEASURED) -> list[Measured]:
    """The measurements of a file."""
    return [
        Measured(
            Gemm(*(result[name] for name in ("kernel", "m", "n", "k"))),
            result["microseconds"],
            result["clock_mhz"],
        )
        for result in json.loads(path.read_text())["results"]
    ]
