"""Decode forwards as CUDA graphs: captured once per shape, then replayed.

A decode forward is thousands of small kernels, which take the host longer to launch than the GPU to
run. A replay launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.engine.forward import verify
from dsv4.engine.inputs import ForwardInputs
from dsv4.layers.moe import MAX_STATIC_CHUNK
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.cache.model_cache import ModelCache
    from dsv4.model.model import DeepseekV4

Forward = Callable[[], Tensor]


def decode_forward(
    model: DeepseekV4, cache: ModelCache, num_drafts: int, use_cuda_graphs: bool | None
) -> Callable[[ForwardInputs], Tensor]:
    """Return `verify` of a model and its cache, as a function of the inputs alone.

    Args:
        num_drafts: draft tokens per forward, k.
        use_cuda_graphs: capture and replay it; None: wherever that is possible.

    Raises:
        TypeError: `use_cuda_graphs` is neither a bool nor None.
        ValueError: graphs are asked for and impossible.
    """
    if use_cuda_graphs is not None and not isinstance(use_cuda_graphs, bool):
        raise TypeError(f"use_cuda_graphs must be a bool or None, got {quoted(use_cuda_graphs)}")
    device = cache.device
    most = MAX_STATIC_CHUNK - 1
    if use_cuda_graphs is None:
        use_cuda_graphs = device.type == "cuda" and num_drafts <= most
    if use_cuda_graphs and device.type != "cuda":
        raise ValueError(f"use_cuda_graphs: needs a model on a CUDA device, got one on {device}")
    if use_cuda_graphs and num_drafts > most:
        raise ValueError(
            f"num_draft_tokens must be at most {most} with use_cuda_graphs, got {num_drafts}"
        )
    if use_cuda_graphs:
        return DecodeGraphs(model, cache, num_drafts, CudaGraphs(device))
    return partial(verify, model, cache, num_drafts=num_drafts)


class GraphKey(NamedTuple):
    """Identity of a decode forward's kernels: all they depend on beside the contents of its inputs.

    Rows and capacity come in powers of two, so that keys are few.
    """

    rows: int  # B
    chunk: int  # C = 1 + drafts
    capacity: int
    greedy: bool
    nucleus: bool

    @classmethod
    def of(cls, inputs: ForwardInputs) -> GraphKey:
        """Return the key of a forward."""
        step, sampling = inputs.step, inputs.sampling
        return cls(step.batch, step.chunk, step.capacity, sampling.greedy, sampling.nucleus)


class GraphBackend(Protocol):
    """Recorder of forwards, which plays them back."""

    def warm_up(self, forward: Forward) -> None:
        """Run a forward where captures will run, so that nothing is done for the first time."""

    def capture(self, forward: Forward) -> Forward:
        """Record a forward without running it.

        Returns:
            Runs what was recorded, on the memory it was recorded with; always returns one tensor.
        """


class DecodeGraphs:
    """`verify` for one model, cache and number of drafts, a graph per `GraphKey`.

    A graph reads its inputs where they lay when it was captured: `CacheManager` and `InputStage`
    put inputs of one key at one address and refill them with asynchronous copies. Inputs that lie
    elsewhere are captured anew. Parameters and cache must stay where they are. All graphs share one
    memory pool, so they must run one after the other.

    Args:
        num_drafts: draft tokens per forward, k.
        backend: records and plays back.
    """

    def __init__(
        self, model: DeepseekV4, cache: ModelCache, num_drafts: int, backend: GraphBackend
    ) -> None:
        self._model = model
        self._cache = cache
        self._num_drafts = num_drafts
        self._backend = backend
        self._graphs: dict[GraphKey, _Graph] = {}

    def __len__(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        """Run `verify`; its result, [B, C + 1 + k] int64, is valid until the next call."""
        key, addresses = GraphKey.of(inputs), _addresses(inputs)
        graph = self._graphs.get(key)
        if graph is None or graph.addresses != addresses:
            graph = self._graphs[key] = _Graph(self._capture(inputs), addresses)
        return graph.replay()

    def _capture(self, inputs: ForwardInputs) -> Forward:
        self._backend.warm_up(partial(self._verify, _padding_like(inputs)))
        return self._backend.capture(partial(self._verify, inputs))

    def _verify(self, inputs: ForwardInputs) -> Tensor:
        # A step keeps what was derived from it, which must be derived within the graph.
        fresh = replace(inputs, step=replace(inputs.step))
        return verify(self._model, self._cache, fresh, self._num_drafts)


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
                output = forward()
            finally:
                graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True)
class _Graph:
    replay: Forward
    addresses: tuple[int, ...]


def _addresses(inputs: ForwardInputs) -> tuple[int, ...]:
    """Addresses of all that a decode forward reads."""
    step, sampling = inputs.step, inputs.sampling
    of_step = (step.slots, step.starts, step.lens, step.block_table)
    of_sampling = (sampling.temperature, sampling.top_p, sampling.seed)
    return tuple(tensor.data_ptr() for tensor in (*of_step, inputs.tokens, *of_sampling))


def _padding_like(inputs: ForwardInputs) -> ForwardInputs:
    """Inputs of the same key whose rows are all padding: a forward over them leaves no trace."""
    step = inputs.step
    return replace(
        inputs,
        step=replace(
            step,
            slots=torch.full_like(step.slots, -1),
            starts=torch.zeros_like(step.starts),
            lens=torch.zeros_like(step.lens),
            block_table=torch.full_like(step.block_table, -1),
        ),
        tokens=torch.zeros_like(inputs.tokens),
    )
