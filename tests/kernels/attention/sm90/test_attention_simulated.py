"""The Hopper kernels, simulated: what depends on how many CTAs run, and how splits are combined.

The schedules complete asynchronous work at once, as late as possible, or at random; the race
checker watches every one of them. Clauses of the contract are in tests/kernels/attention.
"""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.attention.split_kv import counter_words
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_kernel import (
    AttentionKernels,
    AttentionOutcome,
    assert_right,
    config_of,
    new_workspace,
)
from dsv4.testing.harness import SCHEDULES, Simulator, simulator
from dsv4.testing.magnitudes import check_columns, check_rows

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

WINDOW = 20
# Query heads of each of the two kernels.
SWAP_AB, HEADS_M = 24, 40
# Fewer CTAs than work items: each goes through several.
CTAS = 3
KERNELS = AttentionKernels(simulator("sm_90a"), CTAS)


def slow(*values: object) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def run(
    inputs: Inputs,
    splits: int,
    schedule: str,
    *,
    races: bool = True,
    fixed: bool = False,
    ctas: int = CTAS,
    workspace: torch.Tensor | None = None,
) -> AttentionOutcome:
    """Launch the kernel; `fixed`: compiled for a fixed number of splits."""
    kernel = KERNELS.compile(config_of(inputs, splits if fixed else None))
    return KERNELS.run(
        kernel, inputs, splits, schedule, races=races, ctas=ctas, workspace=workspace
    )


def check(inputs: Inputs, splits: int, schedule: str, **options) -> AttentionOutcome:
    """Launch the kernel and compare it with the oracle."""
    outcome = run(inputs, splits, schedule, **options)
    assert_right(outcome, inputs)
    return outcome


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(splits: int):
    """o and lse of the kernel, as a function of the inputs."""

    def compute(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        outcome = run(inputs, splits, "eager", races=False)
        return outcome.o, outcome.lse

    return compute


RAGGED = (
    (24, 512, 2, True, "swa_gate"),
    (HEADS_M, 64, 3, False, "softmax"),
    (16, 128, 2, True, "swa_gate"),
    (8, 64, 1, True, "softmax"),
    (HEADS_M, 64, 1, True, "swa_gate"),
    (8, 512, 1, False, "softmax"),
    (72, 64, 3, False, "swa_gate"),
    (72, 512, 2, True, "swa_gate"),
)
# The contract has both kernels in every schedule, of 64 channels.
QUICK = [*((*RAGGED[0], schedule) for schedule in SCHEDULES)]
QUICK += [(*case, "random") for case in RAGGED[1:3]]


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits", "is_causal", "sink_mode", "schedule"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((*case, schedule) for case in RAGGED for schedule in SCHEDULES)
    ],
)
def test_ragged_lengths(seed, heads, head_dim, num_splits, is_causal, sink_mode, schedule) -> None:
    case = Case.random(
        *(4, heads, head_dim, 300, 100, 2, seed),
        ragged=True,
        padding=1,
        is_causal=is_causal,
        sliding_window=WINDOW,
        sink_mode=sink_mode,
    )
    check(make_inputs(case, seed), num_splits, schedule)


@pytest.mark.parametrize("schedule", [*slow("lazy"), "random"])
@pytest.mark.parametrize(
    ("tokens", "heads", "num_splits", "is_causal", "sink_mode"),
    [
        (1, HEADS_M, 1, False, "softmax"),
        pytest.param(2, HEADS_M, 1, False, "softmax", marks=pytest.mark.slow),
        pytest.param(1, 72, 1, True, "swa_gate", marks=pytest.mark.slow),
        pytest.param(1, 48, 3, False, "swa_gate", marks=pytest.mark.slow),
    ],
)
def test_ctas_that_slice_columns(
    seed, tokens, heads, num_splits, is_causal, sink_mode, schedule
) -> None:
    """Two CTAs halve the columns of a tile where there are enough for all; no bit depends on it."""
    case = Case.random(
        *(tokens, heads, 512, 300, 100, 2, seed),
        ragged=True,
        is_causal=is_causal,
        sliding_window=WINDOW,
        sink_mode=sink_mode,
    )
    inputs = make_inputs(case, seed)
    sliced = check(inputs, num_splits, schedule, ctas=6)
    alone = run(inputs, num_splits, schedule, ctas=3)
    sliced.assert_same_bits(alone, "columns sliced against whole")


@pytest.mark.parametrize("schedule", [*slow("lazy"), "random"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits", "num_ctas", "sink_mode"),
    [
        (64, 64, 1, 12, "softmax"),
        (64, 64, 3, 36, "softmax"),
        (64, 64, 3, 11, "softmax"),
        *(
            pytest.param(*sizes, "swa_gate", marks=pytest.mark.slow)
            for sizes in (
                (64, 64, 1, 12),
                (64, 64, 3, 36),
                (64, 64, 3, 11),
                (32, 128, 1, 6),
                (32, 128, 3, 18),
                (32, 128, 3, 5),
                (64, 512, 3, 36),
                (64, 512, 3, 35),
                (128, 64, 1, 24),
                (128, 64, 7, 168),
            )
        ),
    ],
)
def test_ctas_that_share_heads(
    seed, heads, head_dim, num_splits, num_ctas, sink_mode, schedule
) -> None:
    """Tiles of 16 heads where there is a CTA for each, and the other kernel's where not."""
    case = Case.random(
        *(3, heads, head_dim, 300, 100, 2, seed),
        ragged=True,
        padding=1,
        is_causal=sink_mode == "swa_gate",
        sliding_window=WINDOW,
        sink_mode=sink_mode,
    )
    check(make_inputs(case, seed), num_splits, schedule, ctas=num_ctas)


@pytest.mark.parametrize("num_splits", [1, *slow(3)])  # three: the test of combining CTAs below
@pytest.mark.parametrize("heads", [64, *slow(32, 128)])
def test_at_fixed_splits_bits_do_not_depend_on_how_many_ctas_there_are(
    seed, heads, num_splits
) -> None:
    """Nor on the number of tokens: where others launch tiles of 16 heads, one kernel serves all."""
    inputs = make_inputs(Case.random(3, heads, 64, 300, 100, 2, seed, ragged=True), seed)
    tiles = heads // 16 * 3 * num_splits
    many = check(inputs, num_splits, "eager", races=False, fixed=True, ctas=tiles)
    few = run(inputs, num_splits, "eager", races=False, fixed=True, ctas=tiles - 1)
    many.assert_same_bits(few, f"{tiles} CTAs against one fewer")


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "sink_mode"),
    [
        (SWAP_AB, "softmax"),
        (64, "softmax"),
        pytest.param(16, "swa_gate", marks=pytest.mark.slow),
        pytest.param(64, "swa_gate", marks=pytest.mark.slow),
    ],
)
def test_row_maxima_that_grow_with_every_key_tile(
    seed, heads, sink_mode, head_dim, num_splits
) -> None:
    case = Case.random(2, heads, head_dim, 384, 64, 2, seed, sink_mode=sink_mode)
    inputs = make_inputs(case, seed).with_larger_later_keys()
    # Scores far beyond the stale limit: every key tile updates the row maxima. From q alone: few
    # keys then share the weight, and the bf16 rounding of P times keys of full size would pass the
    # bound of an element, which is meant for many keys.
    inputs = inputs.replaced(
        q=inputs.q * 16, compressed_kv=inputs.compressed_kv * 0.5, swa_kv=inputs.swa_kv * 0.5
    )
    check(inputs, num_splits, "lazy", races=False)


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
@pytest.mark.parametrize("outlier", [None, 150])
def test_rows_whose_scores_are_all_far_below_0(seed, heads, outlier) -> None:
    """References are then below 0, too, and one key near 0 has to raise them: its weight relative
    to the old ones would be infinite."""
    inputs = make_inputs(Case.random(2, heads, 64, 384, 64, 2, seed), seed)
    inputs = inputs.replaced(
        q=64 * inputs.q.abs(),
        compressed_kv=-inputs.compressed_kv.abs() / 2,
        swa_kv=-inputs.swa_kv.abs() / 2,
        sink_logits=torch.full((heads,), -torch.inf),
    )
    if outlier is not None:
        inputs.compressed_kv[:, outlier] *= 0.1
    check(inputs, 1, "eager", races=False)


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
@pytest.mark.parametrize(
    ("top_k", "num_splits"),
    [(0, 1), pytest.param(100, 1, marks=pytest.mark.slow), (100, 4)],
)
def test_no_requests(seed, top_k, num_splits, heads) -> None:
    """A speculative first tile in a window, of which there is none, is not loaded from past the end
    of q."""
    case = Case.random(2, heads, 64, top_k, 130, 0, seed, padding=2)
    found = run(make_inputs(case, seed), num_splits, "random")
    assert (found.o == 0).all()
    assert (found.lse == -torch.inf).all()


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
@pytest.mark.parametrize("num_splits", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("requests", [(0, 0, 1, 1, 2, 2), (2, -1, 0, 1, 1, 0)])
def test_speculative_first_tiles_and_window_lengths(seed, requests, num_splits, heads) -> None:
    """Full lengths and equally many tokens of each request, a hit; and requests in another order,
    with windows of their own."""
    case = Case.random(6, heads, 64, 130, 100, 3, seed)
    inputs = make_inputs(case, seed).replaced(request_ids=int32(*requests))
    if requests[0] != 0:
        inputs = inputs.replaced(swa_lens=int32(100, 3, 70))
    check(inputs, num_splits, "random", ctas=24)


@pytest.mark.parametrize("schedule", [*slow("eager", "lazy"), "random"])
def test_work_tiles_beyond_whole_grids(seed, schedule) -> None:
    """Six grids of three work tiles, and two that are CTAs of their own; tokens without keys, and
    some of three key tiles after and before some of one."""
    inputs = make_inputs(Case.random(20, HEADS_M, 512, 100, 20, 3, seed), seed)
    requests = [0, -1, 1, 2, -1, 1, 0, -1, 2, 0, 1, 1, 2, 1, 0, -1, 2, 0, 1, 2]
    lengths = [100, 3, 0, 64, 9, 65, 100, 1, 100, 0, 2, 64, 100, 5, 0, 2, 70, 1, 65, 100]
    inputs = inputs.replaced(request_ids=int32(*requests), compressed_lens=int32(*lengths))
    check(inputs, 1, schedule)


@pytest.mark.parametrize(
    ("heads", "head_dim", "sink_mode", "schedule"),
    [
        (16, 128, "swa_gate", "random"),
        (64, 64, "softmax", "lazy"),
        (64, 64, "softmax", "random"),
        *(
            pytest.param(*case, schedule, marks=pytest.mark.slow)
            for case, schedules in (
                ((16, 128, "swa_gate"), ("eager", "lazy")),
                ((64, 64, "softmax"), ("eager",)),
                ((48, 64, "softmax"), SCHEDULES),
            )
            for schedule in schedules
        ),
    ],
)
def test_splits_that_run_together(seed, heads, head_dim, sink_mode, schedule) -> None:
    """Every split has a CTA, and tiles get fewer heads. Launches with different numbers of splits
    follow each other on one workspace, whose counters nobody resets."""
    case = Case.random(
        *(2, heads, head_dim, 300, 100, 2, seed),
        ragged=True,
        is_causal=sink_mode == "swa_gate",
        sliding_window=WINDOW,
        sink_mode=sink_mode,
    )
    inputs = make_inputs(case, seed)
    workspace = new_workspace("sm_90a", config_of(case), 2, 5)
    for num_splits in (5, 2):
        check(inputs, num_splits, schedule, ctas=132, workspace=workspace)
        counters = workspace[: counter_words(len(workspace))].view(torch.int64)
        # All but the generation is 0 again.
        assert not (counters & (2**63 - 1)).any()


@pytest.mark.parametrize(
    ("heads", "num_splits"),
    [
        (SWAP_AB, 9),
        (64, 3),
        *(pytest.param(SWAP_AB, n, marks=pytest.mark.slow) for n in (3, 5, 18, 32)),
        *(pytest.param(64, n, marks=pytest.mark.slow) for n in (5, 9, 18, 32)),
    ],
)
def test_which_cta_combines_the_splits_does_not_matter(seed, num_splits, heads) -> None:
    """One CTA for each split; fewer CTAs, where the last to arrive combines all; a full head tile,
    and tiles of 16 heads; a token alone: the same, bit for bit."""
    inputs = make_inputs(Case.random(3, heads, 64, 500, 100, 2, seed, ragged=True), seed)
    options = {"races": False, "fixed": True}
    first = check(inputs, num_splits, "random", ctas=4 * 3 * num_splits, **options)
    for ctas in (3 * num_splits, 5, 1):
        again = run(inputs, num_splits, "random", ctas=ctas, **options)
        first.assert_same_bits(again, f"{ctas} CTAs")
    alone = run(inputs.of_tokens(slice(2, 3)), num_splits, "random", ctas=132, **options)
    assert_same_bits("o", alone.o[0], first.o[2])
    assert_same_bits("lse", alone.lse[0], first.lse[2])


@pytest.fixture(scope="module")
def impatient() -> AttentionKernels:
    """Kernels whose CTAs look for the splits of others once, of a compiler of their own."""
    return AttentionKernels(Simulator("sm_90a"))


@pytest.mark.parametrize("heads", [8, pytest.param(HEADS_M, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", [*slow("eager"), "lazy", "random"])
def test_a_cta_that_stops_polling(seed, schedule, heads, impatient, monkeypatch) -> None:
    """CTAs that do not run together: the last to arrive combines the slices of the others."""
    from dsv4.kernels.kit import semaphore

    monkeypatch.setattr(semaphore, "MAX_POLLS", 1)
    case = Case.random(2, heads, 64, 300, 100, 2, seed, ragged=True)
    impatient.check(case, seed, 6, schedules=(schedule,))


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
@pytest.mark.parametrize(
    ("head_dim", "magnitude"),
    [
        (64, "tiny"),
        (64, "huge"),
        (64, "columns"),
        pytest.param(512, "pieces", marks=pytest.mark.slow),
    ],
)
def test_partial_rows_of_any_magnitude(seed, head_dim, magnitude, heads) -> None:
    """Splits pass through the workspace in 16 bits: what shares a scale is right to the largest's
    rounding, and what does not is independent."""
    inputs = make_inputs(Case.random(2, heads, head_dim, 300, 100, 2, seed, ragged=True), seed)
    check_columns(inputs, magnitude, seed, attention(splits=3))


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
def test_partial_rows_of_different_magnitudes(seed, heads) -> None:
    """Every split is as large as its keys; the sum is as right as the largest."""
    inputs = make_inputs(Case.random(2, heads, 64, 320, 64, 2, seed), seed)
    check_rows(inputs, seed, attention(splits=6))


@pytest.mark.parametrize("heads", [SWAP_AB, HEADS_M])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_column_that_overflows_leaves_the_others_alone(seed, num_splits, heads) -> None:
    inputs = make_inputs(Case.random(2, heads, 64, 300, 100, 2, seed), seed)
    for tensor in (inputs.q, inputs.compressed_kv, inputs.swa_kv):
        tensor[..., 5] = 0
    expected_o, expected_lse = inputs.expected()
    for keys in (inputs.compressed_kv, inputs.swa_kv):
        keys[..., 5] = 3e38
    found = run(inputs, num_splits, "eager", races=False)
    assert (found.o[..., 5] == torch.inf).all()
    found.o[..., 5] = 0
    assert_attention_close(found.o, expected_o, found.lse, expected_lse)


@pytest.mark.slow
@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_grid(seed, heads, head_dim, is_causal, sink_mode) -> None:
    for tokens, top_k, width, num_splits in ((1, 1024, 128, 18), (6, 250, 150, 1), (3, 64, 9, 5)):
        case = Case.random(
            *(tokens, heads, head_dim, top_k, width, 3, seed),
            ragged=True,
            growing=True,
            is_causal=is_causal,
            sliding_window=WINDOW,
            sink_mode=sink_mode,
        )
        check(make_inputs(case, seed), num_splits, "random", races=False)
