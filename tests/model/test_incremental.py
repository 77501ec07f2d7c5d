"""However a sequence is cut into steps, and whoever shares the batch, the logits are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.model.model import DeepseekV4
from tests.model.tiny import (
    Session,
    ids_away_from_ties,
    poison,
    random_model,
    relative_error,
    tiny_config,
)

pytestmark = pytest.mark.stage("cache")

# The published window and rates, so that the boundaries tested are the real ones.
PUBLISHED = dict(kinds="SCHC", rates=(4, 128), sliding_window=128, index_topk=7)
LENGTH = 330
BOUNDARIES = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 300)


def _prefill_then_decode(
    model: DeepseekV4, ids: list[int], n: int, stop: int | None = None
) -> Tensor:
    session = Session(model, 1, len(ids))
    parts = [session.logits({0: ids[:n]})[0]]
    parts += [session.logits({0: [token]})[0] for token in ids[n:stop]]
    return torch.cat(parts)


def _assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    error = relative_error(actual, expected)
    assert error < 1e-5, f"{what}: relative difference {error:.1e}"


@pytest.mark.parametrize(
    "n",
    [pytest.param(n, marks=() if n == 257 else pytest.mark.slow) for n in BOUNDARIES],
)
def test_prefill_and_decode_equal_one_prefill(n: int, seed: int) -> None:
    model = random_model(tiny_config(**PUBLISHED))
    ids = ids_away_from_ties(model, 1, LENGTH)
    decoded = _prefill_then_decode(model, ids[0].tolist(), n)
    _assert_close(decoded, model(ids)[0], f"prefill {n}, seed {seed}")


@pytest.mark.parametrize("n", BOUNDARIES)
def test_the_token_after_each_boundary(n: int, seed: int) -> None:
    """The steps most likely to go wrong, without decoding to the end."""
    model = random_model(tiny_config(**PUBLISHED))
    ids = ids_away_from_ties(model, 1, n + 3)
    decoded = _prefill_then_decode(model, ids[0].tolist(), n)
    _assert_close(decoded, model(ids)[0], f"prefill {n}, seed {seed}")


@pytest.mark.parametrize(
    "chunk", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)), 8, 61, 128, 200]
)
def test_chunked_prefill_equals_one_prefill(chunk: int, seed: int) -> None:
    model = random_model(tiny_config(**PUBLISHED))
    ids = ids_away_from_ties(model, 2, 270)
    _assert_close(model(ids, chunk=chunk), model(ids), f"chunks of {chunk}, seed {seed}")


@pytest.mark.parametrize(
    "changes",
    [
        dict(kinds="HC", rates=(4, 4), sliding_window=3),
        dict(kinds="CHS", rates=(3, 7), sliding_window=20, index_topk=2),
        dict(kinds="SC", sliding_window=1, index_topk=64),
    ],
    ids=["one rate", "odd rates", "window of one"],
)
def test_random_cuts_of_other_shapes(changes: dict, seed: int) -> None:
    model = random_model(tiny_config(**changes))
    ids = ids_away_from_ties(model, 1, 90)
    session, tokens, parts = Session(model, 1, 90), ids[0].tolist(), []
    while tokens:
        cut = int(torch.randint(1, 14, ()))
        # Wider padding than needed, and at times a capacity far beyond the length.
        capacity = session.cache.max_context if cut % 2 else None
        parts.append(session.logits({0: tokens[:cut]}, chunk=14, capacity=capacity)[0])
        tokens = tokens[cut:]
    _assert_close(torch.cat(parts), model(ids)[0], f"seed {seed}")


def test_chunks_longer_than_the_window(seed: int) -> None:
    """Their first tokens see keys of the ring, the last their own; requests at any position."""
    model = random_model(tiny_config(kinds="SCH", index_topk=6))
    ids = ids_away_from_ties(model, 2, 75)
    whole = model(ids)
    _assert_close(model(ids, chunk=50), whole, f"seed {seed}")
    session = Session(model, 3, 128)
    session.feed({0: ids[0, :70].tolist(), 1: ids[1, :20].tolist()})
    parts = session.logits({1: ids[1, 20:].tolist(), 0: ids[0, 70:].tolist()}, rows=3)
    _assert_close(parts[0], whole[0, 70:], f"seed {seed}")
    _assert_close(parts[1], whole[1, 20:], f"seed {seed}")


def test_capacity_does_not_change_a_result(seed: int) -> None:
    """Scoring more entries than exist, or than are chosen, must not matter."""
    model = random_model(tiny_config(index_topk=10))
    ids = ids_away_from_ties(model, 1, 120)
    results = []
    for capacity in (128, 256, 1024):
        session = Session(model, 1, 1024)
        session.feed({0: ids[0, :-1].tolist()}, capacity=capacity)
        results.append(session.logits({0: [int(ids[0, -1])]}, capacity=capacity)[0])
    _assert_close(results[1], results[0], f"seed {seed}")
    _assert_close(results[2], results[0], f"seed {seed}")


def test_batched_requests_equal_themselves_alone(seed: int) -> None:
    """Requests of different lengths join, decode together with padding, and leave."""
    model = random_model(tiny_config(rates=(4, 16), index_topk=4))
    lengths = {0: 50, 1: 9, 2: 75}
    ids = {slot: ids_away_from_ties(model, 1, n)[0].tolist() for slot, n in lengths.items()}
    alone = {slot: model(torch.tensor([tokens]))[0] for slot, tokens in ids.items()}
    session, got = Session(model, 4, 128), {slot: [] for slot in ids}

    def feed(counts: dict[int, int], **options) -> None:
        done = {slot: sum(len(part) for part in got[slot]) for slot in counts}
        new = {slot: ids[slot][done[slot] : done[slot] + n] for slot, n in counts.items()}
        for slot, logits in session.logits(new, **options).items():
            got[slot].append(logits)

    feed({1: 4})
    feed({0: 30, 1: 3}, chunk=33, rows=4)
    feed({2: 60, 0: 11})
    for _ in range(2):
        feed({1: 1, 0: 1, 2: 1}, rows=5)
    for _ in range(7):
        feed({2: 1, 0: 1}, rows=4)
    feed({2: 6}, rows=2)
    for slot, parts in got.items():
        assert sum(map(len, parts)) == lengths[slot]
        _assert_close(torch.cat(parts), alone[slot], f"request {slot}, seed {seed}")


def test_a_reused_slot_shows_nothing_of_its_former_request(seed: int) -> None:
    """Rings and pages keep what the former request wrote; with other neighbours, too."""
    model = random_model(tiny_config(kinds="SCH", index_topk=3))
    session = Session(model, 2, 256)
    former = torch.randint(0, model.config.vocab_size, (2, 100)).tolist()
    session.feed({0: former[0], 1: former[1]})
    ids = ids_away_from_ties(model, 1, 40)
    session.lengths[0] = 0
    parts = [session.logits({0: ids[0, :2].tolist()})[0]]
    parts += [session.logits({0: [token], 1: [3]})[0] for token in ids[0, 2:].tolist()]
    _assert_close(torch.cat(parts), model(ids)[0], f"seed {seed}")


def test_reset_clears_the_rings_of_one_slot_only(seed: int) -> None:
    model = random_model(tiny_config())
    session = Session(model, 2, 128)
    poison(session.cache)
    session.cache.reset([1])
    for layer in session.cache.layers:
        for ring in (layer.window, *layer.state.rings()):
            assert ring.data[0].isnan().all() and not ring.data[1].any()


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_rejected_drafts_leave_no_trace(drafts: int, seed: int) -> None:
    """Verify wrong drafts, go back by position, and continue: as if they had never been there."""
    model = random_model(tiny_config(kinds="SCHC", rates=(4, 16), index_topk=4))
    ids = ids_away_from_ties(model, 1, 80)
    tokens = ids[0].tolist()
    session = Session(model, 1, 128, max_draft=drafts)
    parts, done = [session.logits({0: tokens[:7]})[0]], 7
    while done < len(tokens):
        accepted = min(int(torch.randint(0, drafts + 1, ())), len(tokens) - done - 1)
        wrong = torch.randint(0, model.config.vocab_size, (drafts - accepted,)).tolist()
        fed = tokens[done : done + 1 + accepted] + wrong
        parts.append(session.logits({0: fed}, chunk=1 + drafts)[0][: 1 + accepted])
        done += 1 + accepted
        session.lengths[0] = done
    _assert_close(torch.cat(parts), model(ids)[0], f"seed {seed}")


@pytest.mark.parametrize("drafts", [2])
def test_single_tokens_through_a_ring_with_room_for_drafts(drafts: int, seed: int) -> None:
    """The ring is then longer than the window: the keys past it must not be seen."""
    model = random_model(tiny_config())
    ids = ids_away_from_ties(model, 1, 50)
    session = Session(model, 1, 128, max_draft=drafts)
    parts = [session.logits({0: [token]})[0] for token in ids[0].tolist()]
    _assert_close(torch.cat(parts), model(ids)[0], f"seed {seed}")


def test_bfloat16_runs_and_stays_close(seed: int) -> None:
    """Same cuts in bf16: steps see the same roundings, and fp32 is not far."""
    config = tiny_config(kinds="SCH", index_topk=64)
    model = random_model(config)
    narrow = DeepseekV4(config, dtype=torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    ids = torch.randint(0, config.vocab_size, (1, 60))
    expected, actual = model(ids), narrow(ids)
    # Experts chosen otherwise at a near tie make single tokens differ by much: take the median.
    rows = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() < 0.1, f"median relative difference {rows.median():.2e}"
    session = Session(narrow, 1, 128)
    parts = [session.logits({0: ids[0, :13].tolist()})[0]]
    parts += [session.logits({0: [token]})[0] for token in ids[0, 13:].tolist()]
    rows = (torch.cat(parts) - actual[0]).norm(dim=-1) / actual[0].norm(dim=-1)
    assert rows.median() < 0.1
