"""`linear_argmax` on a Hopper GPU: the rows of `plain_linear`'s largest outputs for any number of
tokens, what greedy sampling takes of them, graphs, streams."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.engine.sampler import GREEDY, sample
from dsv4.testing.fp8_linear import Case
from dsv4.testing.linear_argmax import Inputs, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 128, 129, 200, 256, 257, 600, 1000, 4096, 8192)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("width", "out_dtype"), [(4096, "float32"), (7168, "bfloat16")])
def test_rows_of_the_largest_outputs(width, out_dtype, seed) -> None:
    case = Case(max(TOKENS), width, 12_345, out_dtype=out_dtype, is_strided=True)
    inputs = Inputs.make(case, seed, "cuda")
    x, weight = inputs.plain.x, inputs.plain.weight
    y = ops.plain_linear(x, weight, out_dtype=getattr(torch, out_dtype))
    wanted = rows_of(y)
    for tokens in TOKENS:
        out = torch.full_like(y[:tokens], torch.nan)
        assert torch.equal(ops.linear_argmax(x[:tokens], weight, out=out), wanted[:tokens])
        assert torch.equal(out, y[:tokens]), f"T = {tokens}"
        if out_dtype == "float32":
            assert torch.equal(ops.linear_argmax(x[:tokens], weight), wanted[:tokens])


@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_greedy_tokens(tokens, seed) -> None:
    case = Case(tokens, 4096, 129_280, has_special_rows=tokens > 1)
    inputs = Inputs.make(case, seed, "cuda")
    logits = ops.plain_linear(inputs.plain.x, inputs.plain.weight)
    positions = torch.zeros(tokens, 1, dtype=torch.int64, device="cuda")
    wanted = sample(logits[:, None], positions, GREEDY)[:, 0]
    for _ in range(5):
        assert torch.equal(ops.linear_argmax(inputs.plain.x, inputs.plain.weight), wanted)


@pytest.mark.parametrize("tokens", [1, 13, 100, 200])
def test_graph_replay_reads_new_inputs(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 4096, 5000), seed, "cuda")
    x, weight = inputs.plain.x, inputs.plain.weight
    first, other = x.clone(), x.flip(0) * 2
    rows = [ops.linear_argmax(given, weight).clone() for given in (first, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Launches that follow each other share keys.
        found = [ops.linear_argmax(x, weight) for _ in range(3)]
    for given, wanted in zip((first, other, first), (*rows, rows[0]), strict=True):
        x.copy_(given)
        for each in found:
            each.fill_(-7)
        graph.replay()
        assert all(torch.equal(each, wanted) for each in found)


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(tokens, 4096, 5000), seed + tokens, "cuda") for tokens in (5, 40)]
    wanted = [ops.linear_argmax(each.plain.x, each.plain.weight) for each in both]
    torch.cuda.synchronize()
    for each, rows in zip(both, wanted, strict=True):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = [ops.linear_argmax(each.plain.x, each.plain.weight) for _ in range(20)]
            assert all(torch.equal(one, rows) for one in found)
