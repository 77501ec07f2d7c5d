"""The cache of a whole model: device memory for every layer, and the size of its blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.entries import EntryPool
from dsv4.cache.formats import KvFormat
from dsv4.cache.index_keys import IndexKeyPool
from dsv4.cache.layer_cache import LayerCache
from dsv4.cache.state_cache import StateCache
from dsv4.cache.step import Step
from dsv4.cache.window import WindowPool
from dsv4.kernels.kit.index_entry import MODEL_FORMAT
from dsv4.kernels.step.config import KINDS
from dsv4.ops.step_indices import step_indices

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

MIN_BLOCK_TOKENS = 128


class ModelCache:
    """State and pages of every layer, MTP layers included. Device memory only: which request owns
    what, the manager knows.

    Args:
        config: the model.
        max_requests: requests that can be cached at the same time (rows of the state cache).
        num_blocks: blocks that all requests share; each holds the entries of `block_size` original
            tokens.
        max_blocks_per_request: columns of a block table, hence the longest context.
        dtype: of the model's activations and of index keys; compressor state is always fp32.
        max_draft: tokens a step may write past the last accepted one.
        max_tokens: B * C of the largest step whose chunks are longer than 1 + max_draft; every
            layer has room for the keys of so many.
        kv_format: of keys, window and entries alike; default the model's own on this device.
        batch_invariant: let attention add over a token's keys in an order that follows from their
            number alone.
        index_format: of index keys that are rounded, "fp4" (68 bytes of 128 channels) or "fp8"
            (132), as `dsv4.kernels.kit.index_entry` says. Results are the same.

    Attributes:
        block_size: original tokens per block: the smallest multiple of every compression rate that
            is >= 128.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_requests: int,
        num_blocks: int,
        max_blocks_per_request: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_draft: int = 0,
        max_tokens: int = 0,
        kv_format: KvFormat | None = None,
        batch_invariant: bool = False,
        index_format: str = MODEL_FORMAT,
    ) -> None:
        sizes = {
            "max_requests": max_requests,
            "num_blocks": num_blocks,
            "max_blocks_per_request": max_blocks_per_request,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, value in (("max_draft", max_draft), ("max_tokens", max_tokens)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.config = config
        self.max_requests = max_requests
        self.num_blocks = num_blocks
        self.max_blocks_per_request = max_blocks_per_request
        self.max_draft = max_draft
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_size = block_size(config)
        self._ratios = tuple(sorted({spec.ratio for spec in config.schedule if spec.ratio}))
        self.kv_format = kv_format or KvFormat.of(config, dtype, self.device)
        self.state = StateCache(config, max_requests, device, max_draft)
        window = (max_requests, config.sliding_window, max_draft, max_tokens)

        def entries(ratio: int) -> EntryPool:
            return EntryPool(self.kv_format, num_blocks, self.block_size // ratio, ratio, device)

        def index_keys(ratio: int) -> IndexKeyPool:
            size, dim = self.block_size // ratio, config.index_head_dim
            return IndexKeyPool(
                num_blocks, size, dim, dtype, config.quantized, device, index_format
            )

        self.layers = tuple(
            LayerCache(
                WindowPool(self.kv_format, *window, device),
                state,
                entries=entries(spec.ratio) if spec.ratio else None,
                index_keys=index_keys(spec.ratio) if spec.overlap else None,
                batch_invariant=batch_invariant,
            )
            for spec, state in zip(config.schedule, self.state.layers, strict=True)
        )

    def prepared(self, step: Step) -> Step:
        """The step with what its layers derive from it, made at once, if its keys fit into the
        rings."""
        window = self.layers[0].window
        is_known = step.indices is not None or not window.is_in_place(step)
        if is_known or len(self._ratios) > KINDS:
            return step
        given = (step.slots, step.starts, step.lens, step.block_table)
        given = (tensor.contiguous() for tensor in given)
        sizes = {"ring": window.size, "block": self.block_size}
        indices = step_indices(*given, chunk=step.chunk, **sizes, ratios=self._ratios)
        return step.having(indices, self._ratios)

    @property
    def max_context(self) -> int:
        """Positions one request can have."""
        return self.block_size * self.max_blocks_per_request

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the rings of the given slots. Nothing needs it: readers mask by position."""
        self.state.reset(rows)
        for layer in self.layers:
            layer.window.reset(rows)


def block_size(config: ModelConfig) -> int:
    """Return the original tokens per cache block: whole entries of every layer fit in it."""
    unit = math.lcm(*(spec.ratio for spec in config.schedule if spec.ratio))
    return unit * -(-MIN_BLOCK_TOKENS // unit)
