"""Continuous batching: requests of any length join, share forwards, and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.allocator import OutOfBlocksError
from dsv4.cache.manager import CacheManager
from dsv4.cache.model_cache import block_size
from dsv4.engine.arguments import (
    check_drafts,
    check_integer,
    check_length,
    check_prompt,
    check_token_ids,
)
from dsv4.engine.flight import Flight
from dsv4.engine.forward import prefill
from dsv4.engine.graphs import decode_forward, padded_rows
from dsv4.engine.inputs import SAMPLED_HERE, known_inputs
from dsv4.engine.mailbox import Letter
from dsv4.engine.prefix_reuse import PrefixReuse
from dsv4.engine.request import Output, Request
from dsv4.engine.request_state import DecodeShape, RequestState
from dsv4.engine.results import RowResult
from dsv4.engine.sampling_params import SamplingKind, SamplingParams, check_bias
from dsv4.engine.sharing import Sharing
from dsv4.engine.stats import GenerationStats
from dsv4.model.model import DEFAULT_PREFILL_CHUNK
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

MAX_REQUESTS = 1 << 16
MAX_SNAPSHOTS = 1 << 20


class Engine:
    """Scheduler of requests through a model over one paged cache.

    A step is at most one decode forward over the requests whose known tokens are all cached but
    the newest, and one prefill forward over others. Requests start in the order they came, as
    slots and blocks allow. Blocks are taken as a request grows; when none is left the youngest
    request waits again and is recomputed later. The oldest therefore always proceeds, and `add`
    refuses what could not finish alone.

    A forward of another shape sums in another order. What a request gets is therefore the same
    beside other requests, in other chunks and when it is recomputed as far as the dtype of the
    model tells numbers apart; where two candidates are closer than that, another token can win. In
    a quantised model the rounding of activations amplifies such differences (logits moved by 0.6 at
    the 99th percentile, in 1 of 30 continuations of 24 tokens one was another). With
    `batch_invariant` nothing can differ: where all of a forward are kernels, which add in one order
    for any number of tokens, requests share forwards as ever; elsewhere, and for requests that
    sample, every token is computed by itself, in one shape.

    Args:
        model: the model; its MTP block drafts.
        max_requests: requests that run at the same time.
        max_context: prompt and new tokens of one request, at most.
        num_draft_tokens: drafts per decode forward, k; a forward has 1 + k positions per request.
        prefill_chunk: tokens of one prefill forward, padding included; longer prompts take several.
        num_blocks: blocks of the paged cache; default enough for `max_requests` of `max_context`.
        use_cuda_graphs: replay decode forwards as CUDA graphs, which are captured when a shape
            first occurs; needs a CUDA device and at most 15 drafts. None: wherever that holds.
        batch_invariant: a request's tokens depend on nothing but the request, bit for bit. Without
            drafts. Where kernels are missing, as on a CPU, forwards have one position of one
            request each, which is many times slower; `shares_forwards` tells.
        async_scheduling: a step starts its forwards before it reads what those of the step before
            found: the device never waits for the host. A request then ends a step after its stop
            token was found, and what that step computed for it is dropped; it gets the same tokens.
            None: on CUDA.
        prefix_snapshots: ends of blocks that are kept, with the rings there, for requests that
            begin alike: of chunks of prompts and, without drafts, of continuations. Such a request
            is prefilled from the longest known beginning on. Its text is the same as far as chunks
            change nothing (see above); its first drafts may be others. Blocks are kept until
            requests need them. 0: nothing is.

    Attributes:
        stats: counts and times since the engine was made.

    Raises:
        TypeError: an argument is of another type; the message names it.
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        model: DeepseekV4,
        max_requests: int,
        max_context: int,
        *,
        num_draft_tokens: int = 0,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        num_blocks: int | None = None,
        use_cuda_graphs: bool | None = None,
        batch_invariant: bool = False,
        async_scheduling: bool | None = None,
        prefix_snapshots: int = 0,
    ) -> None:
        config = model.config
        max_requests = check_integer("max_requests", max_requests, 1, MAX_REQUESTS)
        max_context = check_integer("max_context", max_context, 2)
        prefill_chunk = check_integer("prefill_chunk", prefill_chunk, 1)
        prefix_snapshots = check_integer("prefix_snapshots", prefix_snapshots, 0, MAX_SNAPSHOTS)
        num_draft_tokens = check_drafts(config, num_draft_tokens)
        if num_blocks is not None:
            num_blocks = check_integer("num_blocks", num_blocks, 1)
        if not isinstance(batch_invariant, bool):
            raise TypeError(f"batch_invariant must be a bool, got {quoted(batch_invariant)}")
        if async_scheduling is not None and not isinstance(async_scheduling, bool):
            raise TypeError(
                f"async_scheduling must be a bool or None, got {quoted(async_scheduling)}"
            )
        if max_context > config.max_position_embeddings:
            raise ValueError(
                f"max_context must be at most the model's {config.max_position_embeddings} "
                f"positions, got {max_context}"
            )
        if num_draft_tokens and batch_invariant:
            raise ValueError(
                f"num_draft_tokens must be 0 with batch_invariant, got {num_draft_tokens}"
            )
        self.model = model
        self.max_context = max_context
        self.num_draft_tokens = num_draft_tokens
        self.prefill_chunk = prefill_chunk
        self.batch_invariant = batch_invariant
        self._sharing = Sharing(model, batch_invariant)
        self.shares_forwards = self._sharing.is_possible
        self.stats = GenerationStats()

        size = block_size(config)
        if num_blocks is None:
            num_blocks = max_requests * -(-max_context // size)
        # Drafts are chained past the last position a request may have: into a column without block.
        columns = -(-(max_context + num_draft_tokens) // size)
        prefilled = min(prefill_chunk, max_requests * max_context)
        sizes = (max_requests, num_blocks, columns, num_draft_tokens, prefilled)
        self._cache = model.new_cache(*sizes, batch_invariant=batch_invariant)
        self._manager = CacheManager(self._cache, prefix_snapshots)
        self._reuse = PrefixReuse(self._manager, self._cache, prefix_snapshots)
        self._state = RequestState(self._cache, 1 + num_draft_tokens)
        self._decoder = decode_forward(model, self._cache, self._state, use_cuda_graphs)
        if async_scheduling is None:
            async_scheduling = self._cache.device.type == "cuda"
        self.async_scheduling = async_scheduling

        self._next_id = 0
        self._waiting: deque[Request] = deque()  # oldest first, all younger than the running
        self._running: list[Request] = []  # oldest first
        self._flights: deque[Flight] = deque()  # oldest first
        self._undelivered: list[Output] = []  # of a step that raised after it had read them
        self._done = 0.0  # `perf_counter` when the last forward that was read was done

    @property
    def num_requests(self) -> int:
        """Requests that wait or run, or whose last tokens the next step delivers."""
        unfinished = {request.id for request in (*self._waiting, *self._running)}
        return len(unfinished | {output.request for output in self._undelivered})

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks that no request holds."""
        return self._manager.allocator.num_free + self._manager.allocator.num_idle

    def add(self, prompt_ids: Sequence[int] | Tensor, sampling: SamplingParams) -> int:
        """Queue a request.

        Args:
            prompt_ids: at least one token id, or a 1-D integer tensor of them.

        Returns:
            The request's id: 0, 1, 2 ...

        Raises:
            TypeError: `prompt_ids` does not consist of integers, or `sampling` is something else.
            ValueError: the prompt is empty, an id is outside the vocabulary, or prompt and new
                tokens exceed the context or what the whole cache could hold.
            torch.OutOfMemoryError: the first request that penalises tokens needs memory that is
                not there.
        """
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {quoted(sampling)}")
        vocab_size = self.model.config.vocab_size
        tokens = check_prompt(prompt_ids, vocab_size, "prompt_ids")
        end = check_length(len(tokens), sampling.max_new_tokens, self.max_context, self._cache)
        stop_tokens = sampling.stop_tokens
        if stop_tokens is None:
            stop_tokens = _end_of_sequence(self.model.config.eos_token_id)
        stop_tokens = check_token_ids("stop_tokens", stop_tokens, vocab_size)
        check_bias(sampling.logit_bias or {}, vocab_size)
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(1 << 62, (), device="cpu"))
        request = Request(
            id=self._next_id,
            tokens=tokens,
            prompt=len(tokens),
            end=end,
            stop_tokens=frozenset(stop_tokens),
            sampling=sampling,
            seed=seed,
        )
        self._state.prepare(request)
        self._next_id += 1
        self._waiting.append(request)
        return request.id

    def cancel(self, request_id: int) -> bool:
        """Drop a request, whatever it is doing, and free what it holds.

        Returns:
            Whether it was still waiting or running, or had tokens that no step had delivered. Then
            no step returns anything for it any more.

        Raises:
            TypeError: `request_id` is no integer.
            ValueError: no such request was ever added.
        """
        request_id = check_integer("request_id", request_id, 0)
        if request_id >= self._next_id:
            raise ValueError(f"request_id must be one that add() returned, got {request_id}")
        delivered = [output for output in self._undelivered if output.request != request_id]
        found = len(delivered) < len(self._undelivered)
        self._undelivered = delivered
        for request in self._running:
            if request.id == request_id:
                request.is_over = True
                self._leave(request)
                return True
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        return found

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Start one decode and one prefill forward, as far as there is work for them, and return
        what the forwards before found; with `async_scheduling` the two are of different steps.

        When a forward raises, running requests wait again and are recomputed: the caller may step
        on. Tokens that were read before come with the next step, and `num_requests` counts the
        requests that they belong to.

        Returns:
            The requests that got tokens or failed, each once. Empty when a long prompt is still
            being prefilled, when the first results are still under way, or when nothing is left to
            do (`num_requests` is 0).
        """
        if not self._undelivered:
            try:
                self._run_forwards()
            except BaseException:
                self._start_over()
                raise
        outputs, self._undelivered = self._undelivered, []
        merged: dict[int, Output] = {}
        for output in outputs:
            earlier = merged.get(output.request)
            merged[output.request] = output if earlier is None else earlier.then(output)
        return list(merged.values())

    def _run_forwards(self) -> None:
        earlier = len(self._flights)
        decoding = self._make_room()
        earlier = min(earlier, len(self._flights))
        for group in self._sharing.groups(decoding):
            self._decode(group)
        if not self.async_scheduling:
            self._read_results(len(self._flights))
        self._admit()
        prefilling = [r for r in self._running if not r.decodes]
        if not self.shares_forwards:
            self._prefill_singly(prefilling)
        elif prefilling:
            groups = self._sharing.groups(prefilling)
            self._prefill(next(x for x in groups if x[0] is prefilling[0]), self.prefill_chunk)
        # The device is to be at work while the host reads what is done.
        is_idle = len(self._flights) == earlier
        lag = self.async_scheduling and not is_idle
        self._read_results(earlier if lag else len(self._flights))

    def _start_over(self) -> None:
        """Let all running requests wait again.

        A forward writes layer by layer, over the oldest entries of the layers' rings, so after half
        of one not even the positions cached before it are safe; and results that were not read may
        follow others that were lost.
        """
        for flight in self._flights:
            for row, request in flight.rows:
                request.pending = request.ahead = 0
                self._reuse.give_back(flight.saved.pop(row, None))
        self._flights.clear()
        self._decoder.reset()
        while self._running:
            self._preempt_youngest()

    def _prefill_singly(self, requests: list[Request]) -> None:
        """Cache the next tokens of the oldest requests one by one, a prefill chunk in all."""
        left = self.prefill_chunk
        for request in requests:
            while left and not request.decodes:
                self._prefill([request], 1)
                left -= 1

    def _make_room(self) -> list[Request]:
        """Take the blocks for a decode forward, oldest request first, from the youngest if need be.

        Returns:
            The requests that take part in it.
        """
        while True:
            decoding = [r for r in self._running if r.decodes and r.has_more]
            try:
                for request in decoding:
                    length = self._manager.length(request.slot)
                    self._manager.extend(request.slot, self._written(request) - length)
                return decoding
            except OutOfBlocksError:
                # What is under way may end a request, and says how much others have really grown.
                if self._flights:
                    self._read_results(len(self._flights))
                else:
                    self._preempt_youngest()

    def _written(self, request: Request) -> int:
        """Positions of a request that one more decode forward may have cached, at most."""
        return request.most_cached(self._state.chunk)

    def _admit(self) -> None:
        """Start waiting requests in order, while there are a slot and blocks for their tokens."""
        while self._waiting and self._manager.num_free_slots:
            request = self._waiting[0]
            match = self._reuse.find(request)
            try:
                request.slot = self._manager.admit(len(request.tokens), match.blocks)
            except OutOfBlocksError:
                return
            self._running.append(self._waiting.popleft())
            self._state.seat(request)
            self.stats.prefix_tokens += self._reuse.restore(request, match)

    def _preempt_youngest(self) -> None:
        youngest = self._running[-1]
        self._leave(youngest)
        self._waiting.appendleft(youngest)

    def _leave(self, request: Request) -> None:
        """Stop running a request: it keeps its tokens alone.

        Forwards in flight may still write to what it gives back: before all that others will write.
        """
        self._manager.release(request.slot)
        self._running.remove(request)
        request.slot = None
        request.decodes = False

    def _decode(self, requests: list[Request]) -> None:
        """Verify each request's newest token and drafts; one batched forward of static shape."""
        started = perf_counter()
        slots = [request.slot for request in requests]
        counts = [self._written(r) - self._manager.length(r.slot) for r in requests]
        shape = DecodeShape(
            rows=padded_rows(len(requests), self._cache.max_requests),
            chunk=self._state.chunk,
            capacity=self._manager.advance(slots, counts),
            sampling=SamplingKind.of(request.sampling for request in requests),
        )
        self._state.change_table(self._manager.table_changes())
        self._state.place(slots, shape.rows)
        letter = self._decoder(shape)
        flight = self._fly(letter, list(enumerate(requests)), shape.chunk, None, started)
        if shape.chunk == 1:  # else positions are not known yet
            flight.saved.update((row, self._reuse.save(r)) for row, r in flight.rows)

    def _prefill(self, requests: list[Request], limit: int) -> None:
        """Cache the next tokens of the oldest requests that fit in a forward of `limit` tokens."""
        started = perf_counter()
        spans = self._prefill_spans(requests, limit)
        requests = requests[: len(spans)]
        tokens = [r.tokens[span] for r, span in zip(requests, spans)]
        ends = [span.stop == len(r.tokens) for r, span in zip(requests, spans)]
        following = [
            [*row[1:], SAMPLED_HERE if end else r.tokens[span.stop]]
            for r, span, row, end in zip(requests, spans, tokens, ends)
        ]
        counts = [len(row) for row in tokens]
        step = self._manager.step([r.slot for r in requests], counts, max(counts))
        kind = SamplingKind.of(r.sampling for r, end in zip(requests, ends) if end)
        sampling = self._state.sampling(step.slots, kind)
        inputs = known_inputs(step, sampling, tokens, following)
        result = prefill(self.model, self._cache, inputs, self.num_draft_tokens, any(ends))
        if result is not None:
            self._state.begin(inputs, result)
        letter = Letter(result, self._cache.device)
        rows = [(row, request) for row, request in enumerate(requests) if ends[row]]
        for _, request in rows:
            request.decodes = True
        self._fly(letter, rows, 1, sum(counts), started)
        for request in requests:
            snapshot = self._reuse.save(request)
            self._reuse.file(request, snapshot, self._manager.length(request.slot))

    def _prefill_spans(self, requests: list[Request], limit: int) -> list[slice]:
        """The tokens that the first of `requests` prefill together: `limit`, padding included."""
        spans: list[slice] = []
        chunk = 0
        for request in requests:
            start = self._manager.length(request.slot)
            stop = self._reuse.cut(start, min(len(request.tokens), start + limit))
            chunk = max(chunk, stop - start)
            if spans and (len(spans) + 1) * chunk > limit:
                break
            spans.append(slice(start, stop))
        return spans

    def _fly(
        self,
        letter: Letter,
        rows: list[tuple[int, Request]],
        chunk: int,
        tokens: int | None,
        started: float,
    ) -> Flight:
        computed = perf_counter() if self._cache.device.type == "cpu" else None
        flight = Flight(letter, rows, chunk, tokens, started, computed).take_off()
        self._flights.append(flight)
        return flight

    def _read_results(self, count: int) -> None:
        """Wait for the oldest forwards in flight and give requests what they chose."""
        for _ in range(count):
            flight = self._flights[0]
            result = flight.letter.read()
            for row, request in flight.rows:
                if request.is_over:
                    self._reuse.give_back(flight.saved.pop(row, None))
                else:
                    self._grow(request, flight, row, result[row])
            self._flights.popleft()
            self._count(flight)

    def _count(self, flight: Flight) -> None:
        """Add a forward that is done to the statistics."""
        done = flight.computed or perf_counter()
        seconds, self._done = done - max(flight.started, self._done), done
        if flight.tokens is None:
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_seconds += seconds
            self.stats.prefill_tokens += flight.tokens

    def _grow(self, request: Request, flight: Flight, row: int, result: np.ndarray) -> None:
        """Append new tokens up to a stop token; the cache keeps all positions but the last."""
        found = RowResult.of(result, flight.chunk, self.num_draft_tokens)
        # No more than it may have: its row was padding behind them.
        room = min(flight.chunk, request.end - len(request.tokens))
        tokens = found.sampled[: min(found.accepted + 1, room)]
        tokens, reason = request.cut(tokens)
        wanted = request.sampling.logprobs
        logprobs = found.token_logprobs(len(tokens), wanted)
        # From here on the tokens are the request's: whatever is raised later, they are delivered.
        output = Output(request.id, tokens, reason is not None, reason, logprobs)
        self._undelivered.append(output)
        length = len(request.tokens)  # positions cached when this was chosen
        request.tokens += tokens
        flight.land(request)
        self._reuse.file(request, flight.saved.pop(row, None), length)
        if flight.tokens is None:
            self.stats.decode_tokens += len(tokens)
            self.stats.drafts_proposed += room - 1
            self.stats.drafts_accepted += found.accepted
        if reason is not None:
            request.is_over = True
            self._leave(request)
        else:
            self._manager.truncate(request.slot, request.most_cached())


def _end_of_sequence(eos_token_id: int | Iterable[int] | None) -> tuple[int, ...]:
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
