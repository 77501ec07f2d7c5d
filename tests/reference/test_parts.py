"""The small parts of the reference, each against a loop or a value worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from dsv4.reference import indexer, mhc, moe, rope
from dsv4.reference.compressor import compress, visible_entries
from dsv4.reference.hadamard import hadamard, hadamard_matrix
from dsv4.reference.router import route

pytestmark = pytest.mark.stage("reference")

YARN = SimpleNamespace(
    factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0
)


def test_yarn_keeps_fast_channels_and_divides_slow_ones() -> None:
    plain, scaled = rope.frequencies(64, 160000.0), rope.frequencies(64, 160000.0, YARN)
    ratio = (scaled / plain).double()
    expected = torch.ones(32, dtype=torch.float64)
    for i in range(32):
        ramp = min(max((i - 15) / 10, 0), 1)
        expected[i] = 1 - ramp + ramp / 16
    torch.testing.assert_close(ratio, expected, atol=1e-6, rtol=0)
    assert plain[1] == pytest.approx(160000 ** (-2 / 64))


def test_rope_turns_interleaved_pairs_of_the_last_channels(seed: int) -> None:
    x = torch.randn(3, 2, 10)
    freqs = rope.frequencies(4, 100.0)
    positions = torch.tensor([0, 3, 1000])
    y = rope.rotate(x, positions[:, None], freqs)
    assert torch.equal(y[..., :6], x[..., :6])
    for t, position in enumerate(positions.tolist()):
        for pair in range(2):
            a = position * float(freqs[pair])
            first, second = x[t, 1, 6 + 2 * pair].item(), x[t, 1, 7 + 2 * pair].item()
            turned = complex(first, second) * complex(math.cos(a), math.sin(a))
            assert y[t, 1, 6 + 2 * pair].item() == pytest.approx(turned.real, abs=1e-5)
            assert y[t, 1, 7 + 2 * pair].item() == pytest.approx(turned.imag, abs=1e-5)
    torch.testing.assert_close(rope.rotate(y, positions[:, None], freqs, inverse=True), x)


def test_rope_scores_depend_on_the_distance_alone(seed: int) -> None:
    q, k = torch.randn(8), torch.randn(8)
    freqs = rope.frequencies(8, 10000.0)
    scores = [
        rope.rotate(q, torch.tensor(p + 7), freqs) @ rope.rotate(k, torch.tensor(p), freqs)
        for p in (0, 5, 120)
    ]
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, atol=1e-4, rtol=1e-4)


def test_hadamard_is_orthogonal_in_sylvester_order(seed: int) -> None:
    assert hadamard_matrix(4).tolist() == [
        [1, 1, 1, 1],
        [1, -1, 1, -1],
        [1, 1, -1, -1],
        [1, -1, -1, 1],
    ]
    for row, column in ((5, 9), (127, 127), (64, 3)):
        sign = -1 if (row & column).bit_count() % 2 else 1
        assert hadamard_matrix(128)[row, column] == sign
    x = torch.randn(5, 128)
    torch.testing.assert_close(hadamard(hadamard(x)), x, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="power of two, got 12"):
        hadamard_matrix(12)


@pytest.mark.parametrize("tokens", [0, 3, 4, 11, 12])
@pytest.mark.parametrize("overlap", [True, False], ids=["CSA", "HCA"])
def test_compressor_equals_a_loop_over_channels(overlap: bool, tokens: int, seed: int) -> None:
    rate, dim, hidden = 4, 3, 5
    columns = 2 * dim if overlap else dim
    x = torch.randn(tokens, hidden)
    wkv, wgate, ape = (
        torch.randn(columns, hidden),
        torch.randn(columns, hidden),
        torch.randn(rate, columns),
    )
    out = compress(x, wkv, wgate, ape, overlap=overlap)
    assert out.shape == (tokens // rate, dim)
    for n in range(tokens // rate):
        for channel in range(dim):
            terms = []
            for t in range(rate * (n - 1) if overlap else rate * n, rate * (n + 1)):
                if t < 0:
                    continue
                column = channel + (dim if overlap and t >= rate * n else 0)
                gate = float(wgate[column] @ x[t] + ape[t % rate, column])
                terms.append((math.exp(gate), float(wkv[column] @ x[t])))
            expected = sum(w * v for w, v in terms) / sum(w for w, _ in terms)
            assert out[n, channel].item() == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_a_block_is_visible_from_its_last_token_on() -> None:
    visible = visible_entries(torch.arange(9), 2, 4)
    assert visible.sum(-1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_index_scores_equal_a_loop(seed: int) -> None:
    q, k, w = torch.randn(4, 3, 8), torch.randn(5, 8), torch.randn(4, 3)
    scores = indexer.index_scores(q, k, w)
    for t in range(4):
        for n in range(5):
            expected = sum(float(w[t, h]) * max(float(q[t, h] @ k[n]), 0.0) for h in range(3))
            assert scores[t, n].item() == pytest.approx(expected, abs=1e-5)


def test_top_k_prefers_the_lower_index_among_equals() -> None:
    scores = torch.tensor([[0.0, 2.0, -0.0, 2.0, -torch.inf, 9.0]])
    visible = torch.tensor([[True, True, True, True, True, False]])
    assert indexer.select_top_k(scores, visible, 3).tolist() == [[1, 3, 0]]
    assert indexer.select_top_k(scores, visible, 4).tolist() == [[1, 3, 0, 2]]
    assert indexer.select_top_k(scores, visible, 8).tolist() == [[1, 3, 0, 2, 4, -1, -1, -1]]
    assert indexer.select_top_k(scores, ~visible, 2).tolist() == [[5, -1]]
    mask = indexer.selection_mask(torch.tensor([[1, -1, 3]]), 6)
    assert mask.tolist() == [[False, True, False, True, False, False]]


def test_top_k_equals_a_python_sort(seed: int) -> None:
    scores = torch.randint(-2, 3, (20, 33)).float()
    visible = torch.rand(20, 33) > 0.4
    chosen = indexer.select_top_k(scores, visible, 9)
    for row in range(20):
        order = sorted(range(33), key=lambda n: (-scores[row, n].item(), n))
        order = [n for n in order if visible[row, n]][:9]
        assert chosen[row].tolist() == order + [-1] * (9 - len(order))


def test_sinkhorn_gives_a_doubly_stochastic_matrix_columns_last(seed: int) -> None:
    a = mhc.sinkhorn(torch.rand(6, 4, 4), 20, 1e-6)
    torch.testing.assert_close(a.sum(-2), torch.ones(6, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(a.sum(-1), torch.ones(6, 4), atol=1e-4, rtol=0)
    scores = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    one = mhc.sinkhorn(scores, 1, 0.0)
    e = math.exp(2)
    top = e / (1 + e)
    assert one[0, 0].item() == pytest.approx(top / (top + 0.5), abs=1e-6)
    assert one[1, 0].item() == pytest.approx(0.5 / (top + 0.5), abs=1e-6)


def test_mixing_splits_pre_post_and_source_major_comb(seed: int) -> None:
    n, dim = 2, 3
    streams, fn = torch.randn(n, dim), torch.randn(8, n * dim)
    base, scale = torch.randn(8), torch.randn(3)
    mix = mhc.mixing(streams, fn, base, scale, iterations=1, eps=1e-6, norm_eps=1e-6)
    flat = streams.flatten()
    m = fn @ flat / math.sqrt(float(flat.square().mean()) + 1e-6)
    torch.testing.assert_close(mix.pre, torch.sigmoid(m[:2] * scale[0] + base[:2]) + 1e-6)
    torch.testing.assert_close(mix.post, 2 * torch.sigmoid(m[2:4] * scale[1] + base[2:4]))
    rows = (m[4:] * scale[2] + base[4:]).view(2, 2).softmax(1) + 1e-6
    torch.testing.assert_close(mix.comb, rows / (rows.sum(0) + 1e-6))
    y = torch.randn(dim)
    mixed = mhc.expand(y, streams, mix.post, mix.comb)
    for k in range(n):
        expected = mix.post[k] * y + sum(mix.comb[j, k] * streams[j] for j in range(n))
        torch.testing.assert_close(mixed[k], expected)


def test_router_bias_chooses_but_does_not_weigh(seed: int) -> None:
    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    scores = (1 + (x.double() @ weight.double().T).exp()).log().sqrt().float()
    bias = torch.tensor([0.0, 100.0, 0.0, 0.0, 50.0])
    ids, weights = route(x, weight, top_k=2, scaling=1.5, bias=bias)
    assert (ids == torch.tensor([1, 4])).all()
    expected = scores[:, [1, 4]] / scores[:, [1, 4]].sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(weights, expected)
    ids, _ = route(torch.zeros(1, 8), weight, top_k=3, scaling=1.0)
    assert ids.tolist() == [[0, 1, 2]], "equal scores: the lower id"


def test_hash_router_reads_the_table_and_still_weighs_by_score(seed: int) -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    table = torch.tensor([[0, 1], [4, 2], [3, 0]])
    args = dict(top_k=2, scaling=2.5, table=table)
    ids, weights = route(x, weight, input_ids=torch.tensor([2, 1, 1]), **args)
    assert ids.tolist() == [[3, 0], [4, 2], [4, 2]]
    scores = (1 + (x.double() @ weight.double().T).exp()).log().sqrt().float()
    assert weights[0, 0].item() == pytest.approx(
        2.5 * float(scores[0, 3] / (scores[0, 3] + scores[0, 0])), rel=1e-5
    )
    with pytest.raises(ValueError, match="input_ids"):
        route(x, weight, **args)


def test_gate_is_clamped_above_only_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([5.0, -50.0, 1.0]), torch.tensor([-9.0, 9.0, 0.5])
    out = moe.clamped_swiglu(gate, up, 2.0)
    silu = lambda v: v / (1 + math.exp(-v))
    assert out.tolist() == pytest.approx([silu(2) * -2, silu(-50) * 2, silu(1) * 0.5], abs=1e-6)


def test_experts_equal_a_loop_over_the_chosen_ones(seed: int) -> None:
    x = torch.randn(4, 6)
    w1, w3, w2 = torch.randn(5, 3, 6), torch.randn(5, 3, 6), torch.randn(5, 6, 3)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(4)])
    weights = torch.rand(4, 2)
    dense = moe.dense_weights(ids, weights, 5)
    out = moe.routed_experts(x, w1, w2, w3, dense, 1.0)
    for t in range(4):
        expected = torch.zeros(6)
        for e, weight in zip(ids[t].tolist(), weights[t]):
            hidden = moe.clamped_swiglu(w1[e] @ x[t], w3[e] @ x[t], 1.0)
            expected += weight * (w2[e] @ hidden)
        torch.testing.assert_close(out[t], expected, atol=1e-4, rtol=1e-4)
    one = moe.dense_weights(torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1), 5)
    torch.testing.assert_close(
        moe.routed_experts(x, w1, w2, w3, one, 1.0), moe.shared_expert(x, w1[0], w2[0], w3[0], 1.0)
    )
