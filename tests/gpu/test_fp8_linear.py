"""`fp8_linear` on a Hopper GPU: bits that no number of tokens changes, graphs, streams, no poison
left, chains of launches that overlap."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8_linear import MODEL_LAYERS
from dsv4.testing.fp8_linear import Case, Inputs, assert_linear_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 200, 256, 257, 1000, 4096, 8192)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, tokens: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """y of the first tokens, in a poisoned output."""
    x = inputs.x[:tokens]
    if out is None:
        shape = (len(x), inputs.case.out_features)
        dtype = getattr(torch, inputs.case.out_dtype)
        out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    x_scale = inputs.optional_x_scale
    x_scale = None if x_scale is None else x_scale[:tokens]
    return ops.fp8_linear(x, inputs.weight, inputs.scale, x_scale=x_scale, out=out)


@pytest.mark.parametrize("layer", MODEL_LAYERS)
def test_model_layers(layer, seed) -> None:
    rows, width = MODEL_LAYERS[layer]
    inputs = Inputs.make(Case(max(TOKENS), width, rows), seed, "cuda")
    together = run(inputs)
    assert_linear_close(run(inputs, 16), inputs.first(16))
    for tokens in TOKENS:
        assert torch.equal(run(inputs, tokens), together[:tokens]), f"T = {tokens}"
    # A token in the middle of the batch is as it is alone.
    for place in (5, 100, 3000):
        assert torch.equal(
            ops.fp8_linear(inputs.x[place : place + 1], inputs.weight, inputs.scale),
            together[place : place + 1],
        )


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 72, 456, 5000])
def test_dtypes_and_ragged_rows(x_dtype, scale_dtype, out_dtype, rows, seed) -> None:
    case = Case(130, 2560, rows, x_dtype, scale_dtype, out_dtype, is_strided=True)
    inputs = Inputs.make(case, seed, "cuda")
    together = run(inputs)
    assert_linear_close(together, inputs)
    for tokens in (1, 8, 9, 64):
        assert torch.equal(run(inputs, tokens), together[:tokens]), f"T = {tokens}"


@pytest.mark.parametrize("tokens", [3, 15, 100])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 4096, 1024, has_special_rows=True), seed, "cuda")
    found = run(inputs)
    assert found[0::5].isnan().all()
    ordinary = inputs.x[4::5]
    assert torch.equal(ops.fp8_linear(ordinary, inputs.weight, inputs.scale), found[4::5])


@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_graph_replay_reads_new_inputs(tokens, seed) -> None:
    inputs, other = (Inputs.make(Case(tokens, 4096, 1536), seed + i, "cuda") for i in range(2))
    expected = [run(inputs), run(other)]
    out = torch.empty_like(expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, out=out)
    first = inputs.x.clone(), inputs.weight.view(torch.uint8).clone(), inputs.scale.clone()
    second = other.x, other.weight.view(torch.uint8), other.scale
    for (x, weight, scale), wanted in zip((first, second, first), (*expected, expected[0])):
        inputs.x.copy_(x)
        inputs.weight.view(torch.uint8).copy_(weight)
        inputs.scale.copy_(scale)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_chain_of_launches_that_overlap(tokens, seed) -> None:
    """A launch reads what the one before it wrote, though it begins while that one ends."""
    down = Inputs.make(Case(tokens, 8192, 4096), seed, "cuda")
    up = Inputs.make(Case(tokens, 4096, 8192), seed + 1, "cuda")
    wanted = down.x
    for _ in range(4):
        for layer in (down, up):
            wanted = ops.fp8_linear(wanted, layer.weight, layer.scale)
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = down.x
        for _ in range(4):
            for layer in (down, up):
                y = ops.fp8_linear(y, layer.weight, layer.scale)
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, wanted)


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(tokens, 4096, 1536), seed + tokens, "cuda") for tokens in (5, 40)]
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
        for y in found:
            assert torch.equal(y, wanted)


def test_warmup_is_enough_for_a_capture(seed) -> None:
    inputs = Inputs.make(Case(20, 3584, 640), seed, "cuda")
    ops.warmup(ops.fp8_linear_runner_id(3584, 640), max_tokens=20)
    out = torch.empty(20, 640, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, out=out)
    graph.replay()
    assert torch.equal(out, run(inputs))


def test_no_tokens() -> None:
    inputs = Inputs.make(Case(0, 512, 136), 0, "cuda")
    assert run(inputs).shape == (0, 136)


def test_wrong_scales_are_refused_before_the_launch(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 136), seed, "cuda")
    with pytest.raises(ValueError, match=r"^scale: got 1 rows, a weight of 136 rows needs 2"):
        ops.fp8_linear(inputs.x, inputs.weight, inputs.scale[:1])


def test_unaligned_rows_are_refused_by_name(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 136), seed, "cuda")
    x = torch.zeros(3, 516, dtype=torch.bfloat16, device="cuda")[:, :512]
    with pytest.raises(ValueError, match=r"^x: got strides .* multiple of 16 bytes"):
        ops.fp8_linear(x, inputs.weight, inputs.scale)


def test_float32_inputs_take_the_torch_implementation(seed) -> None:
    inputs = Inputs.make(Case(3, 512, 136), seed, "cuda")
    y = ops.fp8_linear(inputs.x.float(), inputs.weight, inputs.scale)
    assert y.dtype == torch.float32
    assert_linear_close(y, inputs)
