"""`HeadRotation` under test: an epilogue's tensors, and linears that have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.merged_config import MergedLinearConfig, weights_text
from dsv4.ops.head_rotation import HeadRotation, head_squares
from dsv4.ops.runtime.backend import Device
from dsv4.reference import linear as oracle
from dsv4.testing import fp8_linear as fp8
from dsv4.testing import merged_linear as merged
from dsv4.testing.harness import Call

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
    """Inputs of an `fp8_linear` with the epilogue.

    Attributes:
        gap: elements between the rows of y, where that is to be none that TMA can write.
    """

    rotation: Rotation | None = None
    gap: int = 0

    @classmethod
    def make_heads(
        cls, case: fp8.Case, head_dim: int, seed: int, device: torch.device | str = "cpu"
    ) -> Inputs:
        made = fp8.Inputs.make(case, seed, device)
        return cls(**vars(made), rotation=make_rotation(case, head_dim, seed, device))

    @property
    def plain(self) -> fp8.Inputs:
        """The same without the epilogue."""
        own = {field.name: getattr(self, field.name) for field in fields(fp8.Inputs)}
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

    @property
    def padding(self) -> int:
        return self.gap or super().padding

    def call(self, device: Device, given: Mapping[str, Tensor] | None = None, **scalars) -> Call:
        given = {"squares": self.rotation.first(self.case.tokens).squares, **(given or {})}
        return super().call(device, given, **scalars)

    def applied(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the torch implementation makes of y, which has no epilogue; and the squares."""
        epilogue = self.rotation.first(len(y)).epilogue
        return epilogue.apply_(y.clone()), epilogue.squares


@dataclass(frozen=True)
class MergedInputs(merged.Inputs):
    """Inputs of a `merged_linear` whose first weight has the epilogue."""

    rotation: Rotation | None = None

    @classmethod
    def make_heads(
        cls, case: merged.Case, head_dim: int, seed: int, device: torch.device | str = "cpu"
    ) -> MergedInputs:
        made = merged.Inputs.make(case, seed, device)
        return cls(**vars(made), rotation=make_rotation(case.linears[0], head_dim, seed, device))

    @property
    def config(self) -> MergedLinearConfig:
        first, *others = self.case.config.parsed
        first = replace(first, epilogue=self.rotation.epilogue.config)
        return replace(self.case.config, weights=weights_text([first, *others]))

    @property
    def arguments(self) -> dict[str, Tensor]:
        rotation = self.rotation
        return {**super().arguments, "rope": rotation.rope, "positions": rotation.positions}

    @property
    def heads(self) -> Inputs:
        """The first weight alone."""
        return Inputs(**vars(self.linears[0]), rotation=self.rotation)

    def call(self, device: Device, given: Mapping[str, Tensor] | None = None, **scalars) -> Call:
        given = {"squares_0": self.rotation.first(self.case.tokens).squares, **(given or {})}
        return super().call(device, given, **scalars)


def assert_heads_close(y: Tensor, squares: Tensor, inputs: Inputs) -> None:
    """Fail where rotated heads or their sums of squares are further from the oracle than roundings
    before and after the rotation, and the accumulator, allow; finite inputs."""
    rotation, rounding = inputs.rotation, fp8.ROUNDING[inputs.case.out_dtype]
    heads = inputs.case.out_features // rotation.head_dim
    sums = inputs.expected()
    expected, mean = oracle.rotated_heads(sums, heads, rotation.rope, rotation.positions)
    error = sums.abs() * rounding + inputs.magnitude() * fp8.SUM_ERROR
    # A rotated channel has that of both of its pair, and is rounded again.
    pairs = error.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    fp8.assert_within(y, expected, pairs + expected.abs() * 2 * rounding, "y")
    wide = sums.unflatten(-1, (heads, -1))
    allowed = (2 * wide.abs() + error.view_as(wide)) * error.view_as(wide)
    fp8.assert_within(squares.sum(-1), mean * rotation.head_dim, allowed.sum(-1), "squares")
