"""`kv_insert` under test: inputs, what they must give, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.rows.kv_insert_config import KvInsertConfig
from dsv4.ops.kv_insert import KV_INSERT
from dsv4.testing.kernel_call import OpInputs

EPS = 1e-6
FILL = 0xA5  # what pools hold at first, between and behind entries too


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        latents, dim: N and d.
        kv_format, is_rounded, uniform_scale: as in `KvInsertConfig`.
        page: entries of a page.
        has_special_rows: whether some latents are NaN, infinite, zero or tiny.
    """

    latents: int
    dim: int = 512
    kv_format: str = "fp8"
    is_rounded: bool = True
    uniform_scale: bool = False
    page: int = 64
    rope_dim: int = 64
    has_special_rows: bool = False

    @property
    def config(self) -> KvInsertConfig:
        return KvInsertConfig(
            self.dim, EPS, self.kv_format, self.is_rounded, self.uniform_scale, self.rope_dim
        )


@dataclass(frozen=True)
class Inputs(OpInputs):
    """Tensors of a case; a fifth of the slots are none."""

    op = KV_INSERT

    case: Case
    x: Tensor
    weight: Tensor
    rope: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def make(cls, case: Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        count, dim = case.latents, case.dim
        exponents = torch.randint(-8, 8, (count, dim), generator=generator) // 4
        x = torch.randn(count, dim, generator=generator) * torch.exp2(exponents.float())
        if case.has_special_rows:
            x[0::6] = torch.nan
            x[1::6, dim // 2] = torch.inf
            x[2::6] = 0
            x[3::6] *= 2.0**-30
            x[4::6, :64] *= 2.0**40
        weight = torch.randn(dim, generator=generator)
        angles = torch.randn(count + 5, case.rope_dim // 2, generator=generator) * 10
        positions = torch.randint(-2, count + 8, (count,), generator=generator)
        slots = torch.randperm(cls.pages_of(case) * case.page, generator=generator)[:count]
        none = torch.tensor([-1, -(2**31), 2**31 - 1, cls.pages_of(case) * case.page])
        slots[::5] = none[torch.arange(len(slots[::5])) % len(none)]
        tensors = (
            x.bfloat16(),
            weight,
            torch.cat((angles.cos(), angles.sin()), 1),
            positions.to(torch.int32),
            slots.to(torch.int32),
        )
        return cls(case, *(tensor.to(device) for tensor in tensors))

    @staticmethod
    def pages_of(case: Case) -> int:
        return -(-case.latents // case.page) + 2

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments of the operator before the pool."""
        return self.x, self.weight, self.rope, self.positions, self.slots

    def pool(self) -> Tensor:
        """[pages, P, row] of `FILL`, pages 1,040 bytes apart."""
        case, config = self.case, self.case.config
        size = 1 if case.kv_format == "fp8" else 2
        stride = case.page * config.row + 1040 // size
        stride += -stride % (16 // size)
        pages = self.pages_of(case)
        frame = torch.full((pages * stride * size,), FILL, dtype=torch.uint8, device=self.x.device)
        dtype = torch.uint8 if case.kv_format == "fp8" else torch.bfloat16
        shape = (pages, case.page, config.row)
        return frame.view(dtype).as_strided(shape, (stride, config.row, 1))

    @property
    def config(self) -> KvInsertConfig:
        return self.case.config

    @property
    def arguments(self) -> dict[str, Tensor]:
        """By the table's names, with a pool of its own."""
        names = ("x", "weight", "rope", "positions", "slots")
        return {**dict(zip(names, self.tensors, strict=True)), "pool": self.pool()}

    def expected(self) -> Tensor:
        """The bytes of the pool after the torch implementation, what lies between pages too."""
        pool = self.pool()
        KV_INSERT.torch(self.case.config, *self.tensors, pool)
        return frame_of(pool)


def frame_of(pool: Tensor) -> Tensor:
    """All bytes of a pool's memory."""
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())


def assert_same_pool(actual: Tensor, inputs: Inputs) -> None:
    """Equal bytes; a NaN, in bf16 or as a code, equals any NaN there."""
    expected = inputs.expected().cpu()
    wrong = actual.cpu() != expected
    if inputs.case.has_special_rows:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            nan, also = (x.view(dtype).float().isnan() for x in (actual.cpu(), expected))
            wrong &= ~(nan & also).repeat_interleave(dtype.itemsize)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise AssertionError(
            f"pool: {int(wrong.sum())} of {wrong.numel()} bytes differ, the first at {first}: "
            f"{int(actual.cpu()[first]):#x}, expected {int(expected[first]):#x}"
        )
