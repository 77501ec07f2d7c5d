"""`kv_insert` on a GPU: bytes of the CPU, graphs, overlapping launches, attention on the cache."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.kv_insert import EPS, Case, Inputs, assert_same_pool, frame_of

pytestmark = [pytest.mark.gpu, pytest.mark.stage("rows")]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def insert(inputs: Inputs, pool: torch.Tensor) -> None:
    case = inputs.case
    options = {"is_rounded": case.is_rounded, "uniform_scale": case.uniform_scale}
    ops.kv_insert(*inputs.tensors, pool, eps=EPS, **options)


def check(case: Case, seed: int) -> None:
    inputs = Inputs.make(case, seed)
    there = Inputs.make(case, seed, "cuda")
    pool = there.pool()
    insert(there, pool)
    assert_same_pool(frame_of(pool), inputs)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize("latents", [1, 5, 133, 9000])
def test_bytes_of_the_cpu(kv_format, dim, latents, seed) -> None:
    check(Case(latents, dim, kv_format, page=2 if latents == 133 else 64), seed)


@pytest.mark.parametrize("uniform_scale", [False, True])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_options_and_special_latents(kv_format, uniform_scale, seed) -> None:
    check(Case(300, 512, kv_format, True, uniform_scale, 61, has_special_rows=True), seed)
    check(Case(300, 512, "bf16", is_rounded=False), seed)


def test_graph_replay_reads_new_inputs(seed) -> None:
    inputs, other = (Inputs.make(Case(40), seed + i, "cuda") for i in range(2))
    pool = inputs.pool()
    insert(inputs, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        insert(inputs, pool)
    for tensor, new in zip(inputs.tensors, other.tensors, strict=True):
        tensor.copy_(new)
    frame_of(pool).copy_(frame_of(other.pool()))
    graph.replay()
    assert_same_pool(frame_of(pool), Inputs.make(Case(40), seed + 1))


def test_a_launch_that_follows_sees_what_was_written(seed) -> None:
    """A launch begins while the one before it ends: latents that this wrote must have arrived."""
    inputs = Inputs.make(Case(4000), seed, "cuda")
    expected = Inputs.make(Case(4000), seed)
    late = Inputs(inputs.case, torch.empty_like(inputs.x), *inputs.tensors[1:])
    gains = torch.ones(512, device="cuda")
    for _ in range(20):
        late.x.fill_(torch.nan)
        pool = inputs.pool()
        # A kernel of ours with the same latents as its normalised output, which this one reads.
        ops.rms_norm_fp8(inputs.x, gains, eps=EPS, norm_out=late.x, return_norm=True)
        insert(late, pool)
    normed = ops.rms_norm_fp8(expected.x, torch.ones(512), eps=EPS, return_norm=True)[2]
    assert_same_pool(frame_of(pool), Inputs(expected.case, normed, *expected.tensors[1:]))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_attention_reads_what_was_inserted(kv_format, seed) -> None:
    """Both formats hold the same keys, on the GPU as on the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        inputs = Inputs.make(Case(512, 512, kv_format), seed, device)
        slots = torch.arange(512, dtype=torch.int32, device=device)
        pool = inputs.pool()
        ops.kv_insert(*inputs.tensors[:4], slots, pool, eps=EPS)
        q = torch.ones(4, 64, 512, dtype=torch.bfloat16, device=device) * 0.1
        lists = slots.view(4, 128)
        sinks = torch.zeros(64, device=device)
        o = ops.sparse_fmha_paged(
            *(q, pool, lists, None, None, None, None, sinks), sink_mode="softmax"
        )
        found.append(o.cpu().float())
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)
