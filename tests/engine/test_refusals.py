"""What an engine refuses, and how it names the argument."""

from __future__ import annotations

import pytest
import torch

from dsv4.engine.arguments import MAX_DRAFT_TOKENS
from dsv4.engine.engine import Engine
from tests.engine.driving import alone, drain, greedy
from tests.engine.tiny_model import VOCAB, tiny_model

pytestmark = pytest.mark.stage("cache")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"max_context": 1}, "max_context must be at least 2, got 1"),
        ({"max_context": 4097}, "max_context must be at most the model's 4096"),
        ({"num_draft_tokens": MAX_DRAFT_TOKENS + 1}, "num_draft_tokens must be at most 64"),
        (
            {"num_draft_tokens": 1, "batch_invariant": True},
            "num_draft_tokens must be 0 with batch_invariant, got 1",
        ),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
    ],
)
def test_arguments_of_an_engine(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model(0), **({"max_requests": 1, "max_context": 8} | options))


@pytest.mark.parametrize(
    "name", ["max_requests", "max_context", "num_draft_tokens", "prefill_chunk", "num_blocks"]
)
@pytest.mark.parametrize("value", [1.5, "2", True, [3]])
def test_types_of_its_arguments(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
        Engine(tiny_model(0), **({"max_requests": 1, "max_context": 8} | {name: value}))


def test_stop_tokens_outside_the_vocabulary() -> None:
    engine = Engine(tiny_model(0), 1, 8)
    with pytest.raises(ValueError, match=r"stop_tokens\[1\] must be at most 23, got 1000"):
        engine.add([1], greedy(2, stop_tokens=(3, 10**9)))
    with pytest.raises(TypeError, match="sampling must be SamplingParams, got 3"):
        engine.add([1], 3)
    with pytest.raises(TypeError, match="request_id must be an integer, got '0'"):
        engine.cancel("0")
    assert engine.num_requests == 0


def test_drafts_without_mtp() -> None:
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
def test_arguments_of_a_request(prompt, error: type[Exception], message: str) -> None:
    engine = Engine(tiny_model(0), 1, 256, num_blocks=1)
    with pytest.raises(error, match=message):
        engine.add(prompt, greedy(7))
    assert engine.num_requests == 0


def test_a_tensor_is_a_prompt(seed: int) -> None:
    model = tiny_model(seed)
    prompt = [3, 1, 4, 1, 5]
    engine = Engine(model, 1, 16)
    engine.add(torch.tensor(prompt), greedy(4))
    assert drain(engine)[0] == alone(model, prompt, greedy(4))
