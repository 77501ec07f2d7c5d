"""Decode forwards as CUDA graphs: captured once per shape, then replayed.

A decode forward is thousands of small kernels, which take the host longer to launch than the GPU to
run. A replay launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dsv4.engine.forward import decode
from dsv4.engine.mailbox import Letter, Mailbox
from dsv4.engine.request_state import DecodeShape, RequestState
from dsv4.engine.results import packed_width
from dsv4.layers.moe import MAX_STATIC_CHUNK
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.cache.model_cache import ModelCache
    from dsv4.model.model import DeepseekV4

Forward = Callable[[], object]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_BEYOND = 128


def padded_rows(count: int, most: int) -> int:
    """Rows of a decode forward over `count` requests: of few sizes, so that graphs are few.

    Steps are small where a row costs most of a request; kernels skip padding where they can.

    Args:
        most: requests that may run at the same time.
    """
    rows = next((size for size in ROWS if size >= count), -(-count // ROWS_BEYOND) * ROWS_BEYOND)
    return min(rows, most)


class GraphBackend(Protocol):
    """Recorder of forwards, which plays them back."""

    def warm_up(self, forward: Forward) -> None:
        """Run a forward where captures will run, so that nothing is done for the first time."""

    def capture(self, forward: Forward) -> Forward:
        """Record a forward without running it.

        Returns:
            Runs what was recorded, on the memory it was recorded with.
        """


class DecodeForward:
    """Decode forwards of a model over its cache and the requests in it, by shape.

    With a backend, a shape is captured when it first occurs: parameters, cache and state must stay
    where they are. All graphs share one memory pool, so they must run one after the other.

    Args:
        state: of the requests; which rows a forward takes, `RequestState.place` has said.
        backend: records and plays back; None: every forward is run as it is.
    """

    def __init__(
        self,
        model: DeepseekV4,
        cache: ModelCache,
        state: RequestState,
        backend: GraphBackend | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._state = state
        self._backend = backend
        self._shapes: dict[DecodeShape, _Shape] = {}
        cuda = cache.device.type == "cuda"
        self._stream = torch.cuda.Stream(cache.device) if cuda else None

    def __len__(self) -> int:
        """Shapes that occurred."""
        return len(self._shapes)

    @property
    def is_captured(self) -> bool:
        """Whether forwards are graphs."""
        return self._backend is not None

    def __call__(self, shape: DecodeShape) -> Letter:
        """Start a forward; its results, as `verify` has them, come to the host meanwhile."""
        made = self._shapes.get(shape) or self._make(shape)
        made.mailbox.clear()
        made.run()
        return made.mailbox.send()

    def reset(self) -> None:
        """Forget the results of a forward that failed."""
        for made in self._shapes.values():
            made.mailbox.reset()

    def _make(self, shape: DecodeShape) -> _Shape:
        vocab_size = self._cache.config.vocab_size
        width = packed_width(shape.chunk, shape.chunk - 1, shape.sampling.logprobs, vocab_size)
        mailbox = Mailbox(shape.rows, width, self._cache.device, self._stream)
        run = partial(self._run, self._state.rows(shape.rows), shape, mailbox)
        if self._backend is not None:
            # Over padding: the forward leaves no trace.
            padding = self._state.padding(shape.rows)
            self._backend.warm_up(partial(self._decode, padding, shape))
            run = self._backend.capture(run)
        made = self._shapes[shape] = _Shape(run, mailbox)
        return made

    def _decode(self, rows: Tensor, shape: DecodeShape) -> Tensor:
        return decode(self._model, self._cache, self._state, rows, shape)

    def _run(self, rows: Tensor, shape: DecodeShape, mailbox: Mailbox) -> None:
        mailbox.post(self._decode(rows, shape))


@dataclass(frozen=True)
class _Shape:
    """Forward of one shape, and where its results go."""

    run: Forward
    mailbox: Mailbox


def decode_forward(
    model: DeepseekV4, cache: ModelCache, state: RequestState, use_cuda_graphs: bool | None
) -> DecodeForward:
    """Return the decode forwards of a model and its cache.

    Args:
        use_cuda_graphs: capture and replay them; None: wherever that is possible.

    Raises:
        TypeError: `use_cuda_graphs` is neither a bool nor None.
        ValueError: graphs are asked for and impossible.
    """
    if use_cuda_graphs is not None and not isinstance(use_cuda_graphs, bool):
        raise TypeError(f"use_cuda_graphs must be a bool or None, got {quoted(use_cuda_graphs)}")
    device, num_drafts = cache.device, state.chunk - 1
    most = MAX_STATIC_CHUNK - 1
    if use_cuda_graphs is None:
        use_cuda_graphs = device.type == "cuda" and num_drafts <= most
    if use_cuda_graphs and device.type != "cuda":
        raise ValueError(f"use_cuda_graphs: needs a model on a CUDA device, got one on {device}")
    if use_cuda_graphs and num_drafts > most:
        raise ValueError(
            f"num_draft_tokens must be at most {most} with use_cuda_graphs, got {num_drafts}"
        )
    return DecodeForward(model, cache, state, CudaGraphs(device) if use_cuda_graphs else None)


class CudaGraphs:
    """Records CUDA graphs on a stream of its own, into one memory pool.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        # Warm-up and captures share the stream: libraries keep their workspaces per stream, and one
        # that is made during a capture would live in the pool.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, forward: Forward) -> None:
        """Run a forward on the stream of the captures, in order with the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            forward()
        current.wait_stream(self._stream)

    def capture(self, forward: Forward) -> Forward:
        """Record a forward; what is returned runs it on the stream that is current then."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Torch makes tensors of its random generator here. If they were inference tensors, no
            # later capture of this process could begin outside inference mode.
            with torch.inference_mode(False):
                # "thread_local": what other threads allocate meanwhile is none of this graph.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                forward()
            finally:
                graph.capture_end()
        return graph.replay
