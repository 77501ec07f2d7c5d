"""Growing state of every request: compressed entries in blocks, and the cache of a whole model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.cache.state_cache import LayerState, Ring, StateCache
from dsv4.cache.step import Step

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

MIN_BLOCK_TOKENS = 128


class Pages:
    """Compressed entries of one layer: entry n of a request lies in its block n //
    entries_per_block.

    Attributes:
        data: [blocks + 1, entries_per_block, dim]; the last block swallows writes that must not
            happen.
    """

    def __init__(
        self,
        blocks: int,
        entries_per_block: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.entries_per_block = entries_per_block
        self.data = torch.zeros(blocks + 1, entries_per_block, dim, dtype=dtype, device=device)

    def write(self, step: Step, first_entry: Tensor, values: Tensor, valid: Tensor) -> None:
        """Write entries first_entry[b] + k.

        Args:
            first_entry: [B] int64.
            values: [B, K, dim].
            valid: [B, K] bool; entries where it is False, or whose block is -1, are dropped.
        """
        entries = first_entry[:, None] + torch.arange(values.shape[1], device=values.device)
        blocks = self._blocks(step, entries)
        blocks = torch.where(valid, blocks, self._trash)
        self.data[blocks, entries % self.entries_per_block] = values.to(self.data.dtype)

    def gather(self, step: Step, entries: Tensor) -> Tensor:
        """Return entries [B, C, k] of each request: [B, C, k, dim]; undefined if not written."""
        batch, tokens, k = entries.shape
        flat = entries.reshape(batch, tokens * k)
        blocks = self._blocks(step, flat)
        return self.data[blocks, flat % self.entries_per_block].view(batch, tokens, k, -1)

    def all(self, step: Step, n: int) -> Tensor:
        """Return the first `n` entries of each request: [B, n, dim]. Undefined where they were
        never written.

        Raises:
            ValueError: the block table has no room for `n` entries.
        """
        columns = -(-n // self.entries_per_block)
        if columns > step.block_table.shape[1]:
            raise ValueError(
                f"{n} entries need {columns} blocks per request, "
                f"block_table has {step.block_table.shape[1]}: is capacity too large?"
            )
        blocks = step.block_table[:, :columns]
        blocks = torch.where(blocks < 0, self._trash, blocks)
        return self.data[blocks].flatten(1, 2)[:, :n]

    @property
    def _trash(self) -> int:
        return len(self.data) - 1

    def _blocks(self, step: Step, entries: Tensor) -> Tensor:
        """Physical blocks of the entries [B, n]; the trash block where the request has none."""
        columns = entries // self.entries_per_block
        inside = (columns >= 0) & (columns < step.block_table.shape[1])
        blocks = step.block_table.gather(1, torch.where(inside, columns, 0))
        return torch.where(inside & (blocks >= 0), blocks, self._trash)


@dataclass(frozen=True)
class LayerCache:
    """Everything one layer keeps between steps.

    Attributes:
        state: the rings.
        entries: compressed keys (= values), [.., head_dim]. None in SWA layers.
        index_keys: keys of the indexer, [.., index_head_dim]. None without an indexer.
    """

    state: LayerState
    entries: Pages | None
    index_keys: Pages | None

    @property
    def window(self) -> Ring:
        """Keys of the sliding window."""
        return self.state.window


class ModelCache:
    """State and pages of every layer, MTP layers included. Device memory only: who owns what is the
    manager's.

    Args:
        config: the model.
        max_requests: requests that can be cached at the same time (rows of the state cache).
        num_blocks: blocks that all requests share; each holds the entries of `block_size` original
            tokens.
        max_blocks_per_request: columns of a block table, hence the longest context.
        dtype: of keys and entries; compressor state is always fp32.
        max_draft: tokens a step may write past the last accepted one.

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
    ) -> None:
        sizes = {
            "max_requests": max_requests,
            "num_blocks": num_blocks,
            "max_blocks_per_request": max_blocks_per_request,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if max_draft < 0:
            raise ValueError(f"max_draft must be at least 0, got {max_draft}")
        self.config = config
        self.max_requests = max_requests
        self.num_blocks = num_blocks
        self.max_blocks_per_request = max_blocks_per_request
        self.max_draft = max_draft
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_size = block_size(config)
        self.state = StateCache(config, max_requests, dtype, device, max_draft)

        def pages(ratio: int, dim: int) -> Pages:
            return Pages(num_blocks, self.block_size // ratio, dim, dtype, device)

        self.layers = tuple(
            LayerCache(
                state,
                entries=pages(spec.ratio, config.head_dim) if spec.ratio else None,
                index_keys=pages(spec.ratio, config.index_head_dim) if spec.overlap else None,
            )
            for spec, state in zip(config.schedule, self.state.layers, strict=True)
        )

    @property
    def max_context(self) -> int:
        """Positions one request can have."""
        return self.block_size * self.max_blocks_per_request

    def reset(self, rows: Tensor | list[int]) -> None:
        """Zero the rings of the given slots. Nothing needs it: readers mask by position."""
        self.state.reset(rows)


def block_size(config: ModelConfig) -> int:
    """Return the original tokens per cache block: whole entries of every layer fit in it."""
    unit = math.lcm(*(spec.ratio for spec in config.schedule if spec.ratio))
    return unit * -(-MIN_BLOCK_TOKENS // unit)
