"""`dsv4 bench linear`: its projections, its arguments and its table."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from dsv4.bench import linear as bench
from dsv4.bench.machine import Machine
from dsv4.cli.bench_linear import parse_shape

pytestmark = pytest.mark.stage("projections")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=1e15)
SMALL = {
    "fp8": bench.Fp8(256, 512),
    "codes": bench.Fp8(256, 512, has_codes=True),
    "grouped": bench.Grouped(512, 256, 2),
    "grouped codes": bench.Grouped(512, 256, 2, gives_codes=True),
    "grouped fp8": bench.Grouped(512, 256, 2, act="fp8"),
    "head": bench.Head(512, 200),
}


@pytest.fixture
def projections(monkeypatch) -> None:
    monkeypatch.setattr(bench, "PROJECTIONS", SMALL)


@pytest.mark.parametrize("label", SMALL)
def test_outputs_are_compared_with_exact_products(label, projections, seed) -> None:
    shape = bench.Shape(label, 3)
    calls = SMALL[label].make(3, "cpu")
    exact = calls.exact()
    error = bench.check(shape, calls.ours(), exact)
    # Activations that are rounded once show it.
    assert (error > 0.01) == (label in ("grouped fp8", "grouped codes"))
    for wrong in (exact * 1.1, exact * float("nan")):
        with pytest.raises(RuntimeError, match=r"relative error .* of output 0"):
            bench.check(shape, wrong, exact)
    with pytest.raises(RuntimeError, match="of output 1"):
        bench.check(shape, [exact, exact * 1.1], [exact, exact])


def test_bytes() -> None:
    """Codes take half of what bf16 takes, and a scale of 128."""
    x, y, weight = 3 * 512, 3 * 256, 512 * 256 + 8
    assert SMALL["fp8"].bytes(3) == weight + 2 * x + 2 * y
    assert SMALL["codes"].bytes(3) == weight + x + 3 * 4 + 2 * y
    x, y, weight = 3 * 1024, 3 * 512, 512 * 512 + 16
    assert SMALL["grouped"].bytes(3) == weight + 2 * x + 2 * y
    assert SMALL["grouped codes"].bytes(3) == weight + 2 * x + y + 3 * 4
    assert SMALL["head"].bytes(3) == 2 * 512 * 203 + 4 * 600
    links = bench.CHAIN_LAUNCHES / 2 * (2 * 8192 * 4096 + 2 * 2048 + 4 * (8192 + 4096))
    assert bench.Chain().bytes(1) == links


def test_products_of_bf16_take_twice_the_time() -> None:
    assert SMALL["fp8"].half_rate_flops(3) == 3 * 512 * 256
    assert SMALL["grouped"].half_rate_flops(3) == 2 * 3 * 512 * 512
    assert SMALL["grouped fp8"].half_rate_flops(3) == 3 * 512 * 512
    assert SMALL["head"].half_rate_flops(3) == 2 * 3 * 512 * 200
    assert bench.Merged("Flash SWA x").half_rate_flops(3) == 3 * 1536 * 4096


def test_a_chain_is_measured_by_the_launch(monkeypatch) -> None:
    monkeypatch.setattr(bench, "CHAIN_SIZES", ((512, 512), (512, 512)))
    monkeypatch.setattr(bench, "CHAIN_LAUNCHES", 2)
    monkeypatch.setattr(bench.Chain, "launches", 2)
    chain = bench.Chain()
    shape = bench.Shape(next(label for label in bench.PROJECTIONS if "chain" in label), 2)
    calls = chain.make(2, "cpu")
    bench.check(shape, calls.ours(), calls.exact())
    assert calls.peer is None
    result = bench.Result(shape, 10.0, 8.0, None, 1e-3)
    assert result.gigabytes == pytest.approx(chain.bytes(2) / 2 / 10e3)
    assert bench.cells(bench.as_row(result))[-2:] == ["-", "1.0e-03"]


def test_several_weights_of_one_input(monkeypatch, seed) -> None:
    calls = bench.Merged("Flash HCA x").make(2, "cpu")
    shape = bench.Shape("Flash HCA x", 2)
    exact = calls.exact()
    bench.check(shape, calls.ours(), exact)
    with pytest.raises(RuntimeError, match="of output 3"):
        bench.check(shape, [*exact[:3], exact[3] * 1.1], exact)


def test_rows_of_the_table() -> None:
    shape = bench.Shape("Flash wo_b, codes", 16)
    result = bench.Result(shape, 12.0, MACHINE.floor(4.4e7), 24.0, 1.7e-3)
    row = bench.as_row(result)
    assert row["shape"] == {"label": "Flash wo_b, codes", "tokens": 16}
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells[:3] == ["Flash wo_b, codes", "16", "12.00"]
    assert cells[4:] == ["10.00", "83%", "24.0", "1.7e-03"]
    assert bench.cells(row, is_bold=True)[2] == "**12.00**"
    failed = bench.as_row(replace(result, peer=None, failure="no algorithm"))
    assert bench.cells(failed)[-2] == "-"


def test_every_projection_has_every_number_of_tokens() -> None:
    shapes = bench.model_shapes()
    assert {shape.tokens for shape in shapes} == {1, 4, 16, 64, 128, 256, 1024, 4096}
    assert len(shapes) == 8 * len(bench.PROJECTIONS)


def test_shapes() -> None:
    assert parse_shape("Flash wo_b, codes,16") == ("Flash wo_b, codes", 16)
    for text in ("Flash wo_b", "Flash,1", "Flash wo_b,0"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)


def test_the_peer_takes_codes(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: seen.append(given))
    SMALL["fp8"].make(3, "cpu").peer()
    codes, weight = seen[0]
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (3, 512))
    assert weight.shape == (512, 256)
    assert weight.stride() == (1, 512)
