"""The 128-byte tensor map of TMA, decoded, and the boxes it moves.

Layout of the map (64-bit words): 0 address; 1 format and the first stride; 2, 3 strides (in units
of 16 bytes, 36 bits each: low words first, the high nibbles together); 4..6 sizes minus one, then
element strides; 6, 7 box sizes minus one.

Interleaved tensors (NC/8HWC8 and the like) keep 16 or 32 bytes of channels together. As an H200
does it, these are the units of dimension 0 (its size, box, coordinates and element stride),
whatever the element type, and a box holds one slice of the last but one dimension, C/8. Without
interleave dimension 0 has no element stride: the map's is ignored.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from dsv4.simulator.arithmetic.numerics import bf16_of_f32, f32_of_bf16, tf32_nearest
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.machine.memory import CHUNK, GlobalMemory

MAP_BYTES = 128
# The hardware's element type codes.
_ELEMENTS = {
    0: ("u8", 1), 1: ("u16", 2), 2: ("u32", 4), 3: ("s32", 4), 4: ("u64", 8), 5: ("s64", 8),
    6: ("f16", 2), 7: ("f32", 4), 8: ("f32", 4), 9: ("f64", 8), 10: ("bf16", 2),
    11: ("u4", 1), 12: ("u4", 1), 13: ("u6", 1),
}  # fmt: skip
# Types of less than a byte: bits per element, and whether each 16 elements are padded to 16 bytes
# in shared memory. Their innermost dimension is counted in bytes once the map is decoded.
_SUB_BYTE = {11: (4, False), 12: (4, True), 13: (6, True)}
_NAN_FILL = 0x7FF7  # in every 16 bits of elements outside the tensor
_TF32_NAN = np.uint32(0x7FFFE000)
_CHUNK = 16  # bytes; the granularity of the innermost dimension
_MOST_BYTES = 1 << 36  # of a tensor that can be in memory
_SLICE = 16  # bytes of the channels kept together by the first kind of interleave; the second: 32
_SWIZZLE_SPAN = {0: 0, 1: 32, 2: 64, 3: 128}
# Of the 128-byte swizzle: bytes kept together, and whether the 8-byte halves of 16 bytes change
# places in every other line of 128 bytes.
_ATOMICITY = {0: (16, False), 1: (32, False), 2: (32, True), 3: (64, False)}


def swizzled(address: np.ndarray, span: int, atom: int = 16) -> np.ndarray:
    """XOR address bits 4.. with bits 7..: the 32-, 64- and 128-byte swizzles; span 0 is none.

    The 128-byte swizzle may keep `atom` = 32 or 64 bytes together.
    """
    if span == 128:
        if atom == 32:
            return address ^ (((address >> 7) & 3) << 5)
        if atom == 64:
            return address ^ (((address >> 7) & 1) << 6)
        return address ^ (((address >> 7) & 7) << 4)
    if span == 64:
        return address ^ (((address >> 7) & 3) << 4)
    if span == 32:
        return address ^ (((address >> 7) & 1) << 4)
    return address


class Placement(NamedTuple):
    """16-byte chunks of shared memory: their offsets, their numbers, and the end of the last."""

    offsets: np.ndarray
    chunks: np.ndarray
    stop: int


class TensorMap:
    """One decoded map: `dims`, `strides` (bytes) and `box` innermost first."""

    def __init__(self, raw: bytes, memory: GlobalMemory):
        w = struct.unpack("<16Q", raw)
        form = w[1] & 0xFFFFFFFF
        self.address = w[0]
        self.rank = ((form >> 4) & 7) + 1
        code = (form >> 7) & 15
        if code not in _ELEMENTS or not 1 <= self.rank <= 5 or not self.address:
            raise KernelFault(f"tensor map is not valid: {raw[:64].hex()}")
        self.dtype, self.element = _ELEMENTS[code]
        self.interleaved = form >> 11 & 3
        if self.interleaved == 3 or (self.interleaved and code in _SUB_BYTE):
            raise KernelFault(f"tensor map is not valid: {raw[:64].hex()}")
        if self.interleaved:
            self.element = _SLICE * self.interleaved
        self.span = _SWIZZLE_SPAN[(form >> 13) & 3]
        self.atom, self.flips = _ATOMICITY[form >> 19 & 3] if self.span == 128 else (16, False)
        self.fill = _NAN_FILL if form >> 15 & 1 else 0
        self.rounds_to_tf32 = bool(form >> 16 & 1)
        low = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
        high = w[3] >> 32
        self.strides = [self.element] + [
            (low[i] | (((high >> (4 * i)) & 15) << 32)) << 4 for i in range(self.rank - 1)
        ]
        sizes = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
        self.dims = [size + 1 for size in sizes[: self.rank]]
        steps = (w[6] >> 32) & 0x7FFF
        self.steps = [((steps >> (3 * i)) & 7) + 1 for i in range(self.rank)]
        boxes = [w[6] >> 56] + [(w[7] >> (8 * i)) & 255 for i in range(4)]
        if self.interleaved:
            boxes[self.rank - 2] = 0
        else:
            self.steps[0] = 1
        self.box = [-(-(b + 1) // s) for b, s in zip(boxes[: self.rank], self.steps)]
        self.bits, self.padded = _SUB_BYTE.get(code, (8, False))
        self.chunk_bytes = 2 * self.bits if self.padded else _CHUNK  # that a copy transfers
        # Of one box row in shared memory.
        self.row_bytes = self.box[0] * (8 if self.padded else self.bits) // 8 * self.element
        self.dims[0] = self.dims[0] * self.bits // 8
        self.box[0] = self.box[0] * self.bits // 8
        self._check()
        self.memory = memory
        self._laid_down: dict[tuple[int, int | None], Placement] = {}
        # Ragged tensors declare more than there is memory, from an address ahead of it: of theirs
        # only the boxes that are copied have to lie in memory.
        is_ragged = self._extent(self.dims) > _MOST_BYTES
        self.view = None if is_ragged else self._view(self.dims)
        self.chunks = None if is_ragged else self._chunk_view()

    def _extent(self, dims: list[int]) -> int:
        """Bytes from the first element to the end of the last."""
        return self.element + sum((d - 1) * s for d, s in zip(dims, self.strides))

    def _view(self, dims: list[int]) -> np.ndarray:
        """The tensor's bytes as [.., dims[0], element bytes]."""
        return np.lib.stride_tricks.as_strided(
            self.memory.read(self.address, self._extent(dims)),
            shape=(*reversed(dims), self.element),
            strides=(*reversed(self.strides), 1),
        )

    def _part(self, slices: tuple, dims: list[int]) -> np.ndarray:
        """The bytes of a part of the tensor that `slices` names, outermost first."""
        if self.view is not None:
            return (self.view if dims == self.dims else self._view(dims))[slices]
        inside = tuple(reversed(slices))
        first = self.address + sum(s.start * stride for s, stride in zip(inside, self.strides))
        counts = [-(-(s.stop - s.start) // s.step) for s in inside]
        steps = [stride * s.step for s, stride in zip(inside, self.strides)]
        extent = self.element + sum((n - 1) * step for n, step in zip(counts, steps))
        return np.lib.stride_tricks.as_strided(
            self.memory.read(first, extent),
            shape=(*reversed(counts), self.element),
            strides=(*reversed(steps), 1),
        )

    def _chunk_view(self) -> np.ndarray | None:
        """The tensor's whole 16-byte chunks as [.., chunks of the innermost dimension]; None if
        boxes are more than a copy of them."""
        if self.bits < 8 or self.rounds_to_tf32 or max(self.steps) > 1:
            return None
        shape = (*reversed(self.dims[1:]), self.dims[0] * self.element // _CHUNK)
        strides = (*reversed(self.strides[1:]), _CHUNK)
        data = self.memory.read(self.address, self._extent(self.dims))
        return np.ndarray(shape, CHUNK, data, strides=strides) if shape[-1] else None

    def _box_chunks(self, origin) -> np.ndarray | None:
        """The box at `origin` as a view of chunks; None if parts of it are outside the tensor."""
        if self.chunks is None:
            return None
        inside = []
        for start, count, size in zip(origin, self.box, self.dims):
            if start < 0 or start + count > size:
                return None
            inside.append(slice(start, start + count))
        first = origin[0] * self.element // _CHUNK
        inside[0] = slice(first, first + self.row_bytes // _CHUNK)
        if inside[0].stop > self.chunks.shape[-1]:
            return None
        return self.chunks[tuple(reversed(inside))]

    def load_chunks(self, mode: str, origin) -> np.ndarray:
        """The box or the gathered rows at `origin`, in 16-byte chunks [chunks]."""
        if mode == "tile":
            box = self._box_chunks(origin)
            return self._in_chunks(self.load(origin)) if box is None else box.reshape(-1)
        rows = [self._row_box()._box_chunks((origin[0], row)) for row in origin[1:]]
        if any(row is None for row in rows):
            return self._in_chunks(self.gather(origin[0], origin[1:]))
        return np.concatenate([row[0] for row in rows])

    @staticmethod
    def _in_chunks(data: np.ndarray) -> np.ndarray:
        return data.view(CHUNK).reshape(-1)

    def store_chunks(self, mode: str, origin, data: np.ndarray, op: str | None) -> None:
        """Write chunks to the box or the scattered rows at `origin`, or reduce a box by `op`."""
        box = self._box_chunks(origin) if mode == "tile" and op is None else None
        if box is not None:
            box[:] = data.reshape(box.shape)
        elif mode == "tile":
            self.store(origin, data.view(np.uint8), op)
        else:
            self.scatter(origin[0], origin[1:], data.view(np.uint8))

    def _check(self) -> None:
        inner = self.row_bytes
        if self.span and inner > self.span and not self.interleaved:
            raise KernelFault(f"box rows of {inner} bytes exceed the {self.span}-byte swizzle")
        if inner % _CHUNK:
            raise KernelFault(f"box rows of {inner} bytes are not a multiple of 16")

    def in_bytes(self, origin) -> tuple[int, ...]:
        """Coordinates with the innermost one in units of its dimension."""
        return (origin[0] * self.bits // 8, *origin[1:])

    def check_origin(self, origin, *, stored: bool) -> None:
        """Coordinates that hardware refuses as an illegal instruction."""
        if self.bits < 8:
            if origin[0] % 32 or stored:
                raise KernelFault(f"tensor copy of {self.dtype} at {tuple(origin)}")
            return
        if origin[0] * self.element % _CHUNK:
            raise KernelFault(
                f"tensor copy at {tuple(origin)}: the innermost coordinate must be a multiple of "
                f"{_CHUNK // self.element} elements ({_CHUNK} bytes)"
            )
        if stored and min(origin) < 0:
            raise KernelFault(f"tensor store at {tuple(origin)}: negative coordinates only load")

    def slices(self, origin, dims: list[int]) -> tuple[tuple, tuple] | None:
        """(global, box) slices of the part inside `dims`, None when nothing is inside."""
        inside, within = [], []
        for start, count, size, step in zip(origin, self.box, dims, self.steps):
            first = -(start // step) if start < 0 else 0
            last = min(count, -(-(size - start) // step))
            if last <= first:
                return None
            inside.append(slice(start + first * step, start + (last - 1) * step + 1, step))
            within.append(slice(first, last))
        return tuple(reversed(inside)), tuple(reversed(within))

    def _box_shape(self) -> tuple[int, ...]:
        return (*reversed(self.box), self.element)

    def load(self, origin) -> np.ndarray:
        """The box at `origin` (innermost first) as bytes [rows, row bytes], filled outside."""
        count = int(np.prod(self.box)) * self.element
        if self.fill:
            box = np.full(count // 2, self.fill, np.uint16).view(np.uint8)
            box = box.reshape(self._box_shape())
        else:
            box = np.zeros(self._box_shape(), np.uint8)
        slices = self.slices(self.in_bytes(origin), self.dims)
        if slices:
            inside = self._part(slices[0], self.dims)
            if self.rounds_to_tf32:
                words = np.ascontiguousarray(inside).view(np.uint32)
                nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                inside = np.where(nan, _TF32_NAN, tf32_nearest(words)).view(np.uint8)
            box[slices[1]] = inside
        if self.padded:
            data = box.reshape(-1, 2 * self.bits)
            box = np.zeros((len(data), _CHUNK), np.uint8)
            box[:, : 2 * self.bits] = data
        return box.reshape(-1, self.row_bytes)

    def store(self, origin, rows: np.ndarray, op: str | None = None) -> None:
        """Write or reduce the part of the box that lies inside the tensor.

        Hardware ends the innermost dimension at the next 16 bytes only: a store over the edge of a
        tensor whose rows are not a multiple of 16 bytes also writes the bytes behind them.
        """
        unit = max(1, _CHUNK // self.element)
        dims = [-(-self.dims[0] // unit) * unit, *self.dims[1:]]
        slices = self.slices(origin, dims)
        if not slices:
            return
        part = self._part(slices[0], dims)
        box = rows.reshape(self._box_shape())[slices[1]]
        if op is not None:
            old = np.ascontiguousarray(part)
            box = reduce_bytes(op, self.dtype, old, np.ascontiguousarray(box))
        part[:] = box

    def gather(self, column: int, rows) -> np.ndarray:
        """gather4: four rows of a 2-D tensor, `box[0]` elements from `column`."""
        return np.concatenate([self._row_box().load((column, row)) for row in rows])

    def scatter(self, column: int, rows, data: np.ndarray) -> None:
        """scatter4: the reverse of gather."""
        for row, values in zip(rows, data.reshape(4, -1)):
            self._row_box().store((column, row), values[None])

    def _row_box(self) -> TensorMap:
        if self.rank != 2 or self.box[1] != 1:
            raise KernelFault("gather4 and scatter4 need a 2-D map with a box of one row")
        return self

    def placement(self, offset: int, rows: int | None = None) -> Placement:
        """Where the box, or so many rows of it, lies when laid down at a shared offset."""
        found = self._laid_down.get((offset, rows))
        if found is None:
            offsets = self._chunks_at(offset, rows)
            stop = int(offsets.max()) + _CHUNK if len(offsets) else 0
            found = Placement(offsets, offsets >> 4, stop)
            self._laid_down[offset, rows] = found
        return found

    def _chunks_at(self, offset: int, rows: int | None) -> np.ndarray:
        inner = self.row_bytes
        count = int(np.prod(self.box[1:])) if rows is None else rows
        # Rows shorter than the swizzle's span still start `span` bytes apart.
        row = np.arange(count)[:, None] * max(inner, self.span)
        linear = offset + row + np.arange(0, inner, _CHUNK)
        return swizzled(linear.reshape(-1), self.span, self.atom)

    def in_place(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """16-byte chunks as they lie at shared `offsets`, or back from there."""
        if not self.flips:
            return data
        odd = (offsets >> 7 & 1).astype(np.bool_)
        halves = data.view(np.uint64).reshape(-1, 2)
        return self._in_chunks(np.where(odd[:, None], halves[:, ::-1], halves))


def reduce_bytes(op: str, dtype: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Elementwise reduction of byte arrays [.., element bytes] holding `dtype` values."""
    numpy_type = {
        "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
        "f16": np.float16, "f32": np.float32, "f64": np.float64,
    }.get(dtype)  # fmt: skip
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, new)
    if op in ("inc", "dec"):
        return _count(op, old, new)
    function = {"add": np.add, "min": _minimum, "max": _maximum}.get(op)
    if function is None:
        raise KernelFault(f"reduction {op} of {dtype}")
    if dtype == "bf16":
        a, b = (f32_of_bf16(x.reshape(-1).view(np.uint16)) for x in (old, new))
        return bf16_of_f32(function(a, b)).view(np.uint8).reshape(old.shape)
    if numpy_type is None:
        raise KernelFault(f"reduction {op} of {dtype}")
    a, b = (x.reshape(-1).view(numpy_type) for x in (old, new))
    with np.errstate(over="ignore"):
        return function(a, b).view(np.uint8).reshape(old.shape)


def _minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller; of a number and a NaN, quiet or signalling, the number."""
    return np.where(a != a, b, np.where((b != b) | (a <= b), a, b))


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger; of a number and a NaN, quiet or signalling, the number."""
    return np.where(a != a, b, np.where((b != b) | (a >= b), a, b))


def _count(op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """inc and dec of u32: counters that wrap at the operand."""
    a, b = (x.reshape(-1).view(np.uint32) for x in (old, new))
    if op == "inc":
        out = np.where(a >= b, np.uint32(0), a + np.uint32(1))
    else:
        out = np.where((a == 0) | (a > b), b, a - np.uint32(1))
    return out.astype(np.uint32).view(np.uint8).reshape(old.shape)
