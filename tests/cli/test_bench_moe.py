"""`dsv4 bench moe`: its arguments, its inputs and its table."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from dsv4.bench import moe as bench
from dsv4.bench.machine import Machine
from dsv4.cli.bench_moe import parse_shape

pytestmark = pytest.mark.stage("moe")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)


def test_bytes_are_those_of_the_experts_that_are_used() -> None:
    """The figures of the design for one layer, in MB."""
    flash, pro = bench.Shape("Flash", 1), bench.Shape("Pro", 1)
    assert flash.bytes(7) - flash.bytes(6) == pytest.approx(13.37e6, rel=1e-3)
    assert flash.bytes(6) == pytest.approx(80.2e6 + 25.2e6 + 2.1e6, rel=1e-2)
    assert pro.bytes(6) == pytest.approx(210.6e6 + 66.1e6 + 5.5e6, rel=1e-2)


def small_layer(model: str, monkeypatch) -> bench.Layer:
    sizes = {"hidden": 512, "inner": 256, "experts": 32, "top_k": 3}
    monkeypatch.setitem(bench.LAYERS, model, replace(bench.LAYERS[model], **sizes))
    return bench.Layer(model, "cpu")


@pytest.mark.parametrize("model", ["Flash-Base", "Flash-NVFP4", "Flash-BF16"])
def test_layers_in_other_formats(model, monkeypatch) -> None:
    layer = small_layer(model, monkeypatch)
    assert layer.experts.dtype_name == layer.config.expert_dtype
    layer.check()


def test_layers_are_prepared_and_compared(monkeypatch) -> None:
    layer = small_layer("Flash", monkeypatch)
    layer.check()
    monkeypatch.setattr(bench, "MAX_RELATIVE_ERROR", -1.0)
    with pytest.raises(RuntimeError, match="Flash: relative error"):
        layer.check()


def test_rows_of_the_table() -> None:
    shape = bench.Shape("Flash", 16)
    row = bench.as_row(bench.Result(shape, 80.8, 300.0, MACHINE.floor(shape.bytes(80.8))))
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells[:4] == ["Flash", "16", "80.8", "300.0"]
    assert bench.cells(row, is_bold=True)[3] == "**300.0**"


def test_sizes_on_the_command_line() -> None:
    assert parse_shape("Pro,64") == ("Pro", 64)
    for wrong in ("Pro", "Flush,1", "Flash,0", "Flash,x", "Flash,-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected MODEL,T"):
            parse_shape(wrong)


def test_all_layers_are_measured() -> None:
    found = {(shape.model, shape.tokens) for shape in bench.model_shapes()}
    models = {(model, tokens) for model in ("Flash", "Pro") for tokens in bench.TOKENS}
    others = {(model, tokens) for model in bench.LAYERS for tokens in bench.FEWER_TOKENS}
    assert found == models | others
