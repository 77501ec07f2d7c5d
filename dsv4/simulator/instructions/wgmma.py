"""wgmma of sm_90a: one product of a whole warpgroup, each warp holding 16 of its 64 rows.

The accumulators are registers that the hardware writes asynchronously. Under the eager schedule the
product happens at issue; otherwise when its group is waited for, or when the registers are touched.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.arithmetic.fp8_sums import fp8_sum
from dsv4.simulator.arithmetic.numerics import f32, i32, u8, u16, u32
from dsv4.simulator.compile.codegen import BLOCKED, BlockEmitter, emits
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.descriptors import MatrixDescriptor, operand_elements
from dsv4.simulator.instructions.operands.wgmma_accumulators import (
    ROWS,
    RegisterGroup,
    add_product,
    register_group,
    replace_sum,
)
from dsv4.simulator.machine.memory import Cta
from dsv4.simulator.machine.warp import ALL, Warp
from dsv4.simulator.ptx.entry import Instruction

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
WARPGROUP = 4  # warps


def _shared_tile(cta: Cta, bits: int, rows: int, depth: int, kind: str, k_major: bool):
    """[rows, depth] float32 of an operand in shared memory."""
    size, decode = _TYPES[kind]
    descriptor = MatrixDescriptor.wgmma(bits)
    return decode(operand_elements(cta, descriptor, rows, depth, _UNSIGNED[size], size, k_major))


def _fragment_tile(fragments, depth: int, kind: str) -> np.ndarray:
    """[16 * warps, depth] float32 of the warps' A fragments, four uint32 arrays each.

    Element j of register r of lane t is at row t // 4 + 8 * (r % 2) and column
    (t % 4 + 4 * (r // 2)) * elements per register + j.
    """
    size, decode = _TYPES[kind]
    words = np.concatenate([x for fragment in fragments for x in fragment])
    elements = decode(words.view(_UNSIGNED[size]))
    places = elements.reshape(len(fragments), 2, 2, 8, 4, 4 // size)
    return places.transpose(0, 2, 3, 1, 4, 5).reshape(-1, depth)


class Part(NamedTuple):
    """One warp's share of a product."""

    warp: Warp
    accumulators: RegisterGroup
    a: int | tuple
    accumulate: bool


class Product:
    """One wgmma.mma_async of a warpgroup, issued warp by warp.

    `form` = (N, K, D type, A type, B type); `majors` = (A, B) transposed flags.
    """

    def __init__(self, number: int, at: int, form, b: int, signs, majors):
        self.number, self.at, self.form, self.b, self.majors = number, at, form, b, majors
        self.negative = signs[0] * signs[1] < 0
        self.issues = 0  # warps that have issued it
        self.waiting: list[Part] = []

    def perform(self) -> None:
        """Compute the rows of every warp that has issued the product and is not served yet."""
        parts, self.waiting = self.waiting, []
        if not parts:
            return
        parts.sort(key=lambda part: part.warp.number)
        n, depth, d_type, a_type, b_type = self.form
        b_tile = _shared_tile(parts[0].warp.cta, self.b, n, depth, b_type, not self.majors[1])
        a_tile = self._a_tile(parts)
        if b_type in ("e4m3", "e5m2"):
            a_tile = -a_tile if self.negative else a_tile
            kinds, whole = (a_type, b_type), d_type == "f16"
            replace_sum(parts, d_type, lambda c: fp8_sum(a_tile, b_tile, kinds, c, keep_all=whole))
            return
        product = numerics.product(a_tile, b_tile).astype(i32 if d_type == "s32" else f32)
        add_product(parts, d_type, -product if self.negative else product)

    def _a_tile(self, parts: list[Part]) -> np.ndarray:
        """[16 * warps, K] float32: the warps' rows of A."""
        _, depth, _, a_type, _ = self.form
        if isinstance(parts[0].a, tuple):
            return _fragment_tile([part.a for part in parts], depth, a_type)
        cta = parts[0].warp.cta
        whole = _shared_tile(cta, parts[0].a, WARPGROUP * ROWS, depth, a_type, not self.majors[0])
        if len(parts) == WARPGROUP:
            return whole
        return whole.reshape(WARPGROUP, ROWS, depth)[
            [part.warp.number % WARPGROUP for part in parts]
        ].reshape(-1, depth)


def wgmma_in_step(w: Warp) -> None:
    """The warps of a warpgroup must come to the same wgmma.fence, .mma_async and .commit_group:
    on hardware those in different branches would wait for each other for ever."""
    w.wgmma_steps += 1
    steps, key = w.cta.wgmma_steps, (w.number // WARPGROUP, w.wgmma_steps)
    at, first, passed = steps.get(key, (w.at, w.number, 0))
    if at != w.at:
        there, here = (w.program.entry.instructions[i].where() for i in (at, w.at))
        raise KernelFault(
            f"warps {first} and {w.number} of one warpgroup take different wgmma instructions:\n"
            f"  warp {first}: {there}\n  warp {w.number}: {here}"
        )
    steps[key] = at, first, passed + 1
    if passed + 1 == len(_warpgroup(w)):
        del steps[key]


def wgmma_issue(w: Warp, form, accumulators, a, b, scale_d, signs, majors, mask) -> None:
    """wgmma.mma_async: the warp must be whole, its operands uniform."""
    if mask is not ALL:
        raise KernelFault("wgmma.mma_async needs all lanes of the warp")
    wgmma_in_step(w)
    a = a if isinstance(a, tuple) else int(a[0])
    b = int(b[0])
    w.wgmma_issued += 1
    number, group = w.wgmma_issued, w.number // WARPGROUP
    if w.launch.monitor is not None:
        w.launch.monitor.wgmma(w, form, a, b, majors)
    engine = w.cluster.engine
    engine.issued["wgmma"] = engine.issued.get("wgmma", 0) + 1
    product = w.cta.products.get((group, number))
    if product is None:
        product = w.cta.products[group, number] = Product(number, w.at, form, b, signs, majors)
    elif (product.form, product.b, product.majors) != (form, b, majors):
        raise KernelFault(f"the warps of warpgroup {group} disagree about wgmma number {number}")
    product.waiting.append(Part(w, accumulators, a, bool(scale_d[0])))
    product.issues += 1
    w.wgmma_pending.append(product)
    w.unsettled = True
    if product.issues == len(_warpgroup(w)):
        del w.cta.products[group, number]
        if engine.eager:
            product.perform()


def _warpgroup(w: Warp) -> list[Warp]:
    first = w.number & -WARPGROUP
    return w.cta.warps[first : first + WARPGROUP]


def wgmma_commit(w: Warp) -> None:
    """wgmma.commit_group."""
    wgmma_in_step(w)
    w.wgmma_groups.append(w.wgmma_issued)


def wgmma_wait(w: Warp, groups: int) -> bool:
    """wgmma.wait_group: all but the youngest `groups` groups are complete.

    A product is one operation of the whole warpgroup: its other warps must have issued it too.
    """
    if len(w.wgmma_groups) <= groups:
        return True
    last = w.wgmma_groups[-1 - groups]
    behind = [p.number for p in _warpgroup(w) if p.wgmma_issued < last]
    if behind:
        w.waiting = f"warps {behind} of its warpgroup to issue wgmma number {last}"
        return False
    w.complete_wgmma(last)
    while len(w.wgmma_groups) > groups:
        w.wgmma_groups.popleft()
    w.unsettled = bool(w.tmem_loads or w.wgmma_pending or w.accumulators.unwritten)
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
    if n % 8 or not 8 <= n <= 256 or depth * _TYPES[a_type][0] != 32:
        raise ValueError("shape")
    accumulators = f"accumulators_{ins.index}"
    e.constants[accumulators] = register_group(
        tuple(e.registers.index[r] for r in e.vector(ins.operands[0]))
    )
    if ins.operands[1].startswith("{"):
        fragment = e.vector(ins.operands[1])
        if not e.symbols["asynchronous registers"].isdisjoint(fragment):
            e.early("if w.unsettled: w.settle()")
        a = "(" + ", ".join(e.value(r, "u32") for r in fragment) + ",)"
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
    e.line("wgmma_in_step(w)")
    e.line("w.wgmma_fenced = True")


@emits("wgmma.commit_group")
def emit_commit(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line("wgmma_commit(w)")


@emits("wgmma.wait_group")
def emit_wait(e: BlockEmitter, ins: Instruction) -> None:
    e.mark()
    e.line(f"if not wgmma_wait(w, {int(ins.operands[0])}): return {BLOCKED}")
