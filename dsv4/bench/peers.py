"""What others take for the same attention; each peer gets the same dense inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsv4.bench.attention import Shape


def attention(q: Tensor, compressed_kv: Tensor, swa_kv: Tensor, sink_logits: Tensor) -> Tensor:
    """Softmax attention with a sink, in plain torch: two batched products around a softmax.

    q [T, H, D]; compressed_kv [T, K, D]; swa_kv [T, W, D], one row set per token.
    """
    kv = torch.cat((compressed_kv, swa_kv), 1)
    scores = torch.bmm(q, kv.mT).float() * q.shape[-1] ** -0.5
    sink = sink_logits[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights.to(q.dtype), kv)


@cache
def _compiled() -> Callable[..., Tensor]:
    # One graph for all shapes: a graph per shape would pass the recompilation limit.
    return torch.compile(attention, dynamic=True)


def _eager(
    shape: Shape, q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o
) -> Callable[[], None]:
    return lambda: o.copy_(attention(q, compressed_kv, swa_kv, sink_logits))


def _compile(
    shape: Shape, q, compressed_kv, swa_kv, swa_lens, sink_logits, request_ids, o
) -> Callable[[], None]:
    function = _compiled()
    return lambda: o.copy_(function(q, compressed_kv, swa_kv, sink_logits))


# Name -> (shape, inputs of `attention.make_inputs`) -> a call to time.
PEERS = {"torch eager": _eager, "torch.compile": _compile}
