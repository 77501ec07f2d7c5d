"""Requests that begin like earlier ones: prefilled from there on, with the same text."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from dsv4.engine.engine import Engine
from tests.engine.driving import alone, drain, greedy, recorded_logits
from tests.engine.tiny_model import BLOCK, assert_same_tokens, tiny_model, tokens
from tests.model.tiny import poison

pytestmark = pytest.mark.stage("cache")


def reusing(model, max_requests: int, blocks: int, snapshots: int = 8, **options) -> Engine:
    """An engine whose memory is NaN where nothing was written."""
    engine = Engine(
        model,
        max_requests,
        blocks * BLOCK,
        num_blocks=blocks * max_requests,
        prefix_snapshots=snapshots,
        **options,
    )
    poison(engine._cache)
    for copy in engine._reuse._rings._copies:
        copy.fill_(torch.nan)
    return engine


@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk": BLOCK}, pytest.param({"batch_invariant": True}, marks=pytest.mark.slow)],
    ids=["chunks", "batch_invariant"],
)
def test_a_text_behind_a_known_beginning_has_the_same_bits(
    seed: int, monkeypatch, options: dict
) -> None:
    """Of every logit, where forwards have the same shapes, or shapes change nothing; sampled at
    high temperature, so that the tokens follow their last bits."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    beginning = tokens(generator, BLOCK)
    params = greedy(5, temperature=2.0, seed=seed)
    prompts = [beginning + tokens(generator, count) for count in (3, 6)]
    seen = recorded_logits(model, monkeypatch)
    plain = Engine(model, 1, 2 * BLOCK, **options)
    plain.add(prompts[1], params)
    expected = drain(plain)[0]
    bits = [row.flatten().tolist() for row in seen[-5:]]
    engine = reusing(model, 1, 2, async_scheduling=True, **options)
    engine.add(prompts[0], params)
    engine.add(prompts[1], params)
    seen.clear()
    assert drain(engine)[1] == expected
    assert len(bits) == 5
    assert [row.flatten().tolist() for row in seen[-5:]] == bits
    assert engine.stats.prefix_tokens == BLOCK
    assert engine.stats.prefill_tokens == len(prompts[0]) + 6


@pytest.mark.parametrize("drafts", [0, 2])
def test_prompts_that_share_beginnings(seed: int, drafts: int) -> None:
    """Side by side and one after the other, chunked, of several blocks; a prompt that is known as a
    whole is prefilled from its last block on."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    stem, other = tokens(generator, 2 * BLOCK), tokens(generator, BLOCK)
    prompts = [
        stem + tokens(generator, 5),
        other,
        stem[:BLOCK] + tokens(generator, 9),
        stem + tokens(generator, 7),
        [*other, 1],
        stem,
        other,
    ]
    engine = reusing(model, 2, 3, num_draft_tokens=drafts, prefill_chunk=BLOCK)
    for prompt in prompts:
        engine.add(prompt, greedy(6))
    new = drain(engine)
    for number, prompt in enumerate(prompts):
        assert_same_tokens(model, prompt, new[number], alone(model, prompt, greedy(6)))
    # Of the last four prompts; the third one may have started beside the first.
    found = engine.stats.prefix_tokens
    assert found in (4 * BLOCK, 5 * BLOCK)
    assert engine.stats.prefill_tokens == sum(map(len, prompts)) - found
    assert engine.num_free_blocks == 6


def test_a_conversation_goes_on_behind_its_last_answer(seed: int) -> None:
    """Ends of blocks in continuations are kept, too."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = reusing(model, 2, 3, async_scheduling=True)
    prompt = tokens(generator, BLOCK - 10)
    first = engine.add(prompt, greedy(20))
    beside = engine.add(prompt[::-1], greedy(20))
    answers = drain(engine)
    assert engine.stats.prefix_tokens == 0
    later = prompt + answers[first] + tokens(generator, 4)
    second = engine.add(later, greedy(5))
    new = drain(engine)[second]
    assert engine.stats.prefix_tokens == BLOCK
    assert_same_tokens(model, later, new, alone(model, later, greedy(5)))
    reverse = prompt[::-1]
    assert_same_tokens(model, reverse, answers[beside], alone(model, reverse, greedy(20)))


def test_what_is_kept_makes_way_and_preempted_requests_find_themselves(seed: int) -> None:
    """Requests under memory pressure; what they recompute is what no block end has kept."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = reusing(model, 2, 2, snapshots=2, async_scheduling=True)
    prompts = [tokens(generator, BLOCK + 3) for _ in range(3)] + [tokens(generator, 5)]
    for _ in range(2):
        for prompt in prompts:
            engine.add(prompt, greedy(4))
    new = drain(engine)
    for number in new:
        prompt = prompts[number % 4]
        assert_same_tokens(model, prompt, new[number], alone(model, prompt, greedy(4)))
    assert engine.num_free_blocks == 4
    # A preempted request starts again behind its own last block.
    before = engine.stats.prefix_tokens
    number = engine.add(prompts[0], greedy(8))
    texts = defaultdict(list)
    while len(texts[number]) < 3:
        for output in engine.step():
            texts[output.request] += output.tokens
    engine._read_results(len(engine._flights))
    engine._preempt_youngest()
    for request, more in drain(engine).items():
        texts[request] += more
    assert engine.stats.prefix_tokens - before in (BLOCK, 2 * BLOCK)
    assert_same_tokens(model, prompts[0], texts[number], alone(model, prompts[0], greedy(8)))


def test_cancelled_requests_lose_no_snapshot(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    engine = reusing(tiny_model(seed), 1, 2, snapshots=2, async_scheduling=True)
    for _ in range(3):
        number = engine.add(tokens(generator, BLOCK - 2), greedy(9))
        for _ in range(3):  # the last one's rings were copied, its token was not read
            engine.step()
        assert engine._flights[-1].saved[0] is not None
        assert engine.cancel(number)
        assert engine.num_requests == 0
        assert engine.step() == []
    prefixes = engine._manager.prefixes
    assert sorted(prefixes.take_snapshot() for _ in range(2)) == [0, 1]


def test_arguments(seed: int) -> None:
    model = tiny_model(seed)
    with pytest.raises(ValueError, match="prefix_snapshots must be at least 0, got -1"):
        Engine(model, 1, 8, prefix_snapshots=-1)
    with pytest.raises(TypeError, match="prefix_snapshots must be an integer, got True"):
        Engine(model, 1, 8, prefix_snapshots=True)
