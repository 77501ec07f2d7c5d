"""The sm_90a kernel, compiled and run on the CPU by the simulator, against the FP32 oracle.

The schedules complete asynchronous work at once, as late as possible, or at random; the race
checker watches every one of them.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import counter_words
from dsv4.ops.attention.splits import workspace_size
from tests.gpu.attention_cases import NAN, Case, compare

pytestmark = pytest.mark.stage("H")

cutlass = pytest.importorskip("cutlass")

WINDOW = 20
# Query heads of each of the two kernels.
FEW, MANY = 24, 40


@cache
def compiled_kernel(config: FmhaConfig) -> Any:
    from dsv4.kernels.attention.sm90.fmha import build

    folder = tempfile.mkdtemp(prefix="dsv4-ptx-")
    # The simulator reads the PTX that it finds there.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(config, f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}")


def simulate_case(
    config: FmhaConfig, case: Case, *, num_splits: int, schedule: str, races: bool
) -> None:
    """Compare the kernel with the oracle."""
    o, lse = run(config, case, num_splits=num_splits, schedule=schedule, races=races)
    compare(o, lse, *case.expected(config.sink_mode, config.is_causal, config.sliding_window))


def new_workspace(config: FmhaConfig, tokens: int, num_splits: int) -> torch.Tensor:
    """Counters of 0, and NaN in the place of partial rows."""
    size = workspace_size(config, tokens, num_splits) if num_splits > 1 else 0
    workspace = torch.full((size,), NAN)
    workspace[: counter_words(size)] = 0
    return workspace


def run(
    config: FmhaConfig,
    case: Case,
    *,
    num_splits: int,
    schedule: str,
    races: bool,
    workspace: torch.Tensor | None = None,
    # Fewer CTAs than work items: each goes through several.
    num_ctas: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of the kernel; all that it writes starts as NaN."""
    from dsv4.simulator import simulate

    tokens, heads, _ = case.q.shape
    o = torch.full_like(case.q, NAN)
    lse = torch.full((tokens, heads), NAN)
    if workspace is None:
        workspace = new_workspace(config, tokens, num_splits)
    lens = case.compressed_lens
    report = simulate(
        compiled_kernel(config),
        *case.tensors(),
        o,
        compressed_lens=torch.empty(0, dtype=torch.int32) if lens is None else lens,
        lse=lse,
        workspace=workspace,
        num_splits=num_splits,
        num_ctas=num_ctas,
        schedule=schedule,
        races=races,
    )
    if races:
        report.raise_if_racy()
    return o, lse


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits", "is_causal", "sink_mode"),
    [
        (8, 64, 1, True, "softmax"),
        (40, 64, 1, True, "softmax"),
        (72, 64, 3, False, "swa_gate"),
        (16, 128, 2, True, "swa_gate"),
        (8, 512, 1, False, "softmax"),
        (24, 512, 2, True, "swa_gate"),
        (72, 512, 2, True, "swa_gate"),
    ],
)
def test_ragged_lengths(seed, heads, head_dim, num_splits, is_causal, sink_mode, schedule) -> None:
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, is_causal, sink_mode)
    case = Case.random(4, heads, head_dim, 300, 100, 2, ragged=True, padding=1, device="cpu")
    simulate_case(config, case, num_splits=num_splits, schedule=schedule, races=True)


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize(
    ("tokens", "heads", "num_splits", "is_causal", "sink_mode"),
    [(1, 72, 1, True, "swa_gate"), (2, 40, 1, False, "softmax"), (1, 48, 3, False, "swa_gate")],
)
def test_ctas_that_share_columns(
    seed, tokens, heads, num_splits, is_causal, sink_mode, schedule
) -> None:
    """Two CTAs halve the columns of a tile where there are enough for all; no bit depends on it."""
    config = FmhaConfig(512, heads, WINDOW, 1024, is_causal, sink_mode)
    case = Case.random(tokens, heads, 512, 300, 100, 2, ragged=True, device="cpu")
    shared, alone = (
        run(config, case, num_splits=num_splits, schedule=schedule, races=True, num_ctas=ctas)
        for ctas in (6, 3)
    )
    compare(*shared, *case.expected(config.sink_mode, config.is_causal, config.sliding_window))
    for with_others, without in zip(shared, alone, strict=True):
        assert torch.equal(with_others.nan_to_num(), without.nan_to_num())


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_splits", "num_ctas"),
    [
        (32, 128, 1, 6),
        (32, 128, 3, 18),
        (32, 128, 3, 5),
        (64, 512, 3, 36),
        (64, 512, 3, 35),
        (128, 64, 1, 24),
        (128, 64, 7, 168),
    ],
)
def test_ctas_that_share_heads(seed, heads, head_dim, num_splits, num_ctas, schedule) -> None:
    """Tiles of 16 heads where there is a CTA for each, and the other kernel's where not."""
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, True, "swa_gate")
    case = Case.random(3, heads, head_dim, 300, 100, 2, ragged=True, padding=1, device="cpu")
    options = {"num_splits": num_splits, "schedule": schedule, "races": True, "num_ctas": num_ctas}
    compare(*run(config, case, **options), *case.expected("swa_gate", True, WINDOW))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("heads", [32, 64, 128])
def test_at_fixed_splits_bits_do_not_depend_on_how_many_ctas_there_are(
    seed, heads, num_splits
) -> None:
    """Nor on the number of tokens: where others launch tiles of 16 heads, one kernel serves all."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax", num_splits=num_splits)
    case = Case.random(3, heads, 64, 300, 100, 2, ragged=True, device="cpu")
    tiles = heads // 16 * 3 * num_splits
    many, few = (
        run(config, case, num_splits=num_splits, schedule="eager", races=False, num_ctas=ctas)
        for ctas in (tiles, tiles - 1)
    )
    compare(*many, *case.expected("softmax"))
    for one, other in zip(many, few, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize(
    ("heads", "sink_mode"), [(16, "swa_gate"), (64, "swa_gate"), (64, "softmax")]
)
def test_row_maxima_that_grow_with_every_block(
    seed, heads, sink_mode, head_dim, num_splits
) -> None:
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, sink_mode=sink_mode)
    case = Case.random(2, heads, head_dim, 384, 64, 2, growing=True, device="cpu")
    # Scores far beyond the stale limit: every block moves the references. From q alone: few keys
    # then share the weight, and the bf16 rounding of P times keys of full size would pass the
    # bound of an element, which is meant for many keys.
    case.q *= 16
    case.compressed_kv *= 0.5
    case.swa_kv *= 0.5
    simulate_case(config, case, num_splits=num_splits, schedule="lazy", races=False)


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("outlier", [None, 150])
def test_rows_whose_scores_are_all_far_below_0(seed, heads, outlier) -> None:
    """References are then below 0, too, and one key near 0 has to raise them: its weight relative
    to the old ones would be infinite."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(2, heads, 64, 384, 64, 2, device="cpu")
    case.compressed_kv, case.swa_kv = -case.compressed_kv.abs() / 2, -case.swa_kv.abs() / 2
    case.q = 64 * case.q.abs()
    if outlier is not None:
        case.compressed_kv[:, outlier] *= 0.1
    case.sink_logits.fill_(-float("inf"))
    simulate_case(config, case, num_splits=1, schedule="eager", races=False)


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize(("top_k", "width"), [(0, 64), (70, 0), (0, 0)])
def test_a_branch_without_rows(seed, top_k, width, heads) -> None:
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="swa_gate")
    case = Case.random(3, heads, 64, top_k, width, 2, device="cpu")
    simulate_case(config, case, num_splits=1, schedule="random", races=True)


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize(("top_k", "num_splits"), [(0, 1), (100, 1), (100, 4)])
def test_no_requests(seed, top_k, num_splits, heads) -> None:
    """A first block that is guessed to be in a window, of which there is none, is not loaded from
    past the end of q."""
    config = FmhaConfig(64, heads, 128, 1024, sink_mode="softmax")
    case = Case.random(2, heads, 64, top_k, 130, 1, padding=2, device="cpu")
    case.swa_kv, case.swa_lens = case.swa_kv[:0], case.swa_lens[:0]
    o, lse = run(config, case, num_splits=num_splits, schedule="random", races=True)
    assert (o == 0).all()
    assert (lse == -float("inf")).all()


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("requests", [(0, 0, 1, 1, 2, 2), (2, -1, 0, 1, 1, 0)])
def test_first_blocks_and_window_lengths_that_are_guessed(
    seed, requests, num_splits, heads
) -> None:
    """Full lengths and equally many tokens of each request, as guessed; and requests in another
    order, with windows of their own."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="swa_gate")
    case = Case.random(6, heads, 64, 130, 100, 3, device="cpu")
    case.request_ids = torch.tensor(requests, dtype=torch.int32)
    if requests[0] != 0:
        case.swa_lens = torch.tensor([100, 3, 70], dtype=torch.int32)
    options = {"schedule": "random", "races": True, "num_ctas": 24}
    got = run(config, case, num_splits=num_splits, **options)
    compare(*got, *case.expected("swa_gate"))


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_tiles_beyond_whole_rounds(seed, schedule) -> None:
    """Six rounds of three tiles, and two that are CTAs of their own; tokens without keys, and some
    of three blocks after and before some of one."""
    config = FmhaConfig(512, MANY, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(20, MANY, 512, 100, 20, 3, device="cpu")
    requests = [0, -1, 1, 2, -1, 1, 0, -1, 2, 0, 1, 1, 2, 1, 0, -1, 2, 0, 1, 2]
    lengths = [100, 3, 0, 64, 9, 65, 100, 1, 100, 0, 2, 64, 100, 5, 0, 2, 70, 1, 65, 100]
    case.request_ids = torch.tensor(requests, dtype=torch.int32)
    case.compressed_lens = torch.tensor(lengths, dtype=torch.int32)
    got = run(config, case, num_splits=1, schedule=schedule, races=True, num_ctas=3)
    compare(*got, *case.expected("softmax"))


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize("sink", [float("inf"), -float("inf"), 1e4, -1e4])
def test_extreme_sinks(seed, sink, sink_mode, heads) -> None:
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode=sink_mode)
    case = Case.random(3, heads, 64, 130, 70, 2, ragged=True, device="cpu")
    case.sink_logits.fill_(sink)
    for num_splits in (1, 3):
        simulate_case(config, case, num_splits=num_splits, schedule="eager", races=False)


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_thousands_under_huge_sinks(seed, sign, heads) -> None:
    """A score that a huge sink swallows must not give an infinite weight."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="swa_gate")
    case = Case.random(3, heads, 64, 130, 70, 2, device="cpu")
    case.q *= 2000
    for num_splits in (1, 3):
        results = []
        for sink in (float("inf"), 1e38):
            case.sink_logits.fill_(sign * sink)
            o, _ = run(config, case, num_splits=num_splits, schedule="eager", races=False)
            results.append(o)
        assert results[0].isfinite().all()
        assert torch.equal(*results)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "sink_mode"),
    [(48, 64, "softmax"), (16, 128, "swa_gate"), (64, 64, "softmax")],
)
def test_splits_that_run_together(seed, heads, head_dim, sink_mode, schedule) -> None:
    """Every split has a CTA, and tiles get fewer heads. Launches with different numbers of splits
    follow each other on one workspace, whose counters nobody resets."""
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, sink_mode=sink_mode)
    case = Case.random(2, heads, head_dim, 300, 100, 2, ragged=True, device="cpu")
    expected = case.expected(sink_mode)
    workspace = new_workspace(config, 2, 5)
    for num_splits in (5, 2):
        options = {"workspace": workspace, "num_ctas": 132}
        got = run(config, case, num_splits=num_splits, schedule=schedule, races=True, **options)
        compare(*got, *expected)
        counters = workspace[: counter_words(len(workspace))].view(torch.int64)
        # All but the generation is 0 again.
        assert not (counters & (2**63 - 1)).any()


@pytest.mark.parametrize(
    "num_splits", [3, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 18, 32))]
)
@pytest.mark.parametrize("heads", [FEW, 64])
def test_who_joins_the_splits_does_not_matter(seed, num_splits, heads) -> None:
    """One CTA for each split; fewer CTAs, where the last to arrive joins all; a full head tile, and
    tiles of 16 heads; a token alone: the same, bit for bit."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax", num_splits=num_splits)
    case = Case.random(3, heads, 64, 500, 100, 2, ragged=True, device="cpu")
    options = {"num_splits": num_splits, "schedule": "random", "races": False}
    first = run(config, case, num_ctas=4 * 3 * num_splits, **options)
    compare(*first, *case.expected("softmax"))
    for num_ctas in (3 * num_splits, 5, 1):
        again = run(config, case, num_ctas=num_ctas, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    alone = Case(
        *(x[2:] for x in (case.q, case.compressed_kv)),
        case.swa_kv,
        case.swa_lens,
        case.sink_logits,
        case.request_ids[2:],
        case.compressed_lens[2:],
    )
    o, lse = run(config, alone, num_ctas=132, **options)
    assert torch.equal(o[0], first[0][2])
    assert torch.equal(lse[0], first[1][2])


@pytest.mark.parametrize("heads", [8, MANY])
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_a_cta_that_loses_patience(seed, schedule, heads, monkeypatch) -> None:
    """CTAs that do not run together: whoever comes last joins what the others left."""
    from dsv4.kernels.attention.sm90 import semaphore as fmha_sm90_meeting

    monkeypatch.setattr(fmha_sm90_meeting, "PATIENCE", 1)
    # Compile with the changed constant, for this test alone.
    monkeypatch.setattr(sys.modules[__name__], "compiled_kernel", compiled_kernel.__wrapped__)
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(2, heads, 64, 300, 100, 2, ragged=True, device="cpu")
    got = run(config, case, num_splits=6, schedule=schedule, races=True, num_ctas=132)
    compare(*got, *case.expected("softmax"))


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize(
    ("head_dim", "magnitude"), [(64, "tiny"), (64, "huge"), (64, "columns"), (512, "pieces")]
)
def test_partial_rows_of_any_magnitude(seed, head_dim, magnitude, heads) -> None:
    """Splits pass through the workspace in 16 bits: what shares a scale is right to the largest's
    rounding, and what does not is independent."""
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(2, heads, head_dim, 300, 100, 2, ragged=True, device="cpu")
    case.check_scaled(
        magnitude,
        lambda case: run(config, case, num_splits=3, schedule="eager", races=False),
    )


@pytest.mark.parametrize("heads", [FEW, MANY])
def test_partial_rows_of_different_magnitudes(seed, heads) -> None:
    """Every split is as large as its keys; the sum is as right as the largest."""
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(2, heads, 64, 320, 64, 2, device="cpu")
    case.check_unequal(lambda case: run(config, case, num_splits=6, schedule="eager", races=False))


@pytest.mark.parametrize("heads", [FEW, MANY])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_column_that_overflows_leaves_the_others_alone(seed, num_splits, heads) -> None:
    config = FmhaConfig(64, heads, WINDOW, 1024, sink_mode="softmax")
    case = Case.random(2, heads, 64, 300, 100, 2, device="cpu")
    case.q[..., 5] = 0
    for keys in (case.compressed_kv, case.swa_kv):
        keys[..., 5] = 0
    expected = case.expected("softmax")
    for keys in (case.compressed_kv, case.swa_kv):
        keys[..., 5] = 3e38
    o, lse = run(config, case, num_splits=num_splits, schedule="eager", races=False)
    assert (o[..., 5] == float("inf")).all()
    o[..., 5] = 0
    compare(o, lse, *expected)


@pytest.mark.slow
@pytest.mark.parametrize("sink_mode", ["swa_gate", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_grid(seed, heads, head_dim, is_causal, sink_mode) -> None:
    config = FmhaConfig(head_dim, heads, WINDOW, 1024, is_causal, sink_mode)
    for tokens, top_k, width, num_splits in ((1, 1024, 128, 18), (6, 250, 150, 1), (3, 64, 9, 5)):
        case = Case.random(
            tokens, heads, head_dim, top_k, width, 3, ragged=True, growing=True, device="cpu"
        )
        simulate_case(config, case, num_splits=num_splits, schedule="random", races=False)
