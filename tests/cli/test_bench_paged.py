"""`dsv4 bench attention --paged`: its shapes, its inputs, its peers and its table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from dsv4.bench import paged_attention as bench
from dsv4.bench.machine import Machine
from dsv4.bench.paged_shapes import Shape, make_sets, model_shapes
from dsv4.bench.pages import PAGED_TARGETS, rendered
from dsv4.bench.report import record, write_record
from dsv4.cli import bench_paged
from dsv4.compat import flash_mla

pytestmark = pytest.mark.stage("op")

MACHINE = Machine("a GPU", copy=4e12, read=4.4e12, rate=8e14)
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def small_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.bench.paged_shapes.CONTEXT", 256)


@pytest.mark.usefixtures("small_contexts")
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
@pytest.mark.parametrize("requests", [0, 1])
def test_every_token_reads_entries_of_its_own_request(kv_format, requests, seed) -> None:
    shape = Shape("small", 4, 8, 128, 64, kv_format, requests=requests)
    first, second = make_sets(shape, "cpu", sets=2)
    for inputs in (first, second):
        slots = inputs.compressed_indices
        assert all(len(row.unique()) == 128 for row in slots)
        pages = [set((row // 64).tolist()) for row in slots]
        if requests:
            assert len(set().union(*pages)) <= 4
            # Windows of consecutive positions share all keys but one.
            both = set(inputs.window_indices[0].tolist()) & set(inputs.window_indices[1].tolist())
            assert len(both) == 63
        else:
            assert all(not (pages[0] & other) for other in pages[1:])
    assert not set(first.compressed_indices.flatten().tolist()) & set(
        second.compressed_indices.flatten().tolist()
    )


@pytest.mark.usefixtures("small_contexts")
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_our_output_and_the_peers_are_checked(kv_format, seed) -> None:
    """Our own functions of FlashMLA's interface stand for it: they take the same arguments."""
    shape = Shape("small", 3, 8, 128, 128, kv_format)
    assert bench.serves(shape)
    (inputs,) = make_sets(shape, "cpu", sets=1)
    bench.our_calls(shape, [inputs], batch_invariant=True)[0]()
    assert bench.relative_error(shape, inputs, inputs.o) == 0
    prepare = bench._prefill_call if kv_format == "bf16" else bench._decode_call
    out = prepare(shape, inputs, flash_mla)()
    assert bench.relative_error(shape, inputs, out) <= bench.PEER_ERROR
    assert bench.relative_error(shape, inputs, torch.zeros_like(out)) > 0.9


def test_bytes_and_rotation() -> None:
    shape = Shape("Pro", 4, 128, 1024)
    assert shape.read_bytes == 4 * 1152 * 584
    assert shape.bytes == shape.read_bytes + 4 * 1152 * 4 + 2 * 2 * 4 * 128 * 512
    assert shape.sets * shape.read_bytes >= 1e9
    assert not bench.serves(Shape("odd", 4, 24, 100, kv_format="bf16"))


def test_targets_belong_to_shapes_that_are_measured() -> None:
    shapes = {(s.name, s.tokens, s.kv_format) for s in model_shapes()}
    targets = json.loads((FOLDER / PAGED_TARGETS).read_text())["results"]
    assert {(row["name"], row["tokens"], row["kv_format"]) for row in targets} <= shapes


def test_a_table_beside_the_targets(tmp_path: Path) -> None:
    (tmp_path / PAGED_TARGETS).write_text((FOLDER / PAGED_TARGETS).read_text())
    results = [
        bench.Result(Shape("Pro", 64, 128, 1024), 39.5, 41.0, 30.0, 1e-3, 62.0),
        bench.Result(Shape("user", 3, 8, 64), 5.0, 5.0, 1.0, 1e-3, failure="MemoryError: large"),
    ]
    rows = [bench.as_row(result) for result in results]
    write_record(tmp_path / "some.json", record("paged_attention", MACHINE, rows))
    page = "<!-- benchmarks: paged_attention some.json -->\n<!-- /benchmarks -->\n"
    made = rendered(page, tmp_path)
    assert "| Pro | 64 | 128 | 1024 + 128 | fp8 | bf16 | **39.50** | 41.00 | 1.0e-03 |" in made
    assert "| 62.0 | 40 |" in made and "| - | - |" in made
    assert "Targets met: 1 of 1." in made


def test_options_that_are_not_offered(monkeypatch) -> None:
    args = argparse.Namespace(num_splits=2, plot=None)
    with pytest.raises(ValueError, match="--num-splits: is not offered with --paged"):
        bench_paged.run(args)
    assert [shape.kv_format for shape in bench_paged.user_shapes((1, 8, 64, 64))] == ["bf16", "fp8"]
