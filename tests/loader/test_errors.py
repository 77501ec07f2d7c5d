"""Every broken checkpoint ends in one error that names what is wrong, before any data is read."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import dsv4
from dsv4.loader import CheckpointError, load_tensors, save
from dsv4.loader.reader import Checkpoint
from dsv4.model.model import DeepseekV4
from tests.loader.tiny import FORMATS, random_tensors

pytestmark = pytest.mark.stage("loader")

CONFIG = FORMATS["released"]


@pytest.fixture
def tensors(seed: int) -> dict[str, Tensor]:
    return random_tensors(CONFIG, seed)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    save(tmp_path / "c", CONFIG, tensors, shards=2)
    return tmp_path / "c"


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG.to_json()))


def _error(folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> str:
    """The message of loading, which must fail; with `monkeypatch`, before any data is read."""
    if monkeypatch is not None:
        monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError) as caught:
        dsv4.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_tensors(folder)
    return message


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norm.weight": None}, "1 missing tensors: norm.weight"),
        ({"extra.weight": torch.zeros(2)}, "1 unexpected tensors: extra.weight"),
        (
            {"layers.1.attn.attn_sink": torch.zeros(5)},
            r"1 mis-shaped tensors: layers.1.attn.attn_sink \[5\] instead of \[4\]",
        ),
        (
            {"layers.0.attn.wkv.weight": torch.zeros(128, 128)},
            "1 mis-typed tensors: layers.0.attn.wkv.weight F32 instead of F8_E4M3",
        ),
        (
            {"layers.0.ffn.gate.tid2eid": torch.zeros(40, 2, dtype=torch.int32)},
            "1 mis-typed tensors: layers.0.ffn.gate.tid2eid I32 instead of I64",
        ),
        (
            {"layers.2.ffn.experts.1.w3.scale": torch.zeros(128, 4)},
            "1 mis-typed tensors: layers.2.ffn.experts.1.w3.scale F32 instead of F8_E8M0 or U8",
        ),
        (
            {"layers.2.ffn.experts.1.w3.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn)},
            r"mis-shaped .*\[128, 128\] instead of \[128, 64\]; 1 mis-typed .* F8_E4M3 instead",
        ),
        (
            {"mtp.1.norm.weight": torch.zeros(128), "head.weight": None},
            "missing tensors: head.weight; 1 unexpected tensors: mtp.1.norm.weight",
        ),
    ],
    ids=[
        "missing",
        "unexpected",
        "shape",
        "dtype",
        "int32 table",
        "scale",
        "one fp8 expert",
        "two",
    ],
)
def test_wrong_tensors_are_named(
    change: dict[str, Tensor | None],
    message: str,
    tensors: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = {name: t for name, t in (tensors | change).items() if t is not None}
    _write(tmp_path / "c", changed)
    assert re.search(message, _error(tmp_path / "c", monkeypatch))


def test_many_wrong_tensors_are_counted(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    kept = {name: t for name, t in tensors.items() if not name.startswith("layers.1.")}
    _write(tmp_path / "c", kept)
    missing = len(tensors) - len(kept)
    message = _error(tmp_path / "c")
    assert f"{missing} missing tensors: layers.1." in message
    assert message.endswith(f" and {missing - 4} more")
    assert len(message) < 500


def test_a_tensor_stored_twice_is_named(folder: Path, tensors: dict[str, Tensor]) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": tensors["norm.weight"]}, folder / "more.safetensors")
    assert "1 tensors stored twice: norm.weight" in _error(folder)


@pytest.mark.parametrize("left", [0, 5, 200, 0.5, -1], ids=str)
def test_truncated_file_is_named(left: float, folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    size = int(left * len(data)) if isinstance(left, float) else left
    file.write_bytes(data[:size])
    message = _error(folder)
    assert str(file) in message
    assert "truncated or corrupt" in message


@pytest.mark.parametrize("at", [0, 4, 9, 40])
@pytest.mark.parametrize("damage", [b"\xff\xfe\xfd\xfc", b"\1\1\1\1", b'"F9"'])
def test_corrupt_header_is_named(at: int, damage: bytes, folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[at : at + 4] = damage
    file.write_bytes(data)
    message = _error(folder)
    assert f"{file} is truncated or corrupt" in message
    assert len(message) < 500


def test_any_damage_to_the_headers_is_a_checkpoint_error(folder: Path, seed: int) -> None:
    """Flipped bytes give another name, shape or dtype, or no header: never another exception."""
    dice = random.Random(seed)
    refused = 0
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        header = int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
        for _ in range(40):
            damaged = bytearray(data)
            damaged[dice.randrange(min(header, len(data)))] = dice.choice([*b'0129"-{}', 255])
            file.write_bytes(damaged)
            try:
                Checkpoint(folder)
            except CheckpointError as error:
                refused += 1
                assert len(str(error)) < 2000
        file.write_bytes(data)
    assert refused > 40


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 missing shards: model-00002-of-00002.safetensors" in _error(folder)


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../model.safetensors"}}))
    assert "1 shard names outside the folder: ../model.safetensors" in _error(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}'])
def test_bad_index_is_named(text: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(text)
    assert f"{index} is not a valid index" in _error(folder)


def test_no_folder(tmp_path: Path) -> None:
    assert _error(tmp_path / "none") == f"checkpoint {tmp_path / 'none'}: no such folder"


def test_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "no .safetensors file" in _error(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert _error(folder) == f"checkpoint {folder}: config.json is missing"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("{}", "config lacks hidden_size"),
        ('{"model_type": "llama"}', "config model_type must be 'deepseek_v4', got 'llama'"),
    ],
)
def test_bad_config_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    found = _error(folder)
    assert message in found
    assert found.count(str(folder / "config.json")) == 1


def test_config_of_another_size(folder: Path) -> None:
    data = CONFIG.to_json() | {"hidden_size": 256}
    (folder / "config.json").write_text(json.dumps(data))
    message = _error(folder)
    assert "mis-shaped tensors: embed.weight [40, 128] instead of [40, 256]" in message


@pytest.mark.parametrize("expert", [-1, 3])
def test_expert_ids_out_of_range(
    expert: int, tensors: dict[str, Tensor], tmp_path: Path, seed: int
) -> None:
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = expert
    _write(tmp_path / "c", tensors)
    with pytest.raises(CheckpointError, match=r"tid2eid holds expert ids .* expected 0 \.\. 2"):
        dsv4.load(tmp_path / "c")


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(kv_format="fp32"), "kv_format of a bfloat16 model must be .* got 'fp32'"),
        (dict(kv_format="bf16", dtype=torch.float32), "kv_format of a float32 model"),
        (dict(kv_format=8), "kv_format .* got 8"),
        (dict(index_format="fp2"), r"index_format must be one of \('fp8', 'fp4'\), got 'fp2'"),
        (dict(index_format=None), "index_format must be one of .* got None"),
    ],
)
def test_format_of_cached_keys(folder: Path, options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dsv4.load(folder, **options)


def test_dtype_of_the_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be .* got torch.float16"):
        dsv4.load(folder, dtype=torch.float16)


@pytest.mark.parametrize("device", ["tpu9", "cuda:77"])
def test_device_of_the_model(device: str, folder: Path) -> None:
    with pytest.raises(
        ValueError, match=f"device: got '{device}', which cannot be used: "
    ) as caught:
        dsv4.load(folder, device=device)
    assert "\n" not in str(caught.value)


def test_saving_wrong_tensors_writes_nothing(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors["layers.0.attn.wkv.weight"] = torch.zeros(128, 64)
    tensors["other"] = tensors.pop("norm.weight")
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "c", CONFIG, tensors)
    assert "1 missing tensors: norm.weight; 1 unexpected tensors: other" in str(caught.value)
    assert "layers.0.attn.wkv.weight [128, 64] instead of [128, 128]" in str(caught.value)
    assert "torch.float32 instead of torch.float8_e4m3fn" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_interrupted_save_leaves_nothing(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("dsv4.loader.writer.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "c", CONFIG, tensors)
    assert not list(tmp_path.iterdir())


def test_saving_over_a_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(CheckpointError, match="is a file, expected a folder"):
        save(tmp_path / "c", CONFIG, tensors)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"folder": 3}, "folder must be a str or os.PathLike, got int"),
        ({"config": {}}, "config must be a ModelConfig, got dict"),
        ({"weights": [1]}, "weights must be a model or a mapping, got list"),
        ({"weights": {"norm.weight": 3}}, r"weights\['norm.weight'\] must be a tensor, got int"),
        ({"shards": 1.5}, "shards must be an integer, got 1.5"),
        ({"shards": True}, "shards must be an integer, got True"),
    ],
)
def test_types_of_what_is_saved(changes: dict, message: str, tmp_path: Path) -> None:
    arguments = dict(folder=tmp_path / "c", config=CONFIG, weights={}) | changes
    with pytest.raises(TypeError, match=message):
        save(**arguments)


def test_a_model_without_data_is_not_saved(tmp_path: Path) -> None:
    model = DeepseekV4(CONFIG, device="meta")
    with pytest.raises(CheckpointError, match=r"tensors without data \(on the meta device\): "):
        save(tmp_path / "c", CONFIG, model)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_os_error(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("dsv4.loader.writer.save_file", full_disk)
    with pytest.raises(OSError, match=r"model.safetensors cannot be written: .* No space left"):
        save(tmp_path / "c", CONFIG, tensors)
    assert not list(tmp_path.iterdir())


def test_number_of_shards(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards must be at least 1, got 0"):
        save(tmp_path / "c", CONFIG, tensors, shards=0)
