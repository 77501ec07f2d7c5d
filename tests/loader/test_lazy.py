"""Loading holds one tensor at a time beside the model."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.config.model_config import ModelConfig
from dsv4.loader import inventory, save
from dsv4.loader.reader import Checkpoint
from tests.loader.tiny import FORMATS, random_tensors

pytestmark = pytest.mark.stage("loader")

CODES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int64: "I64",
}


@pytest.mark.parametrize("name", ["released", "nvfp4"])
def test_one_tensor_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    config = FORMATS[name]
    save(tmp_path, config, random_tensors(config, seed), shards=2)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts = []
    read = Checkpoint.read

    def counted(checkpoint: Checkpoint, tensor: str) -> torch.Tensor:
        found = read(checkpoint, tensor)
        alive.add(found)
        counts.append(len(alive))
        return found

    monkeypatch.setattr(Checkpoint, "read", counted)
    dsv4.load(tmp_path)
    assert len(counts) > 100
    assert max(counts) <= 3  # an NVFP4 matrix with its two scales


_MEASURE = """
import sys
from dsv4.loader import load_tensors

def owned():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = owned()
config, tensors = load_tensors(sys.argv[1])
total = sum(tensor.nbytes for tensor in tensors.values()) // 1024
print(owned() - before, total)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_tensors_are_mapped_not_copied(tmp_path: Path, seed: int) -> None:
    config = replace(FORMATS["plain"], vocab_size=100_000)
    save(tmp_path, config, random_tensors(config, seed))
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, total = map(int, output.split())
    assert total > 50_000  # KiB
    assert grown < total / 4, f"{grown} of {total} KiB were copied into memory"


def test_progress_bar_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    config = FORMATS["plain"]
    save(tmp_path, config, random_tensors(config, seed))
    dsv4.load(tmp_path)
    assert capsys.readouterr().err == ""
    dsv4.load(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loading" in captured.err


@pytest.mark.slow
def test_a_checkpoint_of_released_size_opens_by_its_headers(tmp_path: Path) -> None:
    """159.6 GB in 46 sparse files: 69,187 tensors checked without a data page being read."""
    config = ModelConfig.flash()
    specs = list(inventory(config).items())
    for shard in range(46):
        header, end = {}, 0
        for name, spec in specs[shard::46]:
            offsets = [end, end + spec.nbytes]
            header[name] = {
                "dtype": CODES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": offsets,
            }
            end = offsets[1]
        text = json.dumps(header).encode()
        with open(tmp_path / f"{shard:02}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    assert checkpoint.stored.keys() == dict(specs).keys()
    assert checkpoint.read("layers.42.attn.attn_sink").count_nonzero() == 0
