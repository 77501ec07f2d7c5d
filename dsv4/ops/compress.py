"""`compress`: a compressor's step, from projections to entries of the cache, as function and
operator."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.compressor.config import ARGS, CompressConfig, has_kernel, values
from dsv4.kernels.kit.index_entry import INDEX_FORMATS, format_of
from dsv4.ops.index_keys import write_keys
from dsv4.ops.kv_insert import KV_INSERT, rotate_rows_
from dsv4.ops.pools import write_slots
from dsv4.ops.rms_norm_fp8 import MODEL_EPS, rms_norm_rows
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp

_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Compress(KernelOp):
    """State, pooling, norm, rotation, rounding and insertion of compressed entries."""

    name = "compress"
    config = CompressConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.compressor.compress")
    early = ("weight", "state_rows", "starts", "lens", "slots")

    def values(self, config: CompressConfig) -> Mapping[str, int | str]:
        return values(config)

    def has_kernel(self, config: CompressConfig) -> bool:
        return has_kernel(config)

    def check_sizes(self, config: CompressConfig, *tensors: Tensor | None) -> None:
        state, rope, pool = tensors[3], tensors[5], tensors[10]
        if rope.shape[0] == 0:
            raise ValueError("rope: got no rows, needs one per position")
        if state.shape[1] < config.terms:
            raise ValueError(
                f"state: got rings of {state.shape[1]} tokens, a mean of {config.terms} needs as "
                "many"
            )
        size, row = pool.shape[1:]
        if config.is_packed and size > 1 and pool.stride(1) != row:
            raise ValueError(
                f"pool: got strides {tuple(pool.stride())}, each page of packed entries must be "
                f"contiguous: [any, {row}, 1]"
            )

    def torch(
        self,
        config: CompressConfig,
        values: Tensor,
        scores: Tensor,
        ape: Tensor,
        state: Tensor,
        weight: Tensor,
        rope: Tensor,
        state_rows: Tensor,
        starts: Tensor,
        lens: Tensor,
        slots: Tensor,
        pool: Tensor,
    ) -> None:
        batch, chunk, _ = values.shape
        if 0 in (batch, chunk, state.shape[0]):
            return
        device, size = values.device, state.shape[1]
        exists = (state_rows >= 0) & (state_rows < state.shape[0])
        rows = torch.where(exists, state_rows, 0).long()[:, None]
        lens = torch.where(exists, lens, 0).clamp(0, chunk)[:, None]
        starts = starts.long().clamp(min=0)[:, None]
        offsets = torch.arange(chunk, device=device)
        positions = starts + offsets
        tokens = torch.stack((values, scores + ape[positions % config.ratio]), -2)
        before = starts + torch.arange(1 - config.terms, 0, device=device)
        past = state[rows, before % size]
        # A ring is undefined before position 0: a NaN there would survive a weight of zero.
        is_past = ((before >= 0) & exists[:, None])[..., None, None]
        # A list would come from the host, by a copy that no capture allows.
        nothing = torch.zeros(2, 1, device=device)
        nothing[1].fill_(-torch.inf)
        past = torch.where(is_past, past, nothing)
        if slots.shape[1] and pool.numel():
            numbers = starts // config.ratio + torch.arange(slots.shape[1], device=device)
            means = _means(config, torch.cat((past, tokens), 1), numbers * config.ratio - starts)
            places = (numbers * config.ratio).clamp(max=rope.shape[0] - 1).flatten().int()
            latent = means.to(torch.bfloat16 if config.latent == "bf16" else torch.float32)
            _write_entries(config, latent.flatten(0, 1), weight, rope, places, slots, pool)
        is_kept = (offsets < lens) & (offsets >= lens - size)
        targets = torch.where(is_kept, rows * size + positions % size, -1).flatten()
        for part in range(2):
            write_slots(tokens[..., part, :].flatten(0, 1), state[:, :, part], targets)

    def aot(self) -> Mapping[str, CompressConfig]:
        """Compressors of CSA, of HCA and of the indexer, the same in Flash and Pro."""
        found = {}
        for kv_format in ("fp8", "bf16"):
            options = {"eps": MODEL_EPS, "kv_format": kv_format}
            found[f"CSA, {kv_format}"] = CompressConfig(512, 4, True, **options)
            found[f"HCA, {kv_format}"] = CompressConfig(512, 128, False, **options)
        for keys in INDEX_FORMATS:
            found[f"indexer, {keys}"] = CompressConfig(
                128, 4, True, MODEL_EPS, kv_format=keys, is_index=True
            )
        return found


COMPRESS = Compress()
_op = COMPRESS.overload


def compress(
    values: Tensor,
    scores: Tensor,
    ape: Tensor,
    state: Tensor,
    weight: Tensor,
    rope: Tensor,
    state_rows: Tensor,
    starts: Tensor,
    lens: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    dtype: torch.dtype = torch.bfloat16,
    is_index: bool = False,
    is_rounded: bool = True,
    uniform_scale: bool = False,
) -> None:
    """Take in the new tokens of B requests, and write the entries of blocks that end with them.

    Entry n covers positions n m .. (n + 1) m - 1, m the rows of `ape`: the softmax of their scores,
    by channel, weighs their values. Where projections are two series wide, blocks overlap: the
    block's own tokens contribute the last d columns, those of the block before the first d, before
    position 0 nothing. The mean is rounded to `dtype`, normalised, rotated by the block's first
    position, and written as `kv_insert` writes; or, as an index key, Hadamard-transformed and
    rounded to FP4 per 32 channels. Technical report section 2.3.1; official `Compressor.forward`.
    Bits of an entry depend on its own tokens alone. Nothing is read back to the host.

    Args:
        values, scores: [B, C, w] float32, projections of the new tokens; w = d, or 2 d.
        ape: [m, w] float32, added to scores by position within the block.
        state: [S, ring, 2, w] float32: value and biased score of past tokens, position p at
            p mod ring, which is at least a mean's tokens. Written: new tokens, the last `ring`.
        weight: [d] float32 of the norm; m and these are read while the launch before may still
            run.
        rope: [R, rope_dim] float32, cosines, then sines, per position.
        state_rows: [B] int32, row of each request, no two the same; another number: no tokens.
        starts: [B] int32, position of the first new token.
        lens: [B] int32, new tokens, 0..C. GPUs read `state_rows`, `starts`, `lens` and `slots`
            while the launch before may still run: they must not be what a kernel with programmatic
            dependent launch just wrote.
        slots: [B, K] int32, slot of entry starts // m + k; what is not in the pool is not written,
            and blocks that do not end with the step must have none.
        pool: [pages, P, d] rows or [pages, P, bytes] uint8 of FP8 entries
            (`dsv4.kernels.kit.kv_entry`), or of FP8 or FP4 index keys, as their bytes say
            (`dsv4.kernels.kit.index_entry`). Written.
        eps: added to the mean square; at least 1e-18.
        is_index, is_rounded: index keys; whether rows hold rounded values.
        uniform_scale: as in `kv_insert`; by the torch implementation.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    tensors = (
        values, scores, ape, state, weight, rope, state_rows, starts, lens, slots, pool
    )  # fmt: skip
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            COMPRESS.check_no_gradients(*tensors)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got a {type(dtype).__name__}, needs a torch.dtype")
        if dtype not in _FORMATS:
            raise ValueError(f"dtype: got {dtype}, needs torch.bfloat16 or torch.float32")
        dim, width = index(weight.shape[0]), index(ape.shape[1])
        kv_format = _FORMATS.get(pool.dtype, "fp8")
        if is_index and kv_format == "fp8":
            kv_format = format_of(dim, index(pool.shape[2]))
        identity = compress_runner_id(
            dim,
            index(ape.shape[0]),
            width != dim,
            eps,
            _FORMATS[dtype],
            kv_format,
            is_index,
            is_rounded,
            uniform_scale,
            index(rope.shape[1]),
        )
        _op(*tensors, identity)
    except Exception:
        COMPRESS.explain(*tensors)
        for name, tensor in (("state", state), ("pool", pool)):
            check_is_tensor(name, tensor)  # outputs, but no call makes them
        raise


@torch.compiler.assume_constant_result
def compress_runner_id(
    dim: int,
    ratio: int,
    overlap: bool,
    eps: float,
    latent: str = "bf16",
    kv_format: str = "fp8",
    is_index: bool = False,
    is_rounded: bool = True,
    uniform_scale: bool = False,
    rope_dim: int = 64,
) -> int:
    """Id of a configuration, what `torch.ops.dsv4.compress` takes; see `CompressConfig`."""
    return COMPRESS.runner_id(
        dim, ratio, overlap, eps, latent, kv_format, is_index, is_rounded, uniform_scale, rope_dim
    )


# ---- torch implementation ------------------------------------------------------------------------


def _means(config: CompressConfig, tokens: Tensor, begins: Tensor) -> Tensor:
    """Means [B, K, d] of blocks that begin `begins` [B, K] tokens behind a step's first one.

    Args:
        tokens: [B, terms - 1 + C, 2, width], values and scores, those before the step first.
    """
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    within = torch.arange(-(config.terms - config.ratio), config.ratio, device=tokens.device)
    # Rows past the step belong to blocks that do not end: any row will do.
    rows = (begins[..., None] + within + config.terms - 1).clamp(max=tokens.shape[1] - 1)
    found = tokens[batch, rows]
    if config.overlap:
        earlier, own = found.split(config.ratio, 2)
        found = torch.cat((earlier[..., : config.dim], own[..., config.dim :]), 2)
    values, scores = found.unbind(-2)
    return (scores.softmax(2) * values).sum(2)


def _write_entries(
    config: CompressConfig,
    means: Tensor,
    weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
) -> None:
    """Normalise, rotate, round and write means [N, d]."""
    slots = slots.flatten()
    if not config.is_index:
        KV_INSERT.torch(config.insertion, means, weight, rope, positions, slots, pool)
        return
    keys = rms_norm_rows(means, weight, config.eps)
    rotate_rows_(keys, rope[positions])
    write_keys(keys, slots, pool, is_rounded=config.is_rounded)
