"""`generate`: the shapes of prompts it takes, what it returns, what it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch

from dsv4.engine import forward
from dsv4.engine.generate import generate
from dsv4.engine.stats import GenerationStats
from dsv4.model.model import DeepseekV4
from dsv4.model.mtp import MTPBlock
from tests.engine.tiny_model import VOCAB, assert_same_tokens, tiny_model, tokens


def test_a_tensor_equals_a_list_of_lists(seed: int) -> None:
    model = tiny_model(seed)
    prompts = torch.randint(VOCAB, (3, 6))
    assert generate(model, prompts, 5).tokens == generate(model, prompts.tolist(), 5).tokens


def test_the_model_generates_the_argmax_of_its_own_logits(seed: int) -> None:
    """Against plain forwards without any cache kept between them."""
    model = tiny_model(seed)
    sequence = tokens(torch.Generator().manual_seed(seed), 11)
    new = model.generate([sequence], max_new_tokens=8).tokens[0]
    for token in new:
        assert token == model(torch.tensor([sequence]))[0, -1].argmax()
        sequence = [*sequence, token]


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_greedy_tokens_without_logits(num_drafts, seed: int, monkeypatch) -> None:
    """Where the head finds its largest output by itself, only other requests ask for logits."""
    model = tiny_model(seed, num_nextn_predict_layers=1)
    prompts = torch.randint(VOCAB, (2, 6))
    expected = generate(model, prompts, 5, num_draft_tokens=num_drafts).tokens
    wanted = []

    def best(part, streams):
        logits, written = outputs_of[type(part)](part, streams)
        return logits.argmax(-1), written

    def outputs(part, streams):
        wanted.append(part)
        return outputs_of[type(part)](part, streams)

    outputs_of = {part: part.outputs for part in (DeepseekV4, MTPBlock)}
    for part in outputs_of:
        monkeypatch.setattr(part, "best", best)
        monkeypatch.setattr(part, "outputs", outputs)
    assert generate(model, prompts, 5, num_draft_tokens=num_drafts).tokens == expected
    assert not wanted
    generate(model, prompts, 5, num_draft_tokens=num_drafts, temperature=1.0)
    assert wanted


def test_max_requests_changes_no_token_and_callbacks_see_every_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, length) for length in (3, 40, 9, 130)]
    expected = generate(model, prompts, 7).tokens
    for max_requests in (1, 2, 3):
        seen: list[list[int]] = [[] for _ in prompts]
        result = generate(
            model,
            prompts,
            7,
            max_requests=max_requests,
            on_tokens=lambda index, new, seen=seen: seen[index].extend(new),
        )
        assert result.tokens == seen
        for case in zip(prompts, seen, expected):
            assert_same_tokens(model, *case)


def test_seeds(seed: int) -> None:
    """A seed repeats; prompts beside it do not matter; no seed is a new one each time."""
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, 5), tokens(generator, 17)]
    options = {"temperature": 1.5, "max_new_tokens": 20}
    both = generate(model, prompts, seed=seed, **options).tokens
    assert both == generate(model, prompts, seed=seed, **options).tokens
    assert both[1] == generate(model, prompts[1:], seed=seed, **options).tokens[0]
    assert both != generate(model, prompts, seed=seed + 1, **options).tokens
    free = [generate(model, prompts[:1] * 2, **options).tokens for _ in range(2)]
    assert len({tuple(new) for result in free for new in result}) == 4


def test_temperature_and_top_p_reach_the_sampler(seed: int) -> None:
    """Each narrows sampling to the likeliest token at its end of the range, and only there."""
    model = tiny_model(seed)
    prompt = [tokens(torch.Generator().manual_seed(seed), 8)]
    greedy = generate(model, prompt, 30).tokens
    assert generate(model, prompt, 30, temperature=1.0, top_p=1e-6, seed=seed).tokens == greedy
    assert generate(model, prompt, 30, temperature=1e-9, seed=seed).tokens == greedy
    assert generate(model, prompt, 30, temperature=1.0, seed=seed).tokens != greedy


def test_end_of_sequence_ids(seed: int) -> None:
    model = tiny_model(seed)
    prompt = tokens(torch.Generator().manual_seed(seed), 12)
    free = generate(model, [prompt], 20).tokens[0]
    for eos in (free[4], (free[4],), [free[4], free[2]]):
        stops = {eos} if isinstance(eos, int) else set(eos)
        first = next(i for i, token in enumerate(free) if token in stops)
        assert generate(model, [prompt], 20, eos_token_id=eos).tokens[0] == free[: first + 1]
    model = tiny_model(seed, eos_token_id=free[4])
    assert generate(model, [prompt], 20).tokens[0] == free[: free.index(free[4]) + 1]
    assert generate(model, [prompt], 20, eos_token_id=()).tokens[0] == free


def test_stats_count_what_ran(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed)
    prompts = [tokens(generator, 10), tokens(generator, 20)]
    stats = generate(model, prompts, 6).stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (30, 10)
    assert (stats.drafts_proposed, stats.drafts_accepted) == (0, 0)
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    assert "drafts" not in str(stats)
    drafted = generate(model, prompts, 6, num_draft_tokens=2).stats
    assert drafted.decode_tokens == 10
    assert drafted.drafts_proposed > 0


def test_the_method_has_the_signature_of_the_function() -> None:
    method = inspect.signature(DeepseekV4.generate).parameters
    function = inspect.signature(generate).parameters
    assert list(method)[1:] == list(function)[1:]
    for name in list(function)[1:]:
        assert method[name].default == function[name].default, name
        assert method[name].annotation == function[name].annotation, name


def test_drafts_that_could_not_count_are_not_made(seed: int, monkeypatch) -> None:
    made = []
    draft = forward._draft
    monkeypatch.setattr(forward, "_draft", lambda *args: made.append(args[-1]) or draft(*args))
    generate(tiny_model(seed), [[1, 2]], 3, num_draft_tokens=60)
    assert set(made) == {2}


def test_stats_as_text() -> None:
    assert str(GenerationStats()) == (
        "prefill 0 tokens, 0.0 tokens/s; decode 0 tokens, 0.0 tokens/s"
    )
    assert str(GenerationStats(100, 0.5, 30, 2.0, 20, 5)) == (
        "prefill 100 tokens, 200.0 tokens/s; decode 30 tokens, 15.0 tokens/s; "
        "drafts accepted 5/20 (25%)"
    )


@pytest.mark.parametrize(
    "prompts, options, error, message",
    [
        ([], {}, ValueError, "prompts must hold at least one prompt, got none"),
        ([[1], []], {}, ValueError, r"prompts\[1\] must hold at least one token, got none"),
        ([[1], [2, VOCAB]], {}, ValueError, rf"prompts\[1\]\[1\] must be in .* got {VOCAB}"),
        ([1, 2], {}, TypeError, r"prompts\[0\] must be a list or 1-D tensor .*, got 1"),
        (torch.ones(2, 2), {}, TypeError, r"prompts\[0\] must be .*torch.float32"),
        (torch.ones(2).long(), {}, TypeError, r"prompts must be \[B, S\], got .* shape \[2\]"),
        (5, {}, TypeError, "prompts must be a list of token lists, got 5"),
        ("ab", {}, TypeError, "prompts must be a list of token lists, got 'ab'"),
        ([[True]], {}, TypeError, r"prompts\[0\] must be a list or 1-D tensor of integers"),
        ([[1]], {"max_new_tokens": None}, TypeError, "max_new_tokens must be an integer, got None"),
        ([[1]], {"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an integer, got 2.5"),
        ([[1]], {"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ([[1]], {"eos_token_id": "1"}, TypeError, "eos_token_id must be a tuple of integers"),
        ([[1]], {"eos_token_id": 1.5}, TypeError, r"eos_token_id\[0\] must be an integer, got 1.5"),
        ([[1]], {"eos_token_id": -1}, ValueError, r"eos_token_id\[0\] must be at least 0, got -1"),
        ([[1]], {"eos_token_id": [VOCAB]}, ValueError, r"eos_token_id\[0\] must be at most"),
        ([[1]], {"num_draft_tokens": 1.0}, TypeError, "num_draft_tokens must be an integer"),
        ([[1]], {"num_draft_tokens": 5000}, ValueError, "num_draft_tokens must be at most 64"),
        ([[1]], {"prefill_chunk": 2.5}, TypeError, "prefill_chunk must be an integer, got 2.5"),
        ([[1]], {"max_requests": 1.5}, TypeError, "max_requests must be an integer, got 1.5"),
        ([[1]], {"use_cuda_graphs": 1}, TypeError, "use_cuda_graphs must be a bool or None, got 1"),
        ([[1]], {"batch_invariant": 1}, TypeError, "batch_invariant must be a bool, got 1"),
        ([[1]], {"on_tokens": 3}, TypeError, "on_tokens must be callable, got 3"),
        ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ([[1] * 4000], {"max_new_tokens": 97}, ValueError, "4000 tokens, .* 97 .* context of 4096"),
        ([[1]], {"temperature": -1}, ValueError, "temperature must be"),
        ([[1]], {"top_p": 0}, ValueError, "top_p must be"),
        ([[1]], {"num_draft_tokens": -1}, ValueError, "num_draft_tokens must be at least 0"),
        ([[1]], {"prefill_chunk": 0}, ValueError, "prefill_chunk must be at least 1"),
        ([[1]], {"max_requests": 0}, ValueError, "max_requests must be at least 1"),
    ],
)
def test_refusals_name_the_argument(prompts, options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        generate(tiny_model(0), prompts, **({"max_new_tokens": 3} | options))
