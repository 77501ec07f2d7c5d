"""Mixture of experts in plain torch: the CPU backend, and the readable path of all others.

Roundings are those of the official forward pass: quantised experts round their inputs to FP8 per
128 elements, before w1 and w3 and before w2, FP4 experts, too; NVFP4 experts whose scales of inputs
are given round them to NVFP4; the routing weight is applied before w2; routed and shared results
are added in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.kernels.moe.config import K_BLOCK
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.ops.moe.weights import GatedWeights, decoded
from dsv4.ops.quantize import qdq_e4m3, qdq_nvfp4
from dsv4.ops.topk import topk_stable

MAX_GATHERED_ELEMENTS = 1 << 27
"""Bound on the weight elements that are gathered at once: more tokens are processed in parts."""
MAX_GATHERED_TOKENS, MAX_UNSYNCHRONISED = 16, 256
"""Up to so many tokens, on the CPU and on GPUs, weights are brought to the tokens: without reading
the routing back."""


def route(
    x: Tensor,
    gate: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of tokens and their weights.

    Scores are sqrt(softplus(gate x)), in fp32. Experts are the best by score + bias, the lower id
    of equals and NaN last, or those that a table lists for the token's id. Their weights are the
    scores, without bias, normalised to a sum of `scaling`; NaN where the quotient is: of a score
    that is not finite, or of scores that are all 0.

    Args:
        x: [T, D]; gate: [E, D].
        bias: [E] float32; or
        table, input_ids: [V, k] and [T] int64. An expert or a token id out of range is no expert.

    Returns:
        ids [T, k] int64, ascending, -1 last for no expert; weights [T, k] float32, 0 there.
    """
    experts = gate.shape[0]
    scores = F.softplus(F.linear(x.float(), gate.float())).sqrt()
    if table is None:
        biased = scores + bias
        ids, _ = topk_stable(biased, top_k, ~biased.isnan())
    else:
        known = (input_ids >= 0) & (input_ids < table.shape[0])
        ids = table[torch.where(known, input_ids, 0)]
        ids = torch.where(known[:, None] & (ids >= 0) & (ids < experts), ids, experts)
    ids = ids.sort(-1).values
    has_expert = ids < experts
    chosen = scores.gather(-1, ids.clamp(max=experts - 1))
    total = torch.where(has_expert, chosen, 0.0).sum(-1, keepdim=True)
    weights = chosen * (scaling / total)
    return torch.where(has_expert, ids, -1), torch.where(has_expert, weights, 0.0)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up in fp32; gate is clamped from above, up on both sides."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class Gated:
    """Gated units of a configuration: the routed experts, or the shared one.

    Args:
        weights: of all of them.
        dtype_name: their format, as in `MoeConfig`.
    """

    def __init__(self, config: MoeConfig, weights: GatedWeights, dtype_name: str) -> None:
        self.config, self.weights, self.dtype_name = config, weights, dtype_name
        self.rounds = dtype_name in ("fp4", "fp8")

    def __call__(self, x: Tensor, weight: Tensor | None, expert: Tensor | int | None) -> Tensor:
        """[..., n, hidden] -> the same; one expert, or one for each leading index, or the shared
        one (None); `weight` multiplies before the second product."""
        dtype = x.dtype
        x = self._rounded(x, self.weights.x_scale)
        gate, up = (self._product(x, i, expert).to(dtype) for i in range(2))
        inner = swiglu(gate, up, self.config.limit)
        inner = (inner if weight is None else inner * weight).to(dtype)
        whole = self.weights.h_scales
        inner = self._rounded(inner, None if whole is None else whole[expert][..., None])
        return self._product(inner, 2, expert).to(dtype)

    def _rounded(self, x: Tensor, whole: Tensor | None) -> Tensor:
        if whole is not None:
            return qdq_nvfp4(x, whole)
        return qdq_e4m3(x, K_BLOCK) if self.rounds else x

    def _product(self, x: Tensor, matrix: int, expert: Tensor | int | None) -> Tensor:
        codes, scale = self.weights.codes[matrix], self.weights.scales[matrix]
        # Codes times powers of two are exact in bf16; times other scales they are not.
        is_plain = scale is None
        dtype = x.dtype if is_plain or scale.dtype == torch.float8_e8m0fnu else torch.float32
        whole = None if self.weights.global_scales is None else self.weights.global_scales[matrix]
        if expert is not None:
            codes, scale = codes[expert], None if is_plain else _rows(scale, expert)
            whole = None if whole is None else whole[expert]
        config = self.config
        block = (config.block_rows, config.block_columns)
        dense = decoded(codes, scale, config.form, block, dtype, whole)
        return torch.matmul(x.to(dtype), dense.mT)


def _rows(scale: Tensor, expert: Tensor | int) -> Tensor:
    """scale[expert]: torch gathers no float8_e8m0fnu."""
    if scale.element_size() > 1:
        return scale[expert]
    return scale.view(torch.uint8)[expert].view(scale.dtype)


def routed_experts(unit: Gated, x: Tensor, ids: Tensor, weights: Tensor, is_static: bool) -> Tensor:
    """Sum over a token's experts, [T, hidden] fp32.

    Args:
        ids, weights: [T, k]; -1 = no expert.
        is_static: no host synchronisation, and shapes that do not depend on the routing, for few
            tokens; else every used expert runs once over its tokens.
    """
    return (_gathered if is_static else _sorted)(unit, x, ids, weights)


def _gathered(unit: Gated, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Bring the weights to the tokens."""
    tokens, k = ids.shape
    size = max(1, MAX_GATHERED_ELEMENTS // (k * unit.config.hidden * unit.config.inner))
    parts = []
    for begin in range(0, tokens, size):
        part = slice(begin, begin + size)
        rows = x[part].repeat_interleave(k, 0).unsqueeze(1)
        experts = ids[part].flatten()
        out = unit(rows, weights[part].reshape(-1, 1, 1), experts.clamp(min=0))
        # Not a factor of 0: padding rows may hold NaN.
        out = torch.where((experts >= 0)[:, None, None], out.float(), 0.0)
        parts.append(out.view(-1, k, x.shape[-1]).sum(1))
    return torch.cat(parts) if parts else torch.zeros_like(x, dtype=torch.float32)


def _sorted(unit: Gated, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Bring the tokens to the weights."""
    k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = (flat + 1).bincount(minlength=unit.config.experts + 1).tolist()
    rows = order // k
    factors = weights.flatten()[order].unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            part = slice(begin, begin + count)
            y = unit(x[rows[part]], factors[part], expert)
            out.index_add_(0, rows[part], y.float())
            begin += count
    return out
