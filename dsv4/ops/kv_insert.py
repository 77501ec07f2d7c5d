"""`kv_insert`: latents normalised, rotated, rounded and written into a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.arch import ARCHS
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.kernels.rows.kv_insert_config import ARGS, KvInsertConfig, values
from dsv4.ops.pools import check_dtype, decode_entries, encode_entries, entry_views, write_slots
from dsv4.ops.rms_norm_fp8 import MODEL_EPS, rms_norm_rows
from dsv4.ops.runtime.backend import Device
from dsv4.ops.runtime.checks import check_is_tensor
from dsv4.ops.runtime.kernel_op import KernelOp, Sizes
from dsv4.quoting import quoted

CTAS_PER_SM = 8
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class KvInsert(KernelOp):
    """RMSNorm, rotation and FP8 rounding of latents, written to slots of a paged cache."""

    name = "kv_insert"
    config = KvInsertConfig
    args = ARGS
    kernels: ClassVar = dict.fromkeys(ARCHS, "dsv4.kernels.rows.kv_insert")
    early = ("weight", "rope", "positions", "slots")

    def values(self, config: KvInsertConfig) -> Mapping[str, int | str]:
        return values(config)

    def plan(self, config: KvInsertConfig, sizes: Sizes, device: Device) -> tuple[int, ...]:
        """Number of CTAs that run at a time."""
        return (CTAS_PER_SM * device.num_sms,)

    def check_sizes(self, config: KvInsertConfig, *tensors: Tensor | None) -> None:
        rope, pool = tensors[2], tensors[5]
        if rope.shape[0] == 0:
            raise ValueError("rope: got no rows, needs one per position")
        size, row = pool.shape[1:]
        if config.kv_format == "fp8" and size > 1 and pool.stride(1) != row:
            raise ValueError(
                f"pool: got strides {quoted(pool.stride())}, each page of FP8 entries must be "
                f"contiguous: [any, {row}, 1]"
            )

    def torch(
        self,
        config: KvInsertConfig,
        x: Tensor,
        weight: Tensor,
        rope: Tensor,
        positions: Tensor,
        slots: Tensor,
        pool: Tensor,
    ) -> None:
        if x.shape[0] == 0 or pool.numel() == 0:
            return
        keys = rms_norm_rows(x, weight, config.eps)
        rotate_rows_(keys, rope[positions.clamp(0, rope.shape[0] - 1)])
        parts, targets = [keys], [pool]
        if config.quantizes:
            entry = Fp8Entry(config.dim, config.rope_dim)
            encoded = encode_entries(keys, entry, uniform=config.uniform_scale)
            if config.kv_format == "fp8":
                parts, targets = encoded, entry_views(pool, entry)
            else:
                keys[:, : entry.codes] = decode_entries(*encoded, entry)[:, : entry.codes]
        for part, target in zip(parts, targets):
            write_slots(part, target, slots)

    def aot(self) -> Mapping[str, KvInsertConfig]:
        """Latents of Flash and Pro into either cache."""
        return {
            f"{kv_format}": KvInsertConfig(512, MODEL_EPS, kv_format)
            for kv_format in ("fp8", "bf16")
        }


KV_INSERT = KvInsert()
_op = KV_INSERT.overload


def kv_insert(
    x: Tensor,
    weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    is_rounded: bool = True,
    uniform_scale: bool = False,
) -> None:
    """Write N latents into slots of a paged cache: norm, rotation, FP8 rounding, and the entry.

    y = x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once to the dtype of x; pairs of
    neighbours of the last channels turned by the latent's position, rounded again; the other
    channels rounded to e4m3 with the scale 2^ceil(log2(max(amax, 1e-4) / 448)) per 64, as
    quantised checkpoints were trained. A pool of FP8 entries holds the codes, a pool of rows the
    values that they stand for: attention over either sees the same keys. A latent's bits depend on
    nothing but the latent and its position.

    Args:
        x: [N, d] bfloat16; or float32, on GPUs too by the torch implementation. What the window's
            projection or the compressor gives, before its norm. Kernels have d 64, 128 and 512.
        weight: [d] float32.
        rope: [R, rope_dim] float32, cosines, then sines, per position.
        positions: [N] int32, clamped to 0..R - 1.
        slots: [N] int32, page * P + entry, no slot twice; what is not in the pool is not written.
            GPUs read `weight`, `rope`, `positions` and `slots` while the launch before may still
            run: they must not be what a kernel with programmatic dependent launch just wrote.
        pool: [pages, P, d] bfloat16 (float32 on the CPU), or [pages, P, entry bytes] uint8 of FP8
            entries (`dsv4.kernels.kit.kv_entry`); pages may lie apart. Written.
        eps: added to the mean square; at least 1e-18.
        is_rounded: False: a pool of rows gets the values before FP8.
        uniform_scale: give all groups of an entry the largest of their scales, which
            `compute="fp8"` of `sparse_fmha_paged` needs.

    Raises:
        ValueError, TypeError: an argument does not fit, or requires grad; the message names it.
    """
    tensors = (x, weight, rope, positions, slots, pool)
    try:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            KV_INSERT.check_no_gradients(*tensors)
        identity = kv_insert_runner_id(
            index(x.shape[1]),
            eps,
            _FORMATS.get(pool.dtype, "fp8"),
            is_rounded,
            uniform_scale,
            index(rope.shape[1]),
        )
        _op(*tensors, identity)
    except Exception:
        check_dtype("pool", pool)
        KV_INSERT.explain(*tensors)
        check_is_tensor("pool", pool)  # an output, but no call makes one
        raise


@torch.compiler.assume_constant_result
def kv_insert_runner_id(
    dim: int,
    eps: float,
    kv_format: str = "fp8",
    is_rounded: bool = True,
    uniform_scale: bool = False,
    rope_dim: int = 64,
) -> int:
    """Id of a configuration: what `torch.ops.dsv4.kv_insert` takes.

    Args:
        dim: channels of a latent.
        kv_format: of the pool, "bf16", "fp8", or "fp32" beside float32 latents.
        eps, is_rounded, uniform_scale: as in `kv_insert`.
        rope_dim: rotated channels.
    """
    return KV_INSERT.runner_id(dim, eps, kv_format, is_rounded, uniform_scale, rope_dim)


# ---- torch implementation ------------------------------------------------------------------------


def rotate_rows_(x: Tensor, rotation: Tensor) -> None:
    """Turn the last channels of x [..., d] by [..., cosines then sines], in place."""
    cos, sin = rotation.chunk(2, -1)
    tail = x[..., x.shape[-1] - rotation.shape[-1] :]
    even, odd = tail[..., 0::2].float(), tail[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    tail.copy_(turned.flatten(-2))
