"""Speculation proposes what MTP says and changes no token, whatever is accepted."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.cache.manager import CacheManager
from dsv4.cache.step import Step
from dsv4.engine.engine import Engine
from dsv4.engine.forward import decode, prefill
from dsv4.engine.generate import generate
from dsv4.engine.inputs import SAMPLED_HERE, known_inputs
from dsv4.engine.request import Request
from dsv4.engine.request_state import DecodeShape, RequestState
from dsv4.engine.sampling_params import SamplingKind, SamplingParams
from dsv4.layers.hyper_connection import Streams
from tests.engine.tiny_model import (
    BLOCK,
    VOCAB,
    WINDOW,
    PlannedDrafter,
    assert_same_tokens,
    tiny_model,
    tokens,
)

pytestmark = pytest.mark.stage("mtp")

NEW = 24


def with_drafter(model, drafter: PlannedDrafter):
    """The same weights with another drafter."""
    other = tiny_model(0)
    other.load_state_dict(model.state_dict())
    del other.mtp
    other.mtp = [drafter]
    return other


def boundaries(quick: list[tuple[int, int]]) -> list:
    """(prompt length, drafts) around every boundary; all but the quick ones in the full run."""
    lengths = [1, 2, 3, 4, WINDOW - 3, WINDOW, 104, 120, 125, 126, 127, 128, 129, 240, 255]
    pairs = [(length, drafts) for length in lengths for drafts in (1, 2, 5)]
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(
    "length, num_draft_tokens",
    boundaries([(1, 5), (WINDOW, 2), (125, 5), (127, 1), (128, 2)]),
)
def test_accepted_and_rejected_drafts_change_no_token(
    seed: int, length: int, num_draft_tokens: int
) -> None:
    """Around every boundary of entries, window and blocks, for planned patterns of misses."""
    rng = random.Random(seed)
    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), length)
    new = generate(model, [prompt], NEW).tokens[0]
    truth = prompt + new
    everywhere = set(range(len(truth) + 8))
    for misses in (set(), everywhere, {p for p in everywhere if rng.random() < 0.3}):
        drafter = PlannedDrafter(truth, misses)
        result = generate(
            with_drafter(model, drafter), [prompt], NEW, num_draft_tokens=num_draft_tokens
        )
        assert result.tokens == [new], sorted(misses)
        forwards, proposed, accepted = planned_run(length, misses, num_draft_tokens)
        assert result.stats.drafts_proposed == proposed
        assert result.stats.drafts_accepted == accepted
        assert forwards + accepted == NEW - 1
        # MTP saw every position that was kept, with the token that really follows it.
        assert {p: drafter.fed[p] for p in range(len(truth) - 1)} == dict(enumerate(truth[1:]))


def planned_run(length: int, misses: set[int], num_draft_tokens: int) -> tuple[int, int, int]:
    """Decode forwards, drafts proposed and drafts accepted that a plan of misses entails."""
    forwards = proposed = accepted = 0
    known = length + 1  # prefill gives the first token
    while known < length + NEW:
        drafts = range(known, min(known + num_draft_tokens, length + NEW - 1))
        hits = next((i for i, p in enumerate(drafts) if p in misses), len(drafts))
        forwards, proposed, accepted = forwards + 1, proposed + len(drafts), accepted + hits
        known += hits + 1
    return forwards, proposed, accepted


def test_a_stop_token_among_accepted_drafts_ends_the_request_there(seed: int) -> None:
    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), 10)
    new = generate(model, [prompt], NEW).tokens[0]
    model = with_drafter(model, PlannedDrafter(prompt + new, set()))
    for stop in set(new):
        result = generate(model, [prompt], NEW, num_draft_tokens=5, eos_token_id=stop)
        assert result.tokens[0] == new[: new.index(stop) + 1]


@pytest.mark.parametrize("num_draft_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), WINDOW + 2, 126])
def test_drafts_are_what_mtp_says_of_the_whole_sequence(
    seed: int, length: int, num_draft_tokens: int
) -> None:
    """The MTP ring holds every kept position, prefilled or accepted, and nothing of the others."""
    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), length)
    engine = Engine(model, 2, 256, num_draft_tokens=num_draft_tokens, prefill_chunk=40)
    engine.add(prompt, SamplingParams(max_new_tokens=20))
    engine.add(prompt[::-1], SamplingParams(max_new_tokens=20))
    compared = 0
    while engine.num_requests:
        for request in engine._running:
            if not request.decodes:
                continue
            known = request.tokens
            newest, *drafts = engine._state.ints[request.slot, : 1 + num_draft_tokens].tolist()
            assert newest == known[-1]
            assert drafts == chained_drafts(model, known, num_draft_tokens), len(known)
            compared += 1
        engine.step()
    assert compared >= 20


@torch.inference_mode()
def chained_drafts(model, known: list[int], count: int) -> list[int]:
    """Drafts after `known`, from a fresh cache, the whole sequence in one chunk."""
    length = len(known) - 1  # the newest token has no streams yet: its successor is MTP's to say
    blocks = -(-(length + count) // BLOCK)
    cache = model.new_cache(1, blocks, blocks, max_draft=count)

    def step(start: int, size: int) -> Step:
        return Step(
            slots=torch.tensor([0]),
            starts=torch.tensor([start]),
            lens=torch.tensor([size]),
            block_table=torch.arange(blocks)[None],
            chunk=size,
            capacity=blocks * BLOCK,
        )

    ids = torch.tensor([known])
    whole = step(0, length)
    streams = model.mtp[0](model.streams(ids[:, :-1], cache, whole), ids[:, 1:], cache, whole)
    drafts = [model.mtp[0].logits(streams)[:, -1:].argmax(-1)]
    for position in range(length, length + count - 1):
        streams = model.mtp[0](streams[:, -1:], drafts[-1], cache, step(position, 1))
        drafts.append(model.mtp[0].logits(streams).argmax(-1))
    return torch.cat(drafts, dim=1)[0].tolist()


@pytest.mark.parametrize("num_draft_tokens", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_batches_with_a_real_drafter(seed: int, num_draft_tokens: int) -> None:
    """Greedy and sampled requests side by side: the tokens of a run without drafts."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, length) for length in (1, 14, 120, 131)]
    for options in ({}, {"temperature": 0.6, "seed": seed}, {"temperature": 1.2, "top_p": 0.7}):
        options = {"seed": 7} | options
        plain = generate(model, prompts, NEW, **options)
        drafted = generate(model, prompts, NEW, num_draft_tokens=num_draft_tokens, **options)
        assert drafted.stats.drafts_proposed > 0
        for case in zip(prompts, drafted.tokens, plain.tokens):
            assert_same_tokens(model, *case, SamplingParams(**options))


def test_sampled_drafts_hit_when_the_drafter_agrees_with_the_model(seed: int) -> None:
    """Drafts share the noise of their position: with the model's logits they always hit."""

    class Echo:
        """Predicts token t + 2 with the main model itself, over the sequence it has been fed."""

        def __init__(self, model, prompt: list[int]) -> None:
            self.model, self.known = model, list(prompt)

        def unwritten_streams(self, streams, next_ids, cache, step):
            for position, token in zip(step.positions[0], next_ids[0, : int(step.lens[0])]):
                del self.known[int(position) + 1 :]
                self.known.append(int(token))
            return Streams(streams)

        def outputs(self, pending):
            return self.model(torch.tensor([self.known]))[:, -1:], pending.values

    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), 9)
    options = {"temperature": 1.0, "top_p": 0.95, "seed": seed}
    plain = generate(model, [prompt], 13, **options)
    drafted = generate(
        with_drafter(model, Echo(model, prompt)), [prompt], 13, num_draft_tokens=3, **options
    )
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafts_accepted == drafted.stats.drafts_proposed == 9


def test_samples_with_drafts_follow_the_model(seed: int) -> None:
    """Over many seeds, the first two tokens have the distribution of the model's own logits."""
    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), 6)
    engine = Engine(model, 64, 16, num_draft_tokens=2)
    runs = 1500
    for run in range(runs):
        engine.add(prompt, SamplingParams(3, temperature=0.9, seed=seed + run))
    pairs: dict[int, list[int]] = {run: [] for run in range(runs)}
    while engine.num_requests:
        for output in engine.step():
            pairs[output.request] += output.tokens
    counts = torch.zeros(VOCAB, VOCAB)
    for first, second, _ in pairs.values():
        counts[first, second] += 1
    probabilities = torch.softmax(model(torch.tensor([prompt]))[0, -1] / 0.9, -1)[:, None]
    continued = torch.tensor([[*prompt, first] for first in range(VOCAB)])
    probabilities = probabilities * torch.softmax(model(continued)[:, -1] / 0.9, -1)
    expected = probabilities * runs
    assert expected.sum().item() == pytest.approx(runs, rel=1e-4)
    common = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[common].sum().item()
    freedom = int(common.sum())
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5 + 20
    rest, share = counts[~common].sum().item(), expected[~common].sum().item()
    assert abs(rest - share) < 6 * max(share, 1) ** 0.5 + 5


class NoReadback(TorchDispatchMode):
    """Fails on every operation whose result the host would have to wait for."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        boolean_index = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        assert name not in self.FORBIDDEN and not boolean_index, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1},
    "all": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {3: 1.0},
        "logprobs": 2,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_forwards_read_nothing_back(seed: int, options: dict) -> None:
    """What a CUDA graph needs: no step of a decode or prefill forward depends on the host."""
    model = tiny_model(seed)
    cache = model.new_cache(3, 3, 1, max_draft=2)
    manager, state = CacheManager(cache), RequestState(cache, 3)
    sampling = [SamplingParams(**options), SamplingParams()]
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    slots = [manager.admit(20) for _ in prompts]
    for number, (slot, prompt) in enumerate(zip(slots, prompts)):
        request = Request(
            number, prompt, len(prompt), 20, frozenset(), sampling[number], seed, slot
        )
        state.prepare(request)
        state.seat(request)
    following = [[*prompt[1:], SAMPLED_HERE] for prompt in prompts]
    kind = SamplingKind.of(sampling)
    bits = 0 if kind.logprobs is None else 1 + 2 * 20
    with torch.inference_mode():
        step = manager.step(slots, [5, 2], 8)
        inputs = known_inputs(step, state.sampling(step.slots, kind), prompts, following)
        with NoReadback():
            first = prefill(model, cache, inputs, 2, last=True)
            state.begin(inputs, first)
        shape = DecodeShape(3, 3, manager.advance(slots, [3, 3]), kind)
        state.change_table(manager.table_changes())
        state.place(slots, 3)
        with NoReadback():
            result = decode(model, cache, state, state.rows(3), shape)
    assert first.shape == (2, 1 + 1 + 2 + bits)
    assert result.shape == (3, 3 + 1 + 2 + 3 * bits)
    kept = (1 + result[:2, 3]).tolist()
    assert state.ints[:, 3].tolist() == [5 + kept[0], 2 + kept[1], 0, 0]
    with pytest.raises(AssertionError, match="waits for the device"), NoReadback():
        first[0, 0].item()
    with pytest.raises(AssertionError, match="waits for the device"), NoReadback():
        first[first > 0]
