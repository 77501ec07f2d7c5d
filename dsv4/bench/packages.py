"""Other packages' kernels, found in folders of their wheels."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

DEEP_GEMM = "deep_gemm"
HUMMING = "humming"
# Of a vLLM wheel's `vllm` folder: libraries of operators, DeepGEMM.
VLLM_LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
VLLM_OPERATORS = (
    ("_C", "silu_and_mul_with_clamp"), ("_moe_C", "moe_align_block_size"),
    ("_moe_C", "moe_wna16_marlin_gemm"), ("_moe_C", "moe_sum"),
)  # fmt: skip


def reason_of(error: Exception) -> str:
    """The first line of an error, or what it is."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@cache
def package(name: str, folder: Path) -> ModuleType:
    """The package that lies in `folder`, whatever else the installation has.

    Raises:
        ValueError: it is not there or cannot be imported.
    """
    start = folder / "__init__.py"
    if not start.is_file():
        raise ValueError(f"{name}: {folder} has no {start.name}")
    spec = importlib.util.spec_from_file_location(
        name, start, submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise ValueError(f"{name}: {folder} cannot be used ({reason_of(error)})") from None
    return module


def deep_gemm(vllm: Path | None) -> ModuleType | None:
    """DeepGEMM of a vLLM wheel's folder, else the installed package; None where there is none.

    Raises:
        ValueError: the folder is given and has none that can be used.
    """
    if vllm is not None:
        return package(DEEP_GEMM, vllm / "third_party" / DEEP_GEMM)
    return _installed(DEEP_GEMM)


def humming(folder: Path | None) -> ModuleType | None:
    """Humming of a folder that has the package, else the installed one; None where there is none.

    Raises:
        ValueError: the folder is given and has none that can be used.
    """
    if folder is not None:
        return package(HUMMING, folder / HUMMING)
    return _installed(HUMMING)


@cache
def vllm_operators(vllm: Path) -> None:
    """Register the operators of vLLM's libraries, those of Marlin among them.

    Raises:
        ValueError: a library cannot be loaded, or registers other operators.
    """
    for name in VLLM_LIBRARIES:
        path = vllm / name
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ValueError(f"vllm: {path} cannot be used ({reason_of(error)})") from None
    for space, operator in VLLM_OPERATORS:
        if not hasattr(getattr(torch.ops, space), operator):
            raise ValueError(f"vllm: {vllm} has no operator {space}.{operator}")


def _installed(name: str) -> ModuleType | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
