"""h of experts as their kernels leave it, compared with what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.kernels.moe.config import K_BLOCK
from dsv4.ops.quantize import (
    E2M1_VALUES,
    NVFP4_BLOCK,
    dequantize_e2m1,
    quantize_e4m3,
    quantize_nvfp4,
)
from dsv4.testing.fp8_linear import ROUNDING
from dsv4.testing.harness import Outcome

if TYPE_CHECKING:
    from dsv4.testing.moe import Case, Weight

MAX_RELATIVE_ERROR = 4e-3  # of a product's rows, each by its norm


@dataclass(frozen=True)
class Hidden:
    """h [n, I] as kernels leave it: bf16 values, or codes with scales [n, I / 128].

    Attributes:
        values: bf16, or codes times their scales.
        scales: None beside bf16 values.
    """

    values: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, outcome: Outcome, case: Case, device: torch.device, rows: slice) -> Hidden:
        """Rows as a launch has left them, but for those in NVFP4: on Hopper codes where it has
        written none of these poisoned rows in bf16."""
        if not case.is_tiled and not outcome["h"][rows].isnan().all():
            return cls(outcome["h"][rows].to(device), None)
        codes = outcome["h_codes"].to(device).double()
        shape = len(codes), case.inner // K_BLOCK
        scales = outcome["h_scale"].flatten().view(torch.uint8)[: shape[0] * shape[1]]
        scales = scales.view(torch.float8_e8m0fnu).view(shape).to(device).double()
        return cls((codes * scales.repeat_interleave(K_BLOCK, 1))[rows], scales[rows])

    def first(self, rows: Tensor) -> Hidden:
        """Some rows."""
        return Hidden(self.values[rows], None if self.scales is None else self.scales[rows])

    def read_by(self, weight: Weight) -> Tensor:
        """What the second product reads, fp64."""
        return weight.activations(self.values, None) if self.scales is None else self.values

    def check(self, name: str, wanted: Tensor, error: Tensor) -> None:
        """Fail where h is further off than `error` and its own rounding explain."""
        if self.scales is None:
            check_values(name, self.values, wanted, error)
        else:
            self._check_codes(name, wanted, error)

    def _check_codes(self, name: str, wanted: Tensor, error: Tensor) -> None:
        """Each code, and each scale, is that of a value within the bound: rounding is monotonic."""
        bound = allowed_error(wanted, error)
        blocks = wanted.unflatten(1, (-1, K_BLOCK))
        bound = bound.unflatten(1, (-1, K_BLOCK))
        finite = blocks.isfinite().all(-1)
        lost = self.scales.isfinite() != finite
        assert not lost.any(), f"{name}: {int(lost.sum())} groups are finite where they should not"
        largest = blocks.abs()
        least, most = (
            quantize_e4m3(edge.clamp(min=0).float().nan_to_num(), K_BLOCK)[1].double().squeeze(-1)
            for edge in (largest - bound, largest + bound)
        )
        off = finite & ((self.scales < least) | (self.scales > most))
        assert not off.any(), f"{name}: {int(off.sum())} scales are not those of their groups"
        scales = self.scales[..., None]
        low, high = (
            (edge / scales).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scales
            for edge in (blocks - bound, blocks + bound)
        )
        codes = self.values.unflatten(1, (-1, K_BLOCK))
        off = finite[..., None] & ((codes < low) | (codes > high))
        assert not off.any(), f"{name}: {int(off.sum())} codes are not those of their values"


@dataclass(frozen=True)
class PackedHidden(Hidden):
    """h [n, I] in NVFP4, with scales [n, I / 16].

    Attributes:
        whole: the fp32 scale, of an expert.
    """

    whole: Tensor

    @classmethod
    def of_expert(
        cls, outcome: Outcome, rows: Tensor, whole: Tensor, device: torch.device
    ) -> PackedHidden:
        """Some rows that a launch has left."""
        codes = outcome["packed_h"].to(device)[rows]
        scales = outcome["packed_h_scales"].to(device)[rows].view(torch.float8_e4m3fn)
        values = dequantize_e2m1(codes, scales, torch.float64) * whole.double()
        return cls(values, scales.double(), whole)

    def _check_codes(self, name: str, wanted: Tensor, error: Tensor) -> None:
        """As of FP8."""
        bound = allowed_error(wanted, error).unflatten(1, (-1, NVFP4_BLOCK))
        blocks = wanted.unflatten(1, (-1, NVFP4_BLOCK))
        finite = blocks.isfinite().all(-1)
        lost = self.scales.isfinite() != finite
        assert not lost.any(), f"{name}: {int(lost.sum())} groups are finite where they should not"
        largest, whole = blocks.abs(), self.whole.expand(1)
        least, most = (
            quantize_nvfp4(edge.clamp(min=0).flatten(1).float().nan_to_num(), whole)[1].double()
            for edge in (largest - bound, largest + bound)
        )
        off = finite & ((self.scales < least) | (self.scales > most))
        assert not off.any(), f"{name}: {int(off.sum())} scales are not those of their groups"
        steps = (self.scales * self.whole.double())[..., None]
        low, high = (
            _nearest_e2m1(torch.where(steps == 0, 0.0, edge / steps)) * steps
            for edge in (blocks - bound, blocks + bound)
        )
        codes = self.values.unflatten(1, (-1, NVFP4_BLOCK))
        slack = steps * 1e-6
        off = finite[..., None] & ((codes < low - slack) | (codes > high + slack))
        assert not off.any(), f"{name}: {int(off.sum())} codes are not those of their values"


def _nearest_e2m1(x: Tensor) -> Tensor:
    """The nearest of the values of e2m1, by trying all."""
    values = torch.tensor([*(-v for v in E2M1_VALUES[::-1]), *E2M1_VALUES], device=x.device)
    values = values.double()
    return values[(x[..., None] - values).abs().argmin(-1)]


def allowed_error(wanted: Tensor, error: Tensor) -> Tensor:
    """Most that a bf16 value may be off, beside `error` before its rounding."""
    return (error + (wanted.abs() + error) * ROUNDING["bfloat16"] + 2.0**-133) * (1 + 1e-6)


def check_values(name: str, actual: Tensor, wanted: Tensor, error: Tensor) -> None:
    """Fail where bf16 values are further off than `error` and their rounding explain."""
    actual = actual.double()
    lost = actual.isfinite() != wanted.isfinite()
    assert not lost.any(), f"{name}: {int(lost.sum())} elements are finite where they should not be"
    finite = wanted.isfinite()
    off = torch.where(finite, actual - wanted, 0.0).abs()
    allowed = allowed_error(wanted, error)
    worst = torch.where(finite, off - allowed, -1.0)
    if worst.numel() == 0:
        return
    where = divmod(int(worst.argmax()), worst.shape[1])
    assert worst.max() <= 0, (
        f"{name}{list(where)}: got {actual[where]:.6g}, needs {wanted[where]:.6g} "
        f"within {allowed[where]:.2g}"
    )
    norm = torch.where(finite, wanted, 0.0).norm(dim=1).clamp(min=1e-30)
    relative = float((off.norm(dim=1) / norm).max())
    assert relative <= MAX_RELATIVE_ERROR, f"{name}: relative error {relative:.2e} of a row"
