"""Router: gate, selection of experts, and sort of tokens by expert, in two launches.

By itself for tests and measurements; inside `moe` the same launches lead the experts'.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint8, cute

from dsv4.kernels.kit.args import compile_kernel
from dsv4.kernels.moe.gate import Gate, GateTensors
from dsv4.kernels.moe.gate_many import GateMany
from dsv4.kernels.moe.router_args import ARGS, values
from dsv4.kernels.moe.routing import RoutingConfig
from dsv4.kernels.moe.select import Lists, Select
from dsv4.kernels.moe.select_many import SelectMany


class Router:
    """Both launches, or those of many tokens.

    Args:
        is_many: whether the launches are those of many tokens.
    """

    def __init__(self, config: RoutingConfig, is_many: bool = False):
        self.config, self.is_many = config, is_many
        self.gate = GateMany(config) if is_many else Gate(config)
        self.select = SelectMany(config) if is_many else Select(config)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [T, D] bf16
        weight: cute.Tensor,  # [E, D] bf16
        partials: cute.Tensor,  # [S, T, E] fp32, written; S is 1 or D / 512
        codes: cute.Tensor,  # [T, D] e4m3, written
        scales: cute.Tensor,  # [T, D / 128] E8M0, written
        ids: cute.Tensor,  # [T, k] int32, written
        weights: cute.Tensor,  # [T, k] fp32, written
        pairs: cute.Tensor,  # [T * k] int32, written
        groups: cute.Tensor,  # [G, 4] int32, written
        counts: cute.Tensor,  # [2] int32, written
        arrivals: cute.Tensor,  # [2] int32, scratch
        run_counts: cute.Tensor,  # [MOST_RUNS, E] int32, scratch
        stream,
        *,
        bias: cute.Tensor,  # [E] fp32, or no rows
        table: cute.Tensor,  # [V, k] int64, or no rows
        input_ids: cute.Tensor,  # [T] int64, or no rows
        live_tokens: cute.Tensor,  # [1] int32, or no rows
        token_tiles: Int32,
        group_tokens: Int32,
    ):
        """Launch the gate, then the selection."""
        tensors = GateTensors(x, weight, partials, codes, as_bytes(scales), arrivals)
        if cutlass.const_expr(self.is_many):
            self.gate.launch(tensors, stream)
        else:
            self.gate.launch(tensors, stream, token_tiles)
        lists = Lists(
            partials, bias, table, input_ids, live_tokens, ids, weights, pairs, groups, counts,
            arrivals, run_counts,
        )  # fmt: skip
        self.select.launch(lists, stream, group_tokens)


def as_bytes(scales: cute.Tensor) -> cute.Tensor:
    """E8M0 scales as bytes."""
    return cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)


def build(config: RoutingConfig, options: str = ""):
    """Compile the router for the architecture of `CUTE_DSL_ARCH`; needs no GPU."""
    return compile_kernel(Router(config), ARGS, values(config), options)


def build_many(config: RoutingConfig, options: str = ""):
    """The same with the launches of many tokens."""
    return compile_kernel(Router(config, is_many=True), ARGS, values(config), options)
