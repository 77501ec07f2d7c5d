"""`step_indices`: what all layers derive from the requests of a forward pass, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.arch import ARCHS
from dsv4.kernels.step.config import ARGS, KINDS, StepIndicesConfig, values
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_are_tensors, check_ranks
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.quoting import quoted

ROWS_PER_CTA = 1024  # indices
MAX_CHUNK = 1 << 20  # tokens of a request in a step: no context is longer


class StepIndices(KernelOp):
    """Positions, requests and cache slots of a step's tokens, as operators take them."""

    name = "step_indices"
    config = StepIndicesConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.step.step_indices")

    def values(self, config: StepIndicesConfig) -> Mapping[str, int | str]:
        return values(config)

    def compiled_config(self, config: StepIndicesConfig, arch: str) -> StepIndicesConfig:
        """One kernel for rings of every size: with any number of drafts."""
        return replace(config, ring=1)

    def plan(self, config: StepIndicesConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Number of CTAs, and the ring."""
        count = -(-sizes["B"] * max(sizes["W"], sizes["C"]) // ROWS_PER_CTA)
        return min(max(count, 1), device.num_sms), config.ring

    def needs(self, config: StepIndicesConfig, name: str) -> bool | None:
        stem, _, kind = name.rpartition("_")
        return config.ratios[int(kind)] > 0 if stem in ("completed", "visible") else None

    def check_sizes(self, config: StepIndicesConfig, *tensors: Tensor | None) -> None:
        chunk = tensors[6].shape[1]
        for kind, ratio in enumerate(config.ratios):
            completed, visible = tensors[10 + 2 * kind : 12 + 2 * kind]
            for name, tensor in (("completed", completed), ("visible", visible)):
                if (tensor is None) == bool(ratio):
                    got, needed = ("nothing", "a") if tensor is None else ("a tensor", "no")
                    raise ValueError(
                        f"{name}_{kind}: got {got}, ratio {ratio} needs {needed} tensor"
                    )
            if ratio and completed.shape[1] != -(-chunk // ratio):
                raise ValueError(
                    f"completed_{kind}: got {completed.shape[1]} columns, needs "
                    f"{-(-chunk // ratio)} for {chunk} tokens and ratio {ratio}"
                )

    def torch(
        self,
        config: StepIndicesConfig,
        slots: Tensor,
        starts: Tensor,
        lens: Tensor,
        block_table: Tensor,
        requests: Tensor,
        pages: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        window_slots: Tensor,
        live_tokens: Tensor,
        *of_entries: Tensor | None,
    ) -> None:
        chunk = positions.shape[1]
        found = token_positions(starts, chunk)
        valid = valid_tokens(slots, lens, chunk)
        requests.copy_(torch.stack((slots, starts, lens)))
        pages.copy_(block_table)
        positions.copy_(found)
        request_ids.copy_(rows_of(valid))
        window_slots.copy_(ring_slots(slots, found, valid, config.ring))
        live_tokens.copy_(last_valid(valid))
        for ratio, completed, visible in zip(config.ratios, of_entries[::2], of_entries[1::2]):
            if ratio:
                entries = completed_entries(starts, lens, block_table, chunk, ratio, config.block)
                completed.copy_(entries)
                visible.copy_((found + 1) // ratio)

    def aot(self) -> Mapping[str, StepIndicesConfig]:
        """Decode steps of Flash and Pro."""
        return {"Flash, Pro": StepIndicesConfig(128, 128, 4, 128)}


STEP_INDICES = StepIndices()
_op = STEP_INDICES.overload


class StepIndexTensors(NamedTuple):
    """Indices of T = B * C tokens of B requests, int32.

    Attributes:
        requests: [3, B]: slots, starts and lens.
        pages: [B, W], the block table.
        positions: [B, C].
        request_ids: [B, C], -1 for padding.
        window_slots: [B, C], slots in the pages of the window; -1 for padding.
        live_tokens: [1], number of leading tokens behind which all are padding.
        completed: by ratio [B, K], slots of the entries that may end in the step; -1: do not.
        visible: by ratio [B, C], entries that are complete at each token.
    """

    requests: Tensor
    pages: Tensor
    positions: Tensor
    request_ids: Tensor
    window_slots: Tensor
    live_tokens: Tensor
    completed: tuple[Tensor, ...]
    visible: tuple[Tensor, ...]


def step_indices(
    slots: Tensor,
    starts: Tensor,
    lens: Tensor,
    block_table: Tensor,
    *,
    chunk: int,
    ring: int,
    block: int,
    ratios: tuple[int, ...] = (),
) -> StepIndexTensors:
    """Derive the indices of a step's tokens from its requests.

    Args:
        slots: [B] int64, page of the request's window; negative: a padding row.
        starts: [B] int64, position of the first token, at least 0.
        lens: [B] int64, tokens that are not padding.
        block_table: [B, W] int64, blocks of `block` positions; negative: none.
        chunk: C.
        ring: keys of a page of the window; position p lies at p mod ring.
        block: positions of a block.
        ratios: positions per compressed entry, at most two, divisors of `block`.

    Returns:
        New tensors.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    tensors = (slots, starts, lens, block_table)
    check_are_tensors(ARGS[:4], tensors)
    check_ranks(ARGS[:4], tensors)
    if isinstance(chunk, bool) or not isinstance(chunk, int):
        raise TypeError(f"chunk: got {quoted(chunk)}, needs an integer")
    if not 0 <= chunk <= MAX_CHUNK:
        raise ValueError(f"chunk: got {quoted(chunk)}, needs 0 to {MAX_CHUNK}")
    if not isinstance(ratios, tuple):
        raise TypeError(f"ratios: got {quoted(ratios)}, needs a tuple")
    if len(ratios) > KINDS:
        raise ValueError(f"ratios: got {len(ratios)}, at most {KINDS} are possible")
    if any(isinstance(ratio, bool) or not isinstance(ratio, int) for ratio in ratios):
        raise TypeError(f"ratios: got {quoted(ratios)}, needs integers")
    if any(ratio < 1 for ratio in ratios):
        raise ValueError(f"ratios: got {quoted(ratios)}, needs positive ones")
    identity = step_indices_runner_id(ring, block, *ratios)
    rows = len(slots)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=slots.device)

    of_tokens = [empty(rows, chunk) for _ in range(3)]
    completed = tuple(empty(rows, -(-chunk // ratio)) for ratio in ratios)
    visible = tuple(empty(rows, chunk) for _ in ratios)
    found = StepIndexTensors(
        empty(3, rows), empty(*block_table.shape), *of_tokens, empty(1), completed, visible
    )
    pairs = [tensor for pair in zip(completed, visible) for tensor in pair]
    pairs += [None] * (2 * KINDS - len(pairs))
    _op(slots, starts, lens, block_table, *found[:6], identity, *pairs)
    return found


@torch.compiler.assume_constant_result
def step_indices_runner_id(ring: int, block: int, ratio_0: int = 0, ratio_1: int = 0) -> int:
    """Id of a configuration: what `torch.ops.dsv4.step_indices` takes."""
    return STEP_INDICES.runner_id(ring, block, ratio_0, ratio_1)


def token_positions(starts: Tensor, chunk: int) -> Tensor:
    """[B, C] int64: absolute position of every token, padding included."""
    return starts[:, None] + torch.arange(chunk, device=starts.device)


def valid_tokens(slots: Tensor, lens: Tensor, chunk: int) -> Tensor:
    """[B, C] bool: tokens that exist."""
    offsets = torch.arange(chunk, device=slots.device)
    return (offsets < lens[:, None]) & (slots >= 0)[:, None]


def rows_of(valid: Tensor) -> Tensor:
    """[B, C] int32: the row b of every token, -1 for padding."""
    rows = torch.arange(len(valid), device=valid.device)[:, None]
    return torch.where(valid, rows, -1).to(torch.int32)


def last_valid(valid: Tensor) -> Tensor:
    """[1] int32: number of leading tokens of [B * C] behind which all are padding."""
    count = torch.arange(valid.numel() + 1, device=valid.device)
    return (count * F.pad(valid.flatten(), (1, 0))).amax(0, keepdim=True).to(torch.int32)


def ring_slots(slots: Tensor, positions: Tensor, valid: Tensor, ring: int) -> Tensor:
    """[B, C] int32: slot of every token in the pages of the window; -1 for padding."""
    return torch.where(valid, slots[:, None] * ring + positions % ring, -1).to(torch.int32)


def completed_entries(
    starts: Tensor, lens: Tensor, block_table: Tensor, chunk: int, ratio: int, block: int
) -> Tensor:
    """[B, K] int32: slots of the K entries per request that may end within a step, from
    starts // ratio on; -1: the step does not reach its end, or the request has no block."""
    size, count = block // ratio, -(-chunk // ratio)
    numbers = (starts // ratio)[:, None] + torch.arange(count, device=starts.device)
    inside = (numbers >= 0) & (numbers // size < block_table.shape[1])
    complete = inside & ((numbers + 1) * ratio <= (starts + lens)[:, None])
    # A column behind the last stands for all blocks that are not there.
    table = F.pad(block_table, (0, 1), value=-1)
    blocks = table.gather(1, torch.where(inside, numbers // size, table.shape[1] - 1))
    slots = torch.where(blocks < 0, -1, blocks * size + numbers % size)
    return torch.where(complete, slots, -1).to(torch.int32)
