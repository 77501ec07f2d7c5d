"""Formats of keys in a cache: rows in the model's dtype, or the 584-byte FP8 entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4.kernels.attention.paged_config import PagedFmhaConfig
from dsv4.kernels.kit.kv_entry import Fp8Entry
from dsv4.ops import kv_insert
from dsv4.ops.attention.sparse_fmha_paged import SPARSE_FMHA_PAGED
from dsv4.quoting import quoted

if TYPE_CHECKING:
    from dsv4.config.model_config import ModelConfig

ROWS = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # formats of rows, by the model's dtype


@dataclass(frozen=True)
class KvFormat:
    """Format of the keys (= values) of a cache, window and compressed entries alike.

    Attributes:
        name: "bf16" or "fp32" rows, or "fp8": entries of e4m3 codes with a scale per 64 channels
            and the rotated channels in bf16 (`dsv4.kernels.kit.kv_entry`).
        head_dim, rope_dim: channels of a key, rotated ones.
        is_rounded: whether rows hold the values that FP8 entries would: so for checkpoints that
            declare a quantisation, which were trained with such keys. Formats then differ in bytes
            alone.
        uniform_scale: whether all groups of an entry share a scale, as FP8 products need.
    """

    name: str
    head_dim: int
    rope_dim: int
    is_rounded: bool
    uniform_scale: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        name: str | None = None,
        uniform_scale: bool = False,
    ) -> KvFormat:
        """Return the format of a model's caches.

        Args:
            dtype: of the model's activations.
            device: of the cache.
            name: None: FP8 entries where the checkpoint declares a quantisation and the model
                computes in bfloat16, rows elsewhere. FP8 entries that no kernel of a GPU reads give
                way to rows that one does read.
            uniform_scale: see above.

        Raises:
            ValueError: the model has no such format; the message names the argument.
            TypeError: `uniform_scale` is no bool.
        """
        if dtype not in ROWS:
            raise ValueError(f"dtype: caches hold bfloat16 or float32, got {dtype}")
        if not isinstance(uniform_scale, bool):
            raise TypeError(f"uniform_scale must be a bool, got {quoted(uniform_scale)}")
        rows = ROWS[dtype]
        if name is None:
            name = _default(config, rows, device)
        if name not in (rows, "fp8"):
            raise ValueError(
                f"kv_format of a {str(dtype).removeprefix('torch.')} model must be '{rows}' or "
                f"'fp8', got {quoted(name)}"
            )
        if uniform_scale and name != "fp8" and not config.quantized:
            raise ValueError(
                f"uniform_scale: keys of kv_format '{name}' have no scales: the checkpoint "
                "declares no quantisation"
            )
        made = cls(name, config.head_dim, config.qk_rope_head_dim, config.quantized, uniform_scale)
        if name == "fp8":
            Fp8Entry(made.head_dim, made.rope_dim)  # refuses channels that are no whole groups
        return made

    def new_pool(self, pages: int, size: int, device: torch.device | str) -> Tensor:
        """Zeroed pages of `size` entries: [pages, size, head_dim], or [pages, size, entry bytes]
        uint8 whose pages lie at multiples of the record's bytes, as engines store them."""
        if self.name != "fp8":
            dtype = next(dtype for dtype, name in ROWS.items() if name == self.name)
            return torch.zeros(pages, size, self.head_dim, dtype=dtype, device=device)
        entry = Fp8Entry(self.head_dim, self.rope_dim)
        stride = entry.page_bytes(size)
        storage = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
        return storage.as_strided((pages, size, entry.bytes), (stride, entry.bytes, 1))


class KeyPool:
    """Keys of one layer in pages: slot = page * size + entry, as the paged operators count.

    Attributes:
        data: [pages, size, head_dim], or [pages, size, entry bytes].
        format: of the keys.
    """

    def __init__(
        self, kv_format: KvFormat, pages: int, size: int, device: torch.device | str
    ) -> None:
        self.format = kv_format
        self.data = kv_format.new_pool(pages, size, device)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.data.shape[0]

    @property
    def size(self) -> int:
        """Entries of a page."""
        return self.data.shape[1]

    @property
    def rounding(self) -> dict[str, bool]:
        """How `kv_insert` and `compress` round what they write here."""
        return {
            "is_rounded": self.format.is_rounded,
            "uniform_scale": self.format.uniform_scale,
        }

    def insert(
        self,
        latents: Tensor,
        weight: Tensor,
        eps: float,
        rope: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> None:
        """Normalise, rotate and round latents, and write them; what has no slot is dropped.

        Args:
            latents: [N, head_dim], before their norm.
            weight, eps: of the norm.
            rope: [R, rope_dim] fp32, cosines then sines, per position.
            positions, slots: [N] int32.
        """
        kv_insert(
            latents, weight, rope, positions, slots, self.data, eps=eps,
            **self.rounding,
        )  # fmt: skip


def _default(config: ModelConfig, rows: str, device: torch.device) -> str:
    # Entries hold rotated channels in bf16: a float32 model would lose what it computes in float32
    # for.
    if not config.quantized or rows != "bf16":
        return rows
    if device.type == "cuda":
        size = (config.head_dim, config.num_attention_heads)
        readable = [
            name
            for name in ("fp8", "bf16")
            if SPARSE_FMHA_PAGED.has_kernel(
                PagedFmhaConfig(*size, name, rope_dim=config.qk_rope_head_dim)
            )
        ]
        return (readable or ["fp8"])[0]
    return "fp8"
