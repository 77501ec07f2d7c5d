"""wgmma of sm_90a: each warp of a warpgroup computes its 16 rows of the 64-row tile.

The accumulators are registers that the hardware writes asynchronously. Under the eager schedule the
product happens at issue; otherwise when its group is waited for, or when the registers are touched.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial

import numpy as np

from dsv4.simulator import numerics
from dsv4.simulator.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.numerics import f32, i32, u8, u16, u32
from dsv4.simulator.ptx.parser import Instruction
from dsv4.simulator.warp import ALL, Warp

# Element type -> (bytes, decoder to float32)
_TYPES = {
    "f16": (2, numerics.f32_of_f16),
    "bf16": (2, numerics.f32_of_bf16),
    "tf32": (4, lambda x: (x & u32(0xFFFFE000)).view(f32)),
    "e4m3": (1, numerics.SMALL_FLOATS["e4m3"].decode),
    "e5m2": (1, numerics.SMALL_FLOATS["e5m2"].decode),
    "u8": (1, lambda x: x.astype(f32)),
    "s8": (1, lambda x: x.view(np.int8).astype(f32)),
}
_UNSIGNED = {1: u8, 2: u16, 4: u32}


@lru_cache(maxsize=8)
def _accumulator_index(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each accumulator register [n / 2, 32] in the warp's [16, n] tile."""
    i = np.arange(n // 2)[:, None]
    t = np.arange(32)[None, :]
    return t // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2


@lru_cache(maxsize=8)
def _fragment_index(size: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of the elements [4, 32, per register] of an A fragment in registers."""
    per = 4 // size
    r = np.arange(4)[:, None, None]
    t = np.arange(32)[None, :, None]
    j = np.arange(per)[None, None, :]
    return t // 4 + 8 * (r % 2) + 0 * j, t % 4 * per + 4 * per * (r // 2) + j


def _shared_tile(w: Warp, bits: int, rows: int, depth: int, kind: str, k_major: bool, first: int):
    """[rows, depth] float32 of an operand, from row `first` of its tile on."""
    size, decode = _TYPES[kind]
    descriptor = MatrixDescriptor.wgmma(bits)
    index = element_index(descriptor, first + rows, depth, size, k_major)[first:]
    return decode(w.cta.views[_UNSIGNED[size]].take(index))


def multiply(w: Warp, form, accumulators, a, b, scale_d, signs, majors) -> None:
    """One warp's part of wgmma.mma_async.

    `form` = (N, K, D type, A type, B type); `accumulators` are indices into R; `a` a descriptor
    (int) or four uint32 arrays; `majors` = (A, B) transposed flags.
    """
    n, depth, d_type, a_type, b_type = form
    warp = w.number % 4
    if isinstance(a, tuple):
        size, decode = _TYPES[a_type]
        rows, columns = _fragment_index(size)
        raw = np.stack([numerics.words(x, _UNSIGNED[size]) for x in a])
        a_tile = np.empty((16, depth), f32)
        a_tile[rows, columns] = decode(raw)
    else:
        a_tile = _shared_tile(w, a, 16, depth, a_type, not majors[0], 16 * warp)
    b_tile = _shared_tile(w, b, n, depth, b_type, not majors[1], 0)
    sign = signs[0] * signs[1]
    integer = d_type == "s32"
    if integer:
        product = (a_tile.astype(np.float64) @ b_tile.T.astype(np.float64)).astype(i32)
    else:
        product = a_tile @ b_tile.T
    if sign < 0:
        product = -product
    _store(w, d_type, n, accumulators, product, scale_d)


def _store(w: Warp, d_type: str, n: int, accumulators, product: np.ndarray, scale_d: bool) -> None:
    R = w.registers
    rows, columns = _accumulator_index(n)
    values = product[rows, columns]
    if d_type == "f16":
        pairs = values.reshape(n // 4, 2, 32)
        for k, index in enumerate(accumulators):
            pair = pairs[k]
            if scale_d:
                old = numerics.words(R[index], u16)
                pair = pair + numerics.f32_of_f16(np.ascontiguousarray(old.T))
            bits = numerics.f16_of_f32(pair)
            R[index] = numerics.pack32(bits[0], bits[1])
        return
    dtype = i32 if d_type == "s32" else f32
    for index, value in zip(accumulators, values):
        old = R[index]
        out = old.view(dtype) + value if scale_d else value
        R[index] = out.view(old.dtype)


def issue(w: Warp, form, accumulators, a, b, scale_d, signs, majors, mask) -> None:
    """wgmma.mma_async: the warp must be whole, its operands uniform."""
    if mask is not ALL:
        raise KernelFault("wgmma.mma_async needs all lanes of the warp")
    descriptor = a if isinstance(a, tuple) else int(a[0])
    arguments = (form, accumulators, descriptor, int(b[0]), bool(scale_d[0]), signs, majors)
    w.wgmma_issued += 1
    if w.launch.monitor is not None:
        w.launch.monitor.wgmma(w, form, descriptor, int(b[0]), majors)
    issued = w.cluster.engine.issued
    issued["wgmma"] = issued.get("wgmma", 0) + 1
    if w.cluster.engine.eager:
        multiply(w, *arguments)
    else:
        w.wgmma_pending.append((w.wgmma_issued, partial(multiply, w, *arguments)))
        w.unsettled = True


def commit(w: Warp) -> None:
    """wgmma.commit_group."""
    w.wgmma_groups.append(w.wgmma_issued)


def wait(w: Warp, groups: int) -> bool:
    """wgmma.wait_group: all but the youngest `groups` groups are complete.

    A product is one operation of the whole warpgroup: its other warps must have issued it too.
    """
    if len(w.wgmma_groups) <= groups:
        return True
    last = w.wgmma_groups[-1 - groups]
    peers = [p for p in w.cta.warps if p.number // 4 == w.number // 4]
    behind = [p.number for p in peers if p.wgmma_issued < last]
    if behind:
        w.waiting = f"warps {behind} of its warpgroup to issue wgmma number {last}"
        return False
    for peer in peers:
        peer.perform_wgmma(last)
    while len(w.wgmma_groups) > groups:
        w.wgmma_groups.popleft()
    w.unsettled = bool(w.tmem_loads or w.wgmma_pending)
    if w.launch.monitor is not None:
        w.launch.monitor.wgmma_waited(w, last)
    return True


def operand_sizes(a_type: str, b_type: str) -> tuple[int, int]:
    """Bytes per element of A and B."""
    return _TYPES[a_type][0], _TYPES[b_type][0]


# --- emitters ------------------------------------------------------------------------------------
@emits("wgmma.mma_async")
def emit_multiply(e: BlockEmitter, ins: Instruction) -> None:
    if "sp" in ins.parts:
        raise ValueError("sparse wgmma")
    e.mark()
    m = re.fullmatch(r"m64n(\d+)k(\d+)", next(p for p in ins.parts if p.startswith("m64n")))
    n, depth = int(m.group(1)), int(m.group(2))
    d_type, a_type, b_type = (p for p in ins.parts[4:] if p in (*_TYPES, "f32", "s32"))
    accumulators = tuple(e.registers.index[r] for r in e.vector(ins.operands[0]))
    if ins.operands[1].startswith("{"):
        a = "(" + ", ".join(e.value(r, "u32") for r in e.vector(ins.operands[1])) + ",)"
    else:
        a = e.value(ins.operands[1], "u64")
    b, scale_d = e.value(ins.operands[2], "u64"), e.value(ins.operands[3], "p")
    rest = [int(x, 0) for x in ins.operands[4:]]
    signs = (rest[0], rest[1]) if len(rest) >= 2 else (1, 1)
    majors = rest[2:]
    if len(majors) == 1:  # A from registers: only B's major is given
        majors = [0, majors[0]]
    majors = tuple(majors) if majors else (0, 0)
    form = (n, depth, d_type, a_type, b_type)
    e.line(
        f"wgmma_issue(w, {form!r}, {accumulators}, {a}, {b}, {scale_d}, {signs}, {majors}, "
        f"{e.mask})"
    )


@emits("wgmma.fence")
def emit_fence(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line("w.wgmma_fenced = True")


@emits("wgmma.commit_group")
def emit_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line("wgmma_commit(w)")


@emits("wgmma.wait_group")
def emit_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"if not wgmma_wait(w, {int(ins.operands[0])}): return {BLOCKED}")
