"""Writer of checkpoints in the released layout."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.layers.moe import RELEASED, MoE
from dsv4.loader.errors import CheckpointError, brief, brief_name, mis_shape, refuse
from dsv4.loader.files import INDEX_FILE, as_path
from dsv4.loader.layout import TensorSpec, expert_name, inventory
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

_PLAIN_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def save(
    folder: str | PathLike[str],
    config: ModelConfig,
    weights: Mapping[str, Tensor] | DeepseekV4,
    *,
    shards: int = 1,
) -> None:
    """Write `config.json` and the tensors as the releases store them.

    A new folder appears complete or not at all. In an existing one each file is replaced whole, the
    configuration last, shards that are no longer used are removed, and other files are kept.

    Args:
        folder: where to write.
        config: the model's configuration; decides the formats the tensors must be in.
        weights: tensors with released names, written in their own dtypes (plain matrices may be of
            any floating-point dtype); or a model, whose plain tensors are narrowed to the dtypes of
            the releases where that loses nothing. Weights that are prepared for kernels are put
            back while they are written: replay no graph of the model meanwhile.
        shards: number of files, cut at equal bytes.

    Raises:
        CheckpointError: tensors are missing, unexpected, mis-shaped, mis-typed or on the meta
            device, or `folder` is a file; nothing is written.
        OSError: a file cannot be written; a new folder is not left behind.
        TypeError: an argument is of another type; the message names it.
        ValueError: `shards` is not at least 1.
    """
    _check_arguments(config, weights, shards)
    with _released(weights):
        _save(as_path("folder", folder).resolve(), config, weights, shards)


@contextmanager
def _released(weights: Mapping[str, Tensor] | DeepseekV4) -> Iterator[None]:
    """A model's experts in the released order, where they are: no second copy of them is made."""
    modules = weights.modules() if isinstance(weights, torch.nn.Module) else ()
    prepared = [m for m in modules if isinstance(m, MoE) and m.form != RELEASED]
    for module in prepared:
        module.release()
    try:
        yield
    finally:
        for module in prepared:
            module.prepare()


def _save(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor] | DeepseekV4, shards: int
) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: is a file, expected a folder")
    specs = inventory(config)
    named = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    refuse(folder, {"tensors without data (on the meta device)": empty})
    if isinstance(weights, torch.nn.Module):
        tensors = _released_tensors(weights, specs)
    else:
        tensors = dict(weights)
    _check(folder, specs, tensors)
    ordered = {name: tensors[name].detach() for name in specs if name in tensors}
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        files = _write(staging, config, _cut(ordered, shards))
        _publish(staging, folder, files)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_arguments(config: ModelConfig, weights: object, shards: int) -> None:
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise TypeError(f"shards must be an integer, got {quoted(shards)}")
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    if isinstance(weights, torch.nn.Module):
        return
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a model or a mapping, got {type(weights).__name__}")
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            got = type(tensor).__name__
            raise TypeError(f"weights[{quoted(name)}] must be a tensor, got {got}")


def _released_tensors(model: torch.nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return a model's tensors under released names, stacked experts one by one."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, stacked, rest = name.partition(".ffn.experts.")
        if not stacked:
            tensors[name] = _narrowed(tensor, specs.get(name))
            continue
        matrix, part = rest.split(".")
        for expert, row in enumerate(tensor.unbind()):
            single = expert_name(prefix, expert, matrix, part)
            tensors[single] = _narrowed(row, specs.get(single))
    return tensors


def _narrowed(tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    if spec is None or tensor.dtype == spec.dtype or tensor.dtype not in _PLAIN_FLOATS:
        return tensor
    narrow = tensor.to(spec.dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _check(folder: Path, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    mis_shaped, mis_typed = [], []
    for name in specs.keys() & tensors.keys():
        tensor, spec = tensors[name], specs[name]
        if tuple(tensor.shape) != spec.shape:
            mis_shaped.append(mis_shape(name, tuple(tensor.shape), spec.shape))
        plain = spec.dtype in _PLAIN_FLOATS and tensor.dtype in _PLAIN_FLOATS
        if tensor.dtype != spec.dtype and not plain:
            mis_typed.append(f"{brief_name(name)} {tensor.dtype} instead of {spec.dtype}")
    refuse(
        folder,
        {
            "missing tensors": [
                n for n, spec in specs.items() if spec.required and n not in tensors
            ],
            "unexpected tensors": sorted(tensors.keys() - specs.keys()),
            "mis-shaped tensors": sorted(mis_shaped),
            "mis-typed tensors": sorted(mis_typed),
        },
    )


def _cut(tensors: Mapping[str, Tensor], shards: int) -> list[dict[str, Tensor]]:
    """Cut tensors into runs of about equal bytes, never more runs than tensors."""
    shards = min(shards, len(tensors))
    total = sum(tensor.nbytes for tensor in tensors.values())
    runs: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    before, run = 0, 0
    for left, (name, tensor) in zip(range(len(tensors), 0, -1), tensors.items()):
        full = before * shards >= (run + 1) * total or left == shards - run - 1
        if runs[run] and full and run < shards - 1:
            run += 1
        runs[run][name] = tensor
        before += tensor.nbytes
    return runs


def _write(folder: Path, config: ModelConfig, runs: list[dict[str, Tensor]]) -> list[str]:
    """Write every file into an empty folder; return their names, the configuration last."""
    names = ["model.safetensors"]
    if len(runs) > 1:
        names = [f"model-{i + 1:05}-of-{len(runs):05}.safetensors" for i in range(len(runs))]
    for file, run in zip(names, runs):
        # Rows of stacked experts share memory, which safetensors refuses: each gets its own.
        own = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in run.items()}
        try:
            save_file(own, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # its name for a full disk
            raise OSError(f"{folder / file} cannot be written: {brief(error)}") from error
    files = list(names)
    if len(runs) > 1:
        size = sum(tensor.nbytes for run in runs for tensor in run.values())
        weight_map = {name: file for file, run in zip(names, runs) for name in run}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        files.append(INDEX_FILE)
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    text = json.dumps(config.to_json(), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return [*files, "config.json"]


def _publish(staging: Path, folder: Path, files: list[str]) -> None:
    """Move written files to their folder."""
    if not folder.exists():
        os.rename(staging, folder)
        return
    for file in files:
        os.replace(staging / file, folder / file)
    for old in {*folder.glob("*.safetensors"), folder / INDEX_FILE}:
        if old.name not in files:
            old.unlink(missing_ok=True)
