"""The routed experts, stacked, and the gated unit that all experts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.layers.linear import ACTIVATION_BLOCK, SCALE_DTYPES
from dsv4.layers.module import Module, empty_parameter
from dsv4.ops.quantize import dequantize_e2m1, dequantize_e4m3_blocks, qdq_e4m3

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

FP4_GROUP = 32
MAX_GATHERED_ELEMENTS = 1 << 27
"""Bound on the weight elements that are gathered at once: more tokens are processed in parts."""


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return silu(gate) * up in fp32; gate is clamped from above, up on both sides."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class ExpertWeight(Module):
    """One linear of every expert.

    Attributes:
        weight: [E, out, in] in `dtype`; float8_e4m3fn (scheme "fp8"); or two e2m1 codes per byte,
            [E, out, in / 2] int8 (scheme "fp4").
        scale: [E, ceil(out / block[0]), ceil(in / block[1])] or [E, out, in / 32]; if quantised.
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
        self.scheme = scheme
        self.block = block
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

    def dense(self, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Return the weights of the given experts, [..., out, in] in `dtype`."""
        weight = self.weight[experts]
        if self.scheme is None:
            return weight.to(dtype)
        scale = self.scale.view(torch.uint8) if self.scale.element_size() == 1 else self.scale
        scale = scale[experts].view(self.scale.dtype)
        if self.scheme == "fp4":
            return dequantize_e2m1(weight, scale, dtype)
        return dequantize_e4m3_blocks(weight, scale, self.block, dtype)

    @property
    def exact_in_bf16(self) -> bool:
        """Whether `dense` loses nothing in bf16: codes times powers of two."""
        return self.scheme is not None and self.scale.dtype == torch.float8_e8m0fnu


class Experts(Module):
    """E gated units w2(silu(w1 x) * w3 x * routing weight); the weight is applied before w2.

    Quantised experts round their inputs to FP8 per 128 elements, both before w1, w3 and before w2
    (official inference/model.py): also FP4 experts compute with FP8 activations.

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
                f"scheme of experts must be None, 'fp4' or 'fp8', got {scheme!r}; "
                "NVFP4 experts are decoded when they are loaded"
            )
        self.count = config.n_routed_experts
        self.limit = config.swiglu_limit
        self.scheme = scheme
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        for name, width in (("hidden_size", hidden), ("moe_intermediate_size", inner)):
            if scheme and width % ACTIVATION_BLOCK:
                raise ValueError(
                    f"{name} must be a multiple of {ACTIVATION_BLOCK} for {scheme} experts, "
                    f"got {width}"
                )
        options = (scheme, config.fp8_block, SCALE_DTYPES[config.scale_dtype], dtype, device)
        self.w1 = ExpertWeight(self.count, hidden, inner, *options)
        self.w2 = ExpertWeight(self.count, inner, hidden, *options)
        self.w3 = ExpertWeight(self.count, hidden, inner, *options)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, static: bool) -> Tensor:
        """Apply the chosen experts to tokens.

        Args:
            x: [T, hidden_size].
            experts: [T, k] int64.
            weights: [T, k] fp32.
            static: no host synchronisation and shapes that do not depend on the routing, for few
                tokens; otherwise every used expert runs once over its tokens.

        Returns:
            [T, hidden_size] fp32, summed over the k experts.
        """
        if static:
            return self._gathered(x, experts, weights)
        return self._sorted(x, experts, weights)

    def _gathered(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Bring the weights to the tokens."""
        tokens, k = experts.shape
        size = max(1, MAX_GATHERED_ELEMENTS // (k * x.shape[-1] * self.w1.weight.shape[1]))
        parts = []
        for begin in range(0, tokens, size):
            part = slice(begin, begin + size)
            rows = x[part].repeat_interleave(k, 0).unsqueeze(1)
            out = self._run(rows, experts[part].flatten(), weights[part].reshape(-1, 1, 1))
            parts.append(out.view(-1, k, x.shape[-1]).float().sum(1))
        return torch.cat(parts)

    def _sorted(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Bring the tokens to the weights."""
        k = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.count).tolist()
        rows = order // k
        factors = weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(begin, begin + count)
                y = self._run(x[rows[part]], expert, factors[part])
                out.index_add_(0, rows[part], y.float())
                begin += count
        return out

    def _run(self, x: Tensor, experts: Tensor | int, weights: Tensor) -> Tensor:
        """[.., n, hidden] -> the same, with one expert for all or one per leading index."""
        x = self._rounded(x)
        gate, up = self._product(x, self.w1, experts), self._product(x, self.w3, experts)
        inner = (swiglu(gate, up, self.limit) * weights).to(x.dtype)
        return self._product(self._rounded(inner), self.w2, experts)

    def _rounded(self, x: Tensor) -> Tensor:
        return qdq_e4m3(x, ACTIVATION_BLOCK) if self.scheme else x

    def _product(self, x: Tensor, weight: ExpertWeight, experts: Tensor | int) -> Tensor:
        exact = self.scheme is None or weight.exact_in_bf16
        dtype = x.dtype if exact else torch.float32
        return torch.matmul(x.to(dtype), weight.dense(experts, dtype).mT).to(x.dtype)
