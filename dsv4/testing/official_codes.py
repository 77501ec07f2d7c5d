"""Cases in which SageAttention's quantisers have run, and what dsv4's make of the same numbers.

Digests of the official codes and scales are `tests/ops/quantized_attention/official_codes.json`,
which `scripts/sage_parity digests` writes: so that they are compared where neither Triton nor nvcc
nor the official code is there.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.compat import sageattention as ours
from dsv4.kernels.lowp.groups import GEOMETRIES, Groups, key_groups, query_groups
from dsv4.ops.quantized_attention import quantizers as q8

SM90 = {"BLKQ": 64, "WARPQ": 16, "BLKK": 128, "WARPK": 128}
TRITON = ("per_thread, sm90", "per_thread, sm89", "per_block")
INT8 = ("int8, 16 rows", "int8, 128 rows", "int8, 64 rows without their mean")
COLUMNS = ("FP8 columns up to 448", "FP8 columns up to 2.25")
FP4 = ("FP4, rows", "FP4, columns")
KINDS = ("normal", "bias", "outlier", "zeros")
SIZES = ((200, 64, torch.bfloat16), (333, 128, torch.float16))


@dataclass(frozen=True)
class CodesCase:
    """Numbers of a kind, and a quantiser of them.

    Attributes:
        quantiser: of `TRITON`, `INT8`, `COLUMNS`, `FP4`.
        kind: of `KINDS`.
        rows, dim, dtype: of the numbers.
    """

    quantiser: str
    kind: str
    rows: int
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.quantiser}, {self.kind}, {self.rows} x {self.dim}, {self.dtype}"

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """x [rows, dim] and a row to be taken off, of integers, so that no library decides them."""
        x, mean = _hashed(self.rows, self.dim, 1), _hashed(1, self.dim, 2)[0]
        if self.kind == "bias":
            x = x + 8 * mean
        elif self.kind == "outlier":
            x[:, 3] *= 100
        elif self.kind == "zeros":
            x[: self.rows // 2] = 0
        return x.to(self.dtype), mean.to(self.dtype)

    @property
    def pair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [1, 1, rows, dim], and a mean of keys [1, 1, 1, dim], for Triton's."""
        x, mean = self.numbers
        return x[None, None], x.flip(0)[None, None], mean[None, None, None]

    def found(self) -> tuple[Tensor, ...]:
        """Codes and scales by dsv4's torch code."""
        name, (x, mean) = self.quantiser, self.numbers
        if name in TRITON:
            q, k, km = self.pair
            if name == "per_block":
                return per_block(q, k, km, self.dim**-0.5)
            return ours.per_thread_int8(q, k, km, **(SM90 if name.endswith("sm90") else {}))
        if name in INT8:
            wide = x.float() - mean.float() if "mean" in name else x.float()
            codes, scale = q8.quantize_rows(wide, Groups(1, 1, self.block), "cuda")
            return codes, scale.flatten()
        if name in COLUMNS:
            found = ours.per_channel_fp8(x[None, None], "HND", self.largest, smooth_v=False)
            return found[0][0, 0].view(torch.int8), found[1][0, 0]
        wide = x.T if name.endswith("columns") else x
        codes, scale = q8.quantize_fp4(wide.float().contiguous())
        return q8.pack_fp4(codes), scale.view(torch.uint8)

    @property
    def block(self) -> int:
        """Rows with one scale, of int8."""
        return int(self.quantiser.split()[1])

    @property
    def largest(self) -> float:
        """Largest code, of columns."""
        return float(self.quantiser.split()[-1])


def per_block(q: Tensor, k: Tensor, km: Tensor, sm_scale: float) -> tuple[Tensor, ...]:
    """Codes and scales per block, with Triton's rounding: of the operators' torch code."""
    tiles = GEOMETRIES["sm89"]
    rows = (q.float() * (sm_scale * ours.LOG2E), (k - km).float())
    groups = (query_groups("per_block", tiles), key_groups("per_block", tiles))
    found = [q8.quantize_rows(x, of, "block") for x, of in zip(rows, groups)]
    return tuple(x if i == 0 else x.flatten(-2) for pair in found for i, x in enumerate(pair))


def cases() -> list[CodesCase]:
    """All of them; the official launches of FP4 have whole blocks of 128 rows."""
    names = (*TRITON, *INT8, *COLUMNS, *FP4)
    return [
        CodesCase(name, kind, 256 if name in FP4 else rows, dim, dtype)
        for name, kind, (rows, dim, dtype) in itertools.product(names, KINDS, SIZES)
    ]


def digest(tensors: tuple[Tensor, ...]) -> str:
    """SHA-256 of the bytes of codes and scales."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _hashed(rows: int, dim: int, salt: int) -> Tensor:
    """[rows, dim] float32, sums of three numbers between -1 and 1, multiples of 2^-12."""
    x, total = torch.arange(rows * dim, dtype=torch.int64) + salt * 7919, 0
    for _ in range(3):
        x = (x * 1103515245 + 12345) % 2**31
        total = total + (x // 2**18) - 2**12
    return (total.float() / 2**12).view(rows, dim)
