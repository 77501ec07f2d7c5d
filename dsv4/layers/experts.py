"""Weights of the routed experts, stacked, and of the gated unit that all tokens share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4.layers.linear import ACTIVATION_BLOCK, SCALE_DTYPES, Linear, linear_options
from dsv4.layers.module import Module, empty_parameter
from dsv4.ops.moe.weights import GatedWeights
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

FP4_GROUP = 32


class ExpertWeight(Module):
    """One linear of every expert.

    Attributes:
        weight: [E, out, in] in `dtype`; float8_e4m3fn (scheme "fp8"); or two e2m1 codes per byte,
            [E, out, in / 2] int8 (scheme "fp4").
        scale: [E, ceil(out / block[0]), ceil(in / block[1])] or [E, out, in / 32]; None if not
            quantised.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        scheme: str | None,
        block: tuple[int, int],
        scale_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.scale = None
        if scheme == "fp4":
            self.weight = empty_parameter(
                (experts, out_features, in_features // 2), torch.int8, device
            )
            groups = in_features // FP4_GROUP
            self.scale = empty_parameter(
                (experts, out_features, groups), torch.float8_e8m0fnu, device
            )
        elif scheme == "fp8":
            shape = (experts, out_features, in_features)
            self.weight = empty_parameter(shape, torch.float8_e4m3fn, device)
            blocks = (-(-out_features // block[0]), -(-in_features // block[1]))
            self.scale = empty_parameter((experts, *blocks), scale_dtype, device)
        else:
            self.weight = empty_parameter((experts, out_features, in_features), dtype, device)
            self.plain = ("weight",)


class Experts(Module):
    """E gated units w2(silu(w1 x) * w3 x * routing weight); the weight is applied before w2.

    Raises:
        ValueError: unknown scheme, or quantised widths that do not fill whole groups.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        scheme: str | None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scheme not in (None, "fp4", "fp8"):
            raise ValueError(
                f"scheme of experts must be None, 'fp4' or 'fp8', got {quoted(scheme)}; "
                "NVFP4 experts are decoded when they are loaded"
            )
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        for name, width in (("hidden_size", hidden), ("moe_intermediate_size", inner)):
            if scheme and width % ACTIVATION_BLOCK:
                raise ValueError(
                    f"{name} must be a multiple of {ACTIVATION_BLOCK} for {scheme} experts, "
                    f"got {width}"
                )
        options = (scheme, config.fp8_block, SCALE_DTYPES[config.scale_dtype], dtype, device)
        count = config.n_routed_experts
        self.w1 = ExpertWeight(count, hidden, inner, *options)
        self.w2 = ExpertWeight(count, inner, hidden, *options)
        self.w3 = ExpertWeight(count, hidden, inner, *options)

    @property
    def weights(self) -> GatedWeights:
        """As the operator takes them."""
        return gated_weights(self)


class SharedExpert(Module):
    """The gated unit of all tokens, without a routing weight, with the clamps of the others."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        options = linear_options(config, dtype, device)
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, **options)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, **options)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, **options)

    @property
    def weights(self) -> GatedWeights:
        """As the operator takes them."""
        return gated_weights(self)


def gated_weights(unit: Module) -> GatedWeights:
    """Weights and scales of a module with `w1`, `w2` and `w3`."""
    parts = [unit.w1, unit.w3, unit.w2]
    scales = [getattr(part, "scale", None) for part in parts]
    return GatedWeights(*(part.weight for part in parts), *scales)
