"""`dsv4 bench fp8_linear`: its arguments and its table."""

from __future__ import annotations

import argparse

import pytest
import torch

from dsv4.bench import fp8_linear as bench
from dsv4.bench.machine import Machine
from dsv4.cli.bench_fp8_linear import parse_shape

pytestmark = pytest.mark.stage("projections")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)


def test_bytes_are_those_of_every_tensor() -> None:
    shape = bench.Shape(10, 4096, 1024)
    x, weight, scale = bench.make_inputs(shape, "cpu")
    y = torch.empty(10, 4096, dtype=torch.bfloat16)
    assert shape.bytes == sum(t.numel() * t.element_size() for t in (x, weight, scale, y))


def test_the_floor_is_that_of_bytes_or_of_products() -> None:
    few, many = bench.Shape(1, 4096, 1024), bench.Shape(4096, 4096, 1024)
    assert MACHINE.floor(few.bytes, few.flops / 2) == few.bytes / 4.4e6
    assert MACHINE.floor(many.bytes, many.flops / 2) == many.flops / 2e9


def test_rows_of_the_table() -> None:
    shape = bench.Shape(1, 4096, 1024)
    row = bench.as_row(bench.Result(shape, 2.0, MACHINE.floor(shape.bytes), torch=500.0))
    assert row["shape"] == {"tokens": 1, "rows": 4096, "width": 1024}
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells == ["1", "4096", "1024", "2.00", "2102", "0.96", "48%", "500.0"]
    assert bench.cells(row, is_bold=True)[3] == "**2.00**"


def test_wrong_results_are_not_timed() -> None:
    shape = bench.Shape(3, 136, 512)
    inputs = bench.make_inputs(shape, "cpu")
    exact = bench.plain(*inputs, torch.float32)
    bench.check(shape, bench.plain(*inputs), exact)
    for wrong in (exact * 1.01, exact * torch.nan):
        with pytest.raises(RuntimeError, match="relative error"):
            bench.check(shape, wrong, exact)


def test_shapes() -> None:
    assert parse_shape("16,4096,1024") == (16, 4096, 1024)
    for text in ("16,1", "16,1,1,1", "a,b,c", "0,128,512"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)
