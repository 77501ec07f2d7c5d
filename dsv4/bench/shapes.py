"""The shapes that are timed, what they cost at least, and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HEAD_DIM = 512
WINDOW = 128
TOKENS = (1, 4, 16, 64, 128, 256, 1024)
# Inputs rotate over so many times the bytes that the L2 cache holds.
ROTATION = 3
MAX_SETS = 1024


@dataclass(frozen=True)
class Shape:
    """T tokens of `heads` heads, each over `top_k` compressed and `window` window keys."""

    name: str
    tokens: int
    heads: int
    top_k: int
    window: int = WINDOW
    head_dim: int = HEAD_DIM

    @property
    def keys(self) -> int:
        return self.top_k + self.window

    @property
    def bytes(self) -> int:
        """Compulsory traffic: KV and q read once, o written once."""
        return 2 * self.tokens * self.head_dim * (self.keys + 2 * self.heads)

    @property
    def flops(self) -> int:
        return 4 * self.tokens * self.heads * self.keys * self.head_dim


def model_shapes() -> list[Shape]:
    """Decode and prefill chunks of Pro and Flash, and of a rank that holds few heads."""
    shapes = [Shape("Pro", tokens, 128, 1024) for tokens in TOKENS]
    shapes += [Shape("Flash", tokens, 64, 512) for tokens in TOKENS]
    for heads in (8, 16, 32):
        shapes += [Shape(f"Pro/{128 // heads}", tokens, heads, 1024) for tokens in (64, 256)]
    return [*shapes, Shape("Flash/8", 64, 8, 512)]


class Inputs(NamedTuple):
    """Arguments of the operator, in its order."""

    q: Tensor
    compressed_kv: Tensor
    swa_kv: Tensor
    swa_lens: Tensor
    sink_logits: Tensor
    request_ids: Tensor
    o: Tensor


def make_inputs(shape: Shape, rotation: float = ROTATION) -> list[Inputs]:
    """Sets of inputs `rotation` times as large as the L2 cache together, every token its own
    request; lengths, ids and sinks are shared, as the layers of a model share them. Outputs start
    as NaN."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = min(MAX_SETS, max(2, math.ceil(rotation * cache / shape.bytes)))
    tokens, width = shape.tokens, shape.window
    swa_lens = torch.full((tokens,), width, dtype=torch.int32, device="cuda")
    request_ids = torch.arange(tokens, dtype=torch.int32, device="cuda")
    sink_logits = torch.randn(shape.heads, device="cuda")

    def rows(*size: int) -> Tensor:
        return torch.randn(tokens, *size, shape.head_dim, dtype=torch.bfloat16, device="cuda")

    sets = []
    for _ in range(count):
        q, compressed_kv, swa_kv = rows(shape.heads), rows(shape.top_k), rows(width)
        output = torch.full_like(q, float("nan"))
        sets.append(Inputs(q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, output))
    return sets
