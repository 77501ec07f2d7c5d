"""Attention of one layer: sliding window plus, in CSA and HCA layers, compressed entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dsv4.cache.paged_cache import LayerCache
from dsv4.cache.state_cache import Ring
from dsv4.cache.step import Step
from dsv4.layers.compressor import Compressor
from dsv4.layers.indexer import Indexer
from dsv4.layers.linear import GroupedLinear, Linear, frozen, linear_options
from dsv4.layers.norm import RMSNorm, rms_normalize
from dsv4.layers.rope import Rope, rotate_
from dsv4.layers.rounding import round_kv_
from dsv4.ops import sparse_fmha_with_swa

if TYPE_CHECKING:
    from dsv4.model.config import ModelConfig
    from dsv4.model.layer_schedule import LayerSpec


class Attention(nn.Module):
    """Multi-query attention over one latent that is key and value at once.

    Every query sees the `sliding_window` latest tokens, itself included, and the compressed entries
    complete at its position: none (SWA), all (HCA), or the indexer's choice (CSA).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.groups = config.o_groups
        self.window = config.sliding_window
        self.norm_eps = config.rms_norm_eps
        self.ratio = spec.ratio
        self.quantized = config.quantized
        self.rope = Rope.of_layer(config, spec)

        hidden, head_dim = config.hidden_size, config.head_dim
        options = linear_options(config, dtype, device)
        self.wq_a = Linear(hidden, config.q_lora_rank, **options)
        self.q_norm = RMSNorm(config.q_lora_rank, self.norm_eps, device)
        self.wq_b = Linear(config.q_lora_rank, self.heads * head_dim, **options)
        self.wkv = Linear(hidden, head_dim, **options)
        self.kv_norm = RMSNorm(head_dim, self.norm_eps, device)
        self.attn_sink = frozen((self.heads,), torch.float32, device)
        self.wo_a = GroupedLinear(
            self.heads // self.groups * head_dim, config.o_lora_rank, self.groups, **options
        )
        self.wo_b = Linear(self.groups * config.o_lora_rank, hidden, **options)
        self.compressor = None
        if spec.ratio:
            self.compressor = Compressor(
                hidden,
                head_dim,
                spec.ratio,
                spec.overlap,
                self.rope,
                self.norm_eps,
                finish=self._round_kv if self.quantized else None,
                device=device,
            )
        self.indexer = Indexer(config, spec, self.rope, dtype, device) if spec.overlap else None

    def forward(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """[B, C, hidden_size] -> the same; reads and extends the layer's cache."""
        rotation = self.rope.tokens(step)
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.head_dim))
        q = rotate_(rms_normalize(q, self.norm_eps), rotation.unsqueeze(-2))
        kv = rotate_(self.kv_norm(self.wkv(x)), rotation)
        if self.quantized:
            kv = self._round_kv(kv)

        window = self._window_keys(kv, cache.window, step)
        compressed, compressed_lens = self._compressed_keys(x, latent, cache, step)
        o = sparse_fmha_with_swa(
            q.flatten(0, 1),
            compressed,
            window.keys,
            window.lens,
            self.attn_sink,
            window.request_ids,
            sink_mode="softmax",
            compressed_lens=compressed_lens,
            is_causal=window.is_causal,
            sliding_window=self.window,
        )
        # Values carry their own rotation: turning back by the query's leaves the relative one.
        o = rotate_(o.view_as(q), rotation.unsqueeze(-2), inverse=True)
        return self.wo_b(self.wo_a(o.unflatten(2, (self.groups, -1)).flatten(3)).flatten(2))

    def _round_kv(self, kv: Tensor) -> Tensor:
        return round_kv_(kv, self.rope.dim)

    def _window_keys(self, kv: Tensor, ring: Ring, step: Step) -> _WindowKeys:
        """Bring the window of every query into the operator's form and store the new keys."""
        if step.chunk == 1 and ring.size == self.window:
            ring.append(step, kv)
            lens, slots = step.once(("ring window", self.window), lambda: _ring_view(step, ring))
            return _WindowKeys(ring.data, lens, slots, is_causal=False)
        past = ring.history(step, self.window - 1)
        ring.append(step, kv)
        batch, rows, lens = step.once(
            ("chunk window", self.window), lambda: _chunk_view(step, self.window)
        )
        keys = torch.cat((past, kv), dim=1)[batch, rows]
        return _WindowKeys(keys, lens, step.request_ids, is_causal=True)

    def _compressed_keys(
        self, x: Tensor, latent: Tensor, cache: LayerCache, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Return the compressed keys of every token [B * C, n, head_dim] and their count."""
        if self.compressor is None:
            return x.new_empty(step.batch * step.chunk, 0, self.head_dim), None
        self.compressor(x, cache.state.compressor, cache.entries, step)
        if self.indexer is not None:
            self.indexer.update(x, cache, step)
        entries = step.capacity // self.ratio
        visible = step.once(("visible", self.ratio), lambda: (step.positions + 1) // self.ratio)
        if self.indexer is None or entries <= self.indexer.topk:
            keys = cache.entries.all(step, entries).unsqueeze(1)
            keys = keys.expand(-1, step.chunk, -1, -1).flatten(0, 1)
        else:
            chosen = self.indexer.select(x, latent, cache, step, visible, entries)
            keys = cache.entries.gather(step, chosen).flatten(0, 1)
        # The operator clamps to the keys that there are: what min(visible, topk) would do.
        return keys, visible.flatten().to(torch.int32)


class _WindowKeys(NamedTuple):
    """Arguments of the operator.

    Attributes:
        keys: [R, W, head_dim].
        lens: [R] int32.
        request_ids: [B * C] int32, row of `keys` per token, -1 for padding.
        is_causal: rows are chronological; otherwise a token sees all of its row.
    """

    keys: Tensor
    lens: Tensor
    request_ids: Tensor
    is_causal: bool


def _ring_view(step: Step, ring: Ring) -> tuple[Tensor, Tensor]:
    """Lengths [rows + 1] and rows [B] int32 to attend to the ring where it lies, after the write.

    Exact for one token per request and a ring of just the window: what it holds is what is seen.
    """
    filled = (step.starts + 1).clamp(max=ring.size).to(torch.int32)
    lens = torch.zeros(len(ring.data), dtype=torch.int32, device=filled.device)
    # Padding (slot -1) lands in the last row, which belongs to no request.
    lens[step.slots] = filled
    return lens, step.slots.masked_fill(step.lens == 0, -1).to(torch.int32)


def _chunk_view(step: Step, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index [B, 1], [B, W - 1 + C] and lengths [B] int32 of history and chunk, oldest key first.

    Near the beginning of a request the history reaches before position 0: those rows are skipped,
    so that row 0 is position max(0, start - (W - 1)).
    """
    missing = (window - 1 - step.starts).clamp(min=0)
    rows = torch.arange(window - 1 + step.chunk, device=missing.device) + missing[:, None]
    batch = torch.arange(step.batch, device=missing.device)[:, None]
    lens = window - 1 - missing + step.lens
    return batch, rows.clamp(max=window + step.chunk - 2), lens.to(torch.int32)
