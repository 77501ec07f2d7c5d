"""Conversions between floating-point and integer types."""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware.case import Case
from tests.simulator.hardware.elementwise import elementwise, ops
from tests.simulator.hardware.inputs import FLOATS, random_words, uniform

_CONVERSIONS = """
cvt.rn.f16.f32 %oh, %a;
cvt.rz.f16.f32 %oh, %a;
cvt.rn.ftz.f16.f32 %oh, %a;
cvt.rn.sat.f16.f32 %oh, %a;
cvt.rn.relu.f16.f32 %oh, %a;
cvt.rn.satfinite.f16.f32 %oh, %a;
cvt.rn.bf16.f32 %oh, %a;
cvt.rz.bf16.f32 %oh, %a;
cvt.rn.relu.bf16.f32 %oh, %a;
cvt.rz.relu.bf16.f32 %oh, %a;
cvt.rn.satfinite.bf16.f32 %oh, %a;
cvt.rn.f16x2.f32 %o, %a, %b;
cvt.rz.f16x2.f32 %o, %a, %b;
cvt.rn.relu.f16x2.f32 %o, %a, %b;
cvt.rz.relu.f16x2.f32 %o, %a, %b;
cvt.rn.satfinite.f16x2.f32 %o, %a, %b;
cvt.rn.bf16x2.f32 %o, %a, %b;
cvt.rz.bf16x2.f32 %o, %a, %b;
cvt.rn.relu.bf16x2.f32 %o, %a, %b;
cvt.rz.relu.bf16x2.f32 %o, %a, %b;
cvt.rn.satfinite.bf16x2.f32 %o, %a, %b;
cvt.rna.tf32.f32 %o, %a;
cvt.rn.tf32.f32 %o, %a;
cvt.rz.tf32.f32 %o, %a;
cvt.rn.relu.tf32.f32 %o, %a;
cvt.rn.satfinite.e4m3x2.f32 %oh, %a, %b;
cvt.rn.satfinite.relu.e4m3x2.f32 %oh, %a, %b;
cvt.rn.satfinite.e5m2x2.f32 %oh, %a, %b;
cvt.rn.satfinite.relu.e5m2x2.f32 %oh, %a, %b;
cvt.rn.satfinite.e4m3x2.f16x2 %oh, %a;
cvt.rn.satfinite.relu.e4m3x2.f16x2 %oh, %a;
cvt.rn.satfinite.e5m2x2.f16x2 %oh, %a;
cvt.rn.f16x2.e4m3x2 %o, %ha;
cvt.rn.relu.f16x2.e4m3x2 %o, %ha;
cvt.rn.f16x2.e5m2x2 %o, %ha;
cvt.rn.relu.f16x2.e5m2x2 %o, %ha;
cvt.rn.bf16.f16 %oh, %ha;
cvt.rn.f16.bf16 %oh, %ha;
cvt.rn.bf16.s32 %oh, %a;
cvt.rn.bf16.u32 %oh, %a;
cvt.rn.f16.s32 %oh, %a;
cvt.rn.f16.u16 %oh, %ha;
cvt.rn.f16.s64 %oh, %da;
cvt.rn.f32.s32 %o, %a;
cvt.rn.f32.u32 %o, %a;
cvt.rz.f32.u32 %o, %a;
cvt.rm.f32.s32 %o, %a;
cvt.rp.f32.s32 %o, %a;
cvt.rn.f32.s64 %o, %da;
cvt.rn.f32.u64 %o, %da;
cvt.rn.f32.s8 %o, %a;
cvt.rn.f32.u8 %o, %a;
cvt.rn.f32.s16 %o, %ha;
cvt.rn.f64.s32 %od, %a;
cvt.rn.f64.u64 %od, %da;
cvt.rni.s32.f32 %o, %a;
cvt.rzi.s32.f32 %o, %a;
cvt.rmi.s32.f32 %o, %a;
cvt.rpi.s32.f32 %o, %a;
cvt.rni.u32.f32 %o, %a;
cvt.rzi.u32.f32 %o, %a;
cvt.rzi.ftz.u32.f32 %o, %a;
cvt.rpi.ftz.s32.f32 %o, %a;
cvt.rpi.s32.f32 %o, %c;
cvt.rni.s64.f32 %od, %a;
cvt.rzi.u64.f32 %od, %a;
cvt.rzi.s16.f32 %oh, %a;
cvt.rni.u16.f32 %oh, %a;
cvt.rzi.s8.f32 %o, %a;
cvt.rni.u8.f32 %o, %a;
cvt.rzi.s32.f16 %o, %ha;
cvt.rni.u16.f16 %oh, %ha;
cvt.rzi.s32.bf16 %o, %ha;
cvt.rmi.s64.f16 %od, %ha;
cvt.rzi.s32.f64 %o, %da;
cvt.rni.u64.f64 %od, %da;
"""
_CONVERSIONS_TO_F32 = """
cvt.f32.f16 %o, %ha;
cvt.f32.bf16 %o, %ha;
cvt.rn.f32.f64 %o, %da;
"""
_CONVERSIONS_F16 = """
cvt.rni.f16.f16 %oh, %ha;
cvt.rzi.f16.f16 %oh, %ha;
cvt.rmi.f16.f16 %oh, %ha;
"""


def _conversion_operands() -> tuple[np.ndarray, ...]:
    """Every 16-bit word somewhere, and float32 around the ties and limits of the small types."""
    ties = []
    for mantissa in (2, 3, 7, 10):
        step = 1 << (23 - mantissa)
        for exponent in (-26, -25, -17, -16, -15, -14, -10, -9, -7, -6, -1, 0, 7, 8, 9, 15, 16):
            word = (127 + exponent) << 23
            for k in (0, 1, 2 ** (mantissa - 1), 2**mantissa - 1):
                tie = word + k * step + step // 2
                ties += [tie - 1, tie, tie + 1]
    edges = [0x4F000000, 0x4EFFFFFF, 0xCF000000, 0xCF000001, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF,
             0x5F000000, 0x5F7FFFFF, 0x5F800000, 0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000,
             0xC0200000, 0x477FE000, 0x477FF000, 0x43E80000, 0x43E40000, 0x43E00000]  # fmt: skip
    words = np.array([*FLOATS, *edges, *ties], np.uint32)
    count = -(-(len(words) * 2 + 512) // 128) * 128
    b = random_words("conversion b", count)
    a = np.concatenate([words, words | np.uint32(0x80000000), random_words("conversion a", 512)])
    a = np.concatenate([a, random_words("conversion more", count - len(a))])
    c = uniform("conversion c", count, -300, 300).view(np.uint32)
    return a, b, c


def _small_code_operands() -> tuple[np.ndarray, ...]:
    """Every pair of equal and of different 8-bit codes, and every f16 pattern with 6 low zeros."""
    codes = np.arange(256, dtype=np.uint32)
    pairs = codes | (codes[::-1] << np.uint32(8))
    halves = np.arange(0, 65536, 64, dtype=np.uint32)
    a = np.concatenate([pairs, halves | (halves[::-1] << np.uint32(16))])
    return a, np.roll(a, 5), np.roll(a, 9)


_SMALL_CODES = """
cvt.rn.f16x2.e4m3x2 %o, %ha;
cvt.rn.f16x2.e5m2x2 %o, %ha;
cvt.rn.relu.f16x2.e4m3x2 %o, %ha;
cvt.rn.satfinite.e4m3x2.f16x2 %oh, %a;
cvt.rn.satfinite.e5m2x2.f16x2 %oh, %a;
cvt.rn.satfinite.relu.e5m2x2.f16x2 %oh, %a;
"""


def programs() -> list[Case]:
    """The conversion programs."""
    rows = ops(_CONVERSIONS) + ops(_CONVERSIONS_TO_F32, "f32") + ops(_CONVERSIONS_F16, "f16")
    return [
        elementwise("convert", rows, _conversion_operands()),
        elementwise("small codes", ops(_SMALL_CODES), _small_code_operands()),
    ]
