"""CUDA graphs of the operator: what one eager call before a capture makes ready."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor

from dsv4 import ops
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import workspace
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs
from dsv4.testing.attention_op import check_op

pytestmark = [pytest.mark.gpu, pytest.mark.stage("H")]

COLD = count()


@pytest.fixture
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has launched nothing yet."""
    for name, empty in (("_EAGER", {}), ("_CAPTURE", {}), ("_CAPTURED", set()), ("_RETIRED", [])):
        monkeypatch.setattr(workspace, name, empty)


def cold_runner(inputs: Inputs, num_splits: int | None) -> int:
    """A runner that nothing has loaded; a scale is part of what a kernel is compiled for."""
    _, heads, head_dim = inputs.size
    return ops.fmha_runner_id(
        head_dim,
        heads,
        inputs.swa_kv.shape[1],
        inputs.compressed_kv.shape[1],
        sink_mode=inputs.sink_mode,
        softmax_scale=head_dim**-0.5 * (1 + 2**-20 * next(COLD)),
        num_splits=num_splits,
    )


def random_inputs(tokens: int, seed: int) -> Inputs:
    return make_inputs(Case.random(tokens, 128, 512, 512, 128, 3, seed), seed, device="cuda")


def capture(inputs: Inputs, runner: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of one call, on a stream of its own, and the outputs that its replays write."""
    out = torch.full_like(inputs.q, torch.nan)
    lse = torch.full(inputs.q.shape[:2], torch.nan, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner, None, lse)
    return graph, out, lse


@pytest.mark.parametrize("stream", ["current", "other"])
@pytest.mark.parametrize("num_splits", [None, 1, 6])
def test_one_eager_call_makes_a_capture_warm(seed, num_splits, stream, no_workspaces) -> None:
    inputs = random_inputs(3, seed)
    runner = cold_runner(inputs, num_splits)
    eager = torch.empty_like(inputs.q)
    side = torch.cuda.Stream() if stream == "other" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, eager, runner)
    torch.cuda.current_stream().wait_stream(side)
    graph, out, lse = capture(inputs, runner)
    expected = inputs.expected()
    for _ in range(3):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)
        assert_attention_close(out, expected[0], lse, expected[1])


def test_replays_beside_eager_launches(seed, no_workspaces) -> None:
    """A graph on one stream and launches on another never share partials."""
    inputs = random_inputs(4, seed)
    runner = cold_runner(inputs, 6)
    expected = torch.empty_like(inputs.q)
    torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, expected, runner)
    graph, out, _ = capture(inputs, runner)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        eager = torch.empty_like(inputs.q)
        with torch.cuda.stream(side):
            graph.replay()
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, eager, runner)
        torch.cuda.synchronize()
        assert torch.equal(eager, expected)
        assert torch.equal(out, expected)


def test_a_graph_keeps_its_workspace(seed, no_workspaces) -> None:
    """Larger calls come later and need a larger workspace: earlier graphs stay valid."""
    small, large = random_inputs(2, seed), random_inputs(20, seed + 1)
    runner = cold_runner(small, 8)
    graphs = []
    for inputs in (small, large):
        eager = torch.empty_like(inputs.q)
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, eager, runner)
        graphs.append((capture(inputs, runner), eager))
    assert len(workspace._RETIRED) == 1
    torch.cuda.empty_cache()
    for (graph, out, _), eager in (*graphs, *reversed(graphs)):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)


def test_a_large_workspace_is_the_graphs_own(seed, no_workspaces) -> None:
    """Zeroed by every replay, between two launches that share it."""
    inputs = random_inputs(60, seed)
    runner = cold_runner(inputs, 8)
    eager = torch.empty_like(inputs.q)
    torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, eager, runner)
    outs = [torch.full_like(inputs.q, torch.nan) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner)
    assert workspace._CAPTURE[SPARSE_FMHA.name, 0].numel() == 0
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, eager) for out in outs)


def test_a_variable_selects_torch(seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """DSV4_OPS=torch, before a runner's first call: the right result, and no kernel bound."""
    monkeypatch.setenv("DSV4_OPS", "torch")
    for runner in tuple(SPARSE_FMHA.launches):
        monkeypatch.delitem(SPARSE_FMHA.launches, runner)
    check_op(random_inputs(3, seed))
    assert SPARSE_FMHA.launches == {}
