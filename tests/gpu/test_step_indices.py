"""`step_indices` on a GPU: numbers of the CPU, graphs, what a cache prepares."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.step_indices import Case, Inputs

pytestmark = [pytest.mark.gpu, pytest.mark.stage("rows")]

SIZES = {"ring": 129, "block": 128, "ratios": (4, 128)}


def flat(found: ops.StepIndexTensors) -> list[torch.Tensor]:
    return [*found[:6], *found.completed, *found.visible]


@pytest.mark.parametrize("rows, chunk, blocks", [(1, 1, 257), (16, 2, 4), (256, 1, 1025)])
def test_numbers_of_the_cpu_in_replays(rows: int, chunk: int, blocks: int, seed) -> None:
    case = Case(rows, chunk, blocks)
    given, other = (Inputs.make(case, seed + i, "cuda").requests for i in range(2))
    found = ops.step_indices(**given, chunk=chunk, **SIZES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.step_indices(**given, chunk=chunk, **SIZES)
    for name, tensor in given.items():
        tensor.copy_(other[name])
    graph.replay()
    for place, tensors in enumerate((found, replayed)):
        expected = ops.step_indices(
            **Inputs.make(case, seed + place).requests, chunk=chunk, **SIZES
        )
        for one, wanted in zip(flat(tensors), flat(expected), strict=True):
            assert torch.equal(one.cpu(), wanted)
