"""Tensor copies: every swizzle, rank and element type, boxes wholly and partly outside, reductions.

One program loads boxes at a list of coordinates and copies each shared tile out byte for byte; the
other stores (or reduces) random tiles into a tensor.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from tests.simulator.hardware.case import (
    Buffer,
    Case,
    InterleavedMap,
    Row,
    TensorMap,
    module,
)
from tests.simulator.hardware.inputs import random_bytes, random_words, uniform
from tests.simulator.hardware.snippets import PROLOGUE, copy_in, copy_out, initialise, wait
from tests.simulator.hardware.tensor_maps import ELEMENTS, box_shape, slice_bytes, unit

THREADS = 128
_BARRIER = "mov.u32 %bar, %smem;\nadd.u32 %smem, %smem, 1024;\n"
_REPEAT = 1024  # tiles lie at multiples of this: the 128-byte swizzle's pattern
_PARAMS = "u64 out, u64 in, u64 coords, u32 count, map tensor"
_SETUP = """
.reg .b64 %coords, %map;
.reg .b32 %count, %x<5>;
ld.param.u64 %out, [out];
ld.param.u64 %in, [in];
ld.param.u64 %coords, [coords];
ld.param.u32 %count, [count];
mov.b64 %map, tensor;
cvta.param.u64 %map, %map;
"""


def box_bytes(spec: TensorMap) -> int:
    """Bytes of one box, what a barrier counts."""
    return int(np.prod(box_shape(spec))) * unit(spec)


def tile_bytes(spec: TensorMap) -> int:
    """Bytes of shared memory a box covers: rows shorter than the swizzle's span have gaps."""
    if slice_bytes(spec):
        return box_bytes(spec)
    row = spec.box[0] * unit(spec)
    return box_bytes(spec) // row * max(row, spec.swizzle)


def _coordinate_list(rank: int) -> str:
    return "{" + ", ".join(f"%x{k}" for k in range(rank)) + "}"


def _read_coordinates(rank: int) -> str:
    lines = [f"ld.global.b32 %x{k}, [%coords+{4 * k}];" for k in range(rank)]
    return "\n".join([*lines, f"add.u64 %coords, %coords, {4 * rank};"])


def _load_program(rank: int, size: int, counted: int) -> str:
    """Boxes one after another through the same shared tile, which is poisoned before each."""
    return module(
        f"""{PROLOGUE}{_SETUP}{_BARRIER}{initialise("%bar")}
mov.u32 %r0, 0;
NEXT:
{copy_in("%in", "%smem", size, THREADS)}
fence.proxy.async.shared::cta;
bar.sync 0;
{_read_coordinates(rank)}
@!%leader bra ISSUED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {counted};
cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%smem], [%map, {_coordinate_list(rank)}], [%bar];
ISSUED:
and.b32 %r1, %r0, 1;
{wait("%bar", "%r1")}
{copy_out("%smem", "%out", size, THREADS)}
add.u64 %out, %out, {size};
add.u32 %r0, %r0, 1;
setp.lt.u32 %p0, %r0, %count;
@%p0 bra NEXT;""",  # noqa: E501
        _PARAMS,
    )


def _store_program(rank: int, size: int, op: str | None) -> str:
    """Random tiles, one per coordinate, to the tensor."""
    form = "cp.async" if op is None else "cp.reduce.async"
    reduction = "" if op is None else f".{op}"
    return module(
        f"""{PROLOGUE}{_SETUP}{_BARRIER}
mov.u32 %r0, 0;
NEXT:
{copy_in("%in", "%smem", size, THREADS)}
add.u64 %in, %in, {size};
fence.proxy.async.shared::cta;
bar.sync 0;
{_read_coordinates(rank)}
@!%leader bra ISSUED;
{form}.bulk.tensor.{rank}d.global.shared::cta{reduction}.tile.bulk_group [%map, {_coordinate_list(rank)}], [%smem];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ISSUED:
bar.sync 0;
add.u32 %r0, %r0, 1;
setp.lt.u32 %p0, %r0, %count;
@%p0 bra NEXT;""",  # noqa: E501
        _PARAMS,
    )


def _coordinates(spec: TensorMap, seed: str, count: int, *, stored: bool) -> np.ndarray:
    """Inside, at the corners, partly outside on either side, and wholly outside: [count, rank].

    Hardware refuses innermost coordinates off 16 bytes, and negative ones in stores.
    """
    low = [0] * len(spec.dims)
    high = list(spec.dims)
    inside = [max(0, (d - b) // 2) for d, b in zip(spec.dims, spec.box)]
    negative = [-(b // 2) for b in spec.box]
    past = [d - b // 2 for d, b in zip(spec.dims, spec.box)]
    far = [-(1 << 20) if k % 2 else 1 << 20 for k in range(len(low))]
    mixed = [n if k % 2 else p for k, (n, p) in enumerate(zip(negative, past))]
    fixed = [low, inside, negative, past, mixed, high, [-b for b in spec.box], far]
    words = random_words(seed, (count - len(fixed)) * len(low)).reshape(-1, len(low))
    spread = np.array([d + 2 * b for d, b in zip(spec.dims, spec.box)], np.uint32)
    random = (words % spread).astype(np.int64) - np.array(spec.box)
    out = np.concatenate([np.array(fixed), random])
    step = max(1, 16 // unit(spec))
    out[:, 0] = out[:, 0] // step * step
    return (np.maximum(out, 0) if stored else out).astype(np.int32)


def _footprint(spec: TensorMap) -> int:
    return unit(spec) + sum((d - 1) * s for d, s in zip(spec.dims, (unit(spec), *spec.strides)))


def _tensor(
    dtype: str, dims, box, swizzle: int = 0, steps=(), nan_fill: bool = False, pad: int = 16
):
    """A map whose rows are `pad` bytes longer than needed, rounded up to 16."""
    size = ELEMENTS[dtype][0]
    strides, stride = [], dims[0] * size
    for dim in dims[1:]:
        stride = -(-stride // 16) * 16 + pad
        strides.append(stride)
        stride *= dim
    return TensorMap(
        3, dtype, tuple(dims), tuple(strides), tuple(box), tuple(steps), swizzle, nan_fill
    )


def _interleaved(
    size: int, dtype: str, dims, box, swizzle: int = 0, steps=(), nan_fill: bool = False
) -> InterleavedMap:
    """A map over slices of `size` bytes; the dimensions lie one slice further apart than needed."""
    strides, stride = [], dims[0] * size
    for dim in dims[1:]:
        strides.append(stride + size)
        stride = strides[-1] * dim
    return InterleavedMap(
        3, dtype, tuple(dims), tuple(strides), tuple(box), tuple(steps), swizzle, nan_fill, size
    )


def _name(spec: TensorMap) -> str:
    box, dims = ("x".join(map(str, x)) for x in (spec.box, spec.dims))
    text = f"{spec.dtype} {box} of {dims} swizzle {spec.swizzle}"
    if spec.steps:
        text += f" steps {'x'.join(map(str, spec.steps))}"
    if slice_bytes(spec):
        text += f" slices of {slice_bytes(spec)}"
    return text + (" nan" if spec.nan_fill else "")


def _contents(dtype: str, seed: str, size: int) -> np.ndarray:
    """Random bytes; floating-point types hold numbers of moderate size, whose sums round."""
    if dtype == "f32":
        return uniform(seed, -(-size // 4), -100, 100).view(np.uint8)[:size]
    if dtype == "f64":
        return uniform(seed, -(-size // 8), -100, 100).astype(np.float64).view(np.uint8)[:size]
    if dtype == "f16":
        values = uniform(seed, -(-size // 2), -100, 100).astype(np.float16)
        return values.view(np.uint8)[:size]
    if dtype == "bf16":
        bits = uniform(seed, -(-size // 2), -100, 100).view(np.uint32) >> np.uint32(16)
        return bits.astype(np.uint16).view(np.uint8)[:size]
    return random_bytes(seed, size)


def load(spec: TensorMap, count: int = 12, contents: np.ndarray | None = None) -> Case:
    """Loads of boxes of `spec` at `count` places."""
    name, size = _name(spec), tile_bytes(spec)
    coordinates = _coordinates(spec, name, count, stored=False)
    if contents is None:
        contents = random_bytes(name, _footprint(spec))
    rows = tuple(Row(f"box at {tuple(c)}", size) for c in coordinates.tolist())
    return Case(
        f"load {name}",
        _load_program(len(spec.dims), size, box_bytes(spec)),
        rows,
        (
            np.full(size * count, 0xA5, np.uint8),
            np.full(size, 0x5A, np.uint8),
            coordinates.reshape(-1),
            contents,
        ),
        (Buffer(0), Buffer(1), Buffer(2), count, spec),
        block=THREADS,
        shared=_REPEAT + size,
    )


def store(spec: TensorMap, op: str | None = None, count: int = 12) -> Case:
    """Stores or reductions of random boxes; the output is the whole tensor with its padding."""
    spec = replace(spec, buffer=0, nan_fill=False)
    name, size = f"{op or 'store'} {_name(spec)}", tile_bytes(spec)
    coordinates = _coordinates(spec, name, count, stored=True)
    footprint = _footprint(spec)
    tiles = np.concatenate([_contents(spec.dtype, f"{name} {k}", size) for k in range(count)])
    return Case(
        name,
        _store_program(len(spec.dims), size, op),
        (Row("tensor", footprint, spec.dtype if spec.dtype in ("f16", "bf16", "f32") else None),),
        (_contents(spec.dtype, f"{name} tensor", footprint), tiles, coordinates.reshape(-1)),
        (Buffer(0), Buffer(1), Buffer(2), count, spec),
        block=THREADS,
        shared=_REPEAT + size,
    )


def _specs() -> list[TensorMap]:
    out = []
    # Every swizzle at every rank, inner box rows exactly as long as the swizzle span.
    for swizzle, rank in itertools.product((0, 32, 64, 128), range(1, 6)):
        inner = (swizzle or 96) // 2
        dims = (inner + 23, 13, 5, 4, 3)[:rank]
        box = (inner, 8, 3, 2, 2)[:rank]
        out.append(_tensor("bf16", dims, box, swizzle))
    # Rows shorter than the span.
    out += [_tensor("bf16", (50, 9), (24, 8), 64), _tensor("f32", (50, 9), (16, 8), 128)]
    # Every element type.
    for dtype, (size, _, _) in ELEMENTS.items():
        inner = 64 // size
        out.append(_tensor(dtype, (inner + 16 // size + 1, 11), (inner, 8), 64))
        out.append(_tensor(dtype, (inner * 2, 11), (inner, 5), 0, pad=0))
    # Tall and wide boxes, tiles past one repetition of the pattern.
    out += [
        _tensor("bf16", (64, 300), (64, 128), 128),
        _tensor("u8", (300, 40), (128, 32), 128),
        _tensor("u8", (300,), (256,), 0),
        _tensor("f32", (8, 9, 10), (8, 2, 6), 32),
    ]
    return out


def _strided_specs() -> list[TensorMap]:
    """Element strides; that of the innermost dimension is ignored."""
    return [
        _tensor("bf16", (64, 21), (32, 8), 0, steps=(1, 2)),
        _tensor("bf16", (64, 33), (32, 9), 64, steps=(1, 3)),
        _tensor("f32", (64, 21, 5), (8, 4, 3), 32, steps=(1, 2, 2)),
        _tensor("u8", (120, 21, 7, 9), (64, 8, 5, 7), 64, steps=(1, 3, 2, 8)),
        _tensor("f32", (64, 21), (16, 8), 64, steps=(3, 2)),
    ]


def _interleaved_specs() -> list[InterleavedMap]:
    """Slices of both sizes at every rank, with every swizzle, element type size and fill."""
    dims = {3: (21, 9, 5), 4: (21, 9, 7, 3), 5: (21, 9, 5, 7, 3)}
    box = {3: (16, 1, 3), 4: (16, 5, 1, 2), 5: (16, 3, 2, 1, 2)}
    out = [_interleaved(16, "u16", dims[rank], box[rank]) for rank in (3, 4, 5)]
    out += [_interleaved(32, "u16", dims[rank], box[rank], 32) for rank in (3, 4, 5)]
    out += [_interleaved(16, "bf16", dims[4], box[4], swizzle) for swizzle in (32, 64, 128)]
    out += [_interleaved(32, "bf16", dims[4], box[4], swizzle) for swizzle in (0, 64, 128)]
    out += [
        _interleaved(16, "u8", dims[4], (32, 4, 1, 2)),
        _interleaved(16, "f64", dims[4], box[4]),
    ]
    out += [_interleaved(16, "f32", dims[4], box[4], nan_fill=True)]
    out += [_interleaved(32, "tf32", dims[4], (8, 3, 1, 3), 32)]
    # More than one channel in the box's slice dimension is still one slice.
    out += [_interleaved(16, "u16", dims[4], (8, 5, 3, 2))]
    out += [_interleaved(16, "u16", dims[4], (24, 5, 1, 3), steps=(2, 3, 1, 2))]
    return out


_REDUCTIONS = (
    ("u32", "add"), ("u32", "min"), ("u32", "max"), ("u32", "inc"), ("u32", "dec"), ("u32", "and"),
    ("u32", "or"), ("u32", "xor"), ("s32", "add"), ("s32", "min"), ("s32", "max"), ("u64", "add"),
    ("u64", "min"), ("u64", "max"), ("s64", "min"), ("s64", "max"), ("f16", "add"), ("f16", "min"),
    ("f16", "max"), ("bf16", "add"), ("bf16", "min"), ("bf16", "max"), ("f32", "add"),
)  # fmt: skip


def cases() -> list[Case]:
    """The tensor copy programs."""
    out = [load(spec) for spec in (*_specs(), *_strided_specs())]
    floats = random_words("subnormals", 4096)
    floats[::3] &= np.uint32(0x807FFFFF)
    for dtype in ("f32", "f32ftz", "tf32", "tf32ftz"):
        spec = _tensor(dtype, (40, 11), (16, 8), 64, nan_fill=True)
        out.append(load(spec, contents=floats.view(np.uint8)[: _footprint(spec)]))
    out.append(load(_tensor("bf16", (40, 11), (32, 8), 64, nan_fill=True)))
    out.append(load(_tensor("f16", (40, 11), (32, 8), 0, nan_fill=True)))
    stored = [_tensor("bf16", (s + 23, 13, 5, 4, 3)[:r], (s, 8, 3, 2, 2)[:r], 2 * s)
              for s, r in ((16, 2), (32, 3), (64, 4))]  # fmt: skip
    stored += [_tensor("u8", (300,), (256,)), _tensor("f32", (30, 5, 4, 3, 3), (20, 4, 2, 2, 2))]
    stored += [_tensor("bf16", (64, 21), (32, 8), 0, steps=(1, 2))]
    out += [store(spec) for spec in stored]
    interleaved = _interleaved_specs()
    out += [load(spec) for spec in interleaved]
    out += [store(spec) for spec in (*interleaved[:8], interleaved[-1])]
    out += [store(_interleaved(16, "f32", (21, 9, 7, 3), (16, 5, 1, 2), 64), "add")]
    for dtype, op in _REDUCTIONS:
        inner = 64 // ELEMENTS[dtype][0]
        out.append(store(_tensor(dtype, (inner + 3, 11), (inner, 8), 64), op))
    return out
