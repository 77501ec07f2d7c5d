"""`dsv4 bench rms_norm_fp8`: its arguments and its table."""

from __future__ import annotations

import argparse

import pytest
import torch

from dsv4.bench import rms_norm_fp8 as bench
from dsv4.bench.machine import Machine
from dsv4.cli.bench_rms_norm_fp8 import parse_shape

pytestmark = pytest.mark.stage("rows")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)


def test_bytes_are_those_of_every_tensor() -> None:
    shape = bench.Shape(10, 4096)
    x, codes, scales, weight = 10 * 4096 * 2, 10 * 4096, 10 * 32, 4096 * 4
    assert shape.bytes == x + codes + scales + weight


def test_rows_of_the_table() -> None:
    shape = bench.Shape(8192, 4096)
    row = bench.as_row(bench.Result(shape, 25.0, MACHINE.floor(shape.bytes), torch=500.0))
    assert row["shape"] == {"tokens": 8192, "dim": 4096}
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells[2:] == ["25.00", "4038", "22.94", "92%", "500.0"]
    assert bench.cells(row, is_bold=True)[2] == "**25.00**"


def test_wrong_bits_are_not_timed() -> None:
    shape = bench.Shape(1, 128)
    right = bench.plain(torch.randn(1, 128).bfloat16(), torch.ones(128))
    bench.check(shape, right, right)
    wrong = (right[0].view(torch.uint8) ^ 1).view(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="128 of 128 codes are not torch's"):
        bench.check(shape, (wrong, right[1]), right)


def test_shapes() -> None:
    assert parse_shape("16,7168") == (16, 7168)
    for text in ("16", "16,7168,1", "a,b", "0,128"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)
