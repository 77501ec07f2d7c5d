"""`plain_linear` on a Hopper GPU: bits that no number of tokens changes, close to the reference,
graphs, no poison left."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.fp8_linear import Case
from dsv4.testing.plain_linear import Inputs, assert_plain_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 200, 256, 257, 1000, 4096, 8192)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, tokens: int | None = None) -> torch.Tensor:
    """Output of the first tokens, poisoned before."""
    x = inputs.x[:tokens]
    dtype = getattr(torch, inputs.out_dtype)
    shape = (len(x), len(inputs.weight))
    out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    return ops.plain_linear(x, inputs.weight, out=out)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [4096, 7168])
def test_a_token_has_the_same_bits_among_any_number(width, out_dtype, seed) -> None:
    case = Case(max(TOKENS), width, 12_345, out_dtype=out_dtype, is_strided=True)
    inputs = Inputs.make(case, seed, "cuda")
    together = run(inputs)
    for tokens in TOKENS:
        assert torch.equal(run(inputs, tokens), together[:tokens]), f"T = {tokens}"
    first = inputs.first(16)
    assert_plain_close(run(first), first)


@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_graph_replay_reads_new_inputs(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 4096, 5000, out_dtype="float32"), seed, "cuda")
    first = inputs.x.clone()
    wanted = run(inputs).clone()
    out = torch.full_like(wanted, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.plain_linear(inputs.x, inputs.weight, out=out)
    inputs.x.copy_(first.flip(0) * 2)
    other = run(inputs).clone()
    for x, expected in ((first, wanted), (first.flip(0) * 2, other)):
        inputs.x.copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [3, 100])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    case = Case(tokens, 4096, 300, out_dtype="float32", has_special_rows=True)
    inputs = Inputs.make(case, seed, "cuda")
    found = run(inputs)
    assert found[0::5].isnan().all()
    assert torch.equal(ops.plain_linear(inputs.x[4::5], inputs.weight), found[4::5])


def test_two_streams(seed) -> None:
    both = [
        Inputs.make(Case(tokens, 4096, 5000, out_dtype="float32"), seed + tokens, "cuda")
        for tokens in (5, 40)
    ]
    wanted = [run(inputs) for inputs in both]
    torch.cuda.synchronize()
    found = []
    for inputs in both:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append([ops.plain_linear(inputs.x, inputs.weight) for _ in range(20)])
    torch.cuda.synchronize()
    for outputs, expected in zip(found, wanted, strict=True):
        assert all(torch.equal(y.to(expected.dtype), expected) for y in outputs)


def test_no_tokens(seed) -> None:
    inputs = Inputs.make(Case(1, 4096, 300, out_dtype="float32"), seed, "cuda")
    assert ops.plain_linear(inputs.x[:0], inputs.weight).shape == (0, 300)


def test_outputs_that_overlap_inputs_are_refused(seed) -> None:
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, 4096, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="out"):
        ops.plain_linear(x, weight, out=x)
