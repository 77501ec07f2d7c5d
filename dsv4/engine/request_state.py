"""State of requests on the device, which decode forwards read and advance by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.block_table import NO_BLOCK
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.staging import staged, upload
from dsv4.cache.step import Step
from dsv4.engine.history import History
from dsv4.engine.inputs import SAMPLED_HERE, ForwardInputs
from dsv4.engine.request import Request
from dsv4.engine.sampler import Penalties, SamplingBatch
from dsv4.engine.sampling_params import MAX_LOGIT_BIAS, SamplingKind

# Columns of the reals.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


class DecodeShape(NamedTuple):
    """Identity of a decode forward's kernels: all they depend on beside contents of memory.

    Attributes:
        rows: B, of few sizes; chunk: C = 1 + drafts; capacity: of the step.
        sampling: the code that its requests need.
    """

    rows: int
    chunk: int
    capacity: int
    sampling: SamplingKind


class RequestState:
    """Requests by slot: newest tokens, lengths, blocks, and how each samples.

    The host writes what it decides: requests of slots, their blocks, which slots a forward takes. A
    forward writes what it finds: newest token, drafts, length. So a forward can be started before
    the host has read what the one before found. All of it stays at its address, as captured
    graphs need. The row behind the slots belongs to no request: it is a forward's padding.

    Attributes:
        ints: [slots + 1, C + 5] int64: newest token, drafts, positions cached, positions to cache
            at most, slot (-1 in the last row), seed, top_k.
        reals: [slots + 1, 6] fp32: temperature, top_p, min_p, penalties.
        table: [slots + 1, max_blocks] int64: block tables.
        history: tokens that occurred; None until a request penalises them.

    Args:
        cache: the cache in which the requests lie.
        chunk: C, positions per row of a decode forward.
    """

    def __init__(self, cache: ModelCache, chunk: int) -> None:
        rows, device = cache.max_requests + 1, cache.device
        self.chunk = chunk
        self.device = device
        self.ints = torch.zeros(rows, chunk + 5, dtype=torch.int64, device=device)
        self.ints[:, -3] = -1
        self.reals = torch.zeros(rows, 6, device=device)
        self.table = torch.full(
            (rows, cache.max_blocks_per_request), NO_BLOCK, dtype=torch.int64, device=device
        )
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        self.history: History | None = None
        self._padding = rows - 1
        self._vocab_size = cache.config.vocab_size
        self._block_size = cache.block_size
        self._rows = torch.full((rows - 1,), self._padding, dtype=torch.int64, device=device)
        self._padding_rows = self._rows.clone()
        self._placed: list[int] = []

    def tensors(self) -> list[Tensor]:
        """Its memory, but for the history."""
        steady = [self.ints, self.reals, self.table, self.bias_ids, self.bias]
        return [*steady, self._rows, self._padding_rows]

    def prepare(self, request: Request) -> None:
        """Make the memory that a request needs beyond that of others.

        Raises:
            torch.OutOfMemoryError: there is none; nothing has changed.
        """
        if request.sampling.penalizes and self.history is None:
            self.history = History(len(self.ints), self._vocab_size, self.device)

    def seat(self, request: Request) -> None:
        """Write what the host knows of a request into its slot's row."""
        sampling, slot, chunk = request.sampling, request.slot, self.chunk
        ints = np.array([0, request.end - 1, slot, request.seed, sampling.top_k], dtype=np.int64)
        self.ints[slot, chunk:] = upload(ints, self.device)
        reals = np.zeros(self.reals.shape[1], dtype=np.float32)
        reals[[TEMPERATURE, TOP_P, MIN_P]] = sampling.temperature, sampling.top_p, sampling.min_p
        reals[REPETITION] = sampling.repetition_penalty
        reals[[PRESENCE, FREQUENCY]] = sampling.presence_penalty, sampling.frequency_penalty
        self.reals[slot] = upload(reals, self.device)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items())
            self.bias_ids[slot].zero_()[: len(ids)] = upload(np.array(ids, np.int64), self.device)
            self.bias[slot].zero_()[: len(ids)] = upload(np.array(values, np.float32), self.device)
        else:
            self.bias[slot] = 0.0
        if sampling.penalizes:
            cut = request.prompt
            self.history.start(slot, request.tokens[:cut], request.tokens[cut:])

    def change_table(self, changes: np.ndarray) -> None:
        """Bring block tables up to date: [2, n] int64 as `CacheManager.table_changes` gives."""
        if changes.size:
            where, blocks = upload(changes, self.device)
            self.table.view(-1).index_copy_(0, where, blocks)

    def place(self, slots: Sequence[int], rows: int) -> None:
        """Put requests into the rows of the next decode forwards, and padding behind them."""
        placed = [*slots, *[self._padding] * (rows - len(slots))]
        if placed != self._placed:
            host = staged(np.array(placed, dtype=np.int64), self.device)
            self._rows[:rows].copy_(host, non_blocking=True)
            self._placed = placed

    def rows(self, count: int) -> Tensor:
        """[count] int64: rows of this state that the next decode forward takes, at one address."""
        return self._rows[:count]

    def padding(self, count: int) -> Tensor:
        """The same for a forward that leaves no trace."""
        return self._padding_rows[:count]

    def inputs(self, rows: Tensor, shape: DecodeShape) -> ForwardInputs:
        """Inputs of a decode forward over rows [B] int64; device work alone.

        A request that has all its tokens has no valid ones, like padding.
        """
        # By columns, each contiguous, as operators take them.
        columns = self.ints.t().index_select(1, rows)
        tokens, starts = columns[: shape.chunk].t(), columns[shape.chunk]
        lens = (columns[shape.chunk + 1] - starts).clamp_(0, shape.chunk)
        width = shape.capacity // self._block_size
        step = Step(
            slots=columns[-3],
            starts=starts,
            lens=lens,
            block_table=self.table[:, :width].index_select(0, rows),
            chunk=shape.chunk,
            capacity=shape.capacity,
        )
        return ForwardInputs(step, tokens, tokens, self.sampling(rows, shape.sampling, columns))

    def sampling(
        self, rows: Tensor, kind: SamplingKind, ints: Tensor | None = None
    ) -> SamplingBatch:
        """How requests sample: rows [B] int64 of this state; device work alone.

        Args:
            ints: of these rows, by columns, where they are at hand.
        """
        temperature = top_p = seed = top_k = min_p = penalties = bias = None
        if not kind.greedy or kind.penalized:
            # By columns, each contiguous, as operators take them.
            reals = self.reals.t().index_select(1, rows)
        if not kind.greedy:
            ints = self.ints.t().index_select(1, rows) if ints is None else ints
            temperature, top_p, seed = reals[TEMPERATURE], reals[TOP_P], ints[-2]
            top_k = ints[-1] if kind.top_k else None
            min_p = reals[MIN_P] if kind.min_p else None
        if kind.penalized:
            penalties = Penalties(
                *(reals[column] for column in (REPETITION, PRESENCE, FREQUENCY)),
                self.history.prompted.index_select(0, rows),
                self.history.generated.index_select(0, rows),
            )
        if kind.biased:
            bias = self.bias_ids.index_select(0, rows), self.bias.index_select(0, rows)
        return SamplingBatch(
            temperature,
            top_p,
            seed,
            greedy=kind.greedy,
            nucleus=kind.nucleus,
            top_k=top_k,
            min_p=min_p,
            penalties=penalties,
            bias=bias,
            logprobs=kind.logprobs,
        )

    def advance(self, rows: Tensor, lengths: Tensor, result: Tensor, chunk: int) -> None:
        """Take what a forward found as the newest tokens, drafts and lengths; device work alone.

        Args:
            rows: [B] int64 of this state.
            lengths: [B] int64: positions that are cached now.
            result: as `packed` has them, of `chunk` positions.
        """
        found = [result[:, :1], lengths[:, None]]
        if self.chunk > 1:
            if chunk > 1:
                found[0] = result.gather(1, result[:, chunk : chunk + 1])
            found.insert(1, result[:, chunk + 1 : chunk + self.chunk])
        # A request that failed goes on with some token until the host has read that.
        found[0] = found[0].clamp_min(0)
        self.ints[:, : self.chunk + 1].index_copy_(0, rows, torch.cat(found, dim=1))

    def begin(self, inputs: ForwardInputs, result: Tensor) -> None:
        """Take what a prefill forward found; device work alone.

        Args:
            inputs: of requests, in whose slots' rows it is put; no padding rows.
            result: as `prefill` has it. What it says of rows whose prompt goes on is overwritten
                when that ends.
        """
        step = inputs.step
        self.advance(step.slots, step.starts + step.lens, result, 1)
        if inputs.sampling.penalties is not None:
            ends = (inputs.next_tokens == SAMPLED_HERE).any(1, keepdim=True)
            self.count(step.slots, result[:, :1], ends)

    def count(self, rows: Tensor, tokens: Tensor, kept: Tensor) -> None:
        """Count the `kept` ones of tokens [B, n] int64 as occurred; device work alone."""
        self.history.add(rows, tokens.clamp_min(0), kept)
