"""Requests through an engine, step by step."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from dsv4.engine.engine import Engine
from dsv4.engine.request import Output
from dsv4.engine.sampling_params import SamplingParams


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **options)


def alone(model, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """What the request gets from an engine of its own, one token per forward."""
    engine = Engine(model, 1, len(prompt) + sampling.max_new_tokens)
    engine.add(prompt, sampling)
    return drain(engine)[0]


def recorded_logits(model, monkeypatch) -> list[Tensor]:
    """Filled with the logits of every forward from here on."""
    seen, original = [], type(model).outputs

    def recording(self, streams):
        logits, streams = original(self, streams)
        seen.append(logits)
        return logits, streams

    monkeypatch.setattr(type(model), "outputs", recording)
    return seen


def drain(engine: Engine) -> dict[int, list[int]]:
    """Step until nothing is left; the tokens of each request."""
    new = defaultdict(list)
    while engine.num_requests:
        for output in engine.step():
            new[output.request] += output.tokens
    return dict(new)


def outputs_of(engine: Engine) -> dict[int, Output]:
    """All that each request got, as one output."""
    found: dict[int, Output] = {}
    while engine.num_requests:
        for output in engine.step():
            earlier = found.get(output.request)
            found[output.request] = output if earlier is None else earlier.then(output)
    return found
