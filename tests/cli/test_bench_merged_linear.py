"""`dsv4 bench merged_linear`: its arguments and its table."""

from __future__ import annotations

import argparse

import pytest

from dsv4.bench import merged_linear as bench
from dsv4.bench.machine import Machine
from dsv4.cli.bench_merged_linear import parse_shape

pytestmark = pytest.mark.stage("projections")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)
SHAPE = bench.Shape("Flash HCA x", 10)


def test_bytes_are_those_of_every_tensor() -> None:
    inputs = bench.Inputs.make(SHAPE, "cpu")
    tensors = [inputs.x, *inputs.weights, *inputs.outs]
    assert SHAPE.bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_products_of_bf16_take_twice_the_time() -> None:
    fp8 = bench.Shape("Flash SWA x", 10)
    assert fp8.half_rate_flops == 10 * 1536 * 4096
    assert SHAPE.half_rate_flops - fp8.half_rate_flops == 2 * 10 * 1024 * 4096


def test_wrong_results_are_not_timed() -> None:
    inputs = bench.Inputs.make(SHAPE, "cpu")
    found = [y.clone() for y in inputs.merged()]
    alone = inputs.one_by_one()
    bench.check(SHAPE, found, alone)
    for wrong in (found[3] * 1.01, found[3] * float("nan")):
        with pytest.raises(RuntimeError, match=r"relative error .* of output 3"):
            bench.check(SHAPE, [*found[:3], wrong], alone)


def test_rows_of_the_table() -> None:
    result = bench.Result(SHAPE, 6.0, 5.0, 12.0, MACHINE.floor(SHAPE.bytes))
    row = bench.as_row(result)
    assert row["shape"] == {"label": "Flash HCA x", "tokens": 10}
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells[:4] == ["Flash HCA x", "10", "6.00", "5.00"]
    assert cells[-1] == "12.0"
    assert bench.cells(row, is_bold=True)[2] == "**6.00**"


def test_shapes() -> None:
    assert parse_shape("Flash HCA x,16") == ("Flash HCA x", 16)
    for text in ("Flash HCA x", "Flash,1", "Flash HCA x,0"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)
