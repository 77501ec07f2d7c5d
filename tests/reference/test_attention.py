"""The attention contract against loops over single keys in float64, and every edge by itself."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.reference.attention import (
    SINK_MODES,
    attention_with_lse,
    merge,
    sparse_fmha_with_swa,
)

pytestmark = pytest.mark.stage("reference")

INF = math.inf


def _inputs(tokens=7, heads=3, dim=16, top_k=5, batch=3, width=6) -> dict:
    return dict(
        q=torch.randn(tokens, heads, dim),
        compressed_kv=torch.randn(tokens, top_k, dim),
        swa_kv=torch.randn(batch, width, dim),
        swa_lens=torch.randint(0, width + 1, (batch,), dtype=torch.int32),
        sink_logits=torch.randn(heads),
        request_ids=torch.randint(-1, batch, (tokens,)).sort().values.int(),
    )


def _brute(x: dict, mode: str, c_lens: list[int], seen: list[list[int]], scale: float):
    """One key at a time, from the definition, in float64."""
    tokens, heads, dim = x["q"].shape
    o = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -INF, dtype=torch.float64)
    for t in range(tokens):
        request = int(x["request_ids"][t])
        if request < 0:
            continue
        for h in range(heads):
            sums = {}
            q = x["q"][t, h].double()
            for branch, rows in (
                ("c", [x["compressed_kv"][t, j] for j in range(c_lens[t])]),
                ("w", [x["swa_kv"][request, i] for i in seen[t]]),
            ):
                weights = [math.exp(float(q @ k.double()) * scale) for k in rows]
                total = torch.zeros(dim, dtype=torch.float64)
                for weight, k in zip(weights, rows):
                    total += weight * k.double()
                sums[branch] = (sum(weights), total)
            (n_c, v_c), (n_w, v_w) = sums["c"], sums["w"]
            sink = math.exp(float(x["sink_logits"][h]))
            gate = sink if mode == "swa_gate" and n_c > 0 and n_w > 0 else 1.0
            norm = n_c + gate * n_w
            if norm == 0:
                continue
            lse[t, h] = math.log(norm)
            o[t, h] = (v_c + gate * v_w) / (norm + (sink if mode == "softmax" else 0.0))
    return o.float(), lse.float()


def _window_rows(x: dict, window: int, causal: bool) -> list[list[int]]:
    width, ids = x["swa_kv"].shape[1], x["request_ids"].tolist()
    seen = []
    for t, request in enumerate(ids):
        if request < 0:
            seen.append([])
            continue
        length = min(max(int(x["swa_lens"][request]), 0), width)
        if not causal:
            seen.append(list(range(length)))
            continue
        position = length - ids.count(request) + ids[:t].count(request)
        seen.append([i for i in range(width) if position - window < i <= position])
    return seen


@pytest.mark.parametrize("causal", [False, True], ids=["any order", "causal"])
@pytest.mark.parametrize("mode", SINK_MODES)
def test_equals_a_loop_over_single_keys(mode: str, causal: bool, seed: int) -> None:
    for scale in (None, 0.7):
        x = _inputs()
        x["swa_lens"] = torch.tensor([6, 0, 4], dtype=torch.int32)
        lens = torch.tensor([0, 5, 2, 99, -3, 1, 4], dtype=torch.int32)
        o, lse = sparse_fmha_with_swa(
            **x,
            sink_mode=mode,
            compressed_lens=lens,
            is_causal=causal,
            sliding_window=4,
            softmax_scale=scale,
        )
        expected = _brute(
            x,
            mode,
            lens.clamp(0, 5).tolist(),
            _window_rows(x, 4, causal),
            scale or 16**-0.5,
        )
        torch.testing.assert_close(o, expected[0], atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(lse, expected[1], atol=2e-6, rtol=2e-6)


def test_causal_tokens_start_after_the_rows_before_them() -> None:
    x = _inputs(tokens=3, heads=1, dim=8, top_k=0, batch=1, width=5)
    x["request_ids"] = torch.zeros(3, dtype=torch.int32)
    x["swa_lens"] = torch.tensor([5], dtype=torch.int32)
    x["q"].zero_()  # every visible key weighs the same
    x["sink_logits"].fill_(-INF)
    o, lse = sparse_fmha_with_swa(**x, sink_mode="softmax", is_causal=True, sliding_window=3)
    for token, rows in enumerate(([0, 1, 2], [1, 2, 3], [2, 3, 4])):
        torch.testing.assert_close(o[token, 0], x["swa_kv"][0, rows].mean(0))
        assert lse[token, 0] == pytest.approx(math.log(3))


@pytest.mark.parametrize("mode", SINK_MODES)
def test_empty_branches_leave_the_other_alone(mode: str, seed: int) -> None:
    x = _inputs(tokens=4)
    x["request_ids"] = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    x["swa_lens"] = torch.tensor([6, 0, 6], dtype=torch.int32)
    lens = torch.tensor([5, 0, 5, 0], dtype=torch.int32)
    o, lse = sparse_fmha_with_swa(**x, sink_mode=mode, compressed_lens=lens)
    no_sink = {**x, "sink_logits": torch.full((3,), -INF if mode == "softmax" else 0.0)}
    plain, plain_lse = sparse_fmha_with_swa(**no_sink, sink_mode=mode, compressed_lens=lens)
    keep = torch.sigmoid(lse - x["sink_logits"])[..., None] if mode == "softmax" else 1.0
    torch.testing.assert_close(o[1:3], (plain * keep)[1:3])
    torch.testing.assert_close(lse[1:3], plain_lse[1:3])
    assert torch.equal(o[3], torch.zeros_like(o[3])) and (lse[3] == -INF).all()


@pytest.mark.parametrize("mode", SINK_MODES)
def test_infinite_and_huge_sinks(mode: str, seed: int) -> None:
    x = _inputs(tokens=2)
    x["request_ids"].zero_()
    x["swa_lens"].fill_(6)
    empty = torch.zeros(2, dtype=torch.int32)
    o_w, lse_w = sparse_fmha_with_swa(
        **{**x, "sink_logits": torch.full((3,), -INF)}, sink_mode="softmax", compressed_lens=empty
    )
    nothing = {**x, "swa_lens": torch.zeros(3, dtype=torch.int32)}
    o_c, _ = sparse_fmha_with_swa(
        **{**nothing, "sink_logits": torch.full((3,), -INF)}, sink_mode="softmax"
    )
    for sink in (INF, 1e30, -INF, -1e30):
        x["sink_logits"] = torch.full((3,), sink)
        o, lse = sparse_fmha_with_swa(**x, sink_mode=mode)
        assert not o.isnan().any() and not lse.isnan().any()
        if mode == "softmax" and sink > 0:
            assert torch.equal(o, torch.zeros_like(o))
        if mode == "swa_gate":
            torch.testing.assert_close(o, o_w if sink > 0 else o_c)
            only_window, lse_only = sparse_fmha_with_swa(**x, sink_mode=mode, compressed_lens=empty)
            torch.testing.assert_close(only_window, o_w)
            torch.testing.assert_close(lse_only, lse_w)
        if mode == "softmax":
            assert lse.isfinite().all(), "the sink is not part of the softmax mode's lse"


@pytest.mark.parametrize("mode", SINK_MODES)
def test_large_logits_do_not_overflow(mode: str, seed: int) -> None:
    x = _inputs()
    x["q"] *= 3000
    o, lse = sparse_fmha_with_swa(**x, sink_mode=mode)
    active = x["request_ids"] >= 0
    assert o.isfinite().all() and lse[active].isfinite().all()
    assert lse[active].abs().max() > 1000


def test_masked_rows_may_hold_nan(seed: int) -> None:
    x = _inputs()
    x["request_ids"] = torch.tensor([-1, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
    x["swa_lens"] = torch.tensor([3, 6, 0], dtype=torch.int32)
    lens = torch.tensor([5, 0, 1, 2, 3, 4, 5], dtype=torch.int32)
    for causal in (False, True):
        args = dict(compressed_lens=lens, is_causal=causal, sink_mode="softmax", sliding_window=2)
        clean = sparse_fmha_with_swa(**x, **args)
        dirty = {name: tensor.clone() for name, tensor in x.items()}
        dirty["q"][0] = math.nan
        for token in range(7):
            dirty["compressed_kv"][token, lens[token] :] = math.nan
        dirty["compressed_kv"][0] = INF
        dirty["swa_kv"][0, 3:], dirty["swa_kv"][2] = math.nan, INF
        for a, b in zip(clean, sparse_fmha_with_swa(**dirty, **args)):
            assert torch.equal(a, b)


def test_a_ring_may_hold_its_rows_in_any_order(seed: int) -> None:
    x = _inputs()
    x["swa_lens"].fill_(6)
    o, lse = sparse_fmha_with_swa(**x, sink_mode="softmax")
    x["swa_kv"] = x["swa_kv"][:, torch.randperm(6)]
    again, lse_again = sparse_fmha_with_swa(**x, sink_mode="softmax")
    torch.testing.assert_close(o, again)
    torch.testing.assert_close(lse, lse_again)


def test_softmax_mode_equals_one_joint_softmax_with_a_sink_column(seed: int) -> None:
    x = _inputs()
    x["swa_lens"].fill_(6)
    x["request_ids"].clamp_(min=0)
    keys = torch.cat((x["compressed_kv"], x["swa_kv"][x["request_ids"].long()]), 1)
    logits = torch.einsum("thd,tkd->thk", x["q"], keys) / 4
    joint = torch.softmax(
        torch.cat((logits, x["sink_logits"][None, :, None].expand(7, 3, 1)), -1), -1
    )
    o, lse = sparse_fmha_with_swa(**x, sink_mode="softmax")
    torch.testing.assert_close(o, torch.einsum("thk,tkd->thd", joint[..., :-1], keys))
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_no_tokens_and_unknown_mode() -> None:
    x = _inputs(tokens=0)
    o, lse = sparse_fmha_with_swa(**x, sink_mode="swa_gate")
    assert o.shape == (0, 3, 16) and lse.shape == (0, 3)
    with pytest.raises(ValueError, match=r"sink_mode.*'none'"):
        sparse_fmha_with_swa(**x, sink_mode="none")


def test_gradients_are_finite_with_empty_branches(seed: int) -> None:
    q = torch.randn(4, 2, 8, requires_grad=True)
    kv = torch.randn(5, 8, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    visible = torch.arange(5) < torch.tensor([0, 5, 2, 0])[:, None]
    o_c, lse_c = attention_with_lse(q, kv, visible, 0.5)
    o_w, lse_w = attention_with_lse(q, kv, visible.flip(0) & (torch.arange(4) > 0)[:, None], 0.5)
    for mode in SINK_MODES:
        o, lse = merge(o_c, lse_c, o_w, lse_w, sink, mode)
        grads = torch.autograd.grad(
            o.square().sum() + lse[lse.isfinite()].sum(), (q, kv, sink), retain_graph=True
        )
        assert all(grad.isfinite().all() for grad in grads)
        assert grads[2].abs().min() > 0
