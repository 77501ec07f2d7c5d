"""`IndexRounding` under test: linears that have it, and what they must give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.kernels.gemm.config import Fp8LinearConfig
from dsv4.kernels.gemm.merged_config import MergedLinearConfig, weights_text
from dsv4.kernels.kit.index_entry import MODEL_DIM
from dsv4.ops.fp8_linear import INDEX_EPILOGUE
from dsv4.ops.index_keys import decode_index
from dsv4.ops.index_rounding import IndexRounding, index_scales, round_heads
from dsv4.ops.runtime.backend import Device
from dsv4.testing import fp8_linear as fp8
from dsv4.testing import head_rotation
from dsv4.testing.harness import Call

CODES = "float8_e4m3fn"


@dataclass(frozen=True)
class Inputs(fp8.Inputs):
    """Inputs of an `fp8_linear` with the epilogue, in codes."""

    rope: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def make_heads(cls, case: fp8.Case, seed: int, device: torch.device | str = "cpu") -> Inputs:
        made = fp8.Inputs.make(replace(case, x_dtype=CODES), seed, device)
        table = head_rotation.make_rotation(case, MODEL_DIM, seed, device)
        return cls(**vars(made), rope=table.rope, positions=table.positions)

    @property
    def plain(self) -> fp8.Inputs:
        """The same without the epilogue."""
        own = {name: x for name, x in vars(self).items() if name not in ("rope", "positions")}
        return fp8.Inputs(**own)

    def first(self, tokens: int) -> Inputs:
        return replace(super().first(tokens), positions=self.positions[:tokens])

    @property
    def config(self) -> Fp8LinearConfig:
        return replace(super().config, epilogue=INDEX_EPILOGUE, out_dtype=CODES)

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {**super().arguments, "rope": self.rope, "positions": self.positions}

    def scales(self) -> Tensor:
        """Room for the scales, poisoned."""
        heads = self.case.out_features // MODEL_DIM
        return index_scales(self.case.tokens, heads, self.x.device).fill_(torch.nan)

    @property
    def epilogue(self) -> IndexRounding:
        return IndexRounding(self.rope, self.positions, self.scales())

    def call(self, device: Device, given: Mapping[str, Tensor] | None = None, **scalars) -> Call:
        return super().call(device, {"head_scales": self.scales(), **(given or {})}, **scalars)

    def applied(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales that the torch implementation makes of y, which has no epilogue."""
        return round_heads(y, self.rope.to(y.device), self.positions.to(y.device))


@dataclass(frozen=True)
class MergedInputs(head_rotation.MergedInputs):
    """Inputs of a `merged_linear` whose first weight has rotated heads, and whose second one has
    index heads."""

    @property
    def config(self) -> MergedLinearConfig:
        first, second, *others = super().config.parsed
        second = replace(second, epilogue=INDEX_EPILOGUE, out_dtype=CODES)
        return replace(self.case.config, weights=weights_text([first, second, *others]))

    @property
    def index(self) -> Inputs:
        """The second weight alone."""
        rotation, part = self.rotation, self.linears[1]
        part = replace(part, case=replace(part.case, x_dtype=CODES), **self.of_codes)
        return Inputs(**vars(part), rope=rotation.rope, positions=rotation.positions)

    @property
    def of_codes(self) -> dict[str, Tensor]:
        return {"x": self.codes["x_codes"], "x_scale": self.codes["x_scale"]}

    def call(self, device: Device, given: Mapping[str, Tensor] | None = None, **scalars) -> Call:
        given = {"head_scales_1": self.index.scales(), **(given or {})}
        return super().call(device, given, **scalars)


def assert_same_heads(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], y: Tensor, label: str = ""
) -> None:
    """Fail where codes or scales of finite heads of y differ; zeros have any sign."""
    heads = y.cpu().float().unflatten(1, (-1, MODEL_DIM))
    is_finite = heads.isfinite().all(-1)
    codes, scales = ([t.cpu() for t in pair] for pair in zip(found, expected, strict=True))
    wrong = (scales[0] != scales[1]) & is_finite
    assert not wrong.any(), f"{label}: {int(wrong.sum())} scales differ"
    codes = [t.float().view_as(heads) for t in codes]
    wrong = (codes[0] != codes[1]).any(-1) & is_finite
    assert not wrong.any(), f"{label}: codes of {int(wrong.sum())} heads differ"
    values = decode_index(found[0].cpu().view(*is_finite.shape, MODEL_DIM), scales[0])
    assert values[is_finite].isfinite().all(), label
