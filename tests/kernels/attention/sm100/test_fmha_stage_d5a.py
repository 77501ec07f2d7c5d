"""Stage D5a: un-normalised o with its reference and total, as the splits leave them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4.reference.attention import attention_with_lse
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import AttentionKernels, config_of

pytestmark = pytest.mark.stage("D5a")

# Two compressed and two window tiles: of two splits, one holds each branch.
CASE = Case(
    heads=64, head_dim=64, top_k=128, window_rows=128, requests=((0, 2),), batch=1, ragged=False
)


def partials_of(workspace: Tensor, case: Case, splits: int) -> tuple[Tensor, ...]:
    """o [T, n_h, split, d], and maximum, total and lse offset [T, n_h, split] of a workspace."""
    rows = case.tokens * case.heads
    o = workspace[: rows * splits * case.head_dim]
    stats = workspace[o.numel() :][: rows * splits * 4]
    stats = stats.reshape(case.tokens, case.heads, splits, 4)
    o = o.reshape(case.tokens, case.heads, splits, case.head_dim)
    return o, *stats[..., :3].unbind(-1)


def branches(inputs: Inputs) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The oracle's (o, lse) of each branch alone; every key is visible."""
    q, compressed, window = (x.float() for x in inputs.tensors[:3])
    q, window = q.unsqueeze(1), window.expand(q.shape[0], -1, -1)
    scale = q.shape[-1] ** -0.5
    seen = torch.ones(q.shape[0], 1, 128, dtype=torch.bool)
    results = (attention_with_lse(q, keys, seen, scale) for keys in (compressed, window))
    return tuple((o.squeeze(1), lse.squeeze(1)) for o, lse in results)


def test_partials(backend: AttentionKernels, seed: int) -> None:
    """o / total is the branch's output; lse = ln 2 * maximum + ln total, the maximum in base 2."""
    inputs = make_inputs(CASE, seed)
    kernel = backend.compile(config_of(CASE))
    for schedule in backend.schedules:
        workspace = backend.run(kernel, inputs, 2, schedule, seed).workspace
        o, maximum, total, offset = partials_of(workspace, CASE, 2)
        lse = math.log(2) * maximum + total.log()
        for split, (expected_o, expected_lse) in enumerate(branches(inputs)):
            normal = (o[:, :, split] / total[:, :, split, None]).bfloat16()
            assert_attention_close(normal, expected_o, lse[:, :, split], expected_lse)
        assert (offset == 0).all(), "without a gate every split is in the same scale"


def test_rows_are_not_normalised(backend: AttentionKernels, seed: int) -> None:
    """The total is what the rows were not divided by: a sum of weights relative to the maximum."""
    inputs = make_inputs(CASE, seed)
    result = backend.run(backend.compile(config_of(CASE)), inputs, 2)
    _, _, total, _ = partials_of(result.workspace, CASE, 2)
    # At least the largest key weighs 2^-8 to 1 (the reference is lazy), at most all 128 weigh 2^8.
    assert (total > 2**-8).all() and (total < 128 * 2**8).all()
    assert total.std() > 0.1


def test_empty_split(backend: AttentionKernels, seed: int) -> None:
    """More splits than tiles: an empty one has maximum -inf, total 0 and rows of 0."""
    inputs = make_inputs(CASE, seed)
    kernel = backend.compile(config_of(CASE))
    result = backend.run_all(kernel, inputs, 7, seed)
    o, maximum, total, _ = partials_of(result.workspace, CASE, 7)
    empty = total == 0
    assert empty.any(), "7 splits of 4 tiles leave 3 empty"
    assert torch.isneginf(maximum[empty]).all()
    assert (o[empty] == 0).all()
    expected = inputs.expected()
    assert_attention_close(result.o, expected[0], result.lse, expected[1])
