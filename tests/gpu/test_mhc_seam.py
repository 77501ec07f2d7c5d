"""`mhc_seam` on a GPU: the oracle, graphs, streams, and bits that depend on the token alone."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import ExpertRows, moe
from dsv4.testing.mhc_seam import Case, Inputs, assert_seam_close, run_op
from dsv4.testing.moe import Case as ExpertsCase
from dsv4.testing.moe_layer import SCALING, LayerInputs

pytestmark = [pytest.mark.gpu, pytest.mark.stage("mhc")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def same(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rows=slice(None)) -> None:
    for name, tensor in found.items():
        wanted = other[name][rows]
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name


@pytest.mark.parametrize("dim", [128, 1536, 4096, 7168])
@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
def test_equals_the_oracle(dim, tokens, seed) -> None:
    inputs = Inputs.make(Case(tokens, dim), seed, "cuda")
    assert_seam_close(inputs, run_op(inputs))


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("expands", [False, True])
def test_kinds_of_seams(is_head, expands, seed) -> None:
    case = Case(37, 4096, is_head, expands, quantizes=expands, is_strided=True, spread=8.0)
    inputs = Inputs.make(case, seed, "cuda")
    assert_seam_close(inputs, run_op(inputs))


@pytest.mark.parametrize("dim", [4096, 7168])
def test_a_token_is_the_same_alone_and_in_any_batch(dim, seed) -> None:
    inputs = Inputs.make(Case(1000, dim), seed, "cuda")
    found = run_op(inputs)
    for start, stop in ((0, 1), (999, 1000), (100, 102), (50, 53), (3, 20), (7, 71), (0, 257)):
        same(run_op(inputs.rows(start, stop)), found, slice(start, stop))


def test_padding_of_nan_touches_no_other_token(seed) -> None:
    inputs = Inputs.make(Case(21, 4096, padding_rows=4), seed, "cuda")
    assert_seam_close(inputs, run_op(inputs))


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
@pytest.mark.parametrize("dim", [4096, 7168])
def test_rows_of_experts_are_added_with_the_bits_of_their_sum(dim, tokens, seed) -> None:
    case = Case(tokens, dim, top_k=6, is_strided=True, padding_rows=tokens // 5)
    inputs = Inputs.make(case, seed, "cuda")
    found, live = run_op(inputs), slice(tokens - tokens // 5)
    assert_seam_close(inputs, found)
    same({name: x[live] for name, x in found.items()}, run_op(inputs.with_sums()), live)


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_a_layer_of_experts_hands_its_rows_on(tokens, is_hashed, seed) -> None:
    """In a chain whose launches overlap: with the bits of a sum that `moe` makes itself."""
    case = ExpertsCase(tokens, 1024, 512, 64, 6, live=tokens - tokens // 8, has_missing=is_hashed)
    layer = LayerInputs.make(case, seed, "cuda", is_hashed)
    weights, x = layer.weights(is_prepared=True), layer.inputs.x
    live = torch.tensor([case.num_live], dtype=torch.int32, device="cuda")
    options = {"top_k": 6, "scaling": SCALING, "limit": case.limit, "form": case.scale_form}
    seam = Inputs.make(Case(tokens, 1024), seed, "cuda")

    def chain(combine: bool) -> dict[str, torch.Tensor]:
        hidden = x
        for _ in range(4):
            y = moe(
                hidden, layer.gate, *weights, **options, **layer.choice, live_tokens=live,
                combine=combine,
            )  # fmt: skip
            assert isinstance(y, ExpertRows) is not combine
            given = {"y": y} if combine else dict(zip(("rows", "ids", "counts"), y))
            sizes = Case(tokens, 1024, top_k=0 if combine else 6)
            tensors = {**seam.tensors, "y": None, "rows": None, "ids": None, "counts": None}
            found = run_op(Inputs(sizes, {**tensors, **given}))
            hidden = found["x"]
        return found

    wanted = chain(True)
    same(chain(False), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(False)
    for _ in range(10):
        graph.replay()
        same(found, wanted)


def test_graph_replay_reads_new_inputs(seed) -> None:
    inputs, other = (Inputs.make(Case(5, 4096), seed + i, "cuda") for i in range(2))
    run_op(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_op(inputs)
    for source in (inputs, other):
        for name, tensor in inputs.tensors.items():
            if tensor is not None:
                tensor.copy_(source.tensors[name])
        for tensor in found.values():
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert_seam_close(source, found)


def test_a_chain_of_launches_sees_what_was_written(seed) -> None:
    """A launch begins while the one before it ends: what this wrote must have arrived."""
    inputs = Inputs.make(Case(3, 4096), seed, "cuda")

    def chain(is_apart: bool) -> dict[str, torch.Tensor]:
        link = inputs
        for _ in range(40):
            found = run_op(link)
            if is_apart:
                torch.cuda.synchronize()
            new = {"streams": found["streams_out"], "y": found["x"]}
            new |= {"post": found["post_out"], "comb": found["comb_out"]}
            link = Inputs(inputs.case, {**inputs.tensors, **new})
        return found

    apart = chain(True)
    for _ in range(5):
        same(chain(False), apart)


def test_two_streams(seed) -> None:
    both = [Inputs.make(Case(50, 4096), seed + i, "cuda") for i in range(2)]
    wanted = [run_op(inputs) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, wanted, strict=True):
            with torch.cuda.stream(stream):
                results.append((run_op(inputs), found))
    torch.cuda.synchronize()
    for found, other in results:
        same(found, other)


def test_no_tokens() -> None:
    inputs = Inputs.make(Case(0, 4096), 0, "cuda")
    assert run_op(inputs)["x"].shape == (0, 4096)
