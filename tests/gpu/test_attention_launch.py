"""How the operator launches: graphs, streams, strides, sizes, and results bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.testing.attention import Case, Inputs, assert_attention_close, make_inputs, widened
from dsv4.testing.attention_op import check_op, run_op

pytestmark = [pytest.mark.gpu, pytest.mark.stage("H")]


def random_inputs(*sizes: int, seed: int, device: str = "cuda", **options) -> Inputs:
    """Inputs of `Case.random` on a GPU."""
    return make_inputs(Case.random(*sizes, seed, **options), seed, device=device)


def runner_of(inputs: Inputs, num_splits: int | None = None) -> int:
    _, heads, head_dim = inputs.size
    return ops.fmha_runner_id(
        head_dim,
        heads,
        inputs.swa_kv.shape[1],
        inputs.compressed_kv.shape[1],
        sink_mode=inputs.sink_mode,
        num_splits=num_splits,
    )


@pytest.mark.parametrize("num_splits", [1, 6])
def test_graph_replay_reads_new_inputs(seed, num_splits) -> None:
    inputs, other = (random_inputs(3, 128, 512, 512, 128, 3, seed=seed + i) for i in range(2))
    runner = runner_of(inputs, num_splits)
    ops.warmup(runner, 3)
    out = torch.full_like(inputs.q, torch.nan)
    lse = torch.full(inputs.q.shape[:2], torch.nan, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner, None, lse)
    for source in (inputs, other):
        for target, tensor in zip(inputs.tensors, source.tensors, strict=True):
            target.copy_(tensor)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected_o, expected_lse = source.expected()
        assert_attention_close(out, expected_o, lse, expected_lse)


def test_cold_runner_in_a_capture_names_the_warmup(seed) -> None:
    inputs = random_inputs(1, 8, 64, 64, 64, 1, seed=seed)
    # No other test uses this scale: the runner is cold.
    runner = ops.fmha_runner_id(64, 8, 64, 64, softmax_scale=0.1234567)
    out = torch.empty_like(inputs.q)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"dsv4\.ops\.warmup\("),
        torch.cuda.graph(graph),
    ):
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner)


def test_two_streams_do_not_share_partials(seed) -> None:
    both = [random_inputs(4, 128, 512, 1024, 128, 2, seed=seed + i) for i in range(2)]
    expected = [run_op(inputs, num_splits=9) for inputs in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for inputs, stream, found in zip(both, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run_op(inputs, num_splits=9))
    torch.cuda.synchronize()
    for found, reference in zip(results, expected, strict=True):
        for pair in found:
            assert all(torch.equal(a, b) for a, b in zip(pair, reference, strict=True))


def test_strided_tensors(seed) -> None:
    """Every tensor is a slice of a wider one; nothing outside the slices is written."""
    inputs = random_inputs(5, 64, 512, 150, 100, 2, seed=seed, ragged=True)
    expected_o, expected_lse = run_op(inputs)
    out = widened(torch.full_like(inputs.q, torch.nan), margin=7.0)
    o, lse = run_op(inputs.strided(), out=out)
    assert torch.equal(o, expected_o)
    assert torch.equal(lse, expected_lse)
    out.fill_(7.0)
    assert (out._base == 7.0).all(), "wrote outside the output"


def test_a_strided_last_dimension_is_refused_by_name(seed) -> None:
    inputs = random_inputs(2, 8, 64, 64, 64, 1, seed=seed)
    scattered = torch.randn(2, 8, 128, device="cuda").bfloat16()[..., ::2]
    with pytest.raises(ValueError, match=r"^q: got strides"):
        run_op(inputs.replaced(q=scattered), out=torch.empty_like(inputs.q))


def test_float32_and_bfloat16_share_a_runner(seed) -> None:
    """A kernel that has been launched passes float32 on to the torch implementation."""
    inputs = random_inputs(3, 128, 512, 300, 100, 2, seed=seed, ragged=True)
    runner, lens = runner_of(inputs), inputs.compressed_lens
    out = torch.full_like(inputs.q, torch.nan)
    torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner, lens)
    exact = inputs.replaced(
        q=inputs.q.float(),
        compressed_kv=inputs.compressed_kv.float(),
        swa_kv=inputs.swa_kv.float(),
    )
    exact_out = torch.full_like(exact.q, torch.nan)
    torch.ops.dsv4.sparse_fmha_with_swa(*exact.tensors, exact_out, runner, lens)
    expected, _ = exact.expected()
    torch.testing.assert_close(exact_out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.float(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current(seed) -> None:
    """A runner serves every device, whatever device is current, and whichever came first."""
    for num_splits in (1, 4):
        for device in (1, 0, 1):
            sizes = (3, 128, 512, 300, 100, 2)
            inputs = random_inputs(*sizes, seed=seed, device=f"cuda:{device}", ragged=True)
            for current in (0, 1):
                with torch.cuda.device(current):
                    check_op(inputs, num_splits)


def test_no_tokens(seed) -> None:
    o, lse = run_op(random_inputs(0, 64, 512, 128, 128, 2, seed=seed))
    assert o.shape == (0, 64, 512)
    assert lse.shape == (0, 64)


def test_only_padding_tokens(seed) -> None:
    inputs = random_inputs(3, 64, 512, 128, 128, 2, seed=seed, padding=3)
    for num_splits in (1, 4):
        o, lse = run_op(inputs, num_splits)
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 5, None])
def test_run_to_run_bitwise(seed, num_splits) -> None:
    inputs = random_inputs(9, 128, 512, 700, 128, 4, seed=seed, ragged=True)
    first = run_op(inputs, num_splits)
    for _ in range(5):
        again = run_op(inputs, num_splits)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_token_is_the_same_alone_and_in_any_batch(seed, num_splits, heads) -> None:
    """Bit for bit, at a fixed number of splits."""
    inputs = random_inputs(150, heads, 512, 400, 128, 5, seed=seed, ragged=True)
    o, lse = run_op(inputs, num_splits)
    for tokens in (slice(0, 1), slice(77, 78), slice(149, 150), slice(40, 90)):
        part_o, part_lse = run_op(inputs.of_tokens(tokens), num_splits)
        assert torch.equal(part_o, o[tokens])
        assert torch.equal(part_lse, lse[tokens])


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(seed) -> None:
    tokens, top_k = 4200, 1024
    if torch.cuda.mem_get_info()[0] < 3 * tokens * top_k * 512 * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    inputs = random_inputs(1, 8, 512, 64, 128, 2, seed=seed)
    big = torch.zeros(tokens, top_k, 512, device="cuda", dtype=torch.bfloat16)
    assert big.numel() > 2**31
    big[-2:] = torch.randn(2, top_k, 512, device="cuda").bfloat16()
    inputs = inputs.replaced(
        q=torch.randn(tokens, 8, 512, device="cuda").bfloat16(),
        compressed_kv=big,
        request_ids=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
    )
    o, lse = run_op(inputs)
    last = slice(-2, None)
    expected_o, expected_lse = inputs.of_tokens(last).expected()
    assert_attention_close(o[last], expected_o, lse[last], expected_lse)
    assert not o.isnan().any()


def test_no_allocation_after_warmup(seed) -> None:
    inputs = random_inputs(4, 128, 512, 1024, 128, 2, seed=seed)
    runner = runner_of(inputs)
    ops.warmup(runner, 4)
    out = torch.empty_like(inputs.q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        torch.ops.dsv4.sparse_fmha_with_swa(*inputs.tensors, out, runner)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
