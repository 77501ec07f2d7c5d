"""`merged_linear` on a Hopper GPU: bits that no number of tokens changes and that `fp8_linear` has,
graphs, streams, no poison left, launches that overlap."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.ops.merged_linear import MODEL_INPUTS
from dsv4.testing.merged_linear import Case, Inputs, assert_merged_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("projections")]

TOKENS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 200, 256, 257, 1000, 4096, 8192)
WEIGHTS = (
    "456 float8_e8m0fnu bfloat16, 72 float8_e8m0fnu float32, 1000 bfloat16 float32, "
    "64 bfloat16 bfloat16, 1 bfloat16 bfloat16"
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def poisoned(inputs: Inputs, tokens: int) -> list[torch.Tensor]:
    return [
        torch.full((tokens, w.rows), torch.nan, dtype=getattr(torch, w.out_dtype), device="cuda")
        for w in inputs.config.parsed
    ]


def run(
    inputs: Inputs, tokens: int | None = None, outs: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Outputs of the first tokens, poisoned before."""
    x = inputs.x[:tokens]
    weights = [part.weight for part in inputs.linears] + list(inputs.plain)
    scales = [part.scale for part in inputs.linears]
    outs = poisoned(inputs, len(x)) if outs is None else outs
    return ops.merged_linear(x, weights, scales, outs=outs)


def check_tokens(inputs: Inputs, numbers: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs of all tokens, which any number of them must give."""
    together = run(inputs)
    for tokens in numbers:
        for found, wanted in zip(run(inputs, tokens), together, strict=True):
            assert torch.equal(found, wanted[:tokens]), f"T = {tokens}"
    return together


@pytest.mark.parametrize("label", MODEL_INPUTS)
def test_model_inputs(label, seed) -> None:
    inputs = Inputs.make(Case(max(TOKENS), *MODEL_INPUTS[label]), seed, "cuda")
    together = check_tokens(inputs, TOKENS)
    first = inputs.first(16)
    assert_merged_close(dict(zip(inputs.outputs, run(first), strict=True)), first)
    for i, part in enumerate(inputs.linears):
        assert torch.equal(ops.fp8_linear(part.x, part.weight, part.scale), together[i])


@pytest.mark.parametrize("scale_dtype", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("width", [512, 2560])
def test_ragged_rows_and_strides(scale_dtype, width, seed) -> None:
    weights = WEIGHTS.replace("float8_e8m0fnu", scale_dtype)
    inputs = Inputs.make(Case(130, width, weights, is_strided=True), seed, "cuda")
    together = check_tokens(inputs, (1, 8, 9, 17, 64))
    assert_merged_close(dict(zip(inputs.outputs, together, strict=True)), inputs)


@pytest.mark.parametrize("tokens", [3, 15, 100])
def test_rows_that_are_not_finite_touch_no_other(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, 4096, WEIGHTS, has_special_rows=True), seed, "cuda")
    found = run(inputs)
    weights = [part.weight for part in inputs.linears] + list(inputs.plain)
    scales = [part.scale for part in inputs.linears]
    dtypes = [y.dtype for y in found]
    alone = ops.merged_linear(inputs.x[4::5], weights, scales, out_dtypes=dtypes)
    for y, ordinary in zip(found, alone, strict=True):
        assert y[0::5].isnan().all()
        assert torch.equal(ordinary, y[4::5])


@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_graph_replay_reads_new_inputs(tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, *MODEL_INPUTS["Flash HCA x"]), seed, "cuda")
    first = inputs.x.clone()
    expected = [y.clone() for y in run(inputs)]
    outs = poisoned(inputs, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, outs=outs)
    inputs.x.copy_(first.flip(0) * 2)
    other = [y.clone() for y in run(inputs)]
    for x, wanted in ((first, expected), (first.flip(0) * 2, other), (first, expected)):
        inputs.x.copy_(x)
        for y in outs:
            y.fill_(torch.nan)
        graph.replay()
        for y, w in zip(outs, wanted, strict=True):
            assert torch.equal(y, w)


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_launches_that_overlap(tokens, seed) -> None:
    """A launch reads what the one before it wrote, though it begins while that one ends."""
    width = 4096
    inputs = Inputs.make(
        Case(tokens, width, f"{width} float8_e8m0fnu bfloat16, 512 bfloat16 float32"), seed, "cuda"
    )
    part, plain = inputs.linears[0], list(inputs.plain)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        dtypes = [torch.bfloat16, torch.float32]
        return ops.merged_linear(x, [part.weight, *plain], [part.scale], out_dtypes=dtypes)

    wanted = inputs.x
    for _ in range(6):
        wanted, sums = step(wanted)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = inputs.x
        for _ in range(6):
            y, last = step(y)
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, wanted)
        assert torch.equal(last, sums)


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(tokens, 4096, WEIGHTS), seed + tokens, "cuda") for tokens in (5, 40)]
    expected = [run(inputs) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results: list[list[list[torch.Tensor]]] = [[], []]
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        for ys in found:
            for y, w in zip(ys, wanted, strict=True):
                assert torch.equal(y, w)


def test_warmup_is_enough_for_a_capture(seed) -> None:
    weights = "640 float8_e8m0fnu bfloat16, 128 bfloat16 bfloat16"
    inputs = Inputs.make(Case(20, 3584, weights), seed, "cuda")
    ops.warmup(ops.merged_linear_runner_id(3584, str_of(weights)), max_tokens=20)
    outs = poisoned(inputs, 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs, outs=outs)
    graph.replay()
    for y, wanted in zip(outs, run(inputs), strict=True):
        assert torch.equal(y, wanted)


def str_of(weights: str) -> str:
    """Weights as the public function describes them."""
    return ", ".join(map(str, MergedLinearConfig(512, weights).parsed))


def test_no_tokens() -> None:
    inputs = Inputs.make(Case(0, 512, WEIGHTS), 0, "cuda")
    assert [y.shape[0] for y in run(inputs)] == [0] * 5


def test_tensors_that_do_not_fit_are_refused_before_the_launch(seed) -> None:
    inputs = Inputs.make(Case(3, 512, WEIGHTS), seed, "cuda")
    weights = [part.weight for part in inputs.linears] + list(inputs.plain)
    scales = [part.scale for part in inputs.linears]
    outs = poisoned(inputs, 3)
    identity = ops.merged_linear_runner_id(512, str_of(WEIGHTS))
    call = (inputs.x, weights[0], scales[0], outs[0], identity, weights[1])
    # A first call is checked against the whole table; later ones by their launch. Either may see
    # what does not fit, each in its words.
    run(inputs)
    with pytest.raises(ValueError, match=r"^scale_1: got nothing, (needs 1 rows|the weights are)"):
        torch.ops.dsv4.merged_linear(*call)
    with pytest.raises(ValueError, match=r"^scale_1: got (0 rows, needs 1|shape \(0, 4\))"):
        torch.ops.dsv4.merged_linear(*call, scales[1][:0], outs[1])
    with pytest.raises(ValueError, match=r"^out_1: got (2 rows, needs 3|shape \(2, \d+\))"):
        torch.ops.dsv4.merged_linear(*call, scales[1], outs[1][:2])
