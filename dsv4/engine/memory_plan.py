"""Memory plan: what serving a model takes on one GPU, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsv4.cache.formats import KvFormat
from dsv4.cache.model_cache import ModelCache, block_size
from dsv4.cache.ring_snapshots import RingSnapshots
from dsv4.config.model_config import ModelConfig
from dsv4.engine.history import History
from dsv4.engine.request_state import RequestState
from dsv4.model.model import DEFAULT_PREFILL_CHUNK, DeepseekV4

# Copies of a chunk's activations that are alive at once: streams before and after a seam, queries
# before and after attention, in fp32 at the widest.
STREAM_COPIES, QUERY_COPIES, LOGIT_COPIES = 3, 3, 2
CONTEXT_BYTES = 1 << 30  # CUDA context, libraries and their workspaces


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. All but `working` are exact: the same objects, made without memory.

    Attributes:
        weights: of all parameters, in the dtypes that the model holds.
        windows: keys of the sliding windows.
        states: rings of the compressors.
        entries: compressed keys of all requests at their longest.
        index_keys: keys of the indexers.
        requests: tokens, tables and sampling options of requests, and the counts of tokens that
            penalties need.
        snapshots: rings of a prefix cache.
        working: activations of a prefill chunk, logits, CUDA's context; an estimate.
    """

    weights: int
    windows: int
    states: int
    entries: int
    index_keys: int
    requests: int
    snapshots: int
    working: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def cache(self) -> int:
        """Of everything that requests own."""
        return self.windows + self.states + self.entries + self.index_keys


def plan_memory(
    config: ModelConfig,
    context: int,
    requests: int,
    *,
    max_draft: int = 0,
    chunk: int = DEFAULT_PREFILL_CHUNK,
    prefix_snapshots: int = 0,
    device_type: str = "cuda",
    kv_format: str | None = None,
) -> MemoryPlan:
    """Plan a model in bfloat16 for `requests` requests of up to `context` tokens each.

    Args:
        max_draft: tokens a step may write past the last accepted one.
        chunk: tokens of a prefill step.
        prefix_snapshots: of an engine's prefix cache.
        device_type: "cuda" or "cpu": which may store keys in different formats.
        kv_format: of keys, "bf16" or "fp8"; None: the model's own.

    Raises:
        ValueError: a size is below 1, the context exceeds the model's, or there is no such format.
    """
    for name, value in (("context", context), ("requests", requests), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if context > config.max_position_embeddings:
        raise ValueError(
            f"context must be at most {config.max_position_embeddings}, the model's, got {context}"
        )
    model = DeepseekV4(config, device="meta")
    keys_format = KvFormat.of(config, torch.bfloat16, torch.device(device_type), kv_format)
    blocks = -(-context // block_size(config))
    sizes = (requests, requests * blocks, blocks)
    cache = ModelCache(
        config, *sizes, torch.bfloat16, "meta", max_draft, max(chunk, requests), keys_format
    )
    layers = cache.layers
    state = RequestState(cache, 1 + max_draft)
    history = History(requests + 1, config.vocab_size, cache.device)
    keys = [layer.index_keys for layer in layers if layer.index_keys is not None]
    return MemoryPlan(
        weights=_bytes(model.parameters()),
        windows=_bytes(layer.window.data for layer in layers),
        states=_bytes(ring.data for state in cache.state.layers for ring in state.rings()),
        entries=_bytes(layer.entries.data for layer in layers if layer.entries is not None),
        index_keys=_bytes(pool.data for pool in keys),
        requests=_bytes([*state.tensors(), history.prompted, history.generated]),
        snapshots=prefix_snapshots * RingSnapshots(cache, 1).bytes,
        working=_working(config, requests, max(chunk, requests * (1 + max_draft))),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors that share none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _working(config: ModelConfig, requests: int, tokens: int) -> int:
    streams = STREAM_COPIES * config.hc_mult * config.hidden_size
    queries = QUERY_COPIES * config.num_attention_heads * config.head_dim
    experts = config.num_experts_per_tok * (config.hidden_size + config.moe_intermediate_size)
    logits = LOGIT_COPIES * requests * config.vocab_size
    return 4 * (tokens * (streams + queries + experts) + logits) + CONTEXT_BYTES
