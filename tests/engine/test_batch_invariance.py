"""One arithmetic per token: its bits depend on nothing but the request.

The shipped checkpoint rounds activations, which amplifies the order of a sum.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import dsv4
from dsv4.engine.engine import Engine
from dsv4.engine.generate import generate
from dsv4.engine.sampling_params import SamplingParams
from tests.engine.driving import drain, greedy, recorded_logits
from tests.engine.tiny_model import BLOCK, tiny_model

TINY_CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny"


def _requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    dice = random.Random(seed)
    return [
        (
            [dice.randrange(2, 1000) for _ in range(dice.randrange(3, 20))],
            # Sampled at high temperature: the tokens follow the last bits of the logits.
            greedy(6, temperature=2.0, seed=seed + i, stop_tokens=()),
        )
        for i in range(count)
    ]


def test_neighbours_chunks_and_recomputing_change_no_bit(seed: int, monkeypatch) -> None:
    model = dsv4.load(TINY_CHECKPOINT)
    requests = _requests(seed, 3)
    logits = recorded_logits(model, monkeypatch)
    expected = []
    for request in requests:
        engine = Engine(model, 1, 64, batch_invariant=True)
        engine.add(*request)
        expected.append(drain(engine)[0])
    assert len(logits) == 6 * len(requests)
    alone_bits = {tuple(row.flatten().tolist()) for row in logits}
    logits.clear()

    engine = Engine(model, 3, 64, prefill_chunk=5, batch_invariant=True)
    for request in requests:
        engine.add(*request)
    new = defaultdict(list)
    while engine.num_requests:
        for request, more, *_ in engine.step():
            new[request] += more
        if engine.stats.decode_tokens == 3 and len(engine._running) > 1:
            engine._preempt_youngest()  # and recompute it
    assert [new[i] for i in range(3)] == expected
    assert {tuple(row.flatten().tolist()) for row in logits} == alone_bits


def test_generate_takes_the_option(seed: int) -> None:
    model = tiny_model(seed)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    together = generate(model, prompts, 5, batch_invariant=True).tokens
    for prompt, new in zip(prompts, together):
        assert generate(model, [prompt], 5, batch_invariant=True).tokens == [new]


def test_a_step_prefills_no_more_than_a_chunk(seed: int) -> None:
    engine = Engine(tiny_model(seed), 2, BLOCK, prefill_chunk=4, batch_invariant=True)
    for _ in range(2):
        engine.add([1] * 6, greedy(2))
    before = 0
    while engine.num_requests:
        engine.step()
        assert engine.stats.prefill_tokens - before <= 4
        before = engine.stats.prefill_tokens
