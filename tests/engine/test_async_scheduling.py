"""Forwards that start before the results of those before were read: same texts, nothing lost."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from dsv4.config.layer_schedule import LayerKind
from dsv4.engine.engine import Engine
from dsv4.engine.mailbox import Letter
from tests.engine.driving import alone, drain, greedy
from tests.engine.tiny_model import BLOCK, assert_same_tokens, tiny_model, tokens

STOPS = tuple(range(3, 20))

pytestmark = pytest.mark.stage("cache")


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_are_those_of_an_engine_that_waits(seed: int, rows: int) -> None:
    """Bit for bit, where neighbours change nothing: with a stop, a request that is cancelled while
    its next token is under way, and, of two rows, preemption."""
    shape = {"num_hidden_layers": 1, "layer_types": (LayerKind.CSA,), "compress_ratios": (4,)}
    model = tiny_model(seed, **shape)
    dice = random.Random(seed)
    requests = []
    for number, length in enumerate((9, BLOCK - 2, BLOCK - 1, 3)):
        prompt = [dice.randrange(24) for _ in range(length)]
        # Sampled at high temperature: the tokens follow the last bits of the logits.
        options = {"temperature": 2.0, "seed": number, "stop_tokens": STOPS if number == 3 else ()}
        requests.append((prompt, greedy(7, **options)))
    found = []
    for lag in (False, True):
        engine = Engine(
            model,
            rows,
            2 * BLOCK,
            num_blocks=1 + rows,
            batch_invariant=rows > 1,
            async_scheduling=lag,
        )
        for request in requests:
            engine.add(*request)
        new: dict[int, list[int]] = defaultdict(list)
        while engine.num_requests:
            for output in engine.step():
                new[output.request] += output.tokens
            if len(new[0]) == 3:
                assert engine.cancel(0)
                del new[0]
        found.append(new)
        assert engine.num_free_blocks == 1 + rows
        is_recomputed = engine.stats.prefill_tokens > sum(len(prompt) for prompt, _ in requests)
        assert is_recomputed == (rows > 1)
    assert found[0] == found[1]
    assert [request for request, tokens in found[0].items() if tokens] == [1, 2, 3]
    assert found[0][3][-1] in STOPS


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_next_forward_starts_before_the_last_one_is_read(
    seed: int, monkeypatch, drafts: int
) -> None:
    events = []
    model = tiny_model(seed)
    engine = Engine(model, 1, 64, num_draft_tokens=drafts, async_scheduling=True)
    streams, read = model.unwritten_streams, Letter.read

    def started(*args):
        events.append("start")
        return streams(*args)

    monkeypatch.setattr(model, "unwritten_streams", started)
    monkeypatch.setattr(Letter, "read", lambda letter: events.append("read") or read(letter))
    engine.add([1, 2, 3], greedy(6))
    assert engine.step() == []
    new = drain(engine)[0]
    seen, pairs = list(events), len(events) // 2
    assert_same_tokens(model, [1, 2, 3], new, alone(model, [1, 2, 3], greedy(6)))
    assert seen == ["start", *["start", "read"] * (pairs - 1), "read"]
    if not drafts:
        assert pairs == 6, "forwards are started for tokens that the request may not have"


def test_a_stop_is_seen_a_step_late_and_what_was_computed_then_is_dropped(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompt = tokens(generator, BLOCK - 6)
    free = alone(model, prompt, greedy(12))
    stop = free[8]
    expected = free[: free.index(stop) + 1]
    for drafts in (0, 2):
        engine = Engine(model, 1, 2 * BLOCK, num_draft_tokens=drafts, async_scheduling=True)
        first = engine.add(prompt, greedy(12, stop_tokens=(stop,)))
        second = engine.add(prompt, greedy(3))
        outputs = []
        while engine.num_requests:
            outputs += engine.step()
        ended = [output for output in outputs if output.finished]
        assert [(output.request, output.reason) for output in ended] == [
            (first, "stop"),
            (second, "length"),
        ]
        found = [token for output in outputs if output.request == first for token in output.tokens]
        assert_same_tokens(model, prompt, found, expected)
        # The second took slot and blocks of the first while that still wrote to them.
        found = [token for output in outputs if output.request == second for token in output.tokens]
        assert_same_tokens(model, prompt, found, free[:3])
        assert engine.num_free_blocks == 2


def test_blocks_are_taken_for_what_drafts_may_add_and_given_back(seed: int) -> None:
    """At the end of context and cache there is no room for drafts that cannot count."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, BLOCK - 7), tokens(generator, BLOCK - 9)]
    engine = Engine(model, 2, BLOCK, num_draft_tokens=3, num_blocks=2, async_scheduling=True)
    for prompt in prompts:
        engine.add(prompt, greedy(BLOCK - len(prompt)))
    new = drain(engine)
    assert engine.stats.prefill_tokens == sum(map(len, prompts)), "a request was preempted"
    for number, prompt in enumerate(prompts):
        expected = alone(model, prompt, greedy(BLOCK - len(prompt)))
        assert_same_tokens(model, prompt, new[number], expected)


def test_cancelling_drops_what_is_under_way(seed: int) -> None:
    model = tiny_model(seed)
    engine = Engine(model, 2, 64, async_scheduling=True)
    first, second = (engine.add([1, 2, 3 + number], greedy(9)) for number in range(2))
    for _ in range(3):
        engine.step()
    assert engine.cancel(first)
    assert not engine.cancel(first)
    third = engine.add([7, 8], greedy(4))
    new = drain(engine)
    assert sorted(new) == [second, third]
    assert_same_tokens(model, [7, 8], new[third], alone(model, [7, 8], greedy(4)))


def test_what_was_under_way_when_a_forward_raised_is_computed_again(seed: int, monkeypatch) -> None:
    model = tiny_model(seed)
    engine = Engine(model, 2, 64, async_scheduling=True)
    prompts = [[1, 2, 3], [4, 5]]
    for prompt in prompts:
        engine.add(prompt, greedy(8))
    new = {0: [], 1: []}
    for _ in range(4):
        for output in engine.step():
            new[output.request] += output.tokens
    known = [len(new[0]), len(new[1])]
    assert len(engine._flights) == 1

    def fail(*_) -> None:
        raise MemoryError("decode")

    with monkeypatch.context() as patch:
        patch.setattr(model, "unwritten_streams", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.num_requests == 2 and not engine._flights
    for number, more in drain(engine).items():
        new[number] += more
    for number, prompt in enumerate(prompts):
        assert 0 < known[number] < 8
        assert_same_tokens(model, prompt, new[number], alone(model, prompt, greedy(8)))


def test_what_is_no_choice(seed: int) -> None:
    with pytest.raises(TypeError, match="async_scheduling must be a bool or None, got 1"):
        Engine(tiny_model(seed), 1, 8, async_scheduling=1)
