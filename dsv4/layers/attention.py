"""Attention of one layer: sliding window plus, in CSA and HCA layers, compressed entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.pages import Pages
from dsv4.cache.rings import Ring
from dsv4.cache.step import Step
from dsv4.layers.compressor import Compressor
from dsv4.layers.indexer import Indexer
from dsv4.layers.linear import GroupedLinear, Linear, linear_options
from dsv4.layers.module import Module, empty_parameter
from dsv4.layers.norm import RMSNorm, rms_normalize
from dsv4.layers.rope import Rope, rotate_
from dsv4.layers.rounding import round_kv_
from dsv4.ops import fmha_capacity, fmha_runner_id, sparse_fmha_with_swa

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig

SINK_MODE = "softmax"  # what released checkpoints mean (technical report, section 2.3.3)
MAX_KEY_ELEMENTS = 1 << 28
"""Bound on the gathered compressed keys alive at once: a longer chunk attends in parts."""


class Attention(Module):
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
        self.attn_sink = empty_parameter((self.heads,), torch.float32, device)
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
        compressed = self._compressed_keys(x, latent, cache, step)
        size = compressed.tokens_at_once()
        o = torch.cat(
            [
                self._attend(q, window, compressed, slice(begin, min(begin + size, step.chunk)))
                for begin in range(0, step.chunk, size)
            ],
            dim=1,
        )
        # Values carry their own rotation: turning back by the query's leaves the relative one.
        o = rotate_(o, rotation.unsqueeze(-2), inverse=True)
        return self.wo_b(self.wo_a(o.unflatten(2, (self.groups, -1)).flatten(3)).flatten(2))

    def runner_id(self, chunk: int, capacity: int, ring_size: int) -> int:
        """Return the runner of the operator that a step of this shape calls.

        Args:
            chunk, capacity: of the step.
            ring_size: of the layer's window ring.
        """
        return fmha_runner_id(
            self.head_dim,
            self.heads,
            self.window,
            fmha_capacity(self._entries_per_token(capacity)),
            is_causal=not self._attends_to_ring(chunk, ring_size),
            sink_mode=SINK_MODE,
        )

    def _attends_to_ring(self, chunk: int, ring_size: int) -> bool:
        """Whether single tokens find in the ring just what they see, and attend to it in place."""
        return chunk == 1 and ring_size == self.window

    def _entries_per_token(self, capacity: int) -> int:
        """Compressed entries that are brought for every token of a step."""
        if self.compressor is None:
            return 0
        entries = capacity // self.ratio
        return entries if self.indexer is None else min(entries, self.indexer.topk)

    def _attend(
        self, q: Tensor, window: _WindowKeys, compressed: _CompressedKeys, part: slice
    ) -> Tensor:
        """Attention of some tokens of every request: [B, c, heads, head_dim]."""
        q = q[:, part]
        keys, compressed_lens = compressed.of(part)
        lens, request_ids = window.of(part)
        return sparse_fmha_with_swa(
            q.flatten(0, 1),
            keys,
            window.keys,
            lens,
            self.attn_sink,
            request_ids,
            sink_mode=SINK_MODE,
            compressed_lens=compressed_lens,
            is_causal=window.before is not None,
            sliding_window=self.window,
        ).view(q.shape)

    def _round_kv(self, kv: Tensor) -> Tensor:
        return round_kv_(kv, self.rope.dim)

    def _window_keys(self, kv: Tensor, ring: Ring, step: Step) -> _WindowKeys:
        """Bring the window of every query into the operator's form and store the new keys."""
        if self._attends_to_ring(step.chunk, ring.size):
            ring.append(step, kv)
            lens, rows = step.derive(_ring_view, len(ring.data), ring.size)
            return _WindowKeys(ring.data, lens, rows, before=None)
        past = ring.history(step, self.window - 1)
        ring.append(step, kv)
        batch, rows, before = step.derive(_chunk_view, self.window)
        keys = torch.cat((past, kv), dim=1)[batch, rows]
        return _WindowKeys(keys, step.lens, step.request_ids, before)

    def _compressed_keys(
        self, x: Tensor, latent: Tensor, cache: LayerCache, step: Step
    ) -> _CompressedKeys:
        """Compress the new tokens and find what every token attends to."""
        if self.compressor is None:
            nothing = x.new_empty(step.batch, 0, self.head_dim)
            return _CompressedKeys(nothing, None, None, None, step)
        self.compressor(x, cache.state.compressor, cache.entries, step)
        if self.indexer is not None:
            self.indexer.update(x, cache, step)
        entries = step.capacity // self.ratio
        visible = step.derive(_visible_entries, self.ratio)
        if entries == self._entries_per_token(step.capacity):
            shared = cache.entries.all(step, entries)
            return _CompressedKeys(shared, None, None, visible, step)
        chosen = self.indexer.select(x, latent, cache, step, visible, entries)
        return _CompressedKeys(None, cache.entries, chosen, visible, step)


class _WindowKeys(NamedTuple):
    """The window of every query.

    Attributes:
        keys: [R, W, head_dim]: the state cache itself, or one row per request of the step.
        lens: [R] of the state cache: rows in use; [B] of the step: its new tokens.
        request_ids: [B * C] int32, row of `keys` per token, -1 for padding.
        before: [B], rows of `keys` ahead of the new tokens, which are then in chronological order;
            None: every token sees its whole row.
    """

    keys: Tensor
    lens: Tensor
    request_ids: Tensor
    before: Tensor | None

    def of(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the operator's lengths [R] and request ids [B * c] for a part of the chunk."""
        if self.before is None:
            return self.lens, self.request_ids
        lens = self.before + self.lens.clamp(max=part.stop)
        request_ids = self.request_ids.view(len(self.keys), -1)[:, part]
        # A part of one token leaves a strided vector, which the operator refuses.
        return lens.to(torch.int32), request_ids.flatten().contiguous()


class _CompressedKeys(NamedTuple):
    """Compressed entries that the tokens of a step attend to.

    Attributes:
        shared: [B, n, head_dim], the same for all tokens of a request; or None and:
        pages, chosen: where to gather the entries [B, C, k] of every token from.
        visible: [B, C], entries complete at each token; None if there are none.
    """

    shared: Tensor | None
    pages: Pages | None
    chosen: Tensor | None
    visible: Tensor | None
    step: Step

    def tokens_at_once(self) -> int:
        """Tokens per request whose keys fit in `MAX_KEY_ELEMENTS`."""
        if self.shared is None:
            per_token = self.chosen[:, 0].numel() * self.pages.data.shape[-1]
        else:
            # The keys of a single request are not copied: its tokens share them by stride 0.
            per_token = self.shared.numel() if len(self.shared) > 1 else 0
        return max(1, min(self.step.chunk, MAX_KEY_ELEMENTS // max(1, per_token)))

    def of(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return the operator's keys [B * c, n, head_dim] and lengths for a part of the chunk."""
        if self.shared is None:
            keys = self.pages.gather(self.step, self.chosen[:, part])
        else:
            keys = self.shared.unsqueeze(1).expand(-1, part.stop - part.start, -1, -1)
        if self.visible is None:
            return keys.flatten(0, 1), None
        # The operator clamps to the keys that there are: what min(visible, topk) would do.
        return keys.flatten(0, 1), self.visible[:, part].flatten().to(torch.int32)


def _visible_entries(step: Step, ratio: int) -> Tensor:
    """[B, C]: compressed entries that are complete at each token."""
    return (step.positions + 1) // ratio


def _ring_view(step: Step, ring_rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Lengths [ring_rows] and rows [B] int32 to attend to a ring where it lies, after the write.

    Exact for one token per request and a ring of just the window: what it holds is what is seen.
    """
    filled = (step.starts + 1).clamp(max=size).to(torch.int32)
    lens = torch.zeros(ring_rows, dtype=torch.int32, device=filled.device)
    # Padding (slot -1) lands in the last row, which belongs to no request.
    lens[step.slots] = filled
    return lens, step.slots.masked_fill(step.lens == 0, -1).to(torch.int32)


def _chunk_view(step: Step, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index [B, 1], [B, W - 1 + C] of history and chunk, oldest key first; rows before the chunk.

    Near the beginning of a request the history reaches before position 0: those rows are skipped,
    so that row 0 is position max(0, start - (W - 1)).
    """
    missing = (window - 1 - step.starts).clamp(min=0)
    rows = torch.arange(window - 1 + step.chunk, device=missing.device) + missing[:, None]
    batch = torch.arange(step.batch, device=missing.device)[:, None]
    return batch, rows.clamp(max=window + step.chunk - 2), window - 1 - missing
