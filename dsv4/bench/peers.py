"""What others take for the same attention, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.bench.shapes import Inputs, Shape


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
        serves: whether it can run a shape.
        error: relative Frobenius error that its arithmetic may have against the oracle.
        copies: bytes it needs beside the inputs, as a multiple of theirs.
        keys: what its keys are for the oracle, given the inputs' keys [rows, head_dim].
    """

    name: str
    prepare: Callable[[Shape, list[Inputs]], list[Run]]
    serves: Callable[[Shape], bool] = lambda shape: True
    error: float = 6e-3
    copies: float = 4.0
    keys: Callable[[Tensor], Tensor] = lambda keys: keys


def attention(q: Tensor, compressed_kv: Tensor, swa_kv: Tensor, sink_logits: Tensor) -> Tensor:
    """Softmax attention with a sink, in plain torch: batched products around a softmax.

    q [T, H, D]; compressed_kv [T, K, D]; swa_kv [T, W, D], one row set per token. Keys are not
    joined, which would copy them all.
    """
    scale, rows = q.shape[-1] ** -0.5, compressed_kv.shape[1]
    scores = [torch.bmm(q, kv.mT).float() * scale for kv in (compressed_kv, swa_kv)]
    sink = sink_logits[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((*scores, sink), -1).softmax(-1).to(q.dtype)
    output = torch.bmm(weights[..., rows:-1], swa_kv)
    return output.baddbmm_(weights[..., :rows], compressed_kv)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(attention, dynamic=False)


def _torch_runs(function: Callable[..., Tensor], inputs: list[Inputs]) -> list[Run]:
    arguments = [(x.q, x.compressed_kv, x.swa_kv, x.sink_logits) for x in inputs]
    calls = [lambda each=each: function(*each) for each in arguments]
    return [Run(call, call) for call in calls]


def _prepare_eager(shape: Shape, inputs: list[Inputs]) -> list[Run]:
    return _torch_runs(attention, inputs)


def _prepare_compiled(shape: Shape, inputs: list[Inputs]) -> list[Run]:
    # A graph for one number of heads and keys, whatever the number of tokens; one token is apart.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for each in inputs:
        if shape.tokens > 1:
            for tensor in (each.q, each.compressed_kv, each.swa_kv):
                torch._dynamo.mark_dynamic(tensor, 0)
    return _torch_runs(_compiled(), inputs)


def torch_peers() -> list[Peer]:
    """What every installation has."""
    return [Peer("torch eager", _prepare_eager), Peer("torch.compile", _prepare_compiled)]
