"""Launches the compiled attention kernel of a CUDA device: no check that the kernel makes itself,
no allocation after warm-up, no synchronisation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention import splits as fmha_splits
from dsv4.ops.attention.backend import Launch, launch_for
from dsv4.ops.attention.checks import check_arguments
from dsv4.ops.runtime.cache import RUNNERS, Runner
from dsv4.ops.runtime.registry import ARCHITECTURES, runner_key
from dsv4.ops.runtime.runner import refuse_cold_capture

# Launch sizes whose number of splits is remembered.
MAX_SIZES = 4096

# Per (configuration object, device): what a launch needs. Configurations are few and never freed.
_STATES: dict[tuple[int, int], _State] = {}

# Split-KV partials per (device, stream); captures share one per device.
_WORKSPACES: dict[tuple[int, int | None], Tensor] = {}
# Outgrown workspaces of captures: graphs hold their addresses.
_RETIRED: list[Tensor] = []


class _State:
    """A configuration's runner on one device.

    Attributes:
        run: the compiled function.
        absent: empty tensors that stand for the optional arguments.
        splits: number of KV splits by (tokens, compressed rows, window rows).
    """

    def __init__(self, config: FmhaConfig, device: torch.device) -> None:
        if config.num_splits is not None and config.num_splits > fmha_splits.MAX_SPLITS:
            raise ValueError(
                f"num_splits: got {config.num_splits}, at most {fmha_splits.MAX_SPLITS} on a GPU"
            )
        capability = torch.cuda.get_device_capability(device)
        self.arch = ARCHITECTURES[capability]
        key = runner_key(config, self.arch)
        self.config = config
        self.device = device
        self.run: Runner = RUNNERS.get(key, before_miss=lambda: refuse_cold_capture(config))
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.absent = _absent(device.index, config.num_query_heads)
        self.splits: dict[tuple[int, int, int], int] = {}
        self.launch = _launch_of(self)

    def num_splits(self, tokens: int, rows: int, width: int) -> int:
        """KV splits of a launch: fixed by the configuration, else by the launch's size."""
        if len(self.splits) == MAX_SIZES:
            self.splits.clear()
        chosen = self.config.num_splits
        if chosen is None:
            size = (tokens, rows, width)
            chosen = fmha_splits.choose(self.config, *size, self.multiprocessors, self.arch)
        self.splits[tokens, rows, width] = chosen
        return chosen


def _launch_of(state: _State) -> Launch:
    """The launch of a state, as a closure: locals are found faster than attributes, and the host
    takes longer for a launch than the GPU for a small one."""
    config, index = state.config, state.device.index
    run, multiprocessors = state.run, state.multiprocessors
    no_lens, no_lse, no_workspace = state.absent
    current_device, known_splits = torch._C._cuda_getDevice, state.splits.get
    float32, has_others = torch.float32, torch.cuda.device_count() > 1
    unsplit_from = fmha_splits.unsplit_from(config, multiprocessors)
    if config.num_splits is not None:
        unsplit_from = sys.maxsize

    def launch(
        q: Tensor,
        compressed_kv: Tensor,
        swa_kv: Tensor,
        swa_lens: Tensor,
        sink_logits: Tensor,
        request_ids: Tensor,
        o: Tensor,
        compressed_lens: Tensor | None,
        lse: Tensor | None,
        workspace: Tensor | None,
    ) -> None:
        """Attention on the current stream of the device of q.

        The compiled function checks dtypes, ranks, devices, shared sizes and strides. Only what it
        cannot see is checked here.

        Raises:
            ValueError: a length of an optional argument does not fit.
            RuntimeError: a workspace is cold and a graph is being captured.
        """
        if q.dtype is float32 or (
            has_others and (current_device() != index or q.get_device() != index)
        ):
            tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o)
            _pass_on(config, *tensors, compressed_lens, lse, workspace)
            return
        tokens = request_ids.numel()  # cheaper than a shape
        if tokens == 0:
            tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o)
            check_arguments(config, *tensors, compressed_lens, lse, workspace)
            return
        if compressed_lens is None:
            compressed_lens = no_lens
        elif compressed_lens.shape[0] != tokens:
            raise ValueError(f"compressed_lens: got {len(compressed_lens)} lengths, needs {tokens}")
        if lse is None:
            lse = no_lse
        elif lse.shape[0] != tokens:
            raise ValueError(f"lse: got {len(lse)} rows, needs {tokens}")
        splits = 1
        if tokens < unsplit_from:
            size = (tokens, compressed_kv.shape[1], swa_kv.shape[1])
            splits = known_splits(size) or state.num_splits(*size)
        if splits == 1:
            workspace = no_workspace
        else:
            needed = fmha_splits.workspace_size(config, tokens, splits)
            if workspace is None:
                workspace = _workspace(state, needed)
            elif workspace.numel() < needed:
                raise ValueError(f"workspace: got {workspace.numel()} elements, needs {needed}")
        run(
            q,
            compressed_kv,
            swa_kv,
            swa_lens,
            sink_logits,
            request_ids,
            o,
            compressed_lens,
            lse,
            workspace,
            splits,
            multiprocessors,
        )

    return launch


def _pass_on(config: FmhaConfig, q: Tensor, *rest: Tensor | None) -> None:
    """Launch what is for q's dtype on q's device."""
    # The driver launches on the current device, whatever device the tensors are on.
    with torch.cuda.device(q.device):
        launch_for(config, q)(q, *rest)


def bind(config: FmhaConfig, device: torch.device) -> Launch:
    """The launch of a configuration on a device, its runner loaded.

    Raises:
        RuntimeError: the runner is cold and a graph is being captured.
    """
    return _state(config, device).launch


def warmup(config: FmhaConfig, max_tokens: int, device: torch.device) -> None:
    """Load the runner and make the workspaces of the current stream and of later captures."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.device(device):
        state = _state(config, device)
        size = fmha_splits.max_workspace_size(config, max_tokens, state.multiprocessors)
        for owner in (torch.cuda.current_stream().cuda_stream, None):
            _grow(device, owner, size)
        _load_module(state)


def num_splits(config: FmhaConfig, tokens: int, rows: int, width: int) -> int:
    """KV splits of a launch on the current device: `rows` compressed, `width` window keys."""
    device = torch.device("cuda", torch.cuda.current_device())
    return _state(config, device).num_splits(tokens, rows, width)


def bare_launch(config: FmhaConfig, *tensors: Tensor) -> Callable[[], None]:
    """One launch without splits or optional tensors, everything looked up: for measurements.

    `tensors` are q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids and o.
    """
    state = _state(config, tensors[0].device)
    run, absent, count = state.run, state.absent, state.multiprocessors
    return lambda: run(*tensors, *absent, 1, count)


def _state(config: FmhaConfig, device: torch.device) -> _State:
    key = (id(config), device.index)
    if key not in _STATES:
        _STATES[key] = _State(config, device)
    return _STATES[key]


def _workspace(state: _State, size: int) -> Tensor:
    """Workspace of the current stream, or of the device's captures, made or grown on demand."""
    index = state.device.index
    is_capture = torch.cuda.is_current_stream_capturing()
    stream = None if is_capture else torch._C._cuda_getCurrentRawStream(index)
    known = _WORKSPACES.get((index, stream))
    if known is not None and known.numel() >= size:
        return known
    refuse_cold_capture(state.config)
    return _grow(state.device, stream, size)


def _grow(device: torch.device, stream: int | None, size: int) -> Tensor:
    key = (device.index, stream)
    known = _WORKSPACES.get(key)
    if known is None or known.numel() < size:
        if stream is None and known is not None:
            _RETIRED.append(known)
        # Counters start at 0, once: launches leave them as they found them.
        known = _WORKSPACES[key] = torch.zeros(size, dtype=torch.float32, device=device)
        if stream is None:
            # A graph may be replayed on any stream: the zeros must not be on their way on this one.
            torch.cuda.current_stream(device).synchronize()
    return known


@cache
def _absent(index: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors that stand for optional arguments: lengths, lse, workspace."""
    device = torch.device("cuda", index)
    return (
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty((0, heads), dtype=torch.float32, device=device),
        torch.empty(0, dtype=torch.float32, device=device),
    )


def _load_module(state: _State) -> None:
    """Run both kernels once, on a padding token: the driver loads a kernel on its first launch,
    which is not allowed during a capture."""
    config, device = state.config, state.device
    shape = (1, config.num_query_heads, config.head_dim)
    q = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    rows = torch.zeros((1, 1, config.head_dim), dtype=torch.bfloat16, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    sink = torch.zeros(config.num_query_heads, dtype=torch.float32, device=device)
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    for num_splits in (1, 2):
        size = fmha_splits.workspace_size(config, 1, num_splits)
        workspace = torch.zeros(size, dtype=torch.float32, device=device)
        state.run(
            *(q, rows, rows, lengths, sink, nobody, torch.empty_like(q)),
            *(*state.absent[:2], workspace, num_splits, state.multiprocessors),
        )
