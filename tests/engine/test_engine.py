"""The engine: requests that come, wait, share forwards, give up their blocks, stop and leave."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

from dsv4.engine.engine import Engine
from dsv4.engine.generate import generate
from dsv4.engine.sampling_params import SamplingParams
from tests.engine.driving import alone, drain, greedy, outputs_of
from tests.engine.tiny_model import BLOCK, WINDOW, assert_same_tokens, tiny_model, tokens

pytestmark = pytest.mark.stage("cache")


def test_requests_that_join_and_leave_at_different_times(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = Engine(model, max_requests=3, max_context=320, num_blocks=7)
    lengths = [(3, 20), (140, 5), (1, 40), (250, 30), (60, 1), (WINDOW, 17), (129, 12)]
    requests = [(tokens(generator, n), greedy(m)) for n, m in lengths]
    ids = [engine.add(*request) for request in requests[:2]]
    new = defaultdict(list)
    while engine.num_requests:
        for request, more, *_ in engine.step():
            new[request] += more
        if len(ids) < len(requests) and engine.stats.decode_tokens > 3 * len(ids):
            ids.append(engine.add(*requests[len(ids)]))
    assert len(ids) == len(requests)
    for i, request in zip(ids, requests):
        assert_same_tokens(model, request[0], new[i], alone(model, *request))
    assert engine.num_free_blocks == 7


# Chunks around the window, the ratios, a block and the prompt's own length.
EVERY_CHUNK = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 64, 127, 128, 129, 130, 131, 132, 151, 400)


@pytest.mark.parametrize(
    ("num_draft_tokens", "chunks"),
    [
        (2, (5, 16, 127, 131, 400)),
        *(pytest.param(n, EVERY_CHUNK, marks=pytest.mark.slow) for n in (0, 2)),
    ],
)
def test_every_prefill_chunk_gives_the_same_tokens(
    seed: int, num_draft_tokens: int, chunks: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, length) for length in (131, 2, 18)]
    expected = generate(model, prompts, 6).tokens
    for chunk in chunks:
        result = generate(model, prompts, 6, prefill_chunk=chunk, num_draft_tokens=num_draft_tokens)
        for case in zip(prompts, result.tokens, expected):
            assert_same_tokens(model, *case)


def test_prefill_forwards_stay_within_the_chunk(seed: int, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    sizes = []
    streams = model.unwritten_streams
    monkeypatch.setattr(
        model,
        "unwritten_streams",
        lambda ids, *rest: sizes.append(ids.numel()) or streams(ids, *rest),
    )
    generate(model, [tokens(generator, n) for n in (30, 31, 90, 4, 4, 4)], 1, prefill_chunk=64)
    # 30 and 31 side by side; 64 of the 90; its last 26 beside 4 padded to 26, a third row would be
    # 78; the last two.
    assert sizes == [62, 64, 52, 8]


@pytest.mark.parametrize("drafts", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_exhausted_blocks_delay_requests_but_change_nothing(seed: int, drafts: int) -> None:
    """Growing requests take the youngest's blocks; it is recomputed to the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    sampling = [
        greedy(40),
        greedy(40, temperature=1.0, seed=5),
        greedy(40, temperature=0.8, top_p=0.9, seed=6),
    ]
    prompts = [tokens(generator, BLOCK - 20) for _ in sampling]
    engine = Engine(
        model, 3, 2 * BLOCK, num_draft_tokens=drafts, num_blocks=4, async_scheduling=True
    )
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
    """A captured graph serves a shape: rows and blocks come in few sizes, up to the limits."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    engine = Engine(model, max_requests=5, max_context=3 * BLOCK - 2, num_draft_tokens=2)
    shapes = set()
    streams = model.unwritten_streams

    def record(ids, cache, step):
        if step.chunk == 3:
            shapes.add((*ids.shape, step.capacity // BLOCK))
        return streams(ids, cache, step)

    monkeypatch.setattr(model, "unwritten_streams", record)
    for length, count in ((250, 20), (9, 25), (100, 40), (20, 8), (64, 12)):
        engine.add(tokens(generator, length), greedy(count))
    drain(engine)
    rows, _, blocks = map(set, zip(*shapes))
    assert rows >= {1, 5} and rows <= {1, 2, 4, 5}  # `padded_rows`
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


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_the_end_of_the_context_ends_a_request_and_says_so(
    seed: int, num_draft_tokens: int
) -> None:
    """Beside one with a number of its own; a cache that is smaller than a context ends it, too."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompt = tokens(generator, BLOCK - 9)
    expected = alone(model, prompt, greedy(12))
    for context, blocks in ((BLOCK + 3, None), (4 * BLOCK, 1)):
        count = min(context, BLOCK * (blocks or 4)) - len(prompt)
        engine = Engine(
            model, 2, context, num_draft_tokens=num_draft_tokens, num_blocks=blocks,
            async_scheduling=True,
        )  # fmt: skip
        engine.add(prompt, SamplingParams(max_new_tokens=None))
        engine.add(prompt, greedy(2))
        found = outputs_of(engine)
        assert (found[0].reason, found[1].reason) == ("context", "length")
        assert len(found[0].tokens) == count
        assert_same_tokens(model, prompt, found[0].tokens, expected[:count])
        longest = len(prompt) + count
        with pytest.raises(ValueError, match=f"got {longest} tokens, .* at most {longest - 1}"):
            engine.add([1] * longest, SamplingParams(max_new_tokens=None))
    stopped = SamplingParams(max_new_tokens=None, stop_tokens=(expected[1],))
    engine.add(prompt, stopped)
    assert outputs_of(engine)[2].reason == "stop"


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
    engine = Engine(
        model,
        max_requests=3,
        max_context=320,
        num_draft_tokens=1,
        prefill_chunk=64,
        async_scheduling=layer == 0,
    )
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
            for request, more, *_ in engine.step():
                new[request] += more
        except torch.OutOfMemoryError:
            failures += 1
    hook.remove()
    assert failures == len(failing)
    for i, request in enumerate(requests):
        assert_same_tokens(model, request[0], new[i], alone(model, *request))
    assert engine.num_free_blocks == 3 * 3


def _engine_that_failed_after_a_result(model) -> tuple[Engine, int, int]:
    """Two requests; the second's prefill raises in the step in which the first ends by decoding."""
    engine = Engine(model, 2, BLOCK)
    first = engine.add([1, 2, 3], greedy(2))
    engine.step()
    second = engine.add([4, 5], greedy(5))

    def fail(*_) -> None:
        raise MemoryError("prefill")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_prefill", fail)
        with pytest.raises(MemoryError):
            engine.step()
    return engine, first, second


def test_a_result_of_a_step_that_raised_is_counted_until_it_is_delivered(seed: int) -> None:
    engine, first, second = _engine_that_failed_after_a_result(tiny_model(seed))
    assert engine.num_requests == 2
    assert engine.cancel(second)
    assert engine.num_requests == 1, "the last tokens of the first request would never be fetched"
    [output] = engine.step()
    assert (output.request, len(output.tokens), output.finished) == (first, 1, True)
    assert engine.num_requests == 0
    assert engine.step() == []


def test_nothing_is_delivered_after_a_cancel(seed: int) -> None:
    engine, first, second = _engine_that_failed_after_a_result(tiny_model(seed))
    assert engine.cancel(first), "its tokens had not been delivered"
    assert not engine.cancel(first)
    delivered = drain(engine)
    assert list(delivered) == [second]
    assert engine.num_free_blocks == 2


def test_tokens_found_before_an_interrupt_are_delivered(seed: int, monkeypatch) -> None:
    """Also where the interrupt comes between the requests of one forward."""
    model = tiny_model(seed)
    engine = Engine(model, 2, BLOCK)
    prompts = [[1, 2, 3], [4, 5]]
    for prompt in prompts:
        engine.add(prompt, greedy(6))
    truncate, calls = engine._manager.truncate, []

    def interrupt(slot: int, length: int) -> None:
        calls.append(slot)
        if len(calls) == 6:
            raise KeyboardInterrupt
        truncate(slot, length)

    monkeypatch.setattr(engine._manager, "truncate", interrupt)
    new = defaultdict(list)
    while engine.num_requests:
        try:
            for request, more, *_ in engine.step():
                new[request] += more
        except KeyboardInterrupt:
            continue
    for i, prompt in enumerate(prompts):
        assert_same_tokens(model, prompt, new[i], alone(model, prompt, greedy(6)))


@pytest.mark.parametrize("actions", [100, pytest.param(250, marks=pytest.mark.slow)])
def test_random_schedules(seed: int, actions: int) -> None:
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
        async_scheduling=rng.random() < 0.7,
    )
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    new: dict[int, list[int]] = defaultdict(list)
    finished: set[int] = set()
    for _ in range(actions):
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
            for request, more, done, *_ in engine.step():
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
