"""One PTX test program: what is launched, on which bytes, and how its output is compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

POISON = 0xA5


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference of approximate results: `ulp` units in the last place, or `absolute`."""

    ulp: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Row:
    """A named part of the output image.

    Args:
        floats: "f32", "f16" or "bf16" when the bytes are floating-point results of arithmetic,
            whose NaNs compare equal whatever their payload; None compares every bit.
        tolerance: for approximate results; None means equal.
    """

    name: str
    size: int
    floats: str | None = None
    tolerance: Tolerance | None = None


@dataclass(frozen=True)
class Buffer:
    """A kernel parameter: the address of `Case.buffers[index]`, plus `offset` bytes."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a tiled tensor map over a buffer. Innermost dimension first.

    Args:
        buffer: index in `Case.buffers`.
        dtype: element type, a key of `tensor_maps.ELEMENTS`.
        dims, strides: elements per dimension; bytes from one to the next, for all but the first.
        box, steps: extent of the box (before element strides), and the element strides.
        swizzle: 0, 32, 64 or 128 bytes.
        nan_fill: fill what lies outside with NaN instead of zero.
    """

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0
    nan_fill: bool = False

    def element_strides(self) -> tuple[int, ...]:
        """The element strides, one per dimension."""
        return self.steps or (1,) * len(self.dims)


@dataclass(frozen=True)
class InterleavedMap(TensorMap):
    """A tensor map over slices of channels: dimension 0 counts slices of `slice_bytes` (16 or 32),
    the last but one dimension is the slices' own."""

    slice_bytes: int = 16


@dataclass(frozen=True)
class Case:
    """One launch of an entry named `kernel`; `buffers[0]` is the output image, row after row."""

    name: str
    ptx: str
    rows: tuple[Row, ...]
    buffers: tuple[np.ndarray, ...]
    params: tuple[Buffer | TensorMap | int, ...]
    block: int = 32
    grid: int = 1
    cluster: int = 1
    shared: int = 0
    slow: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        size = sum(row.size for row in self.rows)
        if size != self.buffers[0].nbytes:
            raise ValueError(f"{self.name}: rows of {size} bytes, image {self.buffers[0].nbytes}")

    def identity(self) -> str:
        """Digest of everything that decides the output: a golden of another program is stale."""
        digest = hashlib.blake2b(digest_size=8)
        launch = (self.params, self.block, self.grid, self.cluster, self.shared)
        digest.update(f"{self.ptx}{launch}{[(r.name, r.size) for r in self.rows]}".encode())
        for buffer in self.buffers:
            digest.update(buffer.tobytes())
        return digest.hexdigest()


def poisoned(size: int) -> np.ndarray:
    """An output image nothing has written to yet."""
    return np.full(size, POISON, np.uint8)


def module(body: str, params: str, *, threads: int = 0) -> str:
    """A PTX module with one entry `kernel`; `threads` fixes the block size (setmaxnreg needs it).

    Args: `params` like "u64 out, map m": types u32, u64 and map, a 128-byte tensor map.
    """
    declared = []
    for kind, name in (p.split() for p in params.split(", ")):
        declared.append(
            f".param .align 64 .b8 {name}[128]" if kind == "map" else f".param .{kind} {name}"
        )
    required = f"\n.reqntid {threads}, 1, 1" if threads else ""
    return (
        ".version 8.6\n.target sm_90a\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry kernel({', '.join(declared)}){required}\n{{\n{body.strip()}\n ret;\n}}\n"
    )
