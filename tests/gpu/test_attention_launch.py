"""How the operator launches: graphs, streams, strides, sizes, and results bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from tests.gpu.attention_cases import NAN, Case, compare

pytestmark = [pytest.mark.gpu, pytest.mark.stage("H")]

SINK_MODE = "softmax"


def runner_of(case: Case, num_splits: int | None = None) -> int:
    _, heads, head_dim = case.q.shape
    return ops.fmha_runner_id(
        head_dim,
        heads,
        case.swa_kv.shape[1],
        case.compressed_kv.shape[1],
        sink_mode=SINK_MODE,
        num_splits=num_splits,
    )


@pytest.mark.parametrize("num_splits", [1, 6])
def test_graph_replay_reads_new_inputs(seed, num_splits) -> None:
    case, other = (Case.random(3, 128, 512, 512, 128, 3) for _ in range(2))
    runner = runner_of(case, num_splits)
    ops.warmup(runner, 3)
    out = torch.full_like(case.q, NAN)
    lse = torch.full(case.q.shape[:2], NAN, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.dsv4.sparse_fmha_with_swa(*case.tensors(), out, runner, None, lse)
    for source in (case, other):
        for target, tensor in zip(case.tensors(), source.tensors(), strict=True):
            target.copy_(tensor)
        out.fill_(NAN)
        graph.replay()
        compare(out, lse, *source.expected(SINK_MODE))


def test_cold_runner_in_a_capture_names_the_warmup(seed) -> None:
    case = Case.random(1, 8, 64, 64, 64, 1)
    # No other test uses this scale: the runner is cold.
    runner = ops.fmha_runner_id(64, 8, 64, 64, softmax_scale=0.1234567)
    out = torch.empty_like(case.q)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"dsv4\.ops\.warmup\("),
        torch.cuda.graph(graph),
    ):
        torch.ops.dsv4.sparse_fmha_with_swa(*case.tensors(), out, runner)


def test_two_streams_do_not_share_partials(seed) -> None:
    cases = [Case.random(4, 128, 512, 1024, 128, 2) for _ in range(2)]
    expected = [case.run(sink_mode=SINK_MODE, num_splits=9) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for case, stream, found in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.run(sink_mode=SINK_MODE, num_splits=9))
    torch.cuda.synchronize()
    for found, reference in zip(results, expected, strict=True):
        for pair in found:
            assert all(torch.equal(a, b) for a, b in zip(pair, reference, strict=True))


def test_strided_tensors(seed) -> None:
    """Every tensor is a slice of a wider one; nothing outside the slices is written."""
    case = Case.random(5, 64, 512, 150, 100, 2, ragged=True)
    expected = case.run(sink_mode=SINK_MODE)
    for name in ("q", "compressed_kv", "swa_kv"):
        tensor = getattr(case, name)
        wide = torch.full(
            (tensor.shape[0], tensor.shape[1] + 3, 520), NAN, device="cuda"
        ).bfloat16()
        view = wide[:, 2:-1, :512]
        view.copy_(tensor)
        setattr(case, name, view)
    frame = torch.full((5, 66, 520), 7.0, device="cuda", dtype=torch.bfloat16)
    out = frame[:, 1:-1, :512]
    o, lse = ops.sparse_fmha_with_swa(
        *case.tensors(),
        sink_mode=SINK_MODE,
        compressed_lens=case.compressed_lens,
        out=out,
        return_lse=True,
    )
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    out.fill_(7.0)
    assert (frame == 7.0).all(), "wrote outside the output"


def test_a_strided_last_dimension_is_refused_by_name(seed) -> None:
    case = Case.random(2, 8, 64, 64, 64, 1)
    case.q = torch.randn(2, 8, 128, device="cuda").bfloat16()[..., ::2]
    with pytest.raises(ValueError, match=r"^q: got strides"):
        case.run(sink_mode=SINK_MODE)


def test_float32_and_bfloat16_share_a_runner(seed) -> None:
    """A kernel that has been launched passes float32 on to the torch implementation."""
    case = Case.random(3, 128, 512, 300, 100, 2, ragged=True)
    runner = runner_of(case)
    out = torch.full_like(case.q, NAN)
    torch.ops.dsv4.sparse_fmha_with_swa(*case.tensors(), out, runner, case.compressed_lens)
    exact = replace(
        case,
        q=case.q.float(),
        compressed_kv=case.compressed_kv.float(),
        swa_kv=case.swa_kv.float(),
    )
    exact_out = torch.full_like(exact.q, NAN)
    torch.ops.dsv4.sparse_fmha_with_swa(*exact.tensors(), exact_out, runner, case.compressed_lens)
    expected, _ = exact.expected(SINK_MODE)
    torch.testing.assert_close(exact_out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.float(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current(seed) -> None:
    """A runner serves every device, whatever device is current, and whichever came first."""
    for num_splits in (1, 4):
        for device in (1, 0, 1):
            case = Case.random(3, 128, 512, 300, 100, 2, ragged=True, device=f"cuda:{device}")
            for current in (0, 1):
                with torch.cuda.device(current):
                    case.check(sink_mode=SINK_MODE, num_splits=num_splits)


def test_no_tokens(seed) -> None:
    case = Case.random(0, 64, 512, 128, 128, 2)
    o, lse = case.run(sink_mode=SINK_MODE)
    assert o.shape == (0, 64, 512)
    assert lse.shape == (0, 64)


def test_only_padding_tokens(seed) -> None:
    case = Case.random(3, 64, 512, 128, 128, 2, padding=3)
    for num_splits in (1, 4):
        o, lse = case.run(sink_mode=SINK_MODE, num_splits=num_splits)
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 5, None])
def test_run_to_run_bitwise(seed, num_splits) -> None:
    case = Case.random(9, 128, 512, 700, 128, 4, ragged=True)
    first = case.run(sink_mode=SINK_MODE, num_splits=num_splits)
    for _ in range(5):
        again = case.run(sink_mode=SINK_MODE, num_splits=num_splits)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_token_is_the_same_alone_and_in_any_batch(seed, num_splits, heads) -> None:
    """Bit for bit, at a fixed number of splits."""
    case = Case.random(150, heads, 512, 400, 128, 5, ragged=True)
    o, lse = case.run(sink_mode=SINK_MODE, num_splits=num_splits)
    for tokens in (slice(0, 1), slice(77, 78), slice(149, 150), slice(40, 90)):
        part = Case(
            case.q[tokens],
            case.compressed_kv[tokens],
            case.swa_kv,
            case.swa_lens,
            case.sink_logits,
            case.request_ids[tokens],
            case.compressed_lens[tokens],
        )
        part_o, part_lse = part.run(sink_mode=SINK_MODE, num_splits=num_splits)
        assert torch.equal(part_o, o[tokens])
        assert torch.equal(part_lse, lse[tokens])


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(seed) -> None:
    tokens, top_k = 4200, 1024
    if torch.cuda.mem_get_info()[0] < 3 * tokens * top_k * 512 * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    case = Case.random(1, 8, 512, 64, 128, 2)
    big = torch.zeros(tokens, top_k, 512, device="cuda", dtype=torch.bfloat16)
    assert big.numel() > 2**31
    big[-2:] = torch.randn(2, top_k, 512, device="cuda").bfloat16()
    case.compressed_kv = big
    case.q = torch.randn(tokens, 8, 512, device="cuda").bfloat16()
    case.request_ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    o, lse = case.run(sink_mode=SINK_MODE)
    tensors = (case.swa_kv, case.swa_lens, case.sink_logits, case.request_ids[-2:])
    last = Case(case.q[-2:], big[-2:], *tensors, None)
    compare(o[-2:], lse[-2:], *last.expected(SINK_MODE))
    assert not o.isnan().any()


def test_no_allocation_after_warmup(seed) -> None:
    case = Case.random(4, 128, 512, 1024, 128, 2)
    runner = runner_of(case)
    ops.warmup(runner, 4)
    out = torch.empty_like(case.q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        torch.ops.dsv4.sparse_fmha_with_swa(*case.tensors(), out, runner)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
