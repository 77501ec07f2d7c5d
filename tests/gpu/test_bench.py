"""`dsv4 bench attention` without a GPU: its arithmetic, its outputs, its errors."""

from __future__ import annotations

import json

import pytest
import torch

from dsv4.bench import attention_report, flash_mla, report
from dsv4.bench.attention import (
    MAX_ERROR,
    HostCost,
    Result,
    host_cost,
    measure,
    relative_error,
)
from dsv4.bench.kernel_times import kernel_times
from dsv4.bench.machine import Machine
from dsv4.bench.peers import Peer, attention, torch_peers
from dsv4.bench.shapes import Arguments, model_cases
from dsv4.cli.bench_rows import recorded
from dsv4.cli.main import main
from dsv4.compat import flash_mla as compat
from dsv4.reference.attention import sparse_fmha_with_swa as oracle
from dsv4.testing.attention import Case, make_inputs

MACHINE = Machine("GPU", copy=3.9e12, read=4e12, rate=8e14)
CASE = Case.decode(256, heads=128, top_k=1024, name="Pro")


def test_counts_of_a_shape() -> None:
    """Each KV row, q and o once; two products of 2 * heads * keys * dim operations per token."""
    assert CASE.bytes == 256 * 2 * 512 * (1024 + 128 + 128 + 128)
    assert CASE.flops == 256 * 2 * 2 * 128 * 1152 * 512


def test_floor_is_the_larger_of_the_two_times() -> None:
    assert MACHINE.floor(CASE.bytes, CASE.flops) == pytest.approx(CASE.flops / 8e14 * 1e6)
    few_heads = Case.decode(256, 8, 1024)
    floor = MACHINE.floor(few_heads.bytes, few_heads.flops)
    assert floor == pytest.approx(few_heads.bytes / 4e12 * 1e6)


def test_the_table_holds_every_promised_shape() -> None:
    shapes = {(case.name, case.tokens) for case in model_cases()}
    assert {
        (name, t) for name in ("Pro", "Flash") for t in (1, 4, 16, 64, 128, 256, 1024)
    } <= shapes


def test_table_json_and_plot(tmp_path) -> None:
    results = [
        Result(CASE, 1, 128.0, 96.7, 2e-3, {"torch eager": 900.0}),
        Result(CASE, 4, 64.0, 48.0, 2e-3, failures={"torch eager": "MemoryError: too large"}),
    ]
    peers = ["torch eager"]
    header = report.table_head(attention_report.columns(peers)).splitlines()[0]
    rows = [
        report.table_line(attention_report.cells(attention_report.as_row(result), peers))
        for result in results
    ]
    assert all(row.count("|") == header.count("|") for row in rows)
    assert "| 1152 | 1 | 128.0 | 604 |" in rows[0]
    assert rows[0].endswith("| 76% | 900.0 |")
    assert rows[1].endswith("| - |")
    path = tmp_path / "record.json"
    extra = {"host_microseconds": attention_report.host_row(HostCost(11.0, 7.0))}
    with recorded(path, "attention", MACHINE, extra) as stored_rows:
        stored_rows += [attention_report.as_row(result) for result in results]
    stored = json.loads(path.read_text())
    assert stored["machine"]["rate"] == 8e14
    assert stored["host_microseconds"]["beyond_the_launch"] == 4.0
    assert stored["results"][1]["failures"] == {"torch eager": "MemoryError: too large"}
    assert stored["results"][0]["teraflops"] == pytest.approx(CASE.flops / 128e6)
    pytest.importorskip("matplotlib")
    points = attention_report.roofline(results)
    report.plot(MACHINE, points, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_torch_peer_computes_the_same_attention(seed) -> None:
    q, compressed_kv, swa_kv = (torch.randn(3, rows, 64) for rows in (8, 20, 10))
    sink = torch.randn(8)
    lens, requests = torch.full((3,), 10).int(), torch.arange(3).int()
    expected, _ = oracle(q, compressed_kv, swa_kv, lens, sink, requests, sink_mode="softmax")
    kv = torch.cat((compressed_kv, swa_kv), 1)
    torch.testing.assert_close(attention(q, kv, sink), expected)


def cpu_arguments(case: Case, seed: int = 0) -> Arguments:
    inputs = make_inputs(case, seed)
    return Arguments(*inputs.tensors, inputs.q.new_empty(()))


PEERS = [torch_peers()[0], *flash_mla.flash_mla_peers(compat)]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("heads", [8, 64])
def test_peers_are_given_the_same_attention(seed, peer, heads) -> None:
    """Our own functions of FlashMLA's interface stand for it: they take the same arguments."""
    case = Case.decode(5, heads, 128)
    assert peer.serves(case)
    inputs = [cpu_arguments(case, seed + i) for i in range(2)]
    runs = peer.prepare(case, inputs)
    for run, each in zip(runs, inputs, strict=True):
        assert relative_error(run, each, peer) <= peer.error
    assert not relative_error(runs[0], inputs[1], peer) <= 0.5, "the check sees nothing"


def test_fp8_keys_are_other_keys(seed) -> None:
    """The decode kernel is right for the keys it reads, not for those that were rounded to them."""
    case = Case.decode(3, 64, 128)
    inputs = cpu_arguments(case, seed)
    (run,) = PEERS[-1].prepare(case, [inputs])
    assert relative_error(run, inputs) > 1e-2


def test_peers_refuse_what_they_are_not_made_for() -> None:
    prefill, decode = flash_mla.flash_mla_peers(compat)
    assert not prefill.serves(Case.decode(4, 24, 1024))
    assert not prefill.serves(Case.decode(4, 64, 1000))
    assert not decode.serves(Case.decode(4, 64, 1024, window=0))
    assert not decode.serves(Case.decode(4, 64, 1024, head_dim=128))


def test_an_extension_that_is_none_is_one_error(tmp_path) -> None:
    (tmp_path / "some.so").write_bytes(b"no library")
    with pytest.raises(ValueError, match=r"flashmla: .*some\.so cannot be used"):
        flash_mla.find(tmp_path / "some.so")


@pytest.mark.gpu
def test_a_small_measurement(seed) -> None:
    """Time, error, splits and peers of a shape; a wrong and a failing peer get no time."""

    def fail(case: Case, inputs: list[Arguments]) -> list:
        raise ArithmeticError("cannot")

    eager = torch_peers()[0]
    wrong = Peer("wrong", lambda case, inputs: eager.prepare(case, inputs[::-1]))
    (result,) = measure(
        [Case.decode(3, 64, 128)],
        MACHINE,
        num_splits=2,
        peers=[eager, wrong, Peer("failing", fail)],
    )
    assert result.num_splits == 2
    assert result.error <= MAX_ERROR
    assert 1 < result.microseconds < 1000
    assert list(result.peers) == ["torch eager"]
    assert "off by" in result.failures["wrong"]
    assert result.failures["failing"] == "ArithmeticError: cannot"


@pytest.mark.gpu
def test_host_cost_beyond_the_launch(seed) -> None:
    """A bound for any machine; the benchmark prints the figure."""
    cost = host_cost()
    assert 0 < cost.launch < cost.operator
    assert cost.beyond <= 20


@pytest.mark.gpu
def test_kernels_of_some_work_are_counted_and_timed() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    x.sum()
    rows = kernel_times(lambda: (x.add_(1), x.sum(), x.add_(1)))
    assert len(rows) >= 2 and 2 in [calls for _, calls, _ in rows]
    assert all(time > 0 for _, _, time in rows)


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,x", "0,8,64,64", "1,8,0,0", "1,8,-1,64"])
def test_impossible_shapes_are_refused(text, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--shape", text])
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys) -> None:
    assert main(["bench", "attention"]) == 2
    assert capsys.readouterr().err == "dsv4: error: bench needs a CUDA GPU, none is available\n"
