"""The engine: requests that come, wait, share forwards, give up their blocks, stop and leave."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from dsv4.engine.engine import Engine
from dsv4.engine.generate import generate
from dsv4.engine.sampler import SamplingParams
from tests.engine.tiny_model import BLOCK, VOCAB, WINDOW, assert_same_tokens, tiny_model, tokens

pytestmark = pytest.mark.stage("cache")


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **options)


def alone(model, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """What the request gets from an engine of its own, one token per forward."""
    engine = Engine(model, 1, len(prompt) + sampling.max_new_tokens)
    engine.add(prompt, sampling)
    return drain(engine)[0]


def drain(engine: Engine) -> dict[int, list[int]]:
    """Step until nothing is left; the tokens of each request."""
    new = defaultdict(list)
    while engine.num_requests:
        for output in engine.step():
            new[output.request] += output.tokens
    return dict(new)


def test_requests_that_join_and_leave_at_different_times(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = Engine(model, max_requests=3, max_context=320, num_blocks=7)
    lengths = [(3, 20), (140, 5), (1, 40), (250, 30), (60, 1), (WINDOW, 17), (129, 12)]
    requests = [(tokens(generator, n), greedy(m)) for n, m in lengths]
    ids = [engine.add(*request) for request in requests[:2]]
    new = defaultdict(list)
    while engine.num_requests:
        for request, more, _ in engine.step():
            new[request] += more
        if len(ids) < len(requests) and engine.stats.decode_tokens > 3 * len(ids):
            ids.append(engine.add(*requests[len(ids)]))
    assert len(ids) == len(requests)
    for i, request in zip(ids, requests):
        assert_same_tokens(model, request[0], new[i], alone(model, *request))
    assert engine.num_free_blocks == 7


@pytest.mark.parametrize("num_draft_tokens", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_every_prefill_chunk_gives_the_same_tokens(seed: int, num_draft_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, length) for length in (131, 2, 18)]
    expected = generate(model, prompts, 6).tokens
    for chunk in (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 64, 127, 128, 129, 130, 131, 132, 151, 400):
        result = generate(model, prompts, 6, prefill_chunk=chunk, num_draft_tokens=num_draft_tokens)
        for case in zip(prompts, result.tokens, expected):
            assert_same_tokens(model, *case)


def test_prefill_forwards_stay_within_the_chunk(seed: int, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    sizes = []
    streams = model.streams
    monkeypatch.setattr(
        model, "streams", lambda ids, *rest: sizes.append(ids.numel()) or streams(ids, *rest)
    )
    generate(model, [tokens(generator, n) for n in (30, 31, 90, 4, 4, 4)], 1, prefill_chunk=64)
    # 30 and 31 side by side; 64 of the 90; its last 26 beside 4 padded to 26, a third row would be
    # 78; the last two.
    assert sizes == [62, 64, 52, 8]


def test_exhausted_blocks_delay_requests_but_change_nothing(seed: int) -> None:
    """Growing requests take the youngest's blocks; it is recomputed to the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    sampling = [
        greedy(60),
        greedy(60, temperature=1.0, seed=5),
        greedy(60, temperature=0.8, top_p=0.9, seed=6),
    ]
    prompts = [tokens(generator, BLOCK - 20) for _ in sampling]
    for drafts in (0, 3):
        engine = Engine(model, 3, 2 * BLOCK, num_draft_tokens=drafts, num_blocks=4)
        for request in zip(prompts, sampling):
            engine.add(*request)
        new = drain(engine)
        assert engine.stats.prefill_tokens > sum(map(len, prompts)), "nothing was ever preempted"
        for i, (prompt, how) in enumerate(zip(prompts, sampling)):
            assert_same_tokens(model, prompt, new[i], alone(model, prompt, how), how)
        assert engine.num_free_blocks == 4


def test_the_oldest_request_always_proceeds_and_a_preempted_one_is_next(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    engine = Engine(tiny_model(seed), max_requests=2, max_context=2 * BLOCK, num_blocks=3)
    for length in (BLOCK - 20, BLOCK - 20, 5):
        engine.add(tokens(generator, length), greedy(60))
    # When both long requests have grown into a second block, one too many, the short one could
    # take the slot of the second: it must not overtake.
    finished = []
    while engine.num_requests:
        finished += [output.request for output in engine.step() if output.finished]
    assert engine.stats.prefill_tokens > 2 * BLOCK, "nothing was ever preempted"
    assert finished == [0, 1, 2]


def test_requests_wait_for_blocks_in_the_order_they_came(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    engine = Engine(tiny_model(seed), 4, 4 * BLOCK, num_blocks=4)
    for length in (3 * BLOCK, 2 * BLOCK, 5):  # the last would fit beside the first
        engine.add(tokens(generator, length), greedy(4))
    first_tokens = []
    while engine.num_requests:
        for output in engine.step():
            if output.request not in first_tokens:
                first_tokens.append(output.request)
    assert first_tokens == [0, 1, 2]
    assert engine.num_free_blocks == 4


def test_decode_forwards_have_few_shapes(seed: int, monkeypatch) -> None:
    """A captured graph serves a shape: rows and blocks come in powers of two, up to the limits."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = Engine(model, max_requests=5, max_context=3 * BLOCK - 2, num_draft_tokens=2)
    shapes = set()
    streams = model.streams

    def record(ids, cache, step):
        if step.chunk == 3:
            shapes.add((*ids.shape, step.capacity // BLOCK))
        return streams(ids, cache, step)

    monkeypatch.setattr(model, "streams", record)
    for length, count in ((250, 20), (9, 25), (100, 40), (20, 8), (64, 12)):
        engine.add(tokens(generator, length), greedy(count))
    drain(engine)
    rows, _, blocks = map(set, zip(*shapes))
    assert rows >= {1, 5} and rows <= {1, 2, 4, 5}
    assert blocks >= {2, 3} and blocks <= {1, 2, 3}


def test_stop_tokens_end_a_request(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompt = tokens(generator, 20)
    free = alone(model, prompt, greedy(30))
    stop = free[len(free) // 2]
    expected = free[: free.index(stop) + 1]
    for drafts in (0, 1, 4):
        engine = Engine(model, 1, 64, num_draft_tokens=drafts)
        engine.add(prompt, greedy(30, stop_tokens=(stop,)))
        outputs = []
        while engine.num_requests:
            outputs += engine.step()
        assert [token for output in outputs for token in output.tokens] == expected
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert engine.num_free_blocks == 1


def test_the_model_names_the_stop_tokens_unless_the_request_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompt = tokens(generator, 20)
    free = alone(tiny_model(seed), prompt, greedy(30))
    for eos in (free[3], (free[3], free[5])):
        model = tiny_model(seed, eos_token_id=eos)
        stops = {eos} if isinstance(eos, int) else set(eos)
        first = next(i for i, token in enumerate(free) if token in stops)
        assert alone(model, prompt, greedy(30)) == free[: first + 1]
        assert alone(model, prompt, greedy(30, stop_tokens=())) == free


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_max_new_tokens_and_the_whole_context_are_used(seed: int, num_draft_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    expected = alone(model, prompt := tokens(generator, 120), greedy(8))
    for count in range(1, 9):
        engine = Engine(model, 1, 120 + count, num_draft_tokens=num_draft_tokens)
        engine.add(prompt, greedy(count))
        assert_same_tokens(model, prompt, drain(engine)[0], expected[:count])


def test_cancel_frees_waiting_and_running_requests(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = Engine(model, 2, 2 * BLOCK, prefill_chunk=64)
    prompts = [tokens(generator, n) for n in (5, 200, 9)]
    running, prefilling, waiting = (engine.add(prompt, greedy(20)) for prompt in prompts)
    engine.step()
    engine.step()
    assert engine.cancel(prefilling)
    assert not engine.cancel(prefilling)
    assert engine.num_free_blocks == 3
    late = engine.add(prompts[0], greedy(3))
    assert engine.cancel(waiting)
    assert drain(engine)[late] == alone(model, prompts[0], greedy(3))
    assert not engine.cancel(running)
    assert (engine.num_free_blocks, engine.num_requests) == (4, 0)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="request_id"):
            engine.cancel(wrong)


def test_an_idle_engine_does_nothing_and_a_new_request_starts_at_once() -> None:
    engine = Engine(tiny_model(0), 1, 8)
    assert engine.step() == []
    engine.add([3], greedy(2))
    assert [len(engine.step()), len(engine.step()), len(engine.step())] == [1, 1, 0]


@pytest.mark.parametrize("layer", [0, -1], ids=["first layer", "last layer"])
def test_a_forward_that_raises_loses_nothing(seed: int, layer: int) -> None:
    """Out of memory before or after layers wrote to the cache: stepping on gives equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    model = tiny_model(seed)
    engine = Engine(model, max_requests=3, max_context=320, num_draft_tokens=1, prefill_chunk=64)
    lengths = [(5, 12), (140, 9), (70, 6)]
    requests = [(tokens(generator, n), greedy(m)) for n, m in lengths]
    for request in requests:
        engine.add(*request)
    failing, calls = set(rng.sample(range(12), 4)), 0

    def fail_sometimes(*_) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 in failing:
            raise torch.OutOfMemoryError("out of memory")

    hook = model.layers[layer].register_forward_pre_hook(fail_sometimes)
    new, failures = defaultdict(list), 0
    while engine.num_requests:
        try:
            for request, more, _ in engine.step():
                new[request] += more
        except torch.OutOfMemoryError:
            failures += 1
    hook.remove()
    assert failures == len(failing)
    for i, request in enumerate(requests):
        assert_same_tokens(model, request[0], new[i], alone(model, *request))
    assert engine.num_free_blocks == 3 * 3


def test_random_schedules(seed: int) -> None:
    """Added, stepped and cancelled under a tight budget: each gets its tokens, nothing leaks."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    blocks = 5
    engine = Engine(
        model,
        max_requests=3,
        max_context=3 * BLOCK,
        num_draft_tokens=rng.choice([0, 1, 2]),
        prefill_chunk=rng.choice([50, 128, 200]),
        num_blocks=blocks,
    )
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    new: dict[int, list[int]] = defaultdict(list)
    finished: set[int] = set()
    for _ in range(250):
        action = rng.random()
        if action < 0.12 and len(requests) < 14:
            length = rng.choice([1, 4, 15, 100, 120, 127, 128, 130, 250])
            sampling = greedy(
                rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.7]),
                top_p=rng.choice([1.0, 0.8]),
                seed=rng.randint(0, 99),
            )
            request = tokens(generator, length), sampling
            requests[engine.add(*request)] = request
        elif action < 0.15 and requests:
            victim = rng.choice(list(requests))
            assert engine.cancel(victim) == (victim not in finished)
            if victim not in finished:
                del requests[victim]
        else:
            for request, more, done in engine.step():
                assert more and request not in finished
                new[request] += more
                if done:
                    finished.add(request)
        assert 0 <= engine.num_free_blocks <= blocks
    for request, more in drain(engine).items():
        new[request] += more
    assert engine.num_free_blocks == blocks
    for request, (prompt, sampling) in requests.items():
        assert_same_tokens(model, prompt, new[request], alone(model, prompt, sampling), sampling)


class TestRefusals:
    @pytest.mark.parametrize(
        "options, message",
        [
            ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
            ({"max_context": 1}, "max_context must be at least 2, got 1"),
            ({"max_context": 4097}, "max_context must be at most the model's 4096"),
            ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
            ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
            ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ],
    )
    def test_engine(self, options: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Engine(tiny_model(0), **({"max_requests": 1, "max_context": 8} | options))

    def test_drafts_without_mtp(self) -> None:
        model = tiny_model(0, num_nextn_predict_layers=0)
        with pytest.raises(ValueError, match=r"num_draft_tokens must be 0: .* no MTP layer, got 1"):
            Engine(model, 1, 8, num_draft_tokens=1)

    @pytest.mark.parametrize(
        "prompt, error, message",
        [
            ([], ValueError, "prompt_ids must hold at least one token, got none"),
            ([1, VOCAB], ValueError, rf"prompt_ids\[1\] must be in \[0, {VOCAB}\), got {VOCAB}"),
            ([-1], ValueError, r"prompt_ids\[0\] must be in"),
            ([1.0], TypeError, r"prompt_ids must be a list or 1-D tensor .* got \[1.0\]"),
            ("ab", TypeError, r"prompt_ids must be .* got 'ab'"),
            (3, TypeError, r"prompt_ids must be .* got 3"),
            (torch.zeros(2, 2, dtype=torch.long), TypeError, r"torch.int64 .* shape \[2, 2\]"),
            (torch.zeros(2), TypeError, r"torch.float32 tensor of shape \[2\]"),
            ([1] * 250, ValueError, "250 tokens and max_new_tokens = 7 exceed the context of 256"),
            ([1] * 122, ValueError, "need 2 cache blocks, the cache has 1"),
        ],
    )
    def test_request(self, prompt, error: type[Exception], message: str) -> None:
        engine = Engine(tiny_model(0), 1, 256, num_blocks=1)
        with pytest.raises(error, match=message):
            engine.add(prompt, greedy(7))
        assert engine.num_requests == 0

    def test_a_tensor_is_a_prompt(self, seed: int) -> None:
        model = tiny_model(seed)
        prompt = [3, 1, 4, 1, 5]
        engine = Engine(model, 1, 16)
        engine.add(torch.tensor(prompt), greedy(4))
        assert drain(engine)[0] == alone(model, prompt, greedy(4))
