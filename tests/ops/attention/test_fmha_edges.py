"""The edges of the attention contract, each by itself, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dsv4.testing.attention import (
    Case,
    Inputs,
    assert_attention_close,
    assert_lse_close,
    make_inputs,
)
from tests.ops.conftest import Backend

pytestmark = pytest.mark.stage("op")

BASE = Case(ragged=False)
SINK_MODES = ("softmax", "swa_gate")
both_sinks = pytest.mark.parametrize("sink_mode", SINK_MODES)
both_windows = pytest.mark.parametrize("is_causal", [False, True], ids=["ring", "causal"])


def check(backend: Backend, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = backend.run(inputs)
    assert_attention_close(o, expected_o := inputs.expected()[0], lse, inputs.expected()[1])
    assert expected_o.isfinite().all()
    return o, lse


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@both_sinks
@both_windows
def test_without_compressed_keys(
    backend: Backend, sink_mode: str, is_causal: bool, seed: int
) -> None:
    """top_k = 0 equals lengths of 0: the window branch alone, in swa_gate with the sink as 0."""
    case = replace(BASE, sink_mode=sink_mode, is_causal=is_causal)
    inputs = make_inputs(case, seed)
    lens = torch.zeros(case.tokens, dtype=torch.int32)
    o_len, lse_len = check(backend, inputs.replaced(compressed_lens=lens))
    no_rows = inputs.compressed_kv[:, :0]
    o_top, lse_top = check(backend, inputs.replaced(compressed_kv=no_rows))
    # Not the same bits: a launch with rows to spare may split its keys otherwise.
    assert_attention_close(o_len, o_top, lse_len, lse_top)
    if sink_mode == "swa_gate":
        far = inputs.replaced(compressed_lens=lens, sink_logits=torch.full((case.heads,), 7.0))
        assert_lse_close(check(backend, far)[1], lse_len)


@both_sinks
def test_without_window(backend: Backend, sink_mode: str, seed: int) -> None:
    inputs = make_inputs(replace(BASE, sink_mode=sink_mode), seed)
    o, lse = check(backend, inputs.replaced(swa_lens=int32(0, 0, 0, 0)))
    o_w0, lse_w0 = check(backend, inputs.replaced(swa_kv=inputs.swa_kv[:, :0]))
    assert_attention_close(o, o_w0, lse, lse_w0)


@both_sinks
@pytest.mark.parametrize("sink", [0.0, math.inf, -math.inf])
def test_without_any_key(backend: Backend, sink_mode: str, sink: float, seed: int) -> None:
    """Both branches empty: o = 0 and lse = -inf, whatever the sink, never NaN."""
    case = replace(BASE, sink_mode=sink_mode)
    inputs = make_inputs(case, seed).replaced(
        swa_lens=int32(0, 0, 0, 0),
        compressed_lens=torch.zeros(case.tokens, dtype=torch.int32),
        sink_logits=torch.full((case.heads,), sink),
    )
    o, lse = backend.run(inputs)
    assert (o == 0).all()
    assert (lse == -math.inf).all()


@both_sinks
@pytest.mark.parametrize("sink", [math.inf, -math.inf])
def test_infinite_sink(backend: Backend, sink_mode: str, sink: float, seed: int) -> None:
    """swa_gate: one branch alone. softmax: nothing, or no sink at all."""
    case = replace(BASE, sink_mode=sink_mode, requests=((0, 4),))
    inputs = make_inputs(case, seed)
    infinite = inputs.replaced(sink_logits=torch.full((case.heads,), sink))
    o, _ = check(backend, infinite)
    no_keys = torch.zeros(case.tokens, dtype=torch.int32)
    if sink_mode == "softmax" and sink > 0:
        assert (o == 0).all()
        return
    if sink_mode == "swa_gate" and sink > 0:
        alone = inputs.replaced(compressed_lens=no_keys)
    elif sink_mode == "swa_gate":
        alone = inputs.replaced(swa_lens=int32(0, 0, 0, 0))
    else:
        alone = inputs.replaced(sink_logits=torch.full((case.heads,), -1e30))
    torch.testing.assert_close(o, backend.run(alone)[0], atol=1e-2, rtol=1e-2)


@both_sinks
@both_windows
def test_nothing_overflows(backend: Backend, sink_mode: str, is_causal: bool, seed: int) -> None:
    """Scores of thousands and sinks of any size: exp() of a raw lse or sink would be inf."""
    case = replace(BASE, sink_mode=sink_mode, is_causal=is_causal)
    inputs = make_inputs(case, seed)
    sinks = torch.tensor([1e38, -1e38, 2e4, -2e4, 150.0, -150.0, 0.0, 90.0])
    check(backend, inputs.replaced(sink_logits=sinks))
    q = inputs.q * 2000
    o, lse = backend.run(inputs.replaced(q=q, sink_logits=sinks))
    assert o.isfinite().all()
    assert not lse.isnan().any()


@both_sinks
@both_windows
def test_lengths_are_clamped(backend: Backend, sink_mode: str, is_causal: bool, seed: int) -> None:
    case = replace(BASE, sink_mode=sink_mode, is_causal=is_causal, requests=((0, 2), (1, 3)))
    inputs = make_inputs(case, seed)
    outside = inputs.replaced(
        swa_lens=int32(-3, 10**9, 7, 7), compressed_lens=int32(-1, 201, 10**9, -(2**31), 200)
    )
    clean = inputs.swa_kv.nan_to_num(0.5, 0.5, 0.5)
    inside = inputs.replaced(
        swa_lens=int32(0, 200, 7, 7), compressed_lens=int32(0, 200, 200, 0, 200), swa_kv=clean
    )
    o, lse = check(backend, outside.replaced(swa_kv=clean))
    o_inside, lse_inside = backend.run(inside)
    assert torch.equal(o, o_inside)
    assert torch.equal(lse, lse_inside)


@both_sinks
def test_padding_tokens(backend: Backend, sink_mode: str, seed: int) -> None:
    """Padding gives 0 even when everything about it is NaN, and changes nothing for the others."""
    case = replace(BASE, sink_mode=sink_mode, requests=((-1, 2), (3, 2), (-1, 3)))
    inputs = make_inputs(case, seed)
    q, compressed_kv = (x.clone() for x in inputs.tensors[:2])
    padding = inputs.request_ids < 0
    q[padding], compressed_kv[padding] = torch.nan, torch.nan
    o, lse = check(backend, inputs.replaced(q=q, compressed_kv=compressed_kv))
    assert (o[padding] == 0).all()
    assert (lse[padding] == -math.inf).all()


def test_only_padding_and_no_batch(backend: Backend, seed: int) -> None:
    inputs = make_inputs(replace(BASE, requests=((-1, 3),), batch=0), seed)
    o, _ = backend.run(inputs)
    assert (o == 0).all()


def test_no_tokens(backend: Backend, seed: int) -> None:
    o, lse = backend.run(make_inputs(replace(BASE, requests=()), seed))
    assert o.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


@pytest.mark.parametrize("rows", [1, 5, 127, 128, 129, 200])
def test_causal_window_position(backend: Backend, rows: int, seed: int) -> None:
    """Token j of c sees exactly the rows p - window < i <= p with p = length - c + j."""
    count, window = min(4, rows), 3
    case = Case(
        top_k=0,
        window_rows=rows,
        sliding_window=window,
        requests=((0, count),),
        batch=1,
        is_causal=True,
        ragged=False,
        sink_mode="swa_gate",
    )
    inputs = make_inputs(case, seed)
    # Equal scores: the output is the mean of the visible rows, which then spell out their indices.
    index = torch.arange(rows, dtype=torch.float32)
    table = torch.zeros(1, rows, case.head_dim)
    table[0, :, 0], table[0, :, 1] = index % 16, index // 16
    zero_q = torch.zeros_like(inputs.q)
    o, lse = backend.run(inputs.replaced(q=zero_q, swa_kv=table.bfloat16()))
    for j in range(count):
        position = rows - count + j
        seen = [i for i in range(rows) if position - window < i <= position]
        torch.testing.assert_close(
            o[j, 0, :2].float(), table[0, seen, :2].mean(0), atol=0.05, rtol=0.01
        )
        assert lse[j, 0].item() == pytest.approx(math.log(len(seen)), abs=1e-5)


def test_more_tokens_than_rows(backend: Backend, seed: int) -> None:
    """Causal tokens that would sit before row 0 see nothing of the window."""
    case = Case(top_k=0, window_rows=4, requests=((0, 6),), batch=1, is_causal=True, ragged=False)
    o, lse = check(backend, make_inputs(case, seed).replaced(swa_lens=int32(4)))
    assert (o[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()


@both_sinks
def test_ring_order_does_not_matter(backend: Backend, sink_mode: str, seed: int) -> None:
    case = replace(BASE, sink_mode=sink_mode)
    inputs = make_inputs(case, seed).replaced(swa_lens=int32(200, 200, 200, 200))
    inputs = inputs.replaced(swa_kv=torch.randn(4, 200, 64).bfloat16())
    turned = inputs.replaced(swa_kv=inputs.swa_kv.roll(77, 1).contiguous())
    for first, second in zip(backend.run(inputs), backend.run(turned)):
        torch.testing.assert_close(first, second, atol=1e-2, rtol=1e-2)


def test_interleaved_requests_in_a_ring(backend: Backend, seed: int) -> None:
    """Without a causal mask tokens may name requests in any order, repeatedly."""
    inputs = make_inputs(replace(BASE, requests=((2, 1), (0, 1), (2, 1), (-1, 1), (0, 1))), seed)
    check(backend, inputs)


def test_float16_stays_out(backend: Backend, seed: int) -> None:
    """A dtype the kernels do not take is refused by name, not converted."""
    inputs = make_inputs(BASE, seed)
    with pytest.raises(TypeError, match=r"q: got torch\.float16"):
        backend.run(inputs.replaced(q=inputs.q.half()))
