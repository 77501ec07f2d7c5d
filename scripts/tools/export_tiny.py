"""Write the tiny checkpoint in the released layout, beside what is needed to judge it again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.loader import inventory, load_tensors, save
from dsv4.reference.model import ReferenceModel
from dsv4.reference.weights import encode_fp4, encode_fp8
from scripts.tools import tiny_evaluate

CHECKPOINT = Path("checkpoints/tiny")


def released_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """FP32 weights with stacked experts in the released layout.

    FP8 and FP4 codes with their scales, experts one by one, BF16 where the releases have it.
    """
    out: dict[str, Tensor] = {}
    for name, spec in inventory(config).items():
        if name.endswith(".scale"):
            continue
        match = re.fullmatch(r"(.+\.experts\.)(\d+)\.(.+)", name)
        tensor = tensors[match[1] + match[3]][int(match[2])] if match else tensors[name]
        scale = name.removesuffix("weight") + "scale"
        if spec.dtype == torch.float8_e4m3fn:
            out[name], out[scale] = encode_fp8(tensor, config.fp8_block)
        elif spec.dtype == torch.int8:
            out[name], out[scale] = encode_fp4(tensor)
        else:
            out[name] = tensor.to(spec.dtype)
    return out


def export(
    original: Mapping[str, Tensor], folder: Path, config: ModelConfig, plain: ModelConfig
) -> None:
    """Write the checkpoint of FP32 weights and measure both, the original and the rounded.

    Args:
        original: trained weights, experts stacked.
        folder: what `prepare` wrote.
        config: configuration of the checkpoint; plain: the same without quantisation.
    """
    CHECKPOINT.mkdir(parents=True, exist_ok=True)
    save(CHECKPOINT, config, released_tensors(original, config))
    for name in ("tokenizer.json", "held_out.txt"):
        shutil.copyfile(folder / name, CHECKPOINT / name)
    task = tiny_evaluate.Task.of(CHECKPOINT)
    rounded = ReferenceModel(*load_tensors(CHECKPOINT))
    metrics = tiny_evaluate.summary(
        task,
        original=task.measure(ReferenceModel(plain, original)),
        rounded=task.measure(rounded),
        blind=task.measure(ReferenceModel(config, rounded.tensors, compressed_branch=False)),
        accepted=tiny_evaluate.acceptance(CHECKPOINT, task.windows),
    )
    text = json.dumps(metrics, indent=1) + "\n"
    (CHECKPOINT / "metrics.json").write_text(text, encoding="utf-8")
    print({name: value for name, value in metrics.items() if isinstance(value, float)})
