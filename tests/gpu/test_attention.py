"""`sparse_fmha_with_swa` on a GPU against the FP32 oracle."""

from __future__ import annotations

import pytest
import torch

from dsv4.testing.attention import Case, Inputs, make_inputs
from dsv4.testing.attention_op import check_op, run_op
from dsv4.testing.magnitudes import COLUMNS, check_columns, check_rows

pytestmark = [pytest.mark.gpu, pytest.mark.stage("H")]

INF = float("inf")


def random_inputs(*sizes: int, seed: int, **options) -> Inputs:
    """Inputs of `Case.random` on the GPU."""
    return make_inputs(Case.random(*sizes, seed, **options), seed, device="cuda")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits"),
    [(8, 64, 1), (16, 128, 1), (64, 512, 1), (128, 512, 1), (128, 512, 3), (8, 512, None)],
)
def test_ragged_lengths_match_the_oracle(seed, heads, head_dim, num_splits, sink_mode) -> None:
    sizes = (7, heads, head_dim, 300, 200, 3)
    inputs = random_inputs(*sizes, seed=seed, ragged=True, padding=1, sink_mode=sink_mode)
    check_op(inputs, num_splits)


@pytest.mark.parametrize("tokens", [1, 3, 5, 16, 40, 70])
@pytest.mark.parametrize("heads", [32, 64, 128])
def test_launches_of_every_size_match_the_oracle(seed, heads, tokens) -> None:
    """Which kernel serves them, and in how many splits, depends on the size."""
    check_op(random_inputs(tokens, heads, 512, 512, 128, 3, seed=seed, ragged=True))


@pytest.mark.slow
@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("heads", [8, 16, 64, 72, 128])
def test_grid(seed, heads, head_dim, is_causal, sink_mode) -> None:
    for tokens, top_k, width, num_splits in (
        (1, 1024, 128, None),
        (70, 250, 150, 1),
        (9, 64, 9, 5),
    ):
        inputs = random_inputs(
            *(tokens, heads, head_dim, top_k, width, 3),
            seed=seed,
            ragged=True,
            growing=True,
            sink_mode=sink_mode,
            is_causal=is_causal,
            sliding_window=100,
        )
        check_op(inputs, num_splits)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_row_maxima_that_grow_with_every_block(seed, num_splits) -> None:
    inputs = random_inputs(4, 128, 512, 1024, 128, 2, seed=seed, sink_mode="swa_gate")
    check_op(inputs.with_larger_later_keys(), num_splits)
    inputs = random_inputs(4, 128, 512, 1024, 128, 2, seed=seed, sink_mode="swa_gate", growing=True)
    check_op(inputs, num_splits)


@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize("sink", [INF, -INF, 1e4, -1e4, 50.0])
def test_extreme_sinks(seed, sink, sink_mode) -> None:
    inputs = random_inputs(4, 64, 512, 130, 70, 2, seed=seed, ragged=True, sink_mode=sink_mode)
    inputs.sink_logits.fill_(sink)
    for num_splits in (1, 3):
        check_op(inputs, num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_thousands_under_huge_sinks(seed, sign, num_splits) -> None:
    """A sink that swallows every score does what an infinite one does, to the bit."""
    inputs = random_inputs(4, 64, 512, 130, 70, 2, seed=seed, sink_mode="swa_gate")
    inputs = inputs.replaced(q=inputs.q * 2000)
    results = []
    for sink in (INF, 1e38):
        inputs.sink_logits.fill_(sign * sink)
        results.append(run_op(inputs, num_splits)[0])
    assert results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("magnitude", COLUMNS)
def test_partial_rows_of_any_magnitude(seed, magnitude, heads) -> None:
    """Splits may pass through the workspace in fewer bits than the accumulators have."""
    inputs = random_inputs(3, heads, 512, 1024, 128, 2, seed=seed, ragged=True)
    check_columns(inputs, magnitude, seed, lambda changed: run_op(changed, num_splits=4))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_partial_rows_of_different_magnitudes(seed, heads) -> None:
    """Every split is as large as its keys; the sum is as right as the largest."""
    inputs = random_inputs(3, heads, 512, 1024, 128, 2, seed=seed)
    check_rows(inputs, seed, lambda changed: run_op(changed, num_splits=4))


@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize(("top_k", "width"), [(0, 128), (192, 0), (0, 0)])
def test_a_branch_without_rows(seed, top_k, width, sink_mode) -> None:
    check_op(random_inputs(3, 64, 512, top_k, width, 2, seed=seed, sink_mode=sink_mode))


def test_causal_prefill_of_several_requests(seed) -> None:
    sizes = (130, 16, 512, 64, 160, 3)
    check_op(random_inputs(*sizes, seed=seed, padding=5, is_causal=True, sliding_window=128))


def test_a_chunk_longer_than_its_window_and_lengths(seed) -> None:
    """Positions before the first row see nothing."""
    inputs = random_inputs(40, 8, 128, 64, 16, 1, seed=seed, is_causal=True, sliding_window=4)
    inputs.swa_lens.fill_(10)
    check_op(inputs)


def test_lengths_and_requests_out_of_range_are_clamped(seed) -> None:
    inputs = random_inputs(6, 64, 512, 100, 70, 3, seed=seed, sink_mode="swa_gate")
    inputs = inputs.replaced(
        compressed_lens=int32(-5, 0, 50, 100, 101, 2**31 - 1),
        swa_lens=int32(-1, 71, 2**31 - 1),
    )
    check_op(inputs)


def test_lengths_that_say_everything_change_nothing(seed) -> None:
    inputs = random_inputs(5, 64, 512, 200, 128, 2, seed=seed)
    said = inputs.replaced(compressed_lens=int32(*[200] * 5))
    for got, expected in zip(run_op(said), run_op(inputs), strict=True):
        assert torch.equal(got, expected)
