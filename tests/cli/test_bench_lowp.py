"""`dsv4 bench lowp`: its arguments and its table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from dsv4.bench import lowp as bench
from dsv4.bench.lowp_libraries import by_group
from dsv4.bench.lowp_peers import Peer, peers
from dsv4.bench.pages import rendered
from dsv4.cli.bench_lowp import parse_shape
from dsv4.testing.lowp import Metrics

pytestmark = pytest.mark.stage("lowp")

SHAPE = bench.Shape(64, 96, True, 8)


def test_flops_are_those_of_what_is_seen() -> None:
    whole = bench.Shape(64, 96, False, 8)
    assert whole.flops == 4 * bench.BATCH * bench.HEADS * 96 * 96 * 64 == 2 * SHAPE.flops


def test_accuracy_is_that_of_the_last_queries() -> None:
    q, k, v = bench.make_inputs(SHAPE, "cpu")
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    # The first head has the first head of keys, and the last one the last.
    found = bench.accuracy_of(SHAPE, (q, k, v), exact)
    assert found.cosine > 0.999999 and found.l1 < 1e-5
    bench.check(SHAPE, found)
    with pytest.raises(RuntimeError, match="is off"):
        bench.check(SHAPE, bench.accuracy_of(SHAPE, (q, k, v), exact * 1.1))


def test_rows_of_the_table() -> None:
    peer = {"SDPA flash": 200.0, "FA3": None}
    row = bench.as_row(bench.Result(SHAPE, 10.0, 12.5, Metrics(0.9993, 0.038, 1e-3), peer))
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS) + len(peer)
    assert cells[:4] == ["64", "32/8", "yes", "96"]
    assert cells[8] == "0.80" and cells[-1] == "-"
    assert bench.cells(row, is_bold=True)[5] == f"**{cells[5]}**"


def test_rates_beside_targets_and_peers(tmp_path: Path) -> None:
    """The table of a record, and what it says: the better of two peers, not the first."""
    shape = bench.Shape(128, 8192, True)
    times = {"FA3 FP8": 3000.0, "SageAttention": 2400.0, "SDPA flash": 2100.0}
    results = [
        bench.Result(shape, 2000.0, 2500.0, Metrics(0.9993, 0.038, 1e-3), times),
        bench.Result(SHAPE, 10.0, 12.5, Metrics(0.9993, 0.038, 1e-3), dict.fromkeys(times)),
    ]
    rows = [bench.as_row(result) for result in results]
    place = bench.COLUMNS.index("target")
    assert [bench.cells(row)[place : place + 2] for row in rows] == [["900", "1.20"], ["-", "-"]]
    machine = {"name": "NVIDIA H200", "copy": 4e12, "read": 4.4e12, "rate": 8e14}
    record = {
        "machine": machine,
        "software": {},
        "date": "2026-11-28",
        "command": "dsv4 bench lowp",
    }
    (tmp_path / "lowp.json").write_text(json.dumps(record | {"results": rows}))
    page = rendered("<!-- benchmarks: lowp lowp.json -->\n<!-- /benchmarks -->", tmp_path)
    assert "| SDPA flash, TFLOP/s |" in page
    assert "Targets met: 1 of 1. 1.20 to 1.20 times the better of FA3 FP8 and Sage" in page
    assert "With the quantisers 0.80 to 0.80 of the kernel's rate from 8192 rows on" in page


def test_peers_of_every_installation() -> None:
    found = list(peers())
    assert all(isinstance(peer, Peer) for peer in found)
    assert [peer.name for peer in found[:2]] == ["SDPA flash", "SDPA cuDNN"]
    names = [peer.name for peer in peers(Path("fa3.so"), Path("sage.so"))]
    assert {"FA3", "FA3 FP8", "SageAttention"} <= set(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_peers_get_one_scale_for_a_group_of_heads(key_heads: int, seed: int) -> None:
    x = torch.randn(2, 4, 30, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    codes, scale = by_group(x, key_heads)
    assert codes.shape == x.shape and scale.shape == (2, key_heads)
    spread = scale.repeat_interleave(4 // key_heads, 1)[:, :, None, None]
    assert codes.float().abs().amax((2, 3)).amax() == 448
    assert Metrics.of(codes.float() * spread, x).cosine > 0.999


def test_shapes() -> None:
    assert parse_shape("128,2048,1,8") == (128, 2048, True, 8)
    for text in ("128,2048", "128,2048,2,8", "0,1,0,1", "64,64,0,5"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)
