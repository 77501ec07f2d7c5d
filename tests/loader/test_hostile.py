"""Checkpoints made to hang, to fill memory or to command terminals: refused at once, in a line."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dsv4
from dsv4.loader import CheckpointError, load_tensors, save
from dsv4.loader.tokenizer import load_tokenizer
from tests.loader.tiny import FORMATS, random_tensors

pytestmark = pytest.mark.stage("loader")

CONFIG = FORMATS["released"]
SHIPPED = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    save(tmp_path / "c", CONFIG, random_tensors(CONFIG, seed))
    return tmp_path / "c"


def _error(call: Callable[[], object]) -> str:
    """The message of a call that must fail within 20 MB, as one printable line."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 2500
    return message


def _add_to_header(file: Path, name: str, entry: dict[str, Any]) -> None:
    """Name one more tensor in the header of a safetensors file; its bytes stay as they are."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(header | {name: entry}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    "changes",
    [
        {"n_routed_experts": 65_536},
        {"num_nextn_predict_layers": 64, "n_routed_experts": 60_000},
        {"num_hidden_layers": 4096, "compress_ratios": [4] * 4096},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_that_names_more_tensors_than_there_are(
    changes: dict[str, Any], folder: Path
) -> None:
    text = json.dumps(CONFIG.to_json() | changes)
    (folder / "config.json").write_text(text)
    message = _error(lambda: dsv4.load(folder))
    assert "missing tensors or more, since config.json names more than the files hold" in message


@pytest.mark.parametrize("size", [10**9, 3])
def test_an_empty_tensor_that_claims_many_experts(size: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    end = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
    fused = {"dtype": "BF16", "shape": [size, 0, 1], "data_offsets": [end, end]}
    _add_to_header(file, "layers.1.ffn.experts.down_proj", fused)
    message = _error(lambda: dsv4.load(folder))
    assert f"down_proj [{size}, 0, 1] instead of [3, 128, 128]" in message


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_fifo_is_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = _error(lambda: dsv4.load(folder))
    assert name in message and "not a regular file" in message


def test_a_tokenizer_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert "not a regular file" in _error(lambda: load_tokenizer(tmp_path))


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", ".", "..", "", "a\nb"])
def test_shard_names_that_no_file_can_have(name: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    _error(lambda: dsv4.load(folder))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": ' * 50_000])
def test_json_without_end(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "nested too deeply" in _error(lambda: dsv4.load(folder))
    (folder / "config.json").write_text(text)
    assert "nested too deeply" in _error(lambda: load_tensors(folder))


def test_names_cannot_command_a_terminal(folder: Path) -> None:
    evil = "a\nb\x1b[31mred\u202e" + "x" * 500
    file = folder / "model.safetensors"
    tensors = random_tensors(CONFIG, 0) | {evil: torch.zeros(1)}
    save_file(tensors, file)
    message = _error(lambda: dsv4.load(folder))
    assert r"1 unexpected tensors: a\nb\x1b[31mred\u202exxx" in message


def test_a_path_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"path must be a str or os.PathLike, got int"):
        dsv4.load(3)
    with pytest.raises(TypeError, match=r"path must be a str or os.PathLike, got NoneType"):
        load_tokenizer(None)
    for path in ("x" * 300, "a\0b"):
        assert "checkpoint" in _error(lambda path=path: dsv4.load(path))


def test_sizes_that_no_quantised_layer_takes(folder: Path) -> None:
    """The tensors fit the configuration; the model is what cannot be built."""
    from dataclasses import replace

    config = replace(CONFIG, q_lora_rank=64)
    save(folder, config, random_tensors(config, 0))
    assert "must be a multiple of 128" in _error(lambda: dsv4.load(folder))


def test_the_default_device_does_not_matter(folder: Path) -> None:
    try:
        torch.set_default_device("meta")
        model = dsv4.load(SHIPPED)
        result = model.generate([[5, 6, 7]], max_new_tokens=2)
    finally:
        torch.set_default_device(None)
    assert model.device.type == "cpu"
    assert result.tokens == dsv4.load(SHIPPED).generate([[5, 6, 7]], max_new_tokens=2).tokens


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_without_memory(device: object, folder: Path) -> None:
    with pytest.raises(ValueError, match="device: got 'meta', which holds no data"):
        dsv4.load(folder, device=device)


@pytest.mark.parametrize("device", [{}, "cpu:x", 1.5])
def test_a_device_that_is_none(device: object, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"device: got .*, which cannot be used: "):
        dsv4.load(folder, device=device)
