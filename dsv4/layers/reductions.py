"""Sums of half-precision matrix products in float32, as the model was trained, on CUDA too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_SETTINGS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)


class FullPrecisionSums:
    """Context in which cuBLAS adds the partial sums of a split K in float32.

    By default torch lets it round them to the dtype of the operands first, so that a product loses
    bits whenever the library happens to split. The settings belong to the process: they are put
    back when the last of the threads that are inside leaves. What is captured inside stays so in
    every replay of a CUDA graph. Without CUDA nothing depends on them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._outside: dict[str, tuple[bool, bool]] = {}

    def __enter__(self) -> None:
        backend = torch.backends.cuda.matmul
        with self._lock:
            if self._inside == 0:
                self._outside = {
                    name: (getattr(backend, name), getattr(backend, f"{name}_split_k", True))
                    for name in _SETTINGS
                }
                for name, (_, split_k) in self._outside.items():
                    setattr(backend, name, (False, split_k))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                for name, setting in self._outside.items():
                    setattr(torch.backends.cuda.matmul, name, setting)


_SUMS = FullPrecisionSums()


def full_precision_sums(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in `FullPrecisionSums`, which all functions share."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _SUMS:
            return function(*args, **kwargs)

    return run
