"""DeepSeek-V4 attention kernels for Blackwell and Hopper, and the model around them.

Importing the package needs torch alone: no GPU, no CUDA libraries, no kernel compiler. Heavier
parts load on use. It registers the operators, `torch.ops.dsv4.*`.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4

try:
    __version__ = version("dsv4")
except PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    __version__ = "0+unknown"

__all__ = ["__version__", "load"]


def load(
    path: str,
    *,
    device: Any = None,
    dtype: Any = None,
    progress: bool = False,
    kv_format: str | None = None,
    uniform_scale: bool = False,
    index_format: str = "fp8",
) -> DeepseekV4:
    """Load a DeepSeek-V4 checkpoint folder; `dsv4.loader.load` lists layouts and errors.

    Args:
        path: folder with `config.json` and one or more `.safetensors` files.
        device: torch device of the weights; default the CPU.
        dtype: dtype of activations and unquantised weights; default bfloat16.
        progress: show a progress bar.
        kv_format: of cached keys, "bf16" (in a float32 model "fp32") or "fp8"; default FP8 where
            the checkpoint declares a quantisation, which rounds them anyway.
        uniform_scale: give the groups of a cached key one scale, as FP8 products need.
        index_format: of cached index keys, "fp8" (132 bytes) or "fp4" (68 bytes, as exact).

    Returns:
        A `DeepseekV4` in eval mode: `model(input_ids) -> logits`, `model.generate(...)`.
    """
    from dsv4.loader import load as load_checkpoint

    return load_checkpoint(
        path,
        device=device,
        dtype=dtype,
        progress=progress,
        kv_format=kv_format,
        uniform_scale=uniform_scale,
        index_format=index_format,
    )


def _is_command_line() -> bool:
    """Whether this process is the `dsv4` command, whose help and completion need no torch."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # Python is looking for the module that it was asked to run
        return sys.orig_argv[sys.orig_argv.index("-m") + 1] == "dsv4"
    return Path(started).stem == "dsv4"


# Plans of kernels print without torch, too.
if not _is_command_line() and find_spec("torch") is not None:
    import dsv4.ops  # noqa: F401  (registers the operators)
