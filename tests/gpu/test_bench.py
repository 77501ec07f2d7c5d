"""`dsv4 bench attention` without a GPU: its arithmetic, its outputs, its errors."""

from __future__ import annotations

import json

import pytest
import torch

from dsv4.bench import report
from dsv4.bench.attention import Machine, Result, Shape, model_shapes
from dsv4.bench.peers import attention
from dsv4.cli.main import main
from dsv4.reference.attention import sparse_fmha_with_swa as oracle

MACHINE = Machine("GPU", bandwidth=4e12, rate=8e14)
SHAPE = Shape("Pro", tokens=256, heads=128, top_k=1024)


def test_counts_of_a_shape() -> None:
    """Each KV row, q and o once; two products of 2 * heads * keys * dim operations per token."""
    assert SHAPE.bytes == 256 * 2 * 512 * (1024 + 128 + 128 + 128)
    assert SHAPE.flops == 256 * 2 * 2 * 128 * 1152 * 512


def test_floor_is_the_larger_of_the_two_times() -> None:
    assert MACHINE.floor(SHAPE) == pytest.approx(SHAPE.flops / 8e14 * 1e6)
    few_heads = Shape("user", 256, 8, 1024)
    assert MACHINE.floor(few_heads) == pytest.approx(few_heads.bytes / 4e12 * 1e6)


def test_the_table_holds_every_promised_shape() -> None:
    shapes = {(shape.name, shape.tokens) for shape in model_shapes()}
    assert {
        (name, t) for name in ("Pro", "Flash") for t in (1, 4, 16, 64, 128, 256, 1024)
    } <= shapes


def test_table_json_and_plot(tmp_path) -> None:
    results = [Result(SHAPE, 128.0, 96.7, {"torch eager": 900.0}), Result(SHAPE, 64.0, 48.0, {})]
    header = report.table_header(["torch eager"])
    rows = [report.table_row(result, ["torch eager"]) for result in results]
    assert all(row.count("|") == header.count("|") for row in rows)
    assert "| 128.0 | 604 |" in rows[0]
    assert rows[0].endswith("| 76% | 900.0 |")
    assert rows[1].endswith("| - |")
    stored = json.loads(report.to_json(MACHINE, results))
    assert stored["machine"]["rate"] == 8e14
    assert stored["results"][0]["teraflops"] == pytest.approx(SHAPE.flops / 128e6)
    pytest.importorskip("matplotlib")
    report.plot(MACHINE, results, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_torch_peer_computes_the_same_attention(seed) -> None:
    q, compressed_kv, swa_kv = (torch.randn(3, rows, 64) for rows in (8, 20, 10))
    sink = torch.randn(8)
    lens, requests = torch.full((3,), 10).int(), torch.arange(3).int()
    expected, _ = oracle(q, compressed_kv, swa_kv, lens, sink, requests, sink_mode="softmax")
    torch.testing.assert_close(attention(q, compressed_kv, swa_kv, sink), expected)


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,x", "0,8,64,64", "1,8,0,0", "1,8,-1,64"])
def test_impossible_shapes_are_refused(text, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--shape", text])
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys) -> None:
    assert main(["bench", "attention"]) == 2
    assert capsys.readouterr().err == "dsv4: error: bench needs a CUDA GPU, none is available\n"
