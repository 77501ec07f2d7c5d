"""The files of a checkpoint folder: its configuration and its shards."""

from __future__ import annotations

import os
from pathlib import Path

from dsv4.config.json_file import check_regular_file, read_object
from dsv4.config.model_config import ModelConfig
from dsv4.loader.errors import CheckpointError, brief, brief_name, refuse

INDEX_FILE = "model.safetensors.index.json"


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder.

    Raises:
        CheckpointError: there is no such folder, or it cannot be looked up.
        TypeError: `path` is no path.
    """
    folder = as_path("path", path)
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, a folder without permission
        raise CheckpointError(f"checkpoint {folder}: {brief(error)}") from error
    if not is_folder:
        raise CheckpointError(f"checkpoint {folder}: no such folder")
    return folder


def as_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return an argument as a path.

    Raises:
        CheckpointError: it is empty, which `Path` takes for the current folder.
        TypeError: it is none. Both messages have its name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a str or os.PathLike, got {type(path).__name__}")
    if not os.fspath(path):
        raise CheckpointError(f"{name} must name a folder, got an empty one")
    return Path(path)


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`.

    Raises:
        CheckpointError: it is missing, or does not describe a DeepSeek-V4.
    """
    file = folder / "config.json"
    try:
        return ModelConfig.from_json(file)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder}: config.json is missing") from None
    except (OSError, ValueError) as error:
        prefix = "" if str(file) in str(error) else f"{file}: "
        raise CheckpointError(f"{prefix}{brief(error)}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: those the index names, else every `.safetensors` file.

    Raises:
        CheckpointError: there is none, the index is not valid, or a file cannot be read to its end.
    """
    names = _indexed_names(folder / INDEX_FILE)
    if names is None:
        names = _safetensors_of(folder)
    outside = [name for name in names if Path(name).name != name]
    refuse(folder, {"shard names outside the folder": outside})
    problems: dict[str, list[str]] = {"missing shards": [], "shards that cannot be read": []}
    for name in names:
        try:
            check_regular_file(folder / name)
        except FileNotFoundError:
            problems["missing shards"].append(name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a regular file"
            problems["shards that cannot be read"].append(f"{brief_name(name)} ({reason})")
    refuse(folder, problems)
    return [folder / name for name in names]


def _safetensors_of(folder: Path) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {brief(error)}") from error
    if not names:
        raise CheckpointError(f"checkpoint {folder}: no .safetensors file")
    return names


def _indexed_names(index: Path) -> list[str] | None:
    """Return the shards that an index names; None without an index."""
    try:
        data = read_object(index)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is not a valid index: {brief(error)}") from error
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is not a valid index: it has no object weight_map")
    wrong = [name for name in weight_map.values() if not isinstance(name, str) or not name]
    if wrong or not weight_map:
        raise CheckpointError(f"{index} is not a valid index: weight_map must name files")
    return sorted(set(weight_map.values()))
