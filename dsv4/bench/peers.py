"""Times of other packages for the same attention, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.bench.shapes import Arguments
from dsv4.testing.attention import Case


class Run(NamedTuple):
    """A prepared computation: `call` leaves the attention in the tensor that `output` returns."""

    call: Callable[[], object]
    output: Callable[[], Tensor]  # [T, n_h, head_dim]; runs `call` where it keeps no output


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        name: heading of its column.
        prepare: one `Run` per set of inputs, everything but the attention itself done.
        serves: whether it can run a case.
        error: relative Frobenius error that its arithmetic may have against the oracle.
        copies: bytes it needs beside the inputs, as a multiple of theirs.
        keys: what its keys are for the oracle, given the inputs' keys [rows, head_dim].
    """

    name: str
    prepare: Callable[[Case, list[Arguments]], list[Run]]
    serves: Callable[[Case], bool] = lambda case: True
    error: float = 6e-3
    copies: float = 4.0
    keys: Callable[[Tensor], Tensor] = lambda keys: keys


def attention(q: Tensor, kv: Tensor, sink_logits: Tensor) -> Tensor:
    """Softmax attention with a sink, in plain torch: two batched products around a softmax.

    q [T, H, D]; kv [T, K, D], one row set per token.
    """
    scores = torch.bmm(q, kv.mT).float() * q.shape[-1] ** -0.5
    sink = sink_logits[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights.to(q.dtype), kv)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(attention, dynamic=False)


def _prepare(
    function: Callable[..., Tensor], inputs: list[Arguments], dynamic_tokens: bool
) -> list[Run]:
    def prepare(each: Arguments) -> Run:
        # Joined beforehand: these peers get their keys as it suits them.
        kv = torch.cat((each.compressed_kv, each.swa_kv), 1)
        if dynamic_tokens:
            for tensor in (each.q, kv):
                torch._dynamo.mark_dynamic(tensor, 0)

        def call() -> Tensor:
            return function(each.q, kv, each.sink_logits)

        return Run(call, call)

    return [prepare(each) for each in inputs]


def _prepare_eager(case: Case, inputs: list[Arguments]) -> list[Run]:
    return _prepare(attention, inputs, dynamic_tokens=False)


def _prepare_compiled(case: Case, inputs: list[Arguments]) -> list[Run]:
    # A graph for one number of heads and keys, whatever the number of tokens; one token is apart.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return _prepare(_compiled(), inputs, dynamic_tokens=case.tokens > 1)


def torch_peers() -> list[Peer]:
    """What every installation has."""
    return [Peer("torch eager", _prepare_eager), Peer("torch.compile", _prepare_compiled)]
