"""Random checkpoints in the released layout that engines accept, the same bits on every machine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.loader import inventory
from dsv4.reference.weights import encode_fp8

# Small, with all that a release has: FP8 linears, FP4 experts, each kind of layer, both routers, a
# selection among more entries than it takes, MTP.
SMALL = ModelConfig(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    sliding_window=32,
    index_n_heads=4,
    index_head_dim=128,
    index_topk=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    vocab_size=128,
    compress_ratios=(0, 4, 128, 4),
    num_hash_layers=1,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=128),
    max_position_embeddings=512,
    num_nextn_predict_layers=1,
    linear_scheme="fp8",
    expert_scheme="fp4",
)
# What vLLM's CPU kernels are compiled for: head_dim 512, index_topk 512, 256 experts of which 6.
ENGINE = replace(
    SMALL,
    head_dim=512,
    sliding_window=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    vocab_size=1024,
    num_hash_layers=4,
    rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=512),
    max_position_embeddings=8192,
    num_nextn_predict_layers=0,
)


def normal(shape: tuple[int, ...] | torch.Size, generator: torch.Generator) -> Tensor:
    """Nearly normal numbers of variance 1.

    Sums of integers: `torch.randn` rounds by processor.
    """
    total = torch.zeros(shape, dtype=torch.int64)
    for _ in range(4):
        total += torch.randint(0, 4096, shape, generator=generator)
    return (total - 8190).float() / 2365  # 4096 sqrt(4 / 12)


def random_tensors(config: ModelConfig, seed: int, gain: float) -> dict[str, Tensor]:
    """Every tensor of the layout; matrices multiply the size of their input by about `gain`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, spec in inventory(config).items():
        if name.endswith(".scale"):
            continue
        scale = name.removesuffix("weight") + "scale"
        shape = tuple(spec.shape)
        if name.endswith("tid2eid"):
            order = torch.randint(2**40, (shape[0], config.n_routed_experts), generator=generator)
            tensors[name] = order.argsort(-1)[:, : shape[1]].to(spec.dtype)
            continue
        if spec.dtype == torch.int8:
            tensors[name], tensors[scale] = _random_fp4(shape, gain, generator)
            continue
        values = normal(shape, generator) * _size(name, shape, gain)
        if "norm" in name:
            values += 1
        if spec.dtype == torch.float8_e4m3fn:
            tensors[name], tensors[scale] = encode_fp8(values, config.fp8_block)
        else:
            tensors[name] = values.to(spec.dtype)
    return tensors


def _random_fp4(
    shape: tuple[int, ...], gain: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Uniform codes [..., n / 2], two a byte, and scales [..., n / 32] of three sizes.

    Quicker than rounding: most of a checkpoint are experts.
    """
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    size = gain * (2 * shape[-1]) ** -0.5 / 2.9  # the codes' own is 2.9
    exponent = 127 + round(math.log2(size))
    scales = torch.randint(
        exponent - 1, exponent + 2, (*shape[:-1], shape[-1] // 16), generator=generator
    )
    return codes, scales.to(torch.uint8).view(torch.float8_e8m0fnu)


def _size(name: str, shape: tuple[int, ...], gain: float) -> float:
    if "norm" in name:
        return 0.2
    if name.endswith(("_base", "bias")):
        return 0.3
    if name == "head.weight":
        return 2 * shape[-1] ** -0.5
    if name.endswith("_fn"):
        return shape[-1] ** -0.5
    is_matrix = name.endswith("weight") and name != "embed.weight"
    return gain * shape[-1] ** -0.5 if is_matrix else 1.0


def random_ids(config: ModelConfig, length: int, seed: int) -> Tensor:
    """[length] token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, config.vocab_size, (length,), generator=generator)


def digest(tensors: dict[str, Tensor]) -> str:
    """Of names and bytes: recorded results are for these tensors alone."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
