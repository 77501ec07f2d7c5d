"""`HeadRotation` under test: an epilogue's tensors, and linears that have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.ops.head_rotation import HeadRotation, head_squares
from dsv4.testing import fp8_linear as fp8

TABLE_ROWS = 100


@dataclass(frozen=True)
class Rotation:
    """Tensors of an epilogue; the squares are poisoned."""

    head_dim: int
    rope: Tensor
    positions: Tensor
    squares: Tensor

    @property
    def epilogue(self) -> HeadRotation:
        return HeadRotation(self.rope, self.positions, self.head_dim, self.squares)

    def first(self, tokens: int) -> Rotation:
        """That of the first tokens."""
        squares = torch.full_like(self.squares[:tokens], torch.nan)
        return replace(self, positions=self.positions[:tokens], squares=squares)


def make_rotation(
    case: fp8.Case, head_dim: int, seed: int, device: torch.device | str = "cpu"
) -> Rotation:
    """A table of any angles, and positions on both sides of it, too."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    angles = torch.rand((TABLE_ROWS, 32), **options) * 6.3
    positions = torch.randint(-5, TABLE_ROWS + 5, (case.tokens,), dtype=torch.int32, **options)
    squares = head_squares(case.tokens, case.out_features // head_dim, head_dim, device)
    rope = torch.cat((angles.cos(), angles.sin()), -1)
    return Rotation(head_dim, rope, positions, squares.fill_(torch.nan))


@dataclass(frozen=True)
class Inputs(fp8.Inputs):
    """Inputs of an `fp8_linear` with the epilogue."""

    rotation: Rotation | None = None

    @classmethod
    def make_heads(
        cls, case: fp8.Case, head_dim: int, seed: int, device: torch.device | str = "cpu"
    ) -> Inputs:
        made = fp8.Inputs.make(case, seed, device)
        return cls(**vars(made), rotation=make_rotation(case, head_dim, seed, device))

    @property
    def plain(self) -> fp8.Inputs:
        """The same without the epilogue."""
        own = {name: value for name, value in vars(self).items() if name != "rotation"}
        return fp8.Inputs(**own)

    def first(self, tokens: int) -> Inputs:
        return replace(super().first(tokens), rotation=self.rotation.first(tokens))

    @property
    def config(self) -> Fp8LinearConfig:
        return replace(super().config, epilogue=self.rotation.epilogue.config)

    @property
    def arguments(self) -> dict[str, Tensor]:
        rotation = self.rotation
        return {**super().arguments, "rope": rotation.rope, "positions": rotation.positions}

    def call(self, device, given=None, **scalars):
        squares = torch.full_like(self.rotation.squares, torch.nan)
        return super().call(device, {"squares": squares, **(given or {})}, **scalars)

    def applied(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the torch implementation makes of y, which has no epilogue; and the squares."""
        epilogue = self.rotation.first(len(y)).epilogue
        return epilogue.apply_(y.clone()), epilogue.squares
