"""`dsv4 bench moe`: its arguments, its inputs and its table."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from dsv4.bench import moe as bench
from dsv4.bench import moe_peers, packages, targets
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
    assert cells[7:] == ["-"] * 6 + ["280 us", "300"]
    row |= {"fp8_share": 0.41, "peers": {"Marlin": 320.0}}
    assert bench.cells(row)[7:] == ["41%", "-", "-", "320.0", "-", "-", "280 us", "300"]


def test_a_peer_that_cannot_be_made_is_named(monkeypatch) -> None:
    layer = small_layer("Flash", monkeypatch)

    def fails(config, device):
        raise AssertionError(f"{config.hidden} on {device}")

    layer.make_peers([("Marlin", fails), ("DeepGEMM", lambda config, device: config)])
    assert layer.failures == {"Marlin": "512 on cpu"}
    assert layer.peers == {"DeepGEMM": layer.config}


class FakeDeepGemm:
    """Notes what it is given."""

    seen: ClassVar[list] = []

    @classmethod
    def m_grouped_fp8_gemm_nt_masked(cls, inputs, weight, out, counts, expected, **options) -> None:
        assert inputs[0].shape[-1] == weight[0].shape[-1] == 128 * inputs[1].shape[-1]
        assert out.shape == (*inputs[0].shape[:2], weight[0].shape[1])
        cls.seen.append((out.shape[-1], counts.tolist(), expected))


def test_deep_gemm_has_a_place_for_each_expert(monkeypatch) -> None:
    config = small_layer("Flash", monkeypatch).config
    peer = moe_peers.DeepGemm(FakeDeepGemm, config, "cpu")
    ids = torch.tensor([[0, 2, 31], [2, 5, 31]], dtype=torch.int32)
    peer.call(torch.zeros(2, 512), ids)()
    (up, counts, expected), (down, *_) = FakeDeepGemm.seen
    assert (up, down, expected) == (512, 512, 1)
    assert {i: n for i, n in enumerate(counts) if n} == {0: 1, 2: 2, 5: 1, 31: 2}


def test_folders_of_packages(tmp_path) -> None:
    with pytest.raises(ValueError, match="humming: vllm is not given"):
        list(moe_peers.find(None, tmp_path))
    found = moe_peers.find(tmp_path)
    assert next(found)[0] == "torch"
    with pytest.raises(ValueError, match=r"deep_gemm: .* has no __init__.py"):
        next(found)
    with pytest.raises(ValueError, match=r"vllm: .*_C_stable_libtorch.abi3.so cannot be used"):
        packages.vllm_operators(tmp_path)


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
    assert set(targets.MOE) <= found


def test_routing_that_is_not_uniform_is_refused() -> None:
    """The design's mean numbers of distinct experts."""
    expected = {1: 6, 4: 23.2, 16: 80.8, 64: 199.9, 256: 255.4}
    for tokens, distinct in expected.items():
        shape = bench.Shape("Flash", tokens)
        bench.check_distinct(shape, distinct)
        for wrong in (0.96, 1.04, float("nan")):
            with pytest.raises(RuntimeError, match="distinct experts, expected"):
                bench.check_distinct(shape, distinct * wrong)
