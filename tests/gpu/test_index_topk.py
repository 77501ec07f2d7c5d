"""`index_topk` on a GPU: the oracle, ties, graphs, streams, bits that the token alone decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.indexer.config import FP4_PAGES
from dsv4.kernels.kit.index_entry import INDEX_FORMATS
from dsv4.ops import index_topk
from dsv4.testing.attention import Case as AttentionCase
from dsv4.testing.attention import make_inputs
from dsv4.testing.attention_op import run_op as run_attention
from dsv4.testing.index_topk import Case, Inputs, assert_choice, run_op

pytestmark = [pytest.mark.gpu, pytest.mark.stage("indexer")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(params=INDEX_FORMATS)
def keys(request: pytest.FixtureRequest) -> dict[str, str]:
    """Format of the keys."""
    return {"key_format": request.param}


@pytest.mark.parametrize("page, topk", [(8, 512), (32, 512), (32, 1024), (64, 1024), (128, 512)])
def test_equals_the_oracle(page, topk, seed) -> None:
    lens = (0, 1, topk, topk + 1, 4000, 20_011, 40_000, 3)
    inputs = Inputs.make(Case(lens, topk, page, gives_slots=page == 32), seed, "cuda")
    assert_choice(inputs, run_op(inputs))


@pytest.mark.parametrize("page", FP4_PAGES)
@pytest.mark.parametrize("far", [0, 4, 30])
def test_formats_of_keys_give_the_same_bits(page, far, seed) -> None:
    """Groups of a key that FP8 keys hold without loss, and too far apart for that."""
    lens = (0, 513, 4000, 20_011, 40_000) + (700,) * 40
    for count in (len(lens), 5):
        case = Case(lens[:count], page=page, far=far)
        cases = [replace(case, key_format=key_format) for key_format in INDEX_FORMATS]
        inputs = [Inputs.make(case, seed, "cuda") for case in cases]
        first, second = (run_op(one) for one in inputs)
        assert_choice(inputs[1], second, range(5))
        assert torch.equal(first["indices"], second["indices"])
        for token, entries in enumerate(inputs[0].counts()):
            if entries > case.topk:
                a, b = (found["scores"][token, :entries] for found in (first, second))
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    "lens",
    [
        (8192,), (16_300, 5, 0, 9000), (4096, 513) * 3, (4096,) * 9, (30_000,) * 16, (4000,) * 31,
        (131_072, 600), (300_000,),
    ],
)  # fmt: skip
def test_few_and_many_entries(lens, keys, seed) -> None:
    inputs = Inputs.make(Case(lens, gives_slots=True, **keys), seed, "cuda")
    assert_choice(inputs, run_op(inputs))


@pytest.mark.parametrize("lens", [(0, 1, 512, 513, 4000, 20_011), (131_072, 600), (4000,) * 65])
def test_scores_in_fp32(lens, keys, seed) -> None:
    """Rounded, they are those in bf16."""
    inputs = Inputs.make(Case(lens, gives_slots=True, rank="fp32", **keys), seed, "cuda")
    found = run_op(inputs)
    assert_choice(inputs, found)
    rounded = run_op(replace(inputs, case=replace(inputs.case, rank="bf16")))["scores"]
    for token, count in enumerate(inputs.counts()):
        if count > inputs.case.topk:
            assert torch.equal(found["scores"][token, :count].bfloat16(), rounded[token, :count])


@pytest.mark.parametrize("rank", ["bf16", "fp32"])
@pytest.mark.parametrize("levels", [1, 3, 200])
def test_of_equal_scores_the_first_are_chosen(levels, rank, keys, seed) -> None:
    case = Case((5000, 70_000, 513), levels=levels, rank=rank, **keys)
    inputs = Inputs.make(case, seed, "cuda")
    assert_choice(inputs, run_op(inputs))


def test_padding_of_nan_touches_no_other_token(keys, seed) -> None:
    case = Case((3000, 900, 700, 4000), padding_rows=2, gives_slots=True, **keys)
    inputs = Inputs.make(case, seed, "cuda")
    assert_choice(inputs, run_op(inputs))


@pytest.mark.parametrize("longest", [5000, 30_000])
def test_a_token_is_the_same_alone_and_in_any_batch(longest, keys, seed) -> None:
    """Lists for one launch where tokens are few, and for two."""
    lens = tuple(600 + 137 * i % longest for i in range(64))
    inputs = Inputs.make(Case(lens, tokens_per_request=2, **keys), seed, "cuda")
    found = run_op(inputs)
    for start, stop in ((0, 1), (63, 64), (10, 17), (10, 26), (3, 35), (3, 40)):
        part = run_op(inputs.rows(start, stop))
        assert torch.equal(part["indices"], found["indices"][start:stop])
        for row, token in enumerate(range(start, stop)):
            same = part["scores"][row, : lens[token]] == found["scores"][token, : lens[token]]
            assert same.all()


def test_graph_replay_reads_new_inputs(keys, seed) -> None:
    case = Case((700, 9000, 20_000), **keys)
    inputs, other = (Inputs.make(case, seed + i, "cuda") for i in range(2))
    run_op(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_op(inputs)
    for source in (inputs, other):
        for name, tensor in inputs.tensors.items():
            tensor.copy_(source.tensors[name])
        found["indices"].fill_(-7)
        graph.replay()
        assert_choice(source, found)


def test_calls_that_follow_each_other_in_a_graph(keys, seed) -> None:
    """A launch may be resident while the one before the last still runs: what it reads of shared
    memory in L2 must be what the launch before it wrote, not what its SM has seen earlier."""
    for lens in ((4096,), (8192,) * 16, (30_000, 700, 9000)):
        cases = [Inputs.make(Case(lens, **keys), seed + i, "cuda") for i in range(8)]
        wanted = []
        for inputs in cases:
            wanted.append(run_op(inputs)["indices"])
            torch.cuda.synchronize()
        names = ("indices", "scores")
        arguments = [{n: x for n, x in i.arguments.items() if n not in names} for i in cases]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [
                index_topk(**arguments[i % 8], topk=512, weight_scale=cases[0].config.weight_scale)
                for i in range(64)
            ]
        for _ in range(3):
            graph.replay()
            for i, indices in enumerate(found):
                assert torch.equal(indices, wanted[i % 8]), (lens, i)


def test_beside_attention_that_splits_keys(seed) -> None:
    """Partial results of attention lie in a workspace, too: not where scores are counted."""
    keys = make_inputs(AttentionCase.decode(4, 64, 2048), seed, device="cuda")
    inputs = Inputs.make(Case((700, 9000)), seed, "cuda")
    run_attention(keys, num_splits=4)
    assert_choice(inputs, run_op(inputs))


def test_two_streams(keys, seed) -> None:
    cases = Case((9000, 700), **keys), Case((600, 2000, 40_000), **keys)
    both = [Inputs.make(case, seed, "cuda") for case in cases]
    wanted = [run_op(inputs)["indices"] for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, wanted, strict=True):
            with torch.cuda.stream(stream):
                results.append((run_op(inputs)["indices"], found))
    torch.cuda.synchronize()
    for found, other in results:
        assert torch.equal(found, other)


def test_no_tokens() -> None:
    inputs = Inputs.make(Case((5,)), 0, "cuda").rows(0, 0)
    assert run_op(inputs)["indices"].shape == (0, 512)
