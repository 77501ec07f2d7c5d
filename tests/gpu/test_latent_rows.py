"""`latent_rows` on a GPU: the bits of the separate operators, the torch implementation, graphs."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops import compress, kv_insert, latent_rows, rms_norm_fp8
from dsv4.testing.accuracy import assert_same_bits
from dsv4.testing.harness import poison
from dsv4.testing.latent_rows import (
    EPS,
    KINDS,
    OWN,
    QUERY,
    REQUESTS,
    WINDOW,
    Case,
    Inputs,
    assert_tasks,
)

pytestmark = [pytest.mark.gpu, pytest.mark.stage("rows")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, arguments: dict[str, torch.Tensor] | None = None) -> dict:
    """All tensors by their names after the public function."""
    arguments = inputs.arguments if arguments is None else arguments
    found = latent_rows(**inputs.options(arguments))
    return {**arguments, **dict(zip(QUERY[2:], found or ()))}


def separate(inputs: Inputs) -> dict:
    """The same after the separate operators."""
    found, case = inputs.arguments, inputs.case
    window = (found[name] for name in WINDOW)
    kv_insert(*window, eps=EPS, is_rounded=case.is_rounded)
    if inputs.query is not None:
        query = (found[name] for name in QUERY[:2])
        found |= dict(zip(QUERY[2:], rms_norm_fp8(*query, eps=EPS, return_norm=True)))
    for part, names in inputs.compressions():
        own = dict(zip(OWN, (found[name] for name in names)))
        own |= dict(zip(("state_rows", "starts", "lens", "slots"), map(found.get, REQUESTS)))
        options = {"is_index": part.case.is_index, "is_rounded": case.is_rounded}
        compress(**own, rope=found["rope"], eps=EPS, **options)
    return found


def assert_same(inputs: Inputs, outputs: dict) -> None:
    """Right, and with the bits of the separate operators."""
    assert_tasks(inputs, outputs)
    for name, tensor in separate(inputs).items():
        assert_same_bits(name, outputs[name], tensor)


def decode(batch: int, kind: str, **fields) -> Case:
    """A step of one token each, of which some end a block."""
    ratio = KINDS[kind].get("ratio", 4) or 4
    starts = tuple(100 + ratio + i if i % 3 else 2 * ratio - 1 for i in range(batch))
    return Case(starts, (1,) * batch, **{**KINDS[kind], **fields})


@pytest.mark.parametrize("batch", [1, 5, 64, 256])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in KINDS),
        ("CSA", {"kv_format": "bf16", "query_dim": 1536}),
        ("SWA", {"query_dim": 0}),
    ],
    ids=str,
)
def test_decode(batch, kind, fields, seed) -> None:
    inputs = Inputs.make(decode(batch, kind, **fields), seed, "cuda")
    assert_same(inputs, run(inputs))


@pytest.mark.parametrize("chunk", [5, 130, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks(chunk, kind, seed) -> None:
    case = Case((0, 127, 3, 500), (chunk, chunk - 3, chunk // 2, -1), chunk, **KINDS[kind])
    inputs = Inputs.make(case, seed, "cuda")
    assert_same(inputs, run(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_graph_replays_on_two_streams_read_new_inputs(kind, seed) -> None:
    made = [Inputs.make(decode(8, kind), seed + i, "cuda") for i in range(4)]
    run(made[0])
    graphs, streams = [], [torch.cuda.Stream() for _ in range(2)]
    for inputs in made[:2]:
        arguments, graph = inputs.arguments, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, arguments, run(inputs, arguments)))
    for pair in (made[:2], made[2:]):
        for (_, arguments, outputs), inputs in zip(graphs, pair, strict=True):
            for name, tensor in inputs.arguments.items():
                arguments[name].copy_(tensor)
            for name in QUERY[2:]:
                poison(outputs[name])
        torch.cuda.synchronize()
        for (graph, *_), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for (_, _, outputs), inputs in zip(graphs, pair, strict=True):
            assert_same(inputs, outputs)
