"""A model filled from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike

import torch
from torch import Tensor

from dsv4.cache.formats import KvFormat
from dsv4.cache.index_keys import check_index_format
from dsv4.kernels.kit.index_entry import MODEL_FORMAT
from dsv4.layers.moe import MoE
from dsv4.loader.convert import dequantize
from dsv4.loader.errors import CheckpointError, brief
from dsv4.loader.layout import expert_name
from dsv4.loader.reader import Checkpoint
from dsv4.model.model import DeepseekV4
from dsv4.ops.moe.weights import MATRICES
from dsv4.quoting import quoted

STACKED_EXPERTS = re.compile(
    r"(.+)\.ffn\.experts\.(w[123])\.(weight(?:_scale(?:_2)?)?|(?:input_)?scale)"
)


def load(
    path: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
    kv_format: str | None = None,
    uniform_scale: bool = False,
    index_format: str = MODEL_FORMAT,
) -> DeepseekV4:
    """Build the model of a checkpoint folder and fill it, tensor by tensor, straight on its device.

    Reads the released layout (FP8 linears; FP4, FP8 or NVFP4 experts; E8M0 or float32 scales) and
    what `DeepseekV4ForCausalLM.save_pretrained` of transformers writes, in one file or many.
    Headers are checked before any data is read. Quantised weights stay as stored; but NVFP4 drafts,
    of which no release is known, make the loader dequantise all experts. NVFP4 experts round their
    activations to NVFP4, too, where the file has scales for them, but on Hopper, and else not.

    Args:
        path: folder with `config.json` and `.safetensors` files.
        device: where the weights go; default the CPU.
        dtype: bfloat16 (default) or float32, of activations and unquantised weights.
        progress: show a progress bar on stderr.
        kv_format, uniform_scale: how caches store keys, see `dsv4.cache.formats.KvFormat.of`.
        index_format: how they store index keys, see `DeepseekV4`.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: the folder does not hold a complete and sound DeepSeek-V4 checkpoint; the
            message names the files or tensors. Nothing half-loaded is left behind.
        TypeError: `path` is no path.
        ValueError: `dtype` is neither bfloat16 nor float32, `device` is not one of this machine, or
            the checkpoint's keys have no such `kv_format` or `index_format`.
    """
    dtype = torch.bfloat16 if dtype is None else dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float32, got {quoted(dtype)}")
    device = _usable("cpu" if device is None else device)
    # The files are read on the CPU, whatever `torch.set_default_device` says.
    with torch.device("cpu"):
        checkpoint = Checkpoint(path)
        KvFormat.of(checkpoint.model_config, dtype, device, kv_format, uniform_scale)
        check_index_format(index_format)
        model = _filled(checkpoint, dtype, device, progress)
    model.kv_format, model.uniform_scale = kv_format, uniform_scale
    model.index_format = index_format
    return model


def _filled(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: bool
) -> DeepseekV4:
    try:
        model = DeepseekV4(checkpoint.model_config, dtype=dtype, device=device)
    except ValueError as error:  # sizes that no kernel of a quantised model takes
        raise CheckpointError(f"checkpoint {checkpoint.path}: {brief(error)}") from error
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            _drop_absent_scales(checkpoint, name.removesuffix(".ffn"), module)
    targets = dict(model_tensors(model))
    total = sum(checkpoint.stored[name].nbytes for name in targets)
    with _progress_bar(progress, total) as advance:
        for name, target in targets.items():
            _fill(checkpoint, name, target)
            advance(checkpoint.stored[name].nbytes)
    for module in model.modules():
        if isinstance(module, MoE):
            module.prepare()
    return model.eval()


def _drop_absent_scales(checkpoint: Checkpoint, prefix: str, layer: MoE) -> None:
    """A layer's activations are rounded to NVFP4 where all of their scales are there."""
    experts = range(checkpoint.config.n_routed_experts)
    names = (expert_name(prefix, e, name, "input_scale") for e in experts for name in MATRICES)
    if not all(name in checkpoint.stored for name in names):
        layer.experts.drop_input_scales_()


def _usable(device: torch.device | str) -> torch.device:
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        reason = f"which cannot be used: {brief(error)}"
        raise ValueError(f"device: got {quoted(str(device))}, {reason}") from None
    if found.type == "meta":
        raise ValueError("device: got 'meta', which holds no data; give a device with memory")
    return found


def model_tensors(model: DeepseekV4) -> Iterator[tuple[str, Tensor]]:
    """Yield each released name with the memory of the model it belongs in, experts one by one."""
    for name, tensor in model.state_dict().items():
        match = STACKED_EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        prefix, matrix, part = match.groups()
        for expert, row in enumerate(tensor.unbind()):
            yield expert_name(prefix, expert, matrix, part), row


def _fill(checkpoint: Checkpoint, name: str, target: Tensor) -> None:
    def on_device(sibling: str) -> Tensor:
        return checkpoint.read(f"{name.removesuffix('weight')}{sibling}").to(target.device)

    source = checkpoint.read(name)
    if name.endswith(".tid2eid"):
        _check_expert_ids(checkpoint, name, source)
    if target.is_floating_point() and target.dtype.itemsize > 1 and name.endswith(".weight"):
        block = checkpoint.config.fp8_block
        source = dequantize(source.to(target.device), on_device, block, target.dtype)
    if target.dtype.itemsize == 1:
        # Bytes of codes and exponents: a numeric copy would turn the exponent byte 120 into 120.0.
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.copy_(source)


def _check_expert_ids(checkpoint: Checkpoint, name: str, table: Tensor) -> None:
    experts = checkpoint.config.n_routed_experts
    low, high = (int(bound) for bound in torch.aminmax(table))
    if low < 0 or high >= experts:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: {name} holds expert ids {low} .. {high}, expected "
            f"0 .. {experts - 1}"
        )


@contextmanager
def _progress_bar(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number of bytes; without `show`, no bar."""
    if not show:
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
