"""tcgen05.mma: instruction descriptors, accumulator layouts, block scales, the product itself."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsv4.simulator.arithmetic import numerics
from dsv4.simulator.arithmetic.numerics import f32, i32, u8, u16, u32
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.instructions.operands.descriptors import (
    MatrixDescriptor,
    element_index,
    operand_elements,
)
from dsv4.simulator.instructions.operands.formats import DEPTH, FORMATS, Format
from dsv4.simulator.instructions.operands.zero_columns import column_shift, zero_columns
from dsv4.simulator.machine.memory import TMEM_COLUMNS, TMEM_LANES, Cta

_ALL_LANES = np.arange(TMEM_LANES)


class InstructionDescriptor:
    """The 32-bit instruction descriptor. Scaled kinds carry scale formats and positions in it."""

    def __init__(self, bits: int, kind: str):
        self.kind = kind
        self.m, self.n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
        self.negate = bool((bits >> 13 & 1) ^ (bits >> 14 & 1))
        self.a_k_major, self.b_k_major = not bits >> 15 & 1, not bits >> 16 & 1
        if bits & 4:
            raise KernelFault("sparse tcgen05.mma is not simulated")
        self.scaled = kind.startswith("mx")
        a_format, b_format = bits >> 7 & 7, bits >> 10 & (3 if kind.startswith("mxf4") else 7)
        try:
            self.a, self.b = FORMATS[kind][a_format], FORMATS[kind][b_format]
        except KeyError:
            raise KernelFault(
                f"tcgen05.mma kind::{kind}: element formats {a_format} and {b_format}"
            ) from None
        self.f16_accumulator = not self.scaled and kind != "i8" and bits >> 4 & 3 == 0
        self.saturates = kind == "i8" and bool(bits >> 3 & 1)
        self.exponent_scales = bool(bits >> 23 & 1)  # ue8m0, else ue4m3
        self.a_scale_byte, self.b_scale_byte = bits >> 29 & 3, bits >> 4 & 3
        self.depth = DEPTH[kind]
        if self.scaled and bits >> 31:
            raise KernelFault("tcgen05.mma with K = 96 exists on sm_103a only, not on sm_100a")


def check_shape(form: InstructionDescriptor, group: int, stationary: bool) -> None:
    """M and N must be ones the instruction has."""
    m, n = form.m, form.n
    if stationary:
        valid = group == 1 and m in (32, 64, 128) and n in (64, 128, 256) and not form.scaled
    else:
        step = 8 * group
        if form.kind == "i8":
            step *= 2 if group == 2 or n > 32 else 1
        if form.b.bits == 8 and not form.b_k_major:
            step = 16 * group
        rows = (128, 256) if group == 2 else (128,) if form.scaled else (64, 128)
        valid = m in rows and step <= n <= 256 and n % step == 0
    if not valid:
        ws = ".ws" if stationary else ""
        raise KernelFault(f"tcgen05.mma{ws} cta_group::{group} kind::{form.kind} of M={m}, N={n}")


def check_owned(cta: Cta, start: int, stop: int) -> None:
    """TMEM columns [start, stop) must be allocated."""
    # Of so few flags the bytes are looked through faster than the array.
    if stop > TMEM_COLUMNS or b"\0" in cta.tmem_owned[start:stop].tobytes():
        raise KernelFault(f"TMEM columns {start}..{stop} are not all allocated")


def lane_copies(form: InstructionDescriptor, group: int, stationary: bool) -> int:
    """How often the rows of an accumulator repeat over the 128 lanes, each with its share of N.

    1 is one row per lane (or half the lanes unused); pairs with M = 128 and the weight-stationary
    forms with M = 64 put the second half of N into the upper lanes; M = 32 a quarter into each 32.
    """
    if stationary:
        return 128 // form.m
    return 2 if group == 2 and form.m == 128 else 1


def accumulator_columns(form: InstructionDescriptor, group: int, stationary: bool) -> int:
    """TMEM columns an accumulator takes."""
    return form.n // lane_copies(form, group, stationary)


@lru_cache(maxsize=4096)
def _byte_index(descriptor: MatrixDescriptor, rows: int, depth: int, bits: int, run: int):
    """Bytes of a K-major operand of sub-byte elements, padding left out."""
    index = element_index(descriptor, rows, depth // 16 * run, 1, True)
    data = 2 * bits  # bytes of data in each run
    return index.reshape(rows, -1, run)[:, :, :data].reshape(rows, -1)


def shared_operand(cta: Cta, bits: int, rows: int, depth: int, form: Format, k_major: bool):
    """[rows, depth] float32 of an operand in shared memory."""
    descriptor = MatrixDescriptor.tcgen05(bits)
    if form.bits < 8:
        if not k_major:
            raise KernelFault("sub-byte operands must be K-major")
        index = _byte_index(descriptor, rows, depth, form.bits, form.run)
        return form.of_packed(cta.s8.take(index))
    elements = operand_elements(
        cta, descriptor, rows, depth, form.unsigned, form.bits // 8, k_major
    )
    return form.decode(elements)


def operand_granules(bits: int, rows: int, depth: int, form: Format, k_major: bool) -> np.ndarray:
    """4-byte granules of shared memory that an operand occupies."""
    return _granules(MatrixDescriptor.tcgen05(bits), rows, depth, form.bits, form.run, k_major)


@lru_cache(maxsize=2048)
def _granules(descriptor, rows: int, depth: int, bits: int, run: int, k_major: bool):
    if bits < 8:
        return np.unique(_byte_index(descriptor, rows, depth, bits, run) >> 2)
    return np.unique(element_index(descriptor, rows, depth, bits // 8, k_major) * (bits // 8) >> 2)


def operand_columns(depth: int, form: Format) -> int:
    """TMEM columns of operand A."""
    return depth * form.run // 64


def _tmem_operand(cta: Cta, address: int, lanes: np.ndarray, depth: int, form: Format):
    """[lanes, depth] float32 of operand A in TMEM, elements packed along columns."""
    column = address & 0xFFFF
    columns = operand_columns(depth, form)
    check_owned(cta, column, column + columns)
    words = np.ascontiguousarray(cta.tmem[column : column + columns, lanes].T)
    return form.of_tmem(words)


def _scales(cta: Cta, address: int, rows: int, count: int, first: int, exponents: bool):
    """[rows, count] float32 scale factors in TMEM: row r in lane r % 32 of column r // 32."""
    column = address & 0xFFFF
    check_owned(cta, column, column + -(-rows // 32))
    r = np.arange(rows)
    lane = (address >> 16 & 0x7F) + r % 32  # the top bits repeat the position within the word
    words = cta.tmem[column + r // 32, lane]
    codes = np.ascontiguousarray(words).view(u8).reshape(rows, 4)[:, first : first + count]
    if exponents:
        return numerics.f32_of_ue8m0(codes)
    return numerics.SMALL_FLOATS["e4m3"].decode(codes & u8(0x7F))


def _product(a: np.ndarray, b: np.ndarray, integer: bool) -> np.ndarray:
    """[N, M] of B A^T: float32, or exact integers."""
    return numerics.product(b, a).astype(i32 if integer else f32)


@lru_cache(maxsize=256)
def _checked_form(bits: int, kind: str, group: int, stationary: bool) -> InstructionDescriptor:
    form = InstructionDescriptor(bits, kind)
    check_shape(form, group, stationary)
    return form


class Multiplication:
    """One tcgen05.mma as issued.

    Args: operands `d`, `a`, `b` (TMEM addresses or descriptors), the instruction descriptor's
        `bits`, `accumulate`, the `disabled` output lanes (words of 32, of both CTAs of a pair),
        `stationary` for .ws, `scales` the TMEM addresses of A's and B's block scales with the
        scales per row, `input_shift` of scale-input-d, the `zero_mask` descriptor of .ws, and
        `a_shift` for .ashift, which moves A's rows in TMEM afterwards.
    """

    def __init__(self, kind, group, d, a, a_in_tmem, b, bits, accumulate, disabled=(),
                 stationary=False, scales=None, input_shift=None, zero_mask=0,
                 a_shift=False):  # fmt: skip
        self.kind, self.group, self.d, self.a, self.b = kind, group, d, a, b
        self.a_in_tmem, self.accumulate, self.disabled = a_in_tmem, accumulate, disabled
        self.stationary, self.scales, self.input_shift = stationary, scales, input_shift
        self.zero_mask, self.a_shift = zero_mask, a_shift
        self.form = _checked_form(bits, kind, group, stationary)
        self._check()
        self.rows = self.form.m // group
        self.copies = lane_copies(self.form, group, stationary)

    def _check(self) -> None:
        if self.a_shift and (not self.a_in_tmem or self.form.m < 128):
            raise KernelFault(f"tcgen05.mma.ashift needs A in TMEM and M >= 128, M={self.form.m}")
        if self.input_shift and not (0 <= self.input_shift <= 15 and self.kind in ("f16", "tf32")):
            raise KernelFault(
                f"scale-input-d of {self.input_shift} for kind::{self.kind}: 0..15 for f16 and tf32"
            )

    @property
    def is_plain(self) -> bool:
        """A float32 accumulator that takes the sum as it is."""
        form = self.form
        special = form.f16_accumulator or self.kind == "i8" or self.disabled or self.input_shift
        return not special

    def perform(self, cta: Cta) -> None:
        """Multiply in the issuing CTA, or in both CTAs of its pair."""
        form, group = self.form, self.group
        first = cta.rank & ~(group - 1)
        ctas = cta.cluster.ctas[first : first + group]
        shares = [self._b_share(c) for c in ctas]
        b_tile = shares[0] if group == 1 else np.concatenate(shares)
        for c in ctas:
            self._accumulate(c, self._results(c, b_tile))
            if self.a_shift:
                columns = operand_columns(form.depth, form.a)
                for lane in range(0, 128, 32):
                    shift_rows(c, self.a & 0xFFFF, lane, columns)

    def _b_share(self, cta: Cta) -> np.ndarray:
        """[N of the CTA, K] of B, after .ws's column shift and zeroed columns."""
        form = self.form
        shift = column_shift(self.zero_mask, form.m) if self.zero_mask else 0
        rows = form.n // self.group + shift
        tile = shared_operand(cta, self.b, rows, form.depth, form.b, form.b_k_major)[shift:]
        if self.zero_mask:
            tile = np.where(zero_columns(self.zero_mask, form.m, form.n)[:, None], f32(0), tile)
        return tile

    def _scaled(self, cta: Cta, tile: np.ndarray, which: int, lane: int = 0) -> np.ndarray:
        """Rows of A (`which` 0) or B times their block scales, which start `lane` lanes on."""
        if self.scales is None:
            return tile
        form, count = self.form, self.scales[2]
        first = form.b_scale_byte if which else form.a_scale_byte
        address = self.scales[which] + (lane << 16)
        values = _scales(cta, address, len(tile), count, first, form.exponent_scales)
        return tile * np.repeat(values, form.depth // count, axis=1)

    def _results(self, cta: Cta, b_tile: np.ndarray) -> np.ndarray:
        """[columns, lanes in use] of the product, in the accumulator's arrangement."""
        form, integer = self.form, self.kind == "i8"
        share = form.n // self.copies
        parts = []
        for k in range(self.copies):
            # With A in TMEM every copy of the rows multiplies what its own lanes hold.
            if self.a_in_tmem:
                lanes = self.operand_lanes()[k * self.rows : (k + 1) * self.rows]
                tile = _tmem_operand(cta, self.a, lanes, form.depth, form.a)
            elif k == 0:
                tile = shared_operand(cta, self.a, self.rows, form.depth, form.a, form.a_k_major)
            if k == 0 or self.a_in_tmem:
                tile = self._scaled(cta, tile, 0)
            # Each half of the lanes holds the scales of the columns of B that it multiplies.
            columns = self._scaled(cta, b_tile[k * share : (k + 1) * share], 1, k * self.rows)
            parts.append(_product(tile, columns, integer))
        result = parts[0] if self.copies == 1 else np.concatenate(parts, axis=1)
        return -result if form.negate else result

    def _lanes_from(self, first: int) -> np.ndarray:
        """TMEM lanes of the rows of an accumulator, or of A beside it, whose address names lane
        `first`."""
        if self.rows * self.copies == TMEM_LANES:
            return _ALL_LANES
        # M = 64 in one CTA: 16 rows in each warp's 32 lanes.
        lanes = (32 * np.arange(4)[:, None] + np.arange(16)).reshape(-1) + first
        if int(lanes[-1]) >= 128:
            raise KernelFault(f"tcgen05.mma: rows end at TMEM lane {int(lanes[-1])}")
        return lanes

    def lanes(self) -> np.ndarray:
        """TMEM lanes of the accumulator's rows, in order."""
        return self._lanes_from(self.d >> 16)

    def operand_lanes(self) -> np.ndarray:
        """TMEM lanes of the rows of A there, in order."""
        return self._lanes_from(self.a >> 16)

    def _accumulate(self, cta: Cta, result: np.ndarray) -> None:
        column = self.d & 0xFFFF
        check_owned(cta, column, column + len(result))
        lanes = self.lanes()
        target = cta.tmem[column : column + len(result)]
        if lanes is _ALL_LANES and self.is_plain:
            held = target.view(f32)
            if self.accumulate:
                held += result
            else:
                held[:] = result
            return
        held = target if len(lanes) == 128 else target[:, lanes]
        if self.form.f16_accumulator:
            old = numerics.f32_of_f16(held.astype(u16))
        else:
            old = held.view(i32 if self.kind == "i8" else f32)
        if self.accumulate:
            result = self._added(old, result)
        if self.form.f16_accumulator:
            bits = numerics.f16_of_f32(result.astype(f32)).astype(u32)
        else:
            bits = np.ascontiguousarray(result, old.dtype).view(u32)
        if self.disabled:
            words = self.disabled[4 * (cta.rank % self.group) :]
            off = [bool(words[i // 32] >> (i % 32) & 1) for i in lanes.tolist()]
            bits = np.where(np.array(off), held, bits)
        if len(lanes) == 128:
            target[:] = bits
        else:
            target[:, lanes] = bits

    def _added(self, old: np.ndarray, result: np.ndarray) -> np.ndarray:
        if self.form.saturates:
            wide = old.astype(np.int64) + result
            return np.clip(wide, -(1 << 31), (1 << 31) - 1)
        if self.input_shift:
            old = old * f32(2.0**-self.input_shift)
        return old + result


def shift_rows(cta: Cta, column: int, lane: int, columns: int) -> None:
    """Rows of 32 TMEM lanes move down by one: each but the last takes the row of the next lane."""
    check_owned(cta, column, column + columns)
    block = cta.tmem[column : column + columns, lane : lane + 32]
    block[:, :-1] = block[:, 1:].copy()
