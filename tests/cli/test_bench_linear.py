"""`dsv4 bench linear`: its projections, its arguments and its table."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import pytest
import torch

from dsv4.bench import linear as bench
from dsv4.bench import linear_peers, targets
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
    assert not calls.products
    result = bench.Result(shape, 10.0, 8.0, {}, 1e-3)
    assert result.gigabytes == pytest.approx(chain.bytes(2) / 2 / 10e3)
    row = bench.as_row(result)
    assert bench.cells(row)[-6:] == ["-", "-", "-", "1.0e-03", "-", "-"]


def test_several_weights_of_one_input(monkeypatch, seed) -> None:
    calls = bench.Merged("Flash HCA x").make(2, "cpu")
    shape = bench.Shape("Flash HCA x", 2)
    exact = calls.exact()
    bench.check(shape, calls.ours(), exact)
    with pytest.raises(RuntimeError, match="of output 3"):
        bench.check(shape, [*exact[:3], exact[3] * 1.1], exact)


def test_rows_of_the_table() -> None:
    shape = bench.Shape("Flash wo_b, codes", 16)
    floor = MACHINE.floor(4.4e7)
    result = bench.Result(shape, 12.0, floor, {"DeepGEMM": 24.0}, 1.7e-3, fp8_share=0.426)
    row = bench.as_row(result)
    assert row["shape"] == {"label": "Flash wo_b, codes", "tokens": 16}
    cells = bench.cells(row)
    assert len(cells) == len(bench.COLUMNS)
    assert cells[:3] == ["Flash wo_b, codes", "16", "12.00"]
    assert cells[4:] == ["10.00", "83%", "43%", "-", "24.0", "1.7e-03", "-", "-"]
    assert bench.cells(row, is_bold=True)[2] == "**12.00**"


def test_every_projection_has_every_number_of_tokens() -> None:
    shapes = bench.model_shapes()
    assert {shape.tokens for shape in shapes} == {1, 4, 16, 64, 128, 256, 1024, 4096}
    assert len(shapes) == 8 * len(bench.PROJECTIONS)


L2_BYTES = 50 * 2**20  # of an H200


@pytest.mark.parametrize("label", bench.PROJECTIONS)
def test_every_replay_reads_other_weights(label) -> None:
    """Also with so many tokens that outputs alone would fill L2."""
    projection = bench.PROJECTIONS[label]
    stored = projection.bytes(0)
    sets = bench.weight_sets(projection)
    assert sets * stored >= 3 * L2_BYTES
    assert sets > 1 or stored >= 3 * L2_BYTES


def test_targets_belong_to_rows_that_are_measured() -> None:
    shapes = bench.model_shapes()
    assert set(targets.LINEAR) <= {(shape.label, shape.tokens) for shape in shapes}
    # Every linear of many tokens has one: heads and variants of a row apart.
    rows = {shape.label for shape in shapes if "," not in shape.label}
    rows -= {label for label in rows if "head" in label or "chain" in label}
    assert rows == {label for label, tokens in targets.LINEAR if tokens == targets.MANY}


def row_of(label: str, tokens: int, **figures) -> dict:
    return {"shape": {"label": label, "tokens": tokens}, "floor": 6.0} | figures


def test_targets() -> None:
    """Of each kind: met, missed, and not known."""
    of = bench.target_of
    time = row_of("Flash wo_b", 1, microseconds=9.5)
    assert targets.cells(of(time)) == ["9.5 us", "9.3"]
    assert of(time).is_met(time)
    assert not of(time).is_met(time | {"microseconds": 9.6})
    rate = row_of("chain of 8192 x 4096 and 4096 x 8192", 16, microseconds=8.0)
    assert targets.cells(of(rate)) == ["4048 GB/s", "-"]
    assert of(rate).is_met(rate | {"gigabytes_per_second": 4050})
    assert not of(rate).is_met(rate | {"gigabytes_per_second": 4000})
    many = row_of("Flash wq_b", 4096, microseconds=300.0, fp8_share=0.65)
    assert targets.cells(of(many)) == ["65% of FP8 rate", "-"]
    assert of(many).is_met(many)
    assert not of(many).is_met(many | {"fp8_share": 0.64})
    assert of(many).is_met(many | {"fp8_share": None}) is None
    grouped = row_of("Pro wo_a", 4096, microseconds=9.0)
    assert targets.cells(of(grouped)) == ["65% of floor", "-"]
    assert of(grouped).is_met(grouped)
    assert not of(grouped).is_met(grouped | {"floor": 5.8})
    budget = row_of("Flash CSA latent", 16, microseconds=9.0)
    assert targets.cells(of(budget)) == ["-", "12"]
    assert of(budget).is_met(budget) is None
    rows = [time, rate | {"gigabytes_per_second": 4000}, budget, row_of("x", 1, microseconds=1.0)]
    assert targets.met((of(row), row) for row in rows) == "Targets met: 1 of 2."


def test_shapes() -> None:
    assert parse_shape("Flash wo_b, codes,16") == ("Flash wo_b, codes", 16)
    for text in ("Flash wo_b", "Flash,1", "Flash wo_b,0"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            parse_shape(text)


def test_cublas_takes_codes(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: seen.append(given))
    linear_peers.cublas(SMALL["fp8"].make(3, "cpu").products[0])()
    codes, weight = seen[0]
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (3, 512))
    assert weight.shape == (512, 256)
    assert weight.stride() == (1, 512)


class FakeDeepGemm:
    """The functions that are used, in fp32."""

    @staticmethod
    def fp8_gemm_nt(a, b, y, disable_ue8m0_cast) -> None:
        assert a[1].stride() == (1, 4)  # by columns, each a multiple of 16 bytes
        assert disable_ue8m0_cast
        y.copy_(decoded(*a, rows=1) @ decoded(*b, rows=128).mT)

    @staticmethod
    def bf16_gemm_nt(x, weight, y) -> None:
        y.copy_(x @ weight.mT)

    @staticmethod
    def fp8_einsum(expression, a, b, y, recipe) -> None:
        groups = [
            decoded(a[0][:, i], a[1][:, i], rows=1) @ decoded(b[0][i], b[1][i], rows=128).mT
            for i in range(a[0].shape[1])
        ]
        y.copy_(torch.stack(groups, 1))


def decoded(codes, scale, rows: int) -> torch.Tensor:
    return codes.float() * scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("label", ["fp8", "grouped", "head"])
def test_deep_gemm_multiplies_the_same_numbers(label, monkeypatch, seed) -> None:
    calls = SMALL[label].make(3, "cpu")
    peer = linear_peers.Peer("DeepGEMM", partial(linear_peers.deep_gemm, FakeDeepGemm), 0.05)
    monkeypatch.setattr(bench, "graph_microseconds", lambda calls: len([call() for call in calls]))
    assert bench.time_of(peer, [calls.products], calls.exact()) == 1
    error = bench.relative_error(peer.prepare(calls.products[0])(), calls.exact())
    assert (error > 0.01) == (label == "grouped")
    with pytest.raises(RuntimeError, match=r"DeepGEMM: relative error 9.* of output 0"):
        bench.time_of(peer, [calls.products], calls.exact() * 10)


def test_a_folder_without_deep_gemm_is_refused(tmp_path) -> None:
    found = linear_peers.find(tmp_path)
    assert next(found).name == "cuBLAS"
    with pytest.raises(ValueError, match=r"deep_gemm: .*third_party/deep_gemm has no __init__.py"):
        next(found)
    folder = tmp_path / "third_party" / "deep_gemm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no compiler')")
    with pytest.raises(ValueError, match=r"deep_gemm: .* cannot be used \(no compiler\)"):
        list(linear_peers.find(tmp_path))
    (folder / "__init__.py").write_text("from .functions import fp8_gemm_nt")
    (folder / "functions.py").write_text("fp8_gemm_nt = None")
    try:
        assert [peer.name for peer in linear_peers.find(tmp_path)] == ["cuBLAS", "DeepGEMM"]
    finally:
        for name in [name for name in sys.modules if name.startswith("deep_gemm")]:
            del sys.modules[name]
