"""Every format written, read back and loaded into the model, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4
from dsv4.config.model_config import ModelConfig
from dsv4.loader import inventory, load_tensors, save
from dsv4.loader.assemble import model_tensors
from dsv4.reference.weights import decode_nvfp4
from tests.loader.tiny import FORMATS, random_tensors, same_bytes

pytestmark = pytest.mark.stage("loader")

EVERY_FORMAT = pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS.keys())


@EVERY_FORMAT
@pytest.mark.parametrize("shards", [1, 3])
def test_written_tensors_read_back(
    config: ModelConfig, shards: int, tmp_path: Path, seed: int
) -> None:
    tensors = random_tensors(config, seed)
    save(tmp_path / "c", config, tensors, shards=shards)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == shards
    found_config, found = load_tensors(tmp_path / "c")
    assert found_config == config
    assert list(found) == list(inventory(config))
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_holds_what_is_stored(
    config: ModelConfig, dtype: torch.dtype, tmp_path: Path, seed: int
) -> None:
    tensors = random_tensors(config, seed)
    save(tmp_path, config, tensors, shards=2)
    model = dsv4.load(tmp_path, dtype=dtype)
    assert not model.training
    for name, held in model_tensors(model):
        stored = tensors[name]
        quantised = stored.dtype.itemsize == 1
        assert not quantised or held.dtype == stored.dtype, name
        assert same_bytes(held, stored.to(held.dtype)), name


@pytest.mark.gpu
@EVERY_FORMAT
def test_model_on_the_gpu_holds_the_same(config: ModelConfig, tmp_path: Path, seed: int) -> None:
    save(tmp_path, config, random_tensors(config, seed))
    on_cpu, on_gpu = (dict(model_tensors(dsv4.load(tmp_path, device=d))) for d in ("cpu", "cuda"))
    assert on_cpu.keys() == on_gpu.keys()
    for name, held in on_gpu.items():
        assert held.device.type == "cuda"
        assert same_bytes(held.cpu(), on_cpu[name]), name


@pytest.mark.parametrize("name", ["plain", "released", "base", "plain-experts", "nvfp4"])
def test_saved_model_equals_its_checkpoint(name: str, tmp_path: Path, seed: int) -> None:
    config = FORMATS[name]
    tensors = random_tensors(config, seed)
    save(tmp_path / "a", config, tensors)
    save(tmp_path / "b", config, dsv4.load(tmp_path / "a"), shards=2)
    found_config, found = load_tensors(tmp_path / "b")
    assert found_config == config
    assert found.keys() == tensors.keys()
    assert all(same_bytes(found[key], tensors[key]) for key in tensors)


def test_saved_model_keeps_the_precision_that_the_release_dtype_would_lose(
    tmp_path: Path, seed: int
) -> None:
    config = FORMATS["plain"]
    tensors = {
        name: tensor if tensor.dtype == torch.int64 else torch.randn(tensor.shape)
        for name, tensor in random_tensors(config, seed).items()
    }
    save(tmp_path / "a", config, tensors)
    save(tmp_path / "b", config, dsv4.load(tmp_path / "a", dtype=torch.float32))
    found = load_tensors(tmp_path / "b")[1]
    assert all(torch.equal(found[name].to(t.dtype), t) for name, t in tensors.items())


@pytest.mark.parametrize("shown", ["fp4", "fp8", "nvfp4", "bf16"])
def test_expert_format_comes_from_the_tensors(shown: str, tmp_path: Path, seed: int) -> None:
    """The first releases do not say `expert_dtype`; NVFP4 ones say "fp4"."""
    names = {"fp4": "released", "fp8": "base", "nvfp4": "nvfp4", "bf16": "plain-experts"}
    config = FORMATS[names[shown]]
    save(tmp_path, config, random_tensors(config, seed))
    file = tmp_path / "config.json"
    for said in (None, "fp4"):
        data = config.to_json() | {"expert_dtype": said}
        data["quantization_config"].pop("moe_quant_algo", None)
        data["quantization_config"].pop("scale_fmt")
        if said is None:
            del data["expert_dtype"]
        file.write_text(json.dumps(data))
        assert load_tensors(tmp_path)[0] == config


def test_nvfp4_with_nvfp4_drafts(tmp_path: Path, seed: int) -> None:
    config = FORMATS["nvfp4"]
    tensors = random_tensors(config, seed, mtp_expert_scheme="nvfp4")
    _write_raw(tmp_path, config, tensors)
    held = dict(model_tensors(dsv4.load(tmp_path, dtype=torch.float32)))
    name = "mtp.0.ffn.experts.2.w3.weight"
    scales = tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
    assert torch.equal(held[name], decode_nvfp4(tensors[name], *scales))


def test_nvfp4_without_activation_scales(tmp_path: Path, seed: int) -> None:
    config = FORMATS["nvfp4"]
    tensors = random_tensors(config, seed)
    needed = {name: t for name, t in tensors.items() if not name.endswith("input_scale")}
    save(tmp_path, config, needed)
    assert load_tensors(tmp_path)[1].keys() == needed.keys() != tensors.keys()


def test_bytes_declared_as_bytes_are_reinterpreted(tmp_path: Path, seed: int) -> None:
    """Exponent byte 120 means 2^-7: a numeric conversion would make it 120.0."""
    config = FORMATS["released"]
    tensors = random_tensors(config, seed)
    raw = {
        name: t.view(torch.uint8) if t.dtype in (torch.int8, torch.float8_e8m0fnu) else t
        for name, t in tensors.items()
    }
    _write_raw(tmp_path, config, raw)
    found_config, found = load_tensors(tmp_path)
    assert found_config == config
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    held = dict(model_tensors(dsv4.load(tmp_path)))
    name = "layers.1.ffn.experts.1.w2.scale"
    assert same_bytes(held[name], tensors[name])


def test_tensors_that_drafts_share_or_that_nothing_uses_are_skipped(
    tmp_path: Path, seed: int
) -> None:
    config = FORMATS["released"]
    tensors = random_tensors(config, seed)
    copies = {f"mtp.0.{n}.weight": tensors[f"{n}.weight"].clone() for n in ("embed", "head")}
    _write_raw(tmp_path, config, tensors | copies)
    assert load_tensors(tmp_path)[1].keys() == tensors.keys()
    without_drafts = replace(config, num_nextn_predict_layers=0)
    _write_raw(tmp_path, without_drafts, tensors)
    assert load_tensors(tmp_path)[1].keys() == inventory(without_drafts).keys()


def test_saving_again_replaces_the_weights_and_keeps_other_files(tmp_path: Path, seed: int) -> None:
    config = FORMATS["plain"]
    save(tmp_path, config, random_tensors(config, seed), shards=3)
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = random_tensors(config, seed + 1)
    save(tmp_path, config, tensors, shards=1)
    found = load_tensors(tmp_path)[1]
    assert all(same_bytes(found[name], tensors[name]) for name in tensors)
    expected = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == expected


def test_index_lists_every_tensor_and_the_bytes(tmp_path: Path, seed: int) -> None:
    config = FORMATS["released"]
    tensors = random_tensors(config, seed)
    save(tmp_path, config, tensors, shards=4)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in sorted(set(index["weight_map"].values())):
        held = load_file(tmp_path / file)
        assert held.keys() == {n for n, f in index["weight_map"].items() if f == file}


def test_more_shards_than_tensors(tmp_path: Path, seed: int) -> None:
    config = FORMATS["plain"]
    tensors = random_tensors(config, seed)
    save(tmp_path, config, tensors, shards=1000)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(tensors)
    assert load_tensors(tmp_path)[1].keys() == tensors.keys()


def _write_raw(folder: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write files that `save` refuses to."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
