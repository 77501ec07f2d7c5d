"""tcgen05.mma: operand formats, block scales, accumulator layouts, the product itself."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dsv4.simulator import numerics
from dsv4.simulator.descriptors import MatrixDescriptor, element_index
from dsv4.simulator.errors import KernelFault
from dsv4.simulator.memory import TMEM_COLUMNS, Cta
from dsv4.simulator.numerics import f32, f64, i32, u8, u16, u32


class Format:
    """An element type of an operand.

    `bits` of data per element, `run` bytes of shared memory per 16 elements (padded formats use
    16), and a decoder from unsigned codes to float32.
    """

    def __init__(self, bits: int, run: int, decode):
        self.bits, self.run, self.decode = bits, run, decode


def _small(name: str):
    return numerics.SMALL_FLOATS[name].decode


_BYTE_FLOATS = {0: Format(8, 16, _small("e4m3")), 1: Format(8, 16, _small("e5m2"))}
# Beside 8-bit types, 6- and 4-bit elements lie in groups of 16 padded to 16 bytes.
_PADDED_FLOATS = {
    3: Format(6, 16, _small("e2m3")),
    4: Format(6, 16, _small("e3m2")),
    5: Format(4, 16, _small("e2m1")),
}
_PACKED_FP4 = {1: Format(4, 8, _small("e2m1"))}
FORMATS = {
    "f16": {
        0: Format(16, 32, numerics.f32_of_f16),
        1: Format(16, 32, numerics.f32_of_bf16),
    },
    "tf32": {2: Format(32, 64, lambda x: (x & u32(0xFFFFE000)).view(f32))},
    "f8f6f4": _BYTE_FLOATS | _PADDED_FLOATS,
    "i8": {
        0: Format(8, 16, lambda x: x.astype(f32)),
        1: Format(8, 16, lambda x: x.view(np.int8).astype(f32)),
    },
    "mxf8f6f4": _BYTE_FLOATS | _PADDED_FLOATS,
    "mxf4": _PACKED_FP4,
    "mxf4nvf4": _PACKED_FP4,
}
DEPTH = {
    "f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64,
}  # fmt: skip
_UNSIGNED = {8: u8, 16: u16, 32: u32}


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
        self.exponent_scales = bool(bits >> 23 & 1)  # ue8m0, else ue4m3
        self.a_scale_byte, self.b_scale_byte = bits >> 29 & 3, bits >> 4 & 3
        self.depth = DEPTH[kind]
        if self.scaled and bits >> 31:
            raise KernelFault("tcgen05.mma with K = 96 is not simulated")


def check_shape(form: InstructionDescriptor, group: int, stationary: bool) -> None:
    """M and N must be ones the instruction has."""
    if stationary:
        steps = {32: 64, 64: 64, 128: 64} if group == 1 else {}
    else:
        steps = {1: {64: 8, 128: 16}, 2: {128: 16, 256: 16}}[group]
    step = steps.get(form.m)
    if step is None or not step <= form.n <= 256 or form.n % step:
        raise KernelFault(f"tcgen05.mma cta_group::{group} of M={form.m}, N={form.n}")


def check_owned(cta: Cta, start: int, stop: int) -> None:
    """TMEM columns [start, stop) must be allocated."""
    if stop > TMEM_COLUMNS or not cta.tmem_owned[start:stop].all():
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


def _unpacked(codes: np.ndarray, form: Format) -> np.ndarray:
    """Bytes [rows, bytes] of sub-byte elements to float32 [rows, elements]."""
    if form.bits == 4:
        pairs = np.stack((codes & u8(15), codes >> u8(4)), -1)
        return form.decode(pairs.reshape(len(codes), -1))
    # 6 bits: four elements in three bytes.
    triples = codes.reshape(len(codes), -1, 3).astype(u32)
    word = triples[..., 0] | triples[..., 1] << u32(8) | triples[..., 2] << u32(16)
    parts = np.stack([word >> u32(6 * i) & u32(63) for i in range(4)], -1)
    return form.decode(parts.reshape(len(codes), -1).astype(u8))


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
        return _unpacked(cta.s8.take(index), form)
    index = element_index(descriptor, rows, depth, form.bits // 8, k_major)
    return form.decode(cta.views[_UNSIGNED[form.bits]].take(index))


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
    return depth // 16 * form.run // 4


def _tmem_operand(cta: Cta, address: int, rows: int, depth: int, form: Format) -> np.ndarray:
    """[rows, depth] float32 of operand A in TMEM, elements packed along columns."""
    column, lane = address & 0xFFFF, address >> 16
    columns = operand_columns(depth, form)
    check_owned(cta, column, column + columns)
    words = np.ascontiguousarray(cta.tmem[column : column + columns, lane : lane + rows].T)
    if form.bits < 8:
        runs = words.view(u8).reshape(rows, -1, form.run)[:, :, : 2 * form.bits]
        return _unpacked(np.ascontiguousarray(runs).reshape(rows, -1), form)
    return form.decode(words.view(_UNSIGNED[form.bits]))


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
    if integer:
        return (b.astype(f64) @ a.T.astype(f64)).astype(i32)
    return b @ a.T


class Multiplication:
    """One tcgen05.mma as issued.

    Args: operands `d`, `a`, `b` (TMEM addresses or descriptors), the instruction descriptor's
        `bits`, `accumulate`, the `disabled` output lanes (words of 32), `stationary` for .ws,
        `scales` the TMEM addresses of A's and B's block scales with the scales per row, and
        `input_shift` of scale-input-d.
    """

    def __init__(self, kind, group, d, a, a_in_tmem, b, bits, accumulate, disabled=(),
                 stationary=False, scales=None, input_shift=None):  # fmt: skip
        self.kind, self.group, self.d, self.a, self.b = kind, group, d, a, b
        self.a_in_tmem, self.accumulate, self.disabled = a_in_tmem, accumulate, disabled
        self.stationary, self.scales, self.input_shift = stationary, scales, input_shift
        self.form = InstructionDescriptor(bits, kind)
        check_shape(self.form, group, stationary)
        self.rows = self.form.m // group
        self.copies = lane_copies(self.form, group, stationary)

    def perform(self, cta: Cta) -> None:
        """Multiply in the issuing CTA, or in both CTAs of its pair."""
        form, group = self.form, self.group
        first = cta.rank & ~(group - 1)
        ctas = cta.cluster.ctas[first : first + group]
        b_tile = np.concatenate(
            [
                shared_operand(c, self.b, form.n // group, form.depth, form.b, form.b_k_major)
                for c in ctas
            ]
        )
        for c in ctas:
            self._accumulate(c, self._results(c, self._scaled_b(c, b_tile)))

    def _scaled_b(self, cta: Cta, tile: np.ndarray) -> np.ndarray:
        return tile if self.scales is None else self._scaled(cta, tile, 1)

    def _scaled(self, cta: Cta, tile: np.ndarray, which: int) -> np.ndarray:
        form, count = self.form, self.scales[2]
        first = form.b_scale_byte if which else form.a_scale_byte
        values = _scales(cta, self.scales[which], len(tile), count, first, form.exponent_scales)
        return tile * np.repeat(values, form.depth // count, axis=1)

    def _results(self, cta: Cta, b_tile: np.ndarray) -> np.ndarray:
        """[columns, lanes in use] of the product, in the accumulator's arrangement."""
        form, integer = self.form, self.kind == "i8"
        share = form.n // self.copies
        parts = []
        for k in range(self.copies):
            # With A in TMEM every copy of the rows multiplies what its own lanes hold.
            if self.a_in_tmem:
                a = self.a + (k * self.rows << 16)
                tile = _tmem_operand(cta, a, self.rows, form.depth, form.a)
            elif k == 0:
                tile = shared_operand(cta, self.a, self.rows, form.depth, form.a, form.a_k_major)
            if self.scales is not None and (k == 0 or self.a_in_tmem):
                tile = self._scaled(cta, tile, 0)
            parts.append(_product(tile, b_tile[k * share : (k + 1) * share], integer))
        result = np.concatenate(parts, axis=1)
        return -result if form.negate else result

    def lanes(self) -> np.ndarray:
        """TMEM lanes of the accumulator's rows, in order."""
        if self.rows * self.copies == 128:
            return np.arange(128)
        # M = 64 in one CTA: 16 rows in each warp's 32 lanes.
        return (32 * np.arange(4)[:, None] + np.arange(16)).reshape(-1) + (self.d >> 16)

    def _accumulate(self, cta: Cta, result: np.ndarray) -> None:
        column = self.d & 0xFFFF
        check_owned(cta, column, column + len(result))
        lanes = self.lanes()
        if int(lanes[-1]) >= 128:
            raise KernelFault(f"tcgen05.mma: accumulator lanes end at {int(lanes[-1])}")
        target = cta.tmem[column : column + len(result)]
        held = target if len(lanes) == 128 else target[:, lanes]
        if self.form.f16_accumulator:
            old = numerics.f32_of_f16(held.astype(u16))
        else:
            old = held.view(i32 if self.kind == "i8" else f32)
        if self.accumulate:
            if self.input_shift:
                old = old * f32(2.0**-self.input_shift)
            result = old + result
        if self.disabled:
            off = [bool(self.disabled[i // 32] >> (i % 32) & 1) for i in lanes.tolist()]
            result = np.where(np.array(off), old, result)
        if self.form.f16_accumulator:
            bits = numerics.f16_of_f32(result.astype(f32)).astype(u32)
        else:
            bits = np.ascontiguousarray(result, old.dtype).view(u32)
        if len(lanes) == 128:
            target[:] = bits
        else:
            target[:, lanes] = bits
