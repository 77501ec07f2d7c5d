"""`compress` on a GPU: the torch implementation, graphs, bits that the request alone decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.kit.index_entry import INDEX_FORMATS
from dsv4.ops import compress
from dsv4.testing.compress import EPS, Case, Inputs, assert_step, decoded

pytestmark = [pytest.mark.gpu, pytest.mark.stage("compressor")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def run(inputs: Inputs, arguments: dict[str, torch.Tensor] | None = None) -> dict:
    """State and pool after the public function."""
    arguments = inputs.arguments if arguments is None else arguments
    case = inputs.case
    compress(**arguments, eps=EPS, is_index=case.is_index, is_rounded=case.is_rounded)
    return {name: arguments[name] for name in ("state", "pool")}


def decode(batch: int, **fields) -> Case:
    """A step of one token each, of which every fourth ends a block."""
    return Case(tuple(range(100, 100 + batch)), (1,) * batch, **fields)


@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_format": "bf16"},
        {"kv_format": "bf16", "is_rounded": False},
        {"dim": 128, "is_index": True},
        {"dim": 128, "is_index": True, "kv_format": "fp4"},
        {"ratio": 128, "overlap": False},
    ],
    ids=str,
)
def test_decode_equals_the_torch_implementation(batch, fields, seed) -> None:
    inputs = Inputs.make(decode(batch, **fields), seed, "cuda")
    assert_step(inputs, run(inputs))


@pytest.mark.parametrize("chunk", [5, 130, 1024])
@pytest.mark.parametrize(
    "fields", [{}, {"dim": 128, "is_index": True}, {"ratio": 128, "overlap": False}], ids=str
)
def test_chunks_equal_the_torch_implementation(chunk, fields, seed) -> None:
    case = Case((0, 127, 3, 500), (chunk, chunk - 3, chunk // 2, -1), chunk, **fields)
    inputs = Inputs.make(case, seed, "cuda")
    assert_step(inputs, run(inputs))


@pytest.mark.parametrize("chunk", [1, 130])
def test_fp4_index_keys_hold_what_fp8_ones_hold(chunk, seed) -> None:
    case = Case((3, 127, 7), (chunk, 1, 1), chunk, dim=128, is_index=True)
    pools = []
    for kv_format in INDEX_FORMATS:
        inputs = Inputs.make(replace(case, kv_format=kv_format), seed, "cuda")
        pools.append(decoded(inputs.case, run(inputs)["pool"].cpu()))
        slots = inputs.tensors["slots"].cpu().flatten().long()
    slots = slots[slots >= 0]
    first, second = (pool.flatten(0, 1)[slots] for pool in pools)
    assert len(slots) and torch.equal(first, second)


def test_a_request_is_the_same_alone_and_in_any_batch(seed) -> None:
    inputs = Inputs.make(decode(64, page=64), seed, "cuda")
    whole = run(inputs)
    for indices in ([7], [3, 11, 63], list(range(40))):
        part = inputs.rows(indices)
        arguments = {**part.arguments, "pool": inputs.pool()}
        found = run(part, arguments)
        for slot in part.tensors["slots"].flatten().tolist():
            if slot >= 0:
                # A page of one's own: neighbours of other requests are not written here.
                one, other = (x["pool"].view(x["pool"].shape[0], -1) for x in (found, whole))
                width = 576
                page, place = divmod(slot, 64)
                record = slice(place * width, (place + 1) * width)
                assert torch.equal(one[page, record], other[page, record])


def test_graph_replay_reads_new_inputs(seed) -> None:
    inputs, other = (Inputs.make(decode(8), seed + i, "cuda") for i in range(2))
    arguments = inputs.arguments
    run(inputs, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs, arguments)
    for source in (inputs, other):
        for name, tensor in source.arguments.items():
            arguments[name].copy_(tensor)
        graph.replay()
        assert_step(source, found)
