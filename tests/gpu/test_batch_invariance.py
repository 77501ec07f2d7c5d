"""`batch_invariant` on a GPU with kernels: requests share forwards, and no bit of them differs."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from dsv4.bench.random_model import random_model, truncated
from dsv4.config.model_config import ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.invariance import depends_on_neighbours
from dsv4.engine.sampling_params import SamplingParams
from dsv4.model.model import DeepseekV4
from tests.engine.driving import drain, recorded_logits

pytestmark = [pytest.mark.gpu, pytest.mark.stage("model")]

LAYERS = 4  # of Flash: SWA, SWA, CSA, HCA
CONTEXT, NEW = 640, 8
LENGTHS = (3, 200, 37, 530, 9, 128, 127)


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    config = truncated(ModelConfig.flash(), LAYERS, has_drafts=False)
    torch.manual_seed(5)
    with torch.no_grad():
        return random_model(config, LAYERS, torch.device("cuda")).model


def requests(count: int, **options) -> list[tuple[list[int], SamplingParams]]:
    dice = random.Random(7)
    params = SamplingParams(max_new_tokens=NEW, stop_tokens=(), **options)
    return [([dice.randrange(100_000) for _ in range(n)], params) for n in LENGTHS[:count]]


def run(model: DeepseekV4, given: list, **options) -> list[list[int]]:
    """New tokens of each request; all start together."""
    engine = Engine(model, len(given), CONTEXT, batch_invariant=True, **options)
    assert engine.shares_forwards, depends_on_neighbours(model)
    for request in given:
        engine.add(*request)
    new = drain(engine)
    return [new[number] for number in range(len(given))]


def digests(logits: list[torch.Tensor]) -> set[str]:
    """Of the logits of every token that was chosen."""
    rows = [row for found in logits for row in found.flatten(0, 1).cpu()]
    assert all(row.isfinite().any() for row in rows)
    return {hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows}


@pytest.mark.parametrize("chunk", [4096, 64])
def test_neighbours_and_chunks_change_no_bit(model, monkeypatch, chunk: int) -> None:
    # A bias, if of nothing, needs logits: else the kernel of the head keeps the best alone.
    given = requests(7, logit_bias={0: 0.0})
    logits = recorded_logits(model, monkeypatch)
    alone = [run(model, [one], use_cuda_graphs=False)[0] for one in given]
    expected = digests(logits)
    assert len(expected) >= len(given) * NEW
    logits.clear()
    together = run(model, given, use_cuda_graphs=False, prefill_chunk=chunk)
    assert together == alone
    assert not expected - digests(logits)


def run_again(model: DeepseekV4, given: list, blocks: int, **options) -> tuple[list, Engine]:
    """New tokens of requests that begin alike, one after the other or in a tight cache."""
    engine = Engine(
        model, len(given), CONTEXT, batch_invariant=True, num_blocks=blocks, use_cuda_graphs=False,
        **options,
    )  # fmt: skip
    for request in given:
        engine.add(*request)
    new = drain(engine)
    return [new[number] for number in range(len(given))], engine


@pytest.mark.parametrize("chunk", [4096, 64])
def test_prefix_hits_and_recomputing_change_no_bit(model, monkeypatch, chunk: int) -> None:
    """Behind a known beginning, whose rings are restored at the end of a block, and after blocks
    were taken away."""
    dice, params = random.Random(8), SamplingParams(NEW, stop_tokens=(), logit_bias={0: 0.0})
    stem = [dice.randrange(100_000) for _ in range(256)]
    given = [(stem + [dice.randrange(100_000) for _ in range(n)], params) for n in (125, 7, 126)]
    logits = recorded_logits(model, monkeypatch)
    alone = [run(model, [one], use_cuda_graphs=False)[0] for one in given]
    expected = digests(logits)

    logits.clear()
    engine = Engine(
        model, 1, CONTEXT, batch_invariant=True, prefill_chunk=chunk, prefix_snapshots=4,
        use_cuda_graphs=False,
    )  # fmt: skip
    for request in given:
        engine.add(*request)
    new = drain(engine)
    assert [new[number] for number in range(3)] == alone
    assert engine.stats.prefix_tokens >= 2 * 256
    assert not expected - digests(logits)

    # Three blocks hold a prompt, and new tokens want a fourth: two requests run until one does.
    logits.clear()
    together, engine = run_again(model, given, 6, prefill_chunk=chunk)
    assert together == alone
    assert engine.stats.prefill_tokens > sum(len(prompt) for prompt, _ in given)
    assert not expected - digests(logits)


def test_replays_give_the_tokens_of_a_request_alone(model) -> None:
    given = requests(5)
    assert run(model, given) == [run(model, [one])[0] for one in given]


def test_a_library_in_the_forward_is_found(monkeypatch) -> None:
    """One product of torch's, and requests run alone."""
    config = truncated(ModelConfig.flash(), 1, has_drafts=False)
    with torch.no_grad():
        other = random_model(config, 1, torch.device("cuda")).model
    assert not depends_on_neighbours(other)
    head = other.head
    monkeypatch.setattr(head, "forward", lambda x: torch.matmul(x.float(), head.weight.float().T))
    assert any("matmul" in name for name in depends_on_neighbours(other))
    assert not Engine(other, 2, 256, batch_invariant=True).shares_forwards
