"""Random calls of FlashMLA's entry points: each computes, or is refused by an argument's name."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from dsv4.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from dsv4.compat.kv_entry import ENTRY_BYTES, HEAD_DIM
from tests.fuzz.operands import HOSTILE_FIELDS, hostile_tensor
from tests.fuzz.values import assert_one_line

pytestmark = pytest.mark.stage("op")


def _prefill(dice: random.Random) -> dict[str, Any]:
    """A call of `flash_mla_sparse_fwd` that fits."""
    tokens, heads, width = dice.randrange(4), dice.choice((1, 3, 8)), dice.choice((64, 512))
    pool, columns = dice.choice((1, 7, 40)), dice.choice((0, 1, 16, 65))
    dtype = dice.choice((torch.bfloat16, torch.float32))
    return {
        "q": torch.randn(tokens, heads, width).to(dtype),
        "kv": torch.randn(pool, 1, width).to(dtype),
        "indices": _indices(dice, pool, tokens, 1, columns),
        "sm_scale": dice.choice((0.05, 1, 1e-3)),
        "d_v": width,
        "attn_sink": dice.choice((None, torch.randn(heads))),
        "topk_length": dice.choice((None, _indices(dice, columns + 1, tokens))),
        "return_max_logits": dice.random() < 0.5,
    }


def _decode(dice: random.Random) -> dict[str, Any]:
    """A call of `flash_mla_with_kvcache` that fits."""
    batch, length, heads = dice.randrange(3), dice.choice((1, 2)), dice.choice((1, 8))
    pages, entries, columns = dice.choice((1, 3)), dice.choice((1, 4, 64)), dice.choice((0, 1, 16))
    has_extra = dice.random() < 0.6
    lengths = _indices(dice, columns + 1, batch)
    return {
        "q": torch.randn(batch, length, heads, HEAD_DIM).bfloat16(),
        "k_cache": _cache(dice, pages, entries),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": HEAD_DIM,
        "tile_scheduler_metadata": None,
        "num_splits": None,
        "softmax_scale": dice.choice((None, 0.05)),
        "causal": False,
        "is_fp8_kvcache": True,
        "indices": _indices(dice, pages * entries, batch, length, columns),
        "attn_sink": dice.choice((None, torch.randn(heads))),
        "extra_k_cache": _cache(dice, 2, 2) if has_extra else None,
        "extra_indices_in_kvcache": _indices(dice, 4, batch, length, 5) if has_extra else None,
        "topk_length": dice.choice((None, lengths)),
        "extra_topk_length": dice.choice((None, lengths)) if has_extra else None,
    }


def _indices(dice: random.Random, limit: int, *shape: int) -> Tensor:
    """Rows within a pool and beyond both of its ends."""
    beyond = dice.choice((0, 3, 2**30))
    return torch.randint(-beyond, limit + beyond, shape, dtype=torch.int32)


def _cache(dice: random.Random, pages: int, entries: int) -> Tensor:
    """Pages of any finite entries, further apart than they are long."""
    size, gap = entries * ENTRY_BYTES, dice.choice((0, 16, 576))
    pool = torch.randint(0, 120, (pages, size + gap), dtype=torch.uint8)
    dtype = dice.choice((torch.uint8, torch.int8, torch.float8_e4m3fn))
    return pool[:, :size].unflatten(1, (entries, 1, ENTRY_BYTES)).view(dtype)


MAX_SCALE = 1.0  # of the calls that fit
CALLS = {flash_mla_sparse_fwd: _prefill, flash_mla_with_kvcache: _decode}


@pytest.mark.parametrize("rounds", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_calls_compute_or_name_what_is_wrong(function: Callable, rounds: int, seed: int) -> None:
    dice, outcomes = random.Random(seed), Counter()
    for number in range(rounds):
        call = CALLS[function](dice)
        is_right = number % 3 == 0
        if not is_right:
            name = dice.choice(list(call))
            if isinstance(call[name], Tensor):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of sparse and quantised tensors
                    call[name] = hostile_tensor(dice, None, call[name])
            else:
                call[name] = dice.choice((*HOSTILE_FIELDS, None, numpy.zeros(2), torch.zeros(3)))
        outcome = _outcome(function, call)
        assert outcome == "computed" or not is_right, call
        outcomes[outcome] += 1
    assert outcomes.total() == rounds
    assert outcomes["computed"] > rounds // 3, outcomes
    assert outcomes["refused"] > rounds // 4, outcomes


def _outcome(function: Callable, call: dict[str, Any]) -> str:
    before = {name: value.clone() for name, value in call.items() if _is_plain(value)}
    try:
        results = function(**call)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert_one_line(message)
        first = message.replace(",", " ").split()[0].rstrip(":")
        assert first in call, message
        return "refused"
    for name, value in before.items():
        assert torch.equal(call[name], value), name
    out, lse = results[0], results[-1]
    assert out.shape == call["q"].shape and out.dtype == call["q"].dtype
    empty = lse == math.inf
    if function is flash_mla_with_kvcache:
        empty = empty.transpose(1, 2)
    assert not out[empty].any()
    # Scores beyond fp32 have no lse: some scales among the fields are that large.
    scale = call.get("sm_scale", call.get("softmax_scale")) or 0
    assert scale > MAX_SCALE or not (lse.isnan() | (lse == -math.inf)).any()
    return "computed"


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    return value.device.type == "cpu" and not value.is_complex()
