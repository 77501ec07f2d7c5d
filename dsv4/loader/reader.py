"""An opened checkpoint: every header read and checked first, the data lazily."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.loader.convert import FusedExperts, Index, released_name
from dsv4.loader.errors import CheckpointError, brief, brief_name, mis_shape, refuse
from dsv4.loader.files import check_folder, read_config, weight_files
from dsv4.loader.layout import TensorSpec, expert_name, tensor_specs

# Stored dtypes that carry what the layout asks for. Plain floats may be wider or narrower than in
# the releases; E8M0 and e2m1 may be declared as raw bytes: they are reinterpreted, never converted.
_FLOATS = frozenset({"F32", "BF16", "F16"})
_STORED_AS = {
    torch.bfloat16: _FLOATS,
    torch.float32: _FLOATS,
    torch.float8_e4m3fn: frozenset({"F8_E4M3"}),
    torch.float8_e8m0fnu: frozenset({"F8_E8M0", "U8"}),
    torch.int8: frozenset({"I8", "U8"}),
    torch.uint8: frozenset({"U8"}),
    torch.int64: frozenset({"I64"}),
}
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}

_MISSING = 1000  # missing tensors that are still counted where the files hold none

# Files may repeat the embedding and the head inside an MTP layer, which shares the main model's.
_SHARED_WITH_MTP = re.compile(r"mtp\.\d+\.(embed|head)\.weight")


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor's bytes.

    Attributes:
        file: the shard.
        key: its name in there.
        dtype: safetensors dtype name.
        shape: of the part that `index` selects, or of the whole.
        index: which part of a fused tensor; None = all of it.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    index: Index | None = None

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return _ITEM_BYTES.get(self.dtype, 1) * torch.Size(self.shape).numel()


class Checkpoint:
    """A checkpoint folder whose headers match its configuration, read tensor by tensor.

    Attributes:
        path: the folder.
        config: what `config.json` says, corrected by what the tensors show (expert format, scales).
        specs: released name -> what the layout asks for; optional tensors only where present.
        stored: released name -> where it is.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Open a folder and check every tensor's name, shape and dtype; no data is read.

        Raises:
            CheckpointError: the folder, its configuration or a file cannot be read, or tensors are
                missing, unexpected, mis-shaped or mis-typed.
            TypeError: `path` is no path.
        """
        self.path = check_folder(path)
        declared = read_config(self.path)
        self._handles = {file: _open_shard(file) for file in weight_files(self.path)}
        stored = _index_tensors(self.path, self._handles, declared)
        try:
            self.config, self._mtp_scheme = _detect_formats(declared, stored)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {self.path}: {brief(error)}") from error
        specs = tensor_specs(self.config, mtp_expert_scheme=self._mtp_scheme)
        self.stored = {name: t for name, t in stored.items() if not _ignored(name, self.config)}
        self.specs = _check(self.path, specs, self.stored)

    @property
    def model_config(self) -> ModelConfig:
        """The configuration to build the model with: formats that it cannot hold become None."""
        scheme = self.config.expert_scheme
        drafts = "fp4" if scheme == "nvfp4" else scheme
        if self.config.num_nextn_predict_layers and self._mtp_scheme != drafts:
            return replace(self.config, expert_scheme=None)
        return self.config

    def read(self, name: str) -> Tensor:
        """Return one tensor by its released name, on the CPU, mapped from the file if unfused."""
        stored = self.stored[name]
        handle = self._handles[stored.file]
        if stored.index is None:
            tensor = handle.get_tensor(stored.key)
        else:
            tensor = handle.get_slice(stored.key)[stored.index]
        wanted = self.specs[name].dtype
        if tensor.dtype == torch.uint8 and wanted in (torch.int8, torch.float8_e8m0fnu):
            return tensor.view(wanted)
        return tensor


def load_tensors(path: str | PathLike[str]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a checkpoint of any layout as tensors with released names, in their stored dtypes.

    The tensors are mapped from the files: memory fills as they are used, and the system ends the
    process (SIGBUS) if a file is truncated meanwhile. `dsv4.load` copies.

    Returns:
        The configuration and the tensors, routed experts one by one.

    Raises:
        CheckpointError: see `Checkpoint`.
    """
    checkpoint = Checkpoint(path)
    return checkpoint.config, {name: checkpoint.read(name) for name in checkpoint.specs}


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt: {brief(error)}") from error


def _index_tensors(
    folder: Path, handles: Mapping[Path, Any], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Read every shard's header and name what it holds as the releases do."""
    stored: dict[str, StoredTensor] = {}
    repeated: list[str] = []
    mis_shaped: list[str] = []
    for file, handle in handles.items():
        for key in handle.keys():  # noqa: SIM118 (not a mapping)
            view = handle.get_slice(key)
            shape, dtype, name = tuple(view.get_shape()), view.get_dtype(), released_name(key)
            fused = FusedExperts.of(name)
            parts: Iterable[tuple[str, Index | None]] = [(name, None)]
            if fused is not None:
                if shape != fused.shape(config):
                    # Before it is taken apart: an empty tensor may claim any number of experts.
                    mis_shaped.append(mis_shape(name, shape, fused.shape(config)))
                    continue
                parts = fused.parts(config)
            for part, index in parts:
                if part in stored:
                    repeated.append(part)
                size = shape if index is None else _indexed_shape(shape, index)
                stored[part] = StoredTensor(file, key, dtype, size, index)
    refuse(folder, {"tensors stored twice": repeated, "mis-shaped tensors": mis_shaped})
    return stored


def _indexed_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    kept = [i.stop - i.start for i in index if isinstance(i, slice)]
    return (*kept, *shape[len(index) :])


def _detect_formats(
    config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> tuple[ModelConfig, str | None]:
    """Correct a quantised configuration by the tensors; return it and the MTP experts' format.

    `expert_dtype` is absent in the first releases and says "fp4" for NVFP4 too, and nothing tells
    float32 scales from E8M0 ones.
    """
    if config.linear_scheme is None:
        return config, None
    scheme = _expert_scheme(stored, "layers.0", config.expert_scheme)
    scale = stored.get("layers.0.attn.wq_a.scale")
    scale_dtype = "float32" if scale is not None and scale.dtype == "F32" else "e8m0"
    default = "fp4" if scheme == "nvfp4" else scheme
    mtp_scheme = _expert_scheme(stored, "mtp.0", default)
    return replace(config, expert_scheme=scheme, scale_dtype=scale_dtype), mtp_scheme


def _expert_scheme(
    stored: Mapping[str, StoredTensor], prefix: str, declared: str | None
) -> str | None:
    weight = stored.get(expert_name(prefix, 0, "w1", "weight"))
    if weight is None:
        return declared
    if expert_name(prefix, 0, "w1", "weight_scale") in stored:
        return "nvfp4"
    schemes = dict.fromkeys(_FLOATS) | {"I8": "fp4", "U8": "fp4", "F8_E4M3": "fp8"}
    return schemes.get(weight.dtype, declared)


def _ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be present without being part of the model."""
    unused_draft = config.num_nextn_predict_layers == 0 and name.startswith("mtp.")
    return unused_draft or _SHARED_WITH_MTP.fullmatch(name) is not None


def _check(
    folder: Path, specs: Iterable[tuple[str, TensorSpec]], stored: Mapping[str, StoredTensor]
) -> dict[str, TensorSpec]:
    """Compare what should be stored with what is; return the specs of what is.

    Stops at the first tensors that are missing beyond any doubt: a configuration may name more than
    could ever be counted.
    """
    missing: list[str] = []
    mis_shaped: list[str] = []
    mis_typed: list[str] = []
    present: dict[str, TensorSpec] = {}
    for name, spec in specs:
        found = stored.get(name)
        if found is None:
            if spec.required:
                missing.append(name)
            if len(missing) > len(stored) + _MISSING:
                beyond = "missing tensors or more, since config.json names more than the files hold"
                refuse(folder, {beyond: missing})
            continue
        present[name] = spec
        if found.shape != spec.shape:
            mis_shaped.append(mis_shape(name, found.shape, spec.shape))
        if found.dtype not in _STORED_AS[spec.dtype]:
            wanted = " or ".join(sorted(_STORED_AS[spec.dtype]))
            mis_typed.append(f"{brief_name(name)} {found.dtype} instead of {wanted}")
    refuse(
        folder,
        {
            "missing tensors": missing,
            "unexpected tensors": sorted(stored.keys() - present.keys()),
            "mis-shaped tensors": mis_shaped,
            "mis-typed tensors": mis_typed,
        },
    )
    return present
