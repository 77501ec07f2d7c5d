"""The decode steps that are timed, and their inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.testing.attention import Case, make_inputs

HEAD_DIM = 512
WINDOW = 128
TOKENS = (1, 4, 16, 64, 128, 256, 1024)
# Inputs rotate over so many times the bytes that the L2 cache holds.
ROTATION = 3
MAX_SETS = 1024


def model_cases() -> list[Case]:
    """Decode and prefill chunks of Pro and Flash, and of a rank that holds few heads."""

    def case(name: str, tokens: int, heads: int, top_k: int) -> Case:
        return Case.decode(tokens, heads, top_k, WINDOW, HEAD_DIM, name)

    cases = [case("Pro", tokens, 128, 1024) for tokens in TOKENS]
    cases += [case("Flash", tokens, 64, 512) for tokens in TOKENS]
    for heads in (8, 16, 32):
        cases += [case(f"Pro/{128 // heads}", tokens, heads, 1024) for tokens in (64, 256)]
    return [*cases, case("Flash/8", 64, 8, 512)]


def sizes_of(case: Case) -> dict[str, str | int]:
    """The sizes of a decode step as records keep them: what `Case.decode` takes."""
    return {
        "name": case.name,
        "tokens": case.tokens,
        "heads": case.heads,
        "top_k": case.top_k,
        "window": case.window_rows,
        "head_dim": case.head_dim,
    }


class Arguments(NamedTuple):
    """Arguments of the operator, in its order."""

    q: Tensor
    compressed_kv: Tensor
    swa_kv: Tensor
    swa_lens: Tensor
    sink_logits: Tensor
    request_ids: Tensor
    o: Tensor


def rotating_arguments(case: Case, rotation: float = ROTATION) -> list[Arguments]:
    """Sets of arguments on the GPU, `rotation` times as large as its L2 cache together. Lengths,
    ids and sinks are shared, as the layers of a model share them; outputs start as NaN."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = min(MAX_SETS, max(2, math.ceil(rotation * cache / case.bytes)))
    first = make_inputs(case, 0, device="cuda")
    sets = []
    for seed in range(count):
        inputs = make_inputs(case, seed, device="cuda") if seed else first
        shared = (first.swa_lens, first.sink_logits, first.request_ids)
        output = torch.full_like(inputs.q, torch.nan)
        sets.append(Arguments(inputs.q, inputs.compressed_kv, inputs.swa_kv, *shared, output))
    return sets
