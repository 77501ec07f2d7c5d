"""Kernel of `dshb_to_bhsd` under test: operands channels first, and what torch makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.lowp.relayout_config import RelayoutConfig
from dsv4.ops.quantized_attention.relayout import DSHB_TO_BHSD
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.harness import Outcome
from dsv4.testing.kernel_call import OpInputs


@dataclass(frozen=True)
class RelayoutInputs(OpInputs):
    """Operands of a call.

    Attributes:
        x: [d, s, h, b].
        padding: elements between the rows of the output.
    """

    op = DSHB_TO_BHSD

    x: Tensor
    padding: int = 0

    @classmethod
    def make(
        cls,
        shape: tuple[int, int, int, int],
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        padding: int = 0,
    ) -> RelayoutInputs:
        """Elements of a result of shape b, h, s, d, with NaN around them."""
        size = shape[::-1]
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
        frame = torch.full([n + 2 for n in size], torch.nan, dtype=dtype)
        inner = frame[tuple(slice(1, n + 1) for n in size)]
        inner.copy_(x)
        frame = frame.to(device)
        return cls(frame[tuple(slice(1, n + 1) for n in size)], padding)

    @property
    def config(self) -> RelayoutConfig:
        return RelayoutConfig(str(self.x.dtype).removeprefix("torch."))

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {"x": self.x}


def assert_turned(inputs: RelayoutInputs, outcome: Outcome) -> None:
    """Fail where the output is not torch's."""
    # Not contiguous(): of one element that would keep the strides.
    turned = inputs.x.permute(3, 2, 1, 0).clone(memory_format=torch.contiguous_format)
    assert_same_bits("y", outcome.outputs["y"], turned)
