"""vLLM's CPU build as another process in an environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WORKER = Path(__file__).with_name("vllm_worker.py")
# Set by `scripts/test --engines`: the Python of that environment.
VARIABLE = "DSV4_ENGINES_PYTHON"
SECONDS = 1200


def why_not() -> str:
    """Why it cannot be asked on this machine; empty if it can."""
    if VARIABLE not in os.environ:
        return "needs vLLM's CPU build: scripts/test --engines"
    if not torch.cpu._is_avx512_bf16_supported():
        return "vLLM's DeepSeek-V4 kernels need a processor with AVX512-BF16"
    return ""


SOURCES = [
    "recorded",
    pytest.param("asked now", marks=pytest.mark.skipif(bool(why_not()), reason=why_not() or "can")),
]


def ask_kernels(inputs: dict[str, dict[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Results of its kernels, by "kernel/tensor"."""
    given = {
        f"{kernel}/{name}": tensor.contiguous()
        for kernel, tensors in inputs.items()
        for name, tensor in tensors.items()
    }
    save_file(given, folder / "inputs.safetensors")
    return _run(folder, "kernels")


def ask_model(checkpoint: Path, prompts: list[Tensor], new: int, folder: Path) -> dict[str, Tensor]:
    """Log-probabilities of prompts and of `new` greedy tokens after them.

    Returns:
        By "number/prompt" [S - 1, vocab], the rows that predict the prompt's own tokens but the
        first; "number/new" [new, vocab]; "number/tokens" [new], those that were generated.
    """
    given = {str(number): prompt for number, prompt in enumerate(prompts)}
    save_file(given | {"new": torch.tensor(new)}, folder / "inputs.safetensors")
    return _run(folder, "model", str(checkpoint))


def _run(folder: Path, *command: str) -> dict[str, Tensor]:
    outputs = folder / "outputs.safetensors"
    # Nothing of this package, and threads of its own choice.
    hidden = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    arguments = [*command, str(folder / "inputs.safetensors"), str(outputs)]
    done = subprocess.run(
        [os.environ[VARIABLE], str(WORKER), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM's process failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return load_file(outputs)
