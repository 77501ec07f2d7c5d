"""Attention of one layer: sliding window plus, in CSA and HCA layers, compressed entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.step import Step
from dsv4.cache.window import WindowView
from dsv4.layers.compressor import Compressor
from dsv4.layers.indexer import Indexer
from dsv4.layers.linear import (
    GroupedLinear,
    Linear,
    Rounded,
    are_chained,
    linear_options,
    project,
    project_twice,
)
from dsv4.layers.module import Module, empty_parameter
from dsv4.layers.norm import RMSNorm
from dsv4.layers.rope import Rope
from dsv4.ops import (
    HeadRotation,
    Requests,
    head_squares,
    latent_rows,
    sparse_fmha_paged,
    sparse_fmha_paged_fp8,
)

if TYPE_CHECKING:
    from dsv4.config.layer_schedule import LayerSpec
    from dsv4.config.model_config import ModelConfig

SINK_MODE = "softmax"  # what released checkpoints mean (technical report, section 2.3.3)


class Attention(Module):
    """Multi-query attention over one latent that is key and value at once.

    Every query sees the `sliding_window` latest tokens, itself included, and the compressed entries
    complete at its position: none (SWA), all (HCA), or the indexer's choice (CSA). Keys are written
    to the cache and read where they lie there, by decode and prefill alike.
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
                self.norm_eps,
                dtype,
                device=device,
            )
        self.indexer = Indexer(config, spec, self.rope, dtype, device) if spec.overlap else None

    def forward(self, x: Tensor | Rounded, cache: LayerCache, step: Step) -> Tensor:
        """[B, C, hidden_size] -> the same; reads and extends the layer's cache."""
        table = self.rope.table(step.capacity, step.starts.device)
        down, key, *sides = project(x, [self.wq_a, self.wkv, *self._side_linears])
        scores_entries = self.indexer is not None and not self._sees_all(step)
        ups = [self.wq_b, self.indexer.wq_b] if scores_entries else [self.wq_b]
        # The norm of a head has no weight: it is one factor on its scores, which follows from the
        # squares that the projection leaves beside the rotated heads.
        squares = head_squares(down.shape[:2].numel(), self.heads, self.head_dim, down.device)
        rotation = HeadRotation(table, step.token_positions, self.head_dim, squares)
        window = cache.window.view(step)
        latent = self._take_in(down, key, sides, table, window, cache, step)
        rounding = self.indexer.rounding(latent, step) if scores_entries else None
        q, *index_queries = project(latent, ups, *[rotation, rounding][: len(ups)])
        index_scales = None if rounding is None else rounding.scales
        attend = sparse_fmha_paged
        if are_chained(self.wo_a, self.wo_b, q):
            attend = sparse_fmha_paged_fp8
        # Values carry their own rotation: turning back by the query's leaves the relative one.
        o = attend(
            q.view(-1, self.heads, self.head_dim),
            cache.window.data,
            window.indices,
            window.lens,
            *self._entries(sides, (*index_queries, index_scales), cache, step),
            self.attn_sink,
            sink_mode=SINK_MODE,
            q_squares=squares,
            q_eps=self.norm_eps,
            rope=table,
            positions=step.token_positions,
            block_table=self._pages(step),
            request_ids=step.request_ids,
            window_table=window.table,
            sliding_window=self.window,
            ratio=self.ratio,
            batch_invariant=cache.batch_invariant,
        )
        if window.kept is not None:
            row = (key.flatten(0, 1), self.kv_norm.weight, self.norm_eps)
            cache.window.insert(*row, table, step.token_positions, window.kept)
        o = o if isinstance(o, tuple) else o.flatten(1)
        return project_twice(o, self.wo_a, self.wo_b).view(*down.shape[:2], -1)

    @property
    def _side_linears(self) -> list[Linear]:
        """Projections of the layer's input beside those of attention itself."""
        sides = (side for side in (self.compressor, self.indexer) if side is not None)
        return [linear for side in sides for linear in side.linears]

    def _take_in(
        self,
        down: Tensor,
        key: Tensor,
        sides: list[Tensor],
        table: Tensor,
        window: WindowView,
        cache: LayerCache,
        step: Step,
    ) -> Tensor | Rounded:
        """Write what the step's tokens leave in the cache; return their query latents, normalised.

        Args:
            down, key, sides: projections of the tokens, those of `_side_linears` last.
        """
        query = down.flatten(0, 1) if self.wq_b.takes_codes(down) else None
        requests = entries = index_keys = None
        if self.compressor is not None:
            requests = Requests(*step.requests, cache.entries.completed(step))
            entries = self.compressor.step(*sides[:2], cache.state.compressor, cache.entries)
        if self.indexer is not None:
            own = self.indexer.compressor
            index_keys = own.step(*sides[2:4], cache.state.indexer, cache.index_keys)
        rounded = latent_rows(
            key.flatten(0, 1),
            self.kv_norm.weight,
            table,
            step.token_positions,
            window.slots,
            cache.window.data,
            eps=self.norm_eps,
            **cache.window.rounding,
            query=query,
            query_weight=None if query is None else self.q_norm.weight,
            requests=requests,
            entries=entries,
            index_keys=index_keys,
        )
        if rounded is None:
            return self.q_norm(down)
        codes, scale, values = rounded
        return Rounded(values.view(down.shape), codes, scale)

    def _entries(
        self,
        sides: list[Tensor],
        index_queries: tuple[Tensor | None, ...],
        cache: LayerCache,
        step: Step,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The pool of compressed entries, and what each token sees of it.

        Args:
            sides: `_side_linears` of the tokens.
            index_queries: of the indexer, where it scores entries, and the scales of their codes.

        Returns:
            Pool, slots [T, k] and lengths [T] as the operator takes them; no slots where a token
            sees all complete entries.
        """
        if self.compressor is None:
            return None, None, None
        if self._sees_all(step):
            return cache.entries.data, None, None
        lens = step.visible(self.ratio)
        queries, scales = index_queries
        slots = self.indexer.select(queries, sides[4], lens, cache, step, scales)
        return cache.entries.data, slots, lens

    def _sees_all(self, step: Step) -> bool:
        """Whether every token sees all entries that are complete at its position."""
        return self.indexer is None or step.capacity // self.ratio <= self.indexer.topk

    def _pages(self, step: Step) -> Tensor | None:
        """The table of the entries, where no list names them."""
        return step.pages if self.compressor is not None and self._sees_all(step) else None
