"""Pools of keys in pages, read by slot, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.kit.kv_entry import GROUP, Fp8Entry
from dsv4.ops.quantize import decode_e4m3, quantize_e4m3


@dataclass(frozen=True)
class Pool:
    """Keys of `pages` pages of `size` entries each; slot = page * size + entry.

    Attributes:
        data: [pages, size, head_dim] rows, or [pages, size, entry bytes] uint8 FP8 entries.
        entry: geometry of FP8 entries; None: rows.
    """

    data: Tensor
    entry: Fp8Entry | None

    @property
    def pages(self) -> int:
        return self.data.shape[0]

    @property
    def size(self) -> int:
        """Entries of a page."""
        return self.data.shape[1]

    @property
    def slots(self) -> int:
        return self.pages * self.size

    def read(self, slots: Tensor) -> Tensor:
        """Keys of slots [...] int64, all of them in the pool: [..., head_dim]."""
        page, place = slots // self.size, slots % self.size
        if self.entry is None:
            return self.data[page, place]
        records, scales = entry_views(self.data, self.entry)
        return decode_entries(records[page, place], scales[page, place], self.entry)

    def decoded(self) -> Pool:
        """A pool of rows with the same keys."""
        if self.entry is None:
            return self
        return Pool(decode_entries(*entry_views(self.data, self.entry), self.entry), None)


def check_dtype(name: str, pool: object) -> None:
    """Refuse, by the name of the argument, a pool of values that no format of keys has."""
    known = (torch.bfloat16, torch.float32)
    if isinstance(pool, Tensor) and pool.dtype.itemsize > 1 and pool.dtype not in known:
        raise TypeError(
            f"{name}: got {pool.dtype}, needs torch.bfloat16 or FP8 entries in a one-byte dtype"
        )


def entry_views(pool: Tensor, entry: Fp8Entry) -> tuple[Tensor, Tensor]:
    """Records [pages, P, record bytes] and scale records [pages, P, scale bytes] of FP8 pages.

    Args:
        pool: [pages, P, entry bytes] uint8, each page contiguous.
    """
    pages, size, _ = pool.shape
    stride, offset = pool.stride(0), pool.storage_offset()
    records = pool.as_strided(
        (pages, size, entry.record_bytes), (stride, entry.record_bytes, 1), offset
    )
    scales = pool.as_strided(
        (pages, size, entry.scale_bytes),
        (stride, entry.scale_bytes, 1),
        offset + size * entry.record_bytes,
    )
    return records, scales


def decode_entries(records: Tensor, scales: Tensor, entry: Fp8Entry) -> Tensor:
    """Keys [..., head_dim] bf16 of records and scale records; exact, since e4m3 times a power of
    two fits bf16."""
    codes = records[..., : entry.codes].contiguous().view(torch.float8_e4m3fn)
    factors = scales[..., : entry.groups].contiguous().view(torch.float8_e8m0fnu).float()
    plain = decode_e4m3(codes).unflatten(-1, (entry.groups, GROUP)) if entry.groups else codes
    if entry.groups:
        plain = plain.mul_(factors.unsqueeze(-1)).flatten(-2)
    rotated = records[..., entry.codes :].contiguous().view(torch.bfloat16)
    return torch.cat((plain.to(torch.bfloat16), rotated), -1)


def encode_entries(
    keys: Tensor, entry: Fp8Entry, *, uniform: bool = False
) -> tuple[Tensor, Tensor]:
    """Records [..., record bytes] and scale records [..., scale bytes] of keys [..., head_dim].

    Args:
        uniform: whether all groups of an entry have the largest of their scales.
    """
    plain, rotated = keys[..., : entry.codes], keys[..., entry.codes :]
    parts, scales = [], keys.new_zeros((*keys.shape[:-1], entry.scale_bytes), dtype=torch.uint8)
    if entry.groups:
        codes, factors = quantize_e4m3(plain, GROUP, uniform=uniform)
        parts.append(codes.view(torch.uint8))
        scales[..., : entry.groups] = factors.view(torch.uint8)
    parts.append(rotated.to(torch.bfloat16).contiguous().view(torch.uint8))
    return torch.cat(parts, -1), scales


def write_slots(rows: Tensor, target: Tensor, slots: Tensor) -> None:
    """target[slot // P, slot % P] = row where there is such a slot; without a synchronisation."""
    pages, size, _ = target.shape
    place = slots.long()
    valid = (place >= 0) & (place < pages * size)
    # What is not to be written repeats a row that is; with none, the first entry stays as it is.
    anchor = valid.to(torch.uint8).argmax()
    chosen = torch.where(valid, torch.arange(len(rows), device=rows.device), anchor)
    place = place[chosen].clamp(0, pages * size - 1)
    page, entry = place // size, place % size
    target[page, entry] = torch.where(
        valid.any(), rows[chosen].to(target.dtype), target[page, entry]
    )
