"""Recorded results of other implementations: where they lie, and for which inputs they hold."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).with_name("goldens")


def load(name: str) -> dict[str, Tensor]:
    """The tensors of a golden file."""
    return load_file(FOLDER / f"{name}.safetensors")


def about(name: str) -> dict[str, str]:
    """What its script wrote beside the tensors: origin, and digests of inputs."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        return file.metadata()


def save(name: str, tensors: dict[str, Tensor], facts: dict[str, str]) -> Path:
    """Write a golden file; small, for it is part of the repository."""
    path = FOLDER / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, facts)
    return path
