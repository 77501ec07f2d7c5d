"""The launch of the paged attention kernels, written out: hot host code of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.kernels.attention import paged_plan
from dsv4.kernels.attention.paged_args import PagedFmhaTensors
from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.args import Workspace
from dsv4.ops.attention.paged_checks import check_coordinates, check_sizes
from dsv4.ops.code_terms import num_term_rows
from dsv4.ops.runtime import tensors as make
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.calls import tensors_of_call
from dsv4.ops.runtime.kernel_op import KernelOp
from dsv4.ops.runtime.launch import MAX_SIZES, Launch, other_dtypes, pass_on
from dsv4.ops.runtime.state import State


def make_launch(state: State) -> Launch:
    """The launch of a configuration on a device; what follows from sizes is remembered by them."""
    op, config, run, index = state.op, state.config, state.run, state.device.index
    others = other_dtypes(op)
    absent = absent_tensors(op, config, state.device)
    table = op.tensors
    # Those that may be None: the compiled function takes any number of rows of them.
    tokens_first = [i for i, arg in enumerate(table) if arg.may_be_none and arg.shape[0] == "T"]
    workspace, o = map(PagedFmhaTensors._fields.index, ("workspace", "o"))
    rounds_output = config.rounds_output
    plans: dict[tuple[int, int, int], tuple[tuple[int, ...], int, int, bool]] = {}
    # Blackwell gathers rows of bf16 by TMA.
    has_coordinates = state.target.arch != "sm_90a" and config.kv_format == "bf16"
    current_device, has_others = torch._C._cuda_getDevice, torch.cuda.device_count() > 1

    def launch(*arguments: Tensor | int | None) -> None:
        """Attention on the current stream of the device of q.

        Raises:
            ValueError, TypeError: an argument does not fit that the compiled function cannot see.
            RuntimeError: a workspace is cold and a graph is being captured.
        """
        q = arguments[0]
        if q.dtype in others or (
            has_others and (current_device() != index or q.get_device() != index)
        ):
            pass_on(op, config, arguments)
            return
        given = PagedFmhaTensors._make(tensors_of_call(op, arguments))
        check_sizes(config, given)
        if has_coordinates:
            check_coordinates(given)
        tokens = q.shape[0]
        if tokens == 0:
            op.check(config, given)
            return
        for i in tokens_first:
            tensor = given[i]
            if tensor is not None and tensor.shape[0] != tokens:
                raise ValueError(f"{table[i].label}: got {tensor.shape[0]} rows, needs {tokens}")
        window = config.sliding_window
        if given.window_table is None:
            window = given.window_indices.shape[1]
        entries = 0
        if given.compressed_indices is not None:
            entries = given.compressed_indices.shape[1]
        elif given.block_table is not None:
            entries = given.block_table.shape[1] * given.compressed_pool.shape[1]
        scalars, needed, most, has_rows = plan((tokens, window, entries))
        filled = [one if one is not None else other for one, other in zip(given, absent)]
        if not needed:
            filled[workspace] = absent[workspace]
        elif given.workspace is None:
            filled[workspace] = state.workspace(needed, tokens)
        elif given.workspace.numel() < needed:
            raise ValueError(f"workspace: got {given.workspace.numel()} elements, needs {needed}")
        if rounds_output and has_rows:
            filled[o] = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if tokens <= most:
            run(*filled, *scalars)
            return
        for first in range(0, tokens, most):
            run(*_part(op, filled, first, first + most), *scalars)

    def plan(size: tuple[int, int, int]) -> tuple[tuple[int, ...], int, int, bool]:
        """Scalars and workspace of launches of so many tokens and keys, most tokens of one, and
        whether rows of the output are written."""
        known = plans.get(size)
        if known is None:
            if len(plans) == MAX_SIZES:
                plans.clear()
            sizes = dict(zip(("T", "k_w", "k_c"), size))
            scalars = op.plan(config, sizes, state.target)
            needed = op.workspace_size(config, sizes, scalars)
            most = paged_plan.most_tokens(config, scalars)
            launch_sizes = size[0], *scalars[:2]
            rounds = paged_plan.rounds_rows(config, *launch_sizes, state.target.arch)
            known = plans[size] = scalars, needed, most, not rounds
        return known

    return launch


def _part(op: KernelOp, filled: list[Tensor], first: int, last: int) -> list[Tensor]:
    """The tensors of a call, of tokens from `first` on, a multiple of those whose codes lie
    together."""
    rows = {"T": slice(first, last), "C": slice(num_term_rows(first), num_term_rows(last))}
    return [
        x[rows[arg.shape[0]]] if arg.shape[0] in rows else x for arg, x in zip(op.tensors, filled)
    ]


def absent_tensors(
    op: KernelOp, config: PagedFmhaConfig, device: torch.device
) -> tuple[Tensor | None, ...]:
    """What kernels get for None, by place: tensors without rows, a pool of pages of one entry."""
    values = {**op.values(config), "P_c": 1}
    return tuple(
        make.absent(arg, values, device) if arg.may_be_none else None for arg in op.tensors
    )


def smallest_call(
    op: KernelOp, config: PagedFmhaConfig, splits: int, target: Device, device: torch.device
) -> tuple[Tensor | int, ...]:
    """Arguments of a compiled call of one token, which has an index list and no key in it."""
    values, sizes = op.values(config), {"T": 1, "pages_w": 1, "P_w": 1, "k_w": 1, "k_c": 0}
    scalars = (splits, *op.plan(config, sizes, target)[1:])
    sizes["C"] = num_term_rows(1)
    written = ("o", "codes", "code_scales") if config.rounds_output else ("o",)
    call = []
    for arg, absent in zip(op.tensors, absent_tensors(op, config, device), strict=True):
        if isinstance(arg, Workspace):
            size = op.workspace_size(config, sizes, scalars)
            call.append(torch.zeros(size, dtype=torch.float32, device=device))
        elif arg.name == "window_indices":
            call.append(make.empty(arg, values, sizes, device).fill_(-1))
        elif absent is None or arg.name in written:
            call.append(make.empty(arg, values, sizes, device).zero_())
        else:
            call.append(absent)
    return (*call, *scalars)
