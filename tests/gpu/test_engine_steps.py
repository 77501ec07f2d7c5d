"""Steps of an engine on a GPU: no wait between them, texts with and without, the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.engine.engine import Engine
from dsv4.engine.sampler import FAILED, GREEDY, Penalties, SamplingBatch, sample
from dsv4.engine.sampling_params import SamplingParams
from dsv4.loader.tokenizer import load_tokenizer
from dsv4.model.model import DeepseekV4

pytestmark = [pytest.mark.gpu, pytest.mark.stage("sampler")]

FOLDER = Path(__file__).parents[2] / "checkpoints" / "tiny"
DEVICE = torch.device("cuda", 0)
VOCAB = 129_280
STEP_CYCLES = 40_000_000  # some 20 ms: no host is that slow, not even beside other tests


@pytest.fixture(scope="module")
def text() -> list[int]:
    return load_tokenizer(FOLDER).encode((FOLDER / "held_out.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return dsv4.load(FOLDER, device=DEVICE, dtype=torch.bfloat16)


def batch(rows: int, device: torch.device, **options: object) -> SamplingBatch:
    """Rows that sample, with seeds of their own."""
    numbers = torch.arange(rows, device=device)
    given = dict(greedy=False, nucleus="top_p" in options) | options
    given["top_p"] = torch.full((rows,), options.get("top_p", 1.0), device=device)
    return SamplingBatch(torch.full((rows,), 0.9, device=device), seed=numbers, **given)


def every_option(rows: int, vocab: int, device: torch.device) -> dict[str, object]:
    """Options of `batch`."""
    generator = torch.Generator().manual_seed(rows)

    def random(high: int) -> torch.Tensor:
        return torch.randint(high, (rows, vocab), generator=generator).to(device)

    def constant(value: float) -> torch.Tensor:
        return torch.full((rows,), value, device=device)

    return {
        "top_p": 0.9,
        "top_k": torch.full((rows,), 200, device=device),
        "min_p": constant(0.001),
        "penalties": Penalties(
            constant(1.2), constant(0.2), constant(0.1), random(2).bool(), random(3).int()
        ),
        "bias": (random(vocab)[:, :1], constant(1.0)[:, None]),
    }


@pytest.mark.parametrize("rows", [1, 5])
def test_tokens_are_the_cpus(seed: int, rows: int) -> None:
    """Of equal logits; draws but for the rounding of logarithms."""
    logits = torch.randn(rows, 3, VOCAB) * 3
    logits[0, 0, 77] = math.nan
    logits[-1, 1] = -math.inf
    logits[-1, 2, [5, 9]] = math.inf
    logits[:, 0, 500:] = logits[:, 0, 500:].round()  # many equals
    positions = torch.randint(1000, (rows, 3))
    following = torch.randint(VOCAB, (rows, 2))
    cpu = torch.device("cpu")
    batches: list[Callable[[torch.device], SamplingBatch]] = [
        lambda device: GREEDY,
        lambda device: batch(rows, device),
        lambda device: batch(rows, device, top_p=0.8),
        lambda device: batch(rows, device, **every_option(rows, VOCAB, device)),
    ]
    for make in batches:
        expected = sample(logits, positions, make(cpu), following)
        given = (tensor.to(DEVICE) for tensor in (logits, positions))
        found = sample(*given, make(DEVICE), following.to(DEVICE)).cpu()
        assert expected[0, 0] == expected[-1, 1] == FAILED
        assert ((found == FAILED) == (expected == FAILED)).all()
        assert (found != expected).sum() <= (0 if make(cpu) is GREEDY else 1)


def requests_of(text: list[int]) -> list[tuple[list[int], SamplingParams]]:
    return [
        (text[start : start + length], SamplingParams(max_new_tokens=count, **options))
        for start, length, count, options in (
            (0, 90, 60, {}),
            (1000, 120, 25, {"presence_penalty": 0.5, "logprobs": 2}),
            (2000, 250, 30, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}),
            (3000, 5, 40, {"temperature": 1.0, "min_p": 0.05, "seed": 2}),
            (4000, 30, 12, {"logit_bias": dict.fromkeys(range(1024), -math.inf)}),
            (5000, 200, 70, {"stop_tokens": tuple(range(0, 1024, 40))}),
        )
    ]


@pytest.mark.parametrize("drafts", [0, 2])
def test_texts_are_those_of_an_engine_that_waits(model, text, drafts: int) -> None:
    """One request at a time, so that forwards have the same shapes; graphs and eager forwards."""
    found = []
    for lag, graphs in ((False, False), (False, True), (True, False), (True, True)):
        engine = Engine(
            model,
            1,
            400,
            num_draft_tokens=drafts,
            use_cuda_graphs=graphs,
            async_scheduling=lag,
        )
        for request in requests_of(text):
            engine.add(*request)
        new: dict[int, list] = {}
        while engine.num_requests:
            for output in engine.step():
                tokens, logprobs, _ = new.get(output.request, ([], [], None))
                logprobs = logprobs + (output.logprobs or [])
                new[output.request] = (tokens + output.tokens, logprobs, output.reason)
        found.append(new)
    assert found[0] == found[1] == found[2] == found[3]
    reasons = [found[0][number][2] for number in range(6)]
    assert reasons[4] == "failed" and reasons[:4] == ["length"] * 4


@pytest.mark.parametrize("rows", [1, 64])
def test_a_step_is_queued_while_the_one_before_runs(model, text, rows: int, monkeypatch) -> None:
    """Whenever the host comes back, a step is still on its way: the GPU never waits for it."""
    streams = model.unwritten_streams

    def lasting(*args):
        torch.cuda._sleep(STEP_CYCLES)
        return streams(*args)

    monkeypatch.setattr(model, "unwritten_streams", lasting)
    engine = Engine(model, rows, 400)
    assert engine.async_scheduling and engine._decoder.is_captured
    for row in range(rows):
        engine.add(text[100 * row :][:150], SamplingParams(max_new_tokens=80, stop_tokens=()))
    # Prompts run eagerly, and launch after launch of them may last longer than the pause.
    while engine.stats.prefill_tokens < 150 * rows or engine.stats.decode_tokens < 5 * rows:
        engine.step()
    for _ in range(20):
        engine.step()
        assert not engine._flights[-1].letter.copied.query()
