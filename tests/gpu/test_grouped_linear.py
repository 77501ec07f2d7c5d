"""`grouped_linear` on a Hopper GPU: bits that no number of tokens changes, close to the reference,
graphs, streams, no poison left, launches that overlap."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.gemm.plan import RESIDENT_TOKENS
from dsv4.layers.linear import GroupedLinear, Linear, project_twice
from dsv4.ops.code_terms import to_terms
from dsv4.ops.grouped_linear import MODEL_GROUPS
from dsv4.ops.quantize import quantize_e4m3
from dsv4.testing.grouped_linear import Case, Inputs, assert_grouped_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200, 256, 257, 1000, 4096, 8192)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, tokens: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Output of the first tokens, poisoned before."""
    x = inputs.x[:tokens]
    if out is None:
        dtype = getattr(torch, inputs.case.out_dtype)
        out = torch.full((len(x), len(inputs.weight)), torch.nan, dtype=dtype, device="cuda")
    return ops.grouped_linear(x, inputs.weight, inputs.scale, act=inputs.case.act, out=out)


@pytest.mark.parametrize("act", ["bf16", "fp8"])
@pytest.mark.parametrize("label", MODEL_GROUPS)
def test_model_groups(label, act, seed) -> None:
    inputs = Inputs.make(Case(max(TOKENS), *MODEL_GROUPS[label], act), seed, "cuda")
    together = run(inputs)
    for tokens in TOKENS:
        assert torch.equal(run(inputs, tokens), together[:tokens]), f"T = {tokens}"
    first = inputs.first(24)
    assert_grouped_close(run(first), first)


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("act", ["bf16", "fp8"])
def test_strides_and_wide_output(act, scale_dtype, seed) -> None:
    case = Case(130, 2560, 512, 3, act, scale_dtype, "float32", is_strided=True)
    inputs = Inputs.make(case, seed, "cuda")
    together = run(inputs)
    assert_grouped_close(together, inputs)
    for tokens in (1, 9, 33, 65):
        assert torch.equal(run(inputs, tokens), together[:tokens]), f"T = {tokens}"


def same_bits(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(("label", "act"), [("Flash wo_a", "bf16"), ("Pro wo_a", "fp8")])
def test_codes_are_those_of_the_outputs(label, act, seed) -> None:
    case = Case(max(TOKENS), *MODEL_GROUPS[label], act, has_special_rows=True)
    inputs = Inputs.make(case, seed, "cuda")
    weights = inputs.weight, inputs.scale
    wanted = quantize_e4m3(run(inputs), 128)
    for tokens in TOKENS:
        for _ in range(2):
            # What a new tensor gets of the allocator holds no right code.
            poison = torch.full((tokens, len(inputs.weight)), -1, dtype=torch.int8, device="cuda")
            del poison
            found = ops.grouped_linear_fp8(inputs.x[:tokens], *weights, act=act)
            assert same_bits(found, tuple(t[:tokens] for t in wanted)), f"T = {tokens}"


@pytest.mark.parametrize("tokens", [9, 16, 40, 200])
def test_the_next_linear_takes_codes(tokens, seed) -> None:
    """Pairs of launches that overlap, against some that wait after each."""
    first = Inputs.make(Case(tokens, *MODEL_GROUPS["Flash wo_a"]), seed, "cuda")
    second = torch.randn(4096, 8192, device="cuda").to(torch.float8_e4m3fn)
    scale = first.scale.view(torch.uint8).view(32, 64).view(torch.float8_e8m0fnu)
    inputs = first.x, first.x.flip(0).contiguous(), first.x * 2

    def both(x: torch.Tensor) -> torch.Tensor:
        codes, x_scale = ops.grouped_linear_fp8(x, first.weight, first.scale)
        return ops.fp8_linear(codes, second, scale, x_scale=x_scale)

    wanted = []
    for x in inputs:
        middle = ops.grouped_linear(x, first.weight, first.scale)
        torch.cuda.synchronize()
        wanted.append(ops.fp8_linear(middle, second, scale))
        torch.cuda.synchronize()
        assert wanted[-1].isfinite().all()
    graph = torch.cuda.CUDAGraph()
    both(inputs[0])
    with torch.cuda.graph(graph):
        found = [both(x) for x in inputs]
    for _ in range(20):
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [both(x) for _ in range(10) for x in inputs]
            assert all(torch.equal(*pair) for pair in zip(found, wanted * 10, strict=True))


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_layers_have_the_bits_of_one_after_the_other(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, *MODEL_GROUPS["Flash wo_a"]), seed, "cuda")
    options = {"scheme": "fp8", "device": "cuda"}
    first = GroupedLinear(*MODEL_GROUPS["Flash wo_a"], **options)
    second = Linear(8192, 4096, **options)
    scales = inputs.scale.view(torch.uint8)
    for linear, weight, scale in (
        (first, inputs.weight, scales),
        (second, inputs.weight.view(4096, 8192), scales.view(32, 64)),
    ):
        linear.weight.data, linear.scale.data = weight, scale.view(torch.float8_e8m0fnu)
    wanted = second(first(inputs.x))
    assert torch.equal(project_twice(inputs.x, first, second), wanted)
    if tokens > RESIDENT_TOKENS:
        assert torch.equal(project_twice(to_terms(inputs.x), first, second), wanted)


@pytest.mark.parametrize("tokens", [3, 15, 100])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 4096, 256, 4, has_special_rows=True), seed, "cuda")
    found = run(inputs)
    assert found[0::5].isnan().all()
    alone = ops.grouped_linear(inputs.x[4::5], inputs.weight, inputs.scale)
    assert torch.equal(alone, found[4::5])


@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_graph_replay_reads_new_inputs(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, *MODEL_GROUPS["Flash wo_a"]), seed, "cuda")
    first = inputs.x.clone()
    expected = run(inputs).clone()
    out = torch.full_like(expected, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, out=out)
    inputs.x.copy_(first.flip(0) * 2)
    other = run(inputs).clone()
    for x, wanted in ((first, expected), (first.flip(0) * 2, other), (first, expected)):
        inputs.x.copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_launches_that_overlap(tokens, seed) -> None:
    """A launch reads what the one before it wrote, though it begins while that one ends."""
    inputs = Inputs.make(Case(tokens, 1024, 1024, 8), seed, "cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.grouped_linear(x, inputs.weight, inputs.scale)

    wanted = inputs.x
    for _ in range(6):
        wanted = step(wanted)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = inputs.x
        for _ in range(6):
            y = step(y)
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, wanted)


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(tokens, 4096, 512, 4), seed + tokens, "cuda") for tokens in (5, 40)]
    expected = [run(inputs) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(y, wanted) for y in found)


def test_warmup_is_enough_for_a_capture(seed) -> None:
    inputs = Inputs.make(Case(20, 1536, 256, 5), seed, "cuda")
    ops.warmup(ops.grouped_linear_runner_id(1536, 256, 5), max_tokens=20)
    out = torch.full((20, 1280), torch.nan, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, out=out)
    graph.replay()
    assert torch.equal(out, run(inputs))


def test_no_tokens() -> None:
    inputs = Inputs.make(Case(0, 512, 256, 2), 0, "cuda")
    assert run(inputs).shape == (0, 512)
