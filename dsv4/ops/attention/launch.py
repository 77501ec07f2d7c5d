"""The launch of the attention kernels, written out: the hottest host code of a decode step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.runtime.launch import MAX_SIZES, Launch, pass_on
from dsv4.ops.runtime.registry import OPS
from dsv4.ops.runtime.state import State, state_of

Size = tuple[int, int, int]  # tokens, compressed rows, window rows


def make_launch(state: State) -> Launch:
    """The launch of a configuration on a device.

    What `dsv4.ops.runtime.launch.make_launch` derives, with names instead of loops: the host takes
    longer for a launch than the GPU for a small one.
    """
    op, config, run = state.op, state.config, state.run
    index, num_sms = state.device.index, state.target.num_sms
    no_lens, no_lse, no_workspace = state.absent
    current_device, float32 = torch._C._cuda_getDevice, torch.float32
    has_others = torch.cuda.device_count() > 1
    unsplit_from = launch_plan.unsplit_from(config, num_sms)
    if config.num_splits is not None:
        unsplit_from = sys.maxsize
    known_splits, choose = _remembered_splits(state)

    def launch(
        q: Tensor,
        compressed_kv: Tensor,
        swa_kv: Tensor,
        swa_lens: Tensor,
        sink_logits: Tensor,
        request_ids: Tensor,
        o: Tensor,
        runner_id: int,
        compressed_lens: Tensor | None = None,
        lse: Tensor | None = None,
        workspace: Tensor | None = None,
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
            pass_on(op, config, (*tensors, runner_id, compressed_lens, lse, workspace))
            return
        tokens = request_ids.numel()  # cheaper than a shape
        if tokens == 0:
            tensors = (q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o)
            op.check(config, (*tensors, compressed_lens, lse, workspace))
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
            splits = known_splits(size) or choose(size)
        if splits == 1:
            workspace = no_workspace
        else:
            needed = launch_plan.workspace_size(config, tokens, splits)
            if workspace is None:
                workspace = state.workspace(needed, tokens)
            elif workspace.numel() < needed:
                raise ValueError(f"workspace: got {workspace.numel()} elements, needs {needed}")
        run(
            q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o,
            compressed_lens, lse, workspace, splits, num_sms,
        )  # fmt: skip

    return launch


def _remembered_splits(
    state: State,
) -> tuple[Callable[[Size], int | None], Callable[[Size], int]]:
    """Looks up the KV splits that were chosen for a size, and chooses them."""
    splits_by_size: dict[Size, int] = {}

    def choose(size: Size) -> int:
        if len(splits_by_size) == MAX_SIZES:
            splits_by_size.clear()
        chosen = launch_plan.num_splits(
            state.config, *size, state.target.num_sms, state.target.arch
        )
        splits_by_size[size] = chosen
        return chosen

    return splits_by_size.get, choose


def num_splits(config: FmhaConfig, tokens: int, rows: int, width: int) -> int:
    """KV splits of a launch on the current device: `rows` compressed, `width` window keys."""
    target = _current_state(config).target
    return launch_plan.num_splits(config, tokens, rows, width, target.num_sms, target.arch)


def bare_launch(config: FmhaConfig, *tensors: Tensor) -> Callable[[], None]:
    """One launch without splits or optional tensors, everything looked up: for measurements.

    `tensors` are q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids and o.
    """
    state = _current_state(config)
    run, absent, num_sms = state.run, state.absent, state.target.num_sms
    return lambda: run(*tensors, *absent, 1, num_sms)


def _current_state(config: FmhaConfig) -> State:
    device = torch.device("cuda", torch.cuda.current_device())
    return state_of(OPS["sparse_fmha_with_swa"], config, device)
