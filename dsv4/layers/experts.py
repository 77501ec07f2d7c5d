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

FP4_GROUP, NVFP4_GROUP = 32, 16


class ExpertWeight(Module):
    """One linear of every expert.

    Attributes:
        weight: [E, out, in] in `dtype`; float8_e4m3fn (scheme "fp8"); or two e2m1 codes per byte,
            [E, out, in / 2] int8 (scheme "fp4") or uint8 ("nvfp4").
        scale: [E, ceil(out / block[0]), ceil(in / block[1])] or [E, out, in / 32]; None if not
            quantised.
        weight_scale, weight_scale_2: [E, out, in / 16] float8_e4m3fn and [E] float32 of "nvfp4", by
            the names of such checkpoints; None of others.
        input_scale: [E] float32 of "nvfp4", of the inputs; None where a checkpoint has none.
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
        self.scale = self.weight_scale = self.weight_scale_2 = self.input_scale = None
        packed = (experts, out_features, in_features // 2)
        if scheme == "nvfp4":
            self.weight = empty_parameter(packed, torch.uint8, device)
            groups = (experts, out_features, in_features // NVFP4_GROUP)
            self.weight_scale = empty_parameter(groups, torch.float8_e4m3fn, device)
            self.weight_scale_2 = empty_parameter((experts,), torch.float32, device)
            self.input_scale = empty_parameter((experts,), torch.float32, device)
        elif scheme == "fp4":
            self.weight = empty_parameter(packed, torch.int8, device)
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
        if scheme not in (None, "fp4", "fp8", "nvfp4"):
            raise ValueError(
                f"scheme of experts must be None, 'fp4', 'fp8' or 'nvfp4', got {quoted(scheme)}"
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

    def drop_input_scales_(self) -> None:
        """Activations of a checkpoint without their scales are not rounded."""
        for weight in self.matrices:
            weight.input_scale = None

    def join_scales_(self) -> None:
        """Move the fp32 scales of NVFP4 into rows of one tensor, as the operator takes them."""
        parts = self._whole_scales
        if parts and _as_rows(parts) is None:
            for part, row in zip(parts, torch.stack(parts).unbind()):
                part.data = row

    @property
    def _whole_scales(self) -> list[torch.Tensor]:
        """fp32 scales of NVFP4, of the weights and then of their inputs."""
        found = [weight.weight_scale_2 for weight in self.matrices]
        found += [weight.input_scale for weight in self.matrices]
        return [scale for scale in found if scale is not None]

    @property
    def matrices(self) -> tuple[ExpertWeight, ExpertWeight, ExpertWeight]:
        """In the order of `GatedWeights`."""
        return self.w1, self.w3, self.w2

    @property
    def weights(self) -> GatedWeights:
        """As the operator takes them."""
        found, parts = gated_weights(self), self._whole_scales
        if not parts:
            return found
        rows = _as_rows(parts)
        return found._replace(global_scales=torch.stack(parts) if rows is None else rows)


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


def _as_rows(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Neighbouring rows of one tensor as that; None for others."""
    first, size = parts[0], parts[0].numel()
    starts = [part.data_ptr() - first.data_ptr() for part in parts]
    if first.is_meta or starts != [i * size * first.element_size() for i in range(len(parts))]:
        return None
    storages = {part.untyped_storage().data_ptr() for part in parts}
    return first.as_strided((len(parts), size), (size, 1)) if len(storages) == 1 else None


def gated_weights(unit: Module) -> GatedWeights:
    """Weights and scales of a module with `w1`, `w2` and `w3`."""
    parts = [unit.w1, unit.w3, unit.w2]
    scales = [getattr(part, "scale", None) for part in parts]
    if getattr(unit.w1, "weight_scale", None) is not None:
        scales = [part.weight_scale for part in parts]
    return GatedWeights(*(part.weight for part in parts), *scales)
