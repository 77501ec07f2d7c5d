"""Tiny random models and a hand-driven cache, shared by the tests of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from dsv4.cache.model_cache import ModelCache, block_size
from dsv4.cache.step import Step
from dsv4.config.layer_schedule import LayerKind
from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.model.model import DeepseekV4
from dsv4.ops.moe import torch_path
from dsv4.ops.topk import topk_stable
from dsv4.reference.model import ReferenceModel

KINDS = {"S": LayerKind.SWA, "C": LayerKind.CSA, "H": LayerKind.HCA}


def tiny_config(kinds: str = "SCHC", rates: tuple[int, int] = (4, 16), **changes) -> ModelConfig:
    """A small model; `kinds` spells its layers, `rates` are those of CSA and HCA."""
    ratio = {"S": 0, "C": rates[0], "H": rates[1]}
    fields = dict(
        hidden_size=64,
        num_hidden_layers=len(kinds),
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=20,
        sliding_window=9,
        # With few heads whole columns of scores are 0: exact ties.
        index_n_heads=24,
        index_head_dim=16,
        index_topk=5,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        vocab_size=97,
        compress_ratios=tuple(ratio[k] for k in kinds),
        layer_types=tuple(KINDS[k] for k in kinds),
        num_hash_layers=1,
        swiglu_limit=0.9,
        routed_scaling_factor=1.7,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=64),
        num_nextn_predict_layers=0,
    )
    return ModelConfig(**{**fields, **changes})


def quantized_config(kinds: str = "SCH", **changes) -> ModelConfig:
    """The same with FP8 linears and FP4 experts, whose groups need wider layers."""
    fields = dict(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_lora_rank=64,
        index_head_dim=64,
        moe_intermediate_size=128,
        linear_scheme="fp8",
        expert_scheme="fp4",
    )
    return tiny_config(kinds, **{**fields, **changes})


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DeepseekV4:
    """A model whose every parameter is random and away from zero: what is left out must show."""
    model = DeepseekV4(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_random_values(name, parameter, config))
    return model


def _random_values(name: str, parameter: Tensor, config: ModelConfig) -> Tensor:
    shape, dtype = parameter.shape, parameter.dtype
    if name.endswith("tid2eid"):
        rows = [torch.randperm(config.n_routed_experts)[: shape[1]] for _ in range(shape[0])]
        return torch.stack(rows)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape)
    if name.endswith(".scale"):
        # Weights of about in_features^-0.5, whatever the codes' magnitude.
        exponent = -5 if "experts.w" in name and config.expert_scheme == "fp4" else -4
        return torch.exp2(torch.randint(exponent - 1, exponent + 1, shape).float())
    if "norm" in name:
        return torch.empty(shape).uniform_(0.6, 1.4)
    if name.endswith(("attn_sink", "_base", "_scale", "bias")):
        return torch.randn(shape) * 0.7 + 0.3
    if name == "embed.weight":
        return torch.randn(shape)
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape).clamp(-4, 4)
    return torch.randn(shape) * shape[-1] ** -0.5


def reference_of(model: DeepseekV4) -> ReferenceModel:
    """The oracle with the model's weights."""
    return ReferenceModel(model.config, dict(model.state_dict()))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; infinite if anything is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def ids_away_from_ties(model: DeepseekV4, batch: int, length: int, margin: float = 1e-5) -> Tensor:
    """Draw ids [batch, length] for which no choice of entries or experts is close to a tie.

    Where the last chosen and the first rejected score agree to rounding, two correct computations
    may choose differently.
    """
    for _ in range(40):
        ids = torch.randint(0, model.config.vocab_size, (batch, length))
        with closest_choice() as gaps:
            model(ids)
        if min(gaps, default=1.0) > margin:
            return ids
    pytest.fail(f"no input of {batch} x {length} tokens keeps away from ties")


@contextmanager
def closest_choice() -> Iterator[list[float]]:
    """Record, per selection, the smallest gap at its edge, relative to the largest score."""
    gaps: list[float] = []

    def recording(scores: Tensor, k: int, valid: Tensor) -> tuple[Tensor, Tensor]:
        contested = valid.sum(-1) > k
        if contested.any():
            rows = scores.masked_fill(~valid, -torch.inf)[contested]
            best = rows.topk(k + 1, dim=-1).values
            scale = scores[valid].abs().max().clamp(min=1e-30)
            gaps.append(float((best[:, k - 1] - best[:, k]).min() / scale))
        return topk_stable(scores, k, valid)

    with (
        mock.patch.object(sys.modules["dsv4.ops.index_topk"], "topk_stable", recording),
        mock.patch.object(torch_path, "topk_stable", recording),
    ):
        yield gaps


class Session:
    """Drives a model over requests that live in the slots of one cache.

    The cache starts full of NaN, trash rows included, and blocks are dealt out in random order: a
    read of anything that was not written, or a write to the wrong place, shows.
    """

    def __init__(
        self, model: DeepseekV4, requests: int, max_length: int, max_draft: int = 0
    ) -> None:
        self.model = model
        size = block_size(model.config)
        blocks = -(-max_length // size)
        tokens = (requests + 2) * blocks * size  # of steps with rows and columns of padding
        self.cache = model.new_cache(requests, requests * blocks, blocks, max_draft, tokens)
        poison(self.cache)
        self.table = torch.randperm(requests * blocks).view(requests, blocks)
        self.lengths = [0] * requests

    def feed(
        self,
        tokens: dict[int, list[int]],
        *,
        chunk: int | None = None,
        rows: int | None = None,
        capacity: int | None = None,
    ) -> dict[int, Tensor]:
        """Append tokens to requests, slot -> ids; return the final streams, slot -> [n, hc, D].

        Args:
            chunk: padded width, default the longest.
            rows: padded height, default the number of requests.
            capacity: default what the longest request needs, in whole blocks.
        """
        ids, step = self.prepare(tokens, chunk=chunk, rows=rows, capacity=capacity)
        streams = self.model.streams(ids, self.cache, step)
        return self.split(tokens, streams)

    def prepare(
        self,
        tokens: dict[int, list[int]],
        *,
        chunk: int | None = None,
        rows: int | None = None,
        capacity: int | None = None,
    ) -> tuple[Tensor, Step]:
        """Return padded ids [B, C] and the step, and count the tokens as written."""
        chunk = chunk or max(len(t) for t in tokens.values())
        rows = rows or len(tokens)
        slots = torch.full((rows,), -1)
        starts, lens = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        table = torch.full((rows, self.table.shape[1]), -1)
        ids = torch.randint(0, self.model.config.vocab_size, (rows, chunk))
        for row, (slot, new) in enumerate(tokens.items()):
            slots[row], starts[row], lens[row] = slot, self.lengths[slot], len(new)
            table[row] = self.table[slot]
            ids[row, : len(new)] = torch.tensor(new)
            self.lengths[slot] += len(new)
        size = self.cache.block_size
        needed = size * -(-max(self.lengths[slot] for slot in tokens) // size)
        return ids, Step(slots, starts, lens, table, chunk, capacity or needed)

    def split(self, tokens: dict[int, list[int]], values: Tensor) -> dict[int, Tensor]:
        """Cut [B, C, ...] into the valid part of each request."""
        return {slot: values[row, : len(new)] for row, (slot, new) in enumerate(tokens.items())}

    def logits(self, tokens: dict[int, list[int]], **options) -> dict[int, Tensor]:
        """As `feed`, but logits [n, vocab]."""
        fed = self.feed(tokens, **options)
        return {slot: self.model.logits(streams[None])[0] for slot, streams in fed.items()}


def poison(cache: ModelCache) -> None:
    """Fill every tensor of a cache with NaN, FP8 entries with bytes of it."""
    for layer in cache.layers:
        pages = [p for p in (layer.entries, layer.index_keys) if p is not None]
        for holder in (layer.window, *layer.state.rings(), *pages):
            is_packed = holder.data.dtype == torch.uint8
            holder.data.fill_(255 if is_packed else float("nan"))


def with_mtp(config: ModelConfig, layers: int = 1) -> ModelConfig:
    """The configuration with MTP layers."""
    return replace(config, num_nextn_predict_layers=layers)
