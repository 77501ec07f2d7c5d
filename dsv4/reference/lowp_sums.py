"""Sums of weighted values as tensor cores make them: exact, Hopper's FP8 accumulator, fp16.

A sum takes the accumulator [L, d] and the weights [L, n] and values [n, d] of a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor, Tensor, Tensor], Tensor]
HOPPER_BITS = 13  # that an FP8 sum keeps behind the point of its largest term
HOPPER_KEYS, FP16_KEYS = 32, 16  # of one instruction


def exact_sum(start: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """start + p v, float32, rounded once."""
    return (start.double() + p.double() @ v.double()).float()


def hopper_sum(start: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """start + p v by FP8 instructions of Hopper.

    Each shifts its 32 products and the accumulator to the largest exponent among them and cuts what
    lies more than 13 bits below; the result keeps 13 bits, too.
    """
    total = start.double()
    for begin in range(0, len(v), HOPPER_KEYS):
        keys = slice(begin, begin + HOPPER_KEYS)
        a, b = p[:, keys, None].double(), v[None, keys].double()
        exponents = torch.where(a * b == 0, -1000, _exponent(a) + _exponent(b)).amax(1)
        exponents = torch.maximum(exponents, torch.where(total == 0, -1000, _exponent(total)))
        unit = torch.exp2((exponents.clamp(min=-500) - HOPPER_BITS).double())
        total = ((a * b / unit[:, None]).trunc().sum(1) + (total / unit).trunc()) * unit
        unit = torch.exp2((_exponent(total) - HOPPER_BITS).double())
        total = (total / unit).trunc() * unit
    return total.float()


def fp16_sum(keys: int) -> Sum:
    """A sum that is rounded to fp16 after every `keys` keys."""

    def add(start: Tensor, p: Tensor, v: Tensor) -> Tensor:
        total = start.double()
        for begin in range(0, len(v), keys):
            part = slice(begin, begin + keys)
            total = (total + p[:, part].double() @ v[part].double()).float().half().double()
        return total.float()

    return add


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|)."""
    return torch.frexp(x)[1] - 1
