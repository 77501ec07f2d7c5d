"""Sampling options of requests, through the engine, against definitions over whole sequences."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4.engine.engine import Engine
from dsv4.engine.request import Output
from dsv4.engine.sampling_params import SamplingParams
from tests.engine.driving import alone, drain, greedy, outputs_of
from tests.engine.tiny_model import BLOCK, VOCAB, tiny_model, tokens

pytestmark = pytest.mark.stage("sampler")

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4}


def scores_of(model, prompt: list[int], new: list[int], params: SamplingParams) -> torch.Tensor:
    """Logits of the next token with bias and penalties, by their definition."""
    scores = model(torch.tensor([prompt + new]))[0, -1]
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in set(prompt + new):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(new):
        scores[token] -= params.presence_penalty + params.frequency_penalty * new.count(token)
    return scores


def assert_best(model, prompt: list[int], new: list[int], params: SamplingParams) -> None:
    """Every token is the best of its scores, but for rounding."""
    for index, token in enumerate(new):
        scores = scores_of(model, prompt, new[:index], params)
        assert scores.max() - scores[token] < 1e-4, index


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_penalties_and_bias_of_greedy_requests(seed: int, drafts: int) -> None:
    """Beside requests without, and when blocks are taken away and what they held is recomputed."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, length) for length in (BLOCK - 12, BLOCK - 14, 5)]
    params = [
        greedy(24, **PENALTIES),
        greedy(24, logit_bias={3: 2.0, 7: -math.inf}, presence_penalty=-1.0),
        greedy(24),
    ]
    engine = Engine(
        model, 3, 2 * BLOCK, num_draft_tokens=drafts, num_blocks=4, async_scheduling=True
    )
    for request in zip(prompts, params):
        engine.add(*request)
    new = drain(engine)
    assert engine.stats.prefill_tokens > sum(map(len, prompts)), "nothing was preempted"
    for number, request in enumerate(zip(prompts, params)):
        assert len(new[number]) == 24
        assert_best(model, request[0], new[number], request[1])
    assert 7 not in new[1]
    plain = alone(model, prompts[0], greedy(24))
    assert new[0] != plain, "penalties changed nothing"


def test_a_slot_forgets_the_options_of_the_request_before(seed: int) -> None:
    model = tiny_model(seed)
    options = {"temperature": 1.5, "top_k": 2, "min_p": 0.3, "logit_bias": {1: 9.0}, "seed": 3}
    prompt = [4, 2, 9]
    engine = Engine(model, 1, 64)
    requests = [greedy(12, **options, **PENALTIES), greedy(12), greedy(12, **PENALTIES)]
    for params in requests:
        engine.add(prompt, params)
    new = drain(engine)
    assert new[1] == alone(model, prompt, requests[1])
    assert new[2] == alone(model, prompt, requests[2])


def test_sampled_requests_keep_their_tokens_with_drafts(seed: int) -> None:
    """Every option at once; what is drawn depends on position and history, not on forwards."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    params = greedy(20, temperature=1.2, top_p=0.9, top_k=12, min_p=0.02, seed=seed, **PENALTIES)
    prompt = tokens(generator, 17)
    plain = alone(model, prompt, params)
    engine = Engine(model, 2, 64, num_draft_tokens=3, async_scheduling=True)
    engine.add(prompt, params)
    engine.add(prompt[::-1], greedy(20))
    assert drain(engine)[0] == plain


@pytest.mark.parametrize("drafts", [0, 2])
def test_logprobs_are_those_of_the_model(seed: int, drafts: int) -> None:
    """Whatever bias, penalties and temperature make of its logits; each as many as it asks for."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompt = tokens(generator, 9)
    wanted = [None, 0, 3]
    engine = Engine(model, 3, 64, num_draft_tokens=drafts, async_scheduling=True)
    for number, count in enumerate(wanted):
        engine.add(
            prompt, greedy(7, temperature=1.0, seed=number, logit_bias={2: 3.0}, logprobs=count)
        )
    found = outputs_of(engine)
    assert found[0].logprobs is None
    for number in (1, 2):
        new = found[number].tokens
        logits = model(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert len(found[number].logprobs) == len(new) == 7
        for row, token, (logprob, top) in zip(expected, new, found[number].logprobs):
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            best = row.topk(wanted[number])
            assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [row[t].item() for t, _ in top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_request_without_candidates_fails_alone(seed: int, drafts: int, lag: bool) -> None:
    model = tiny_model(seed)
    prompt = [5, 6, 7]
    nothing = dict.fromkeys(range(VOCAB), -math.inf)
    engine = Engine(model, 3, 64, num_draft_tokens=drafts, async_scheduling=lag)
    failing = engine.add(prompt, greedy(6, logit_bias=nothing))
    drawn = engine.add(prompt, greedy(6, logit_bias=nothing, temperature=1.0, logprobs=1))
    good = engine.add(prompt, greedy(6))
    found = outputs_of(engine)
    assert found[failing] == Output(failing, [], True, "failed")
    assert found[drawn] == Output(drawn, [], True, "failed", [])
    assert found[good] == Output(good, alone(model, prompt, greedy(6)), True, "length")
    assert engine.num_requests == 0 and engine.num_free_blocks == 3


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_request_of_nan_fails_alone_and_leaves_nothing_behind(seed: int, drafts: int) -> None:
    """Its logits become NaN in the middle of its text; the next request gets its slot."""
    model = tiny_model(seed)
    prompt = [5, 6, 7]
    bias = {23: -math.inf}
    expected = alone(model, prompt, greedy(8, logit_bias=bias))
    model.embed.weight.data[23] = math.nan
    engine = Engine(model, 2, 64, num_draft_tokens=drafts, async_scheduling=True)
    spoilt = engine.add(prompt, greedy(8, logit_bias={23: 1e4}))
    beside, after = (engine.add(prompt, greedy(8, logit_bias=bias)) for _ in range(2))
    found = outputs_of(engine)
    assert found[spoilt] == Output(spoilt, [23], True, "failed")
    for number in (beside, after):
        assert found[number] == Output(number, expected, True, "length")


def test_tokens_of_a_bias_are_in_the_vocabulary() -> None:
    engine = Engine(tiny_model(0), 1, 8)
    with pytest.raises(ValueError, match="logit_bias: a token must be at most 23, got 24"):
        engine.add([1], greedy(2, logit_bias={3: 1.0, 24: 1.0}))
    assert engine.num_requests == 0
