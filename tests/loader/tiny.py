"""A tiny model with every kind of layer, and random checkpoints of it in every format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.loader import TensorSpec, inventory

# Output sizes of 64 and 192 leave ragged FP8 blocks.
CONFIG = ModelConfig(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=64,
    sliding_window=8,
    index_n_heads=3,
    index_head_dim=64,
    index_topk=4,
    n_routed_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    vocab_size=40,
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=64),
    max_position_embeddings=1024,
    num_nextn_predict_layers=1,
)

# The checkpoints in circulation: (linears, main experts, FP8 scales).
FORMATS = {
    "plain": replace(CONFIG),
    "released": replace(CONFIG, linear_scheme="fp8", expert_scheme="fp4"),
    "base": replace(CONFIG, linear_scheme="fp8", expert_scheme="fp8", scale_dtype="float32"),
    "base-e8m0": replace(CONFIG, linear_scheme="fp8", expert_scheme="fp8"),
    "nvfp4": replace(CONFIG, linear_scheme="fp8", expert_scheme="nvfp4"),
    "plain-experts": replace(CONFIG, linear_scheme="fp8"),
}


def random_tensors(config: ModelConfig, seed: int, **options: Any) -> dict[str, Tensor]:
    """Random bytes and numbers for every tensor of the released layout."""
    generator = torch.Generator().manual_seed(seed)
    specs = inventory(config, **options)
    return {name: _random(config, name, spec, generator) for name, spec in specs.items()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits: -0.0 differs from 0.0, a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def _random(config: ModelConfig, name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, spec.shape, generator=generator)

    if name.endswith(".tid2eid"):
        scores = torch.rand(spec.shape[0], config.n_routed_experts, generator=generator)
        return scores.argsort(-1)[:, : spec.shape[1]].contiguous()
    if name.endswith(("weight_scale", "weight_scale_2", "input_scale")):
        return (torch.rand(spec.shape, generator=generator) + 0.1).to(spec.dtype)
    if spec.dtype == torch.float8_e8m0fnu:
        return integers(115, 124).to(torch.uint8).view(spec.dtype)
    if spec.dtype == torch.float8_e4m3fn:
        sign = integers(0, 2) * 128
        return (integers(0, 0x70) + sign).to(torch.uint8).view(spec.dtype)  # no NaN codes
    if spec.dtype == torch.int8:
        return integers(-128, 128).to(torch.int8)
    if spec.dtype == torch.uint8:
        return integers(0, 256).to(torch.uint8)
    if name.endswith(".scale"):
        return torch.rand(spec.shape, generator=generator) * 0.01 + 0.001
    return torch.randn(spec.shape, generator=generator).mul(0.3).to(spec.dtype)
