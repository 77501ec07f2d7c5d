"""`sample_tokens` on a GPU: the tokens of the CPU, whatever the batch, graphs, streams."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.ops.sample_tokens import VOCAB_SIZE
from dsv4.testing.sample_tokens import Case, Inputs, expected

pytestmark = [pytest.mark.gpu, pytest.mark.stage("sampler")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def chosen(inputs: Inputs) -> torch.Tensor:
    return ops.sample_tokens(inputs.logits, **inputs.given)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize(
    ("rows", "chunk", "vocab_size", "padding"),
    [(1, 1, VOCAB_SIZE, 0), (43, 1, VOCAB_SIZE, 8), (14, 3, 5000, 4), (7, 1, 262_144, 0)],
)
def test_tokens_of_the_cpu(rows, chunk, vocab_size, padding, truncates, seed) -> None:
    inputs = Inputs.make(Case(rows, chunk, vocab_size, truncates, padding), seed, "cuda")
    wanted = expected(inputs)
    assert torch.equal(chosen(inputs).cpu(), wanted)
    for count in {1, rows // 2 + 1}:
        assert torch.equal(chosen(inputs.of(slice(count))).cpu(), wanted[:count])


def test_many_draws_of_the_cpu(seed) -> None:
    """Of few tokens with large noise, and of many that are equal."""
    rows = 500
    inputs = Inputs.make(Case(rows, 1, 1000), seed)
    inputs.logits.copy_(torch.randn(rows, 1, 1000) * torch.linspace(0, 20, rows)[:, None, None])
    inputs.temperature.fill_(0.7)
    moved = {name: tensor.cuda() for name, tensor in inputs.arguments.items()}
    assert torch.equal(ops.sample_tokens(**moved).cpu(), expected(inputs))


@pytest.mark.parametrize("truncates", [False, True])
def test_graph_replay_reads_new_inputs(truncates, seed) -> None:
    case = Case(9, 1, VOCAB_SIZE, truncates)
    inputs, other = (Inputs.make(case, seed + i, "cuda") for i in range(2))
    wanted = [chosen(each).clone() for each in (inputs, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Launches that follow each other share clusters.
        found = [chosen(inputs) for _ in range(3)]
    first = {name: tensor.clone() for name, tensor in inputs.arguments.items()}
    for given, rows in zip((first, other.arguments, first), (*wanted, wanted[0]), strict=True):
        for name, tensor in inputs.arguments.items():
            tensor.copy_(given[name])
        for each in found:
            each.fill_(-7)
        graph.replay()
        assert all(torch.equal(each, rows) for each in found)


def test_two_streams(seed) -> None:
    cases = [Case(rows, 1, VOCAB_SIZE, truncates) for rows, truncates in ((5, False), (40, True))]
    both = [Inputs.make(case, seed, "cuda") for case in cases]
    wanted = [chosen(each) for each in both]
    torch.cuda.synchronize()
    for each, rows in zip(both, wanted, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            assert all(torch.equal(chosen(each), rows) for _ in range(20))
    torch.cuda.synchronize()
