"""Tensor maps edited in memory: tensormap.replace, tensormap.cp_fenceproxy."""

from __future__ import annotations

import struct

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.tensor_map import MAP_BYTES
from dsv4.simulator.machine.memory import OFFSET_MASK
from dsv4.simulator.machine.warp import LANE, Warp
from dsv4.simulator.ptx.entry import Instruction


def _field(raw: bytearray, name: str, index: int, value: int) -> None:
    """Set one field of a 128-byte map; tensor_map.py describes the layout."""
    w = list(struct.unpack("<16Q", raw))

    def put(word: int, shift: int, bits: int, number: int) -> None:
        mask = (1 << bits) - 1
        w[word] = w[word] & ~(mask << shift) | (number & mask) << shift

    if name == "global_address":
        w[0] = value
    elif name == "rank":
        put(1, 4, 3, value)
    elif name == "global_dim":
        put(4 + index // 2, 32 * (index & 1), 32, value - 1)
    elif name == "global_stride":
        if value & 15:
            raise KernelFault(f"tensormap.replace: stride {value} is not a multiple of 16")
        put(1 + (index + 1) // 2, 32 * ((index + 1) & 1), 32, value >> 4)
        put(3, 32 + 4 * index, 4, value >> 36)
    elif name == "box_dim":
        put(*((6, 56) if index == 0 else (7, 8 * (index - 1))), 8, value - 1)
    elif name == "element_stride":
        put(6, 32 + 3 * index, 3, value - 1)
    elif name == "elemtype":
        put(1, 7, 4, value)
    elif name == "swizzle_mode":
        put(1, 13, 2, value)
    else:
        raise KernelFault(f"tensormap.replace of {name} is not simulated")
    raw[:] = struct.pack("<16Q", *w)


def _map_bytes(w: Warp, shared: bool, address: int, lanes, write: bool) -> np.ndarray:
    """The 128 bytes of a map, all of which an access of some lanes counts for."""
    monitor, count = w.launch.monitor, int(lanes.sum())
    if not shared:
        if monitor is not None:
            active = np.full(count, address, np.uint64)
            monitor.global_access(w, active, lanes, MAP_BYTES, write)
        return w.cluster.memory.read(address, MAP_BYTES)
    cta = w.cluster.cta_at(address)
    offset = address & OFFSET_MASK
    if monitor is not None:
        monitor.shared(w, cta, np.full(count, offset, np.uint32), lanes, MAP_BYTES, write)
    return cta.s8[offset : offset + MAP_BYTES]


def replace_field(w: Warp, shared: bool, name: str, index: int, address, value, mask) -> None:
    """tensormap.replace by each active lane."""
    for lane in np.flatnonzero(mask).tolist():
        place = _map_bytes(w, shared, int(address[lane]), lane == LANE, True)
        raw = bytearray(place.tobytes())
        _field(raw, name, index, int(value[lane]))
        place[:] = np.frombuffer(raw, np.uint8)


def publish_map(w: Warp, target, source, mask) -> None:
    """tensormap.cp_fenceproxy: the whole warp copies one map from shared to global memory."""
    lane = int(mask.argmax())
    data = _map_bytes(w, True, int(source[lane]), mask, False).copy()
    _map_bytes(w, False, int(target[lane]), lane == LANE, True)[:] = data
    if w.launch.monitor is not None:
        w.launch.monitor.map_fence(w, None, mask)


@emits("tensormap.replace")
def emit_replace(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    shared = any(p.startswith("shared") for p in ins.parts)
    address = e.address(ins.operands[0], "u32" if shared else "u64")
    index = int(ins.operands[1], 0) if len(ins.operands) > 2 else 0
    kind = "u64" if ins.parts[-1] == "b64" else "u32"
    value = e.value(ins.operands[-1], kind)
    field = ins.parts[3]  # tensormap.replace.tile.<field>
    e.line(f"replace_field(w, {shared}, {field!r}, {index}, {address}, {value}, {e.mask})")


@emits("tensormap.cp_fenceproxy")
def emit_publish(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    target, source = e.address(ins.operands[0], "u64"), e.address(ins.operands[1], "u32")
    e.line(f"publish_map(w, {target}, {source}, {e.mask})")
