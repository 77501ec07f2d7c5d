"""Integer, float32, half-precision and approximate instructions, and the conversions' programs."""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware import conversions
from tests.simulator.hardware.case import Case, Tolerance
from tests.simulator.hardware.elementwise import Op, elementwise, ops
from tests.simulator.hardware.inputs import FLOATS, crossed, random_words, uniform

COUNT = 1024
_INTEGERS = [
    0, 1, 2, 7, 16, 31, 32, 33, 63, 64, 0xFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001,
    0xFFFFFFFF, 0xFFFFFFE0, 0x0F0F0808, 0x00FF7F80,
]  # fmt: skip
_HALVES = [
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0x0001, 0x83FF, 0x0400,
    0x7BFF, 0xFBFF, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0080, 0x007F, 0x7F7F, 0x1234,
]  # fmt: skip


def _integer_operands() -> tuple[np.ndarray, ...]:
    n = COUNT - len(_INTEGERS) ** 2
    rest = np.stack([random_words(f"integer {k}", n) for k in range(3)])
    rest[1:, : n // 2] &= np.uint32(0x3F)  # half of them as shift counts and field sizes
    return crossed(_INTEGERS, rest, "integers")


def _float_operands() -> tuple[np.ndarray, ...]:
    n = COUNT - len(FLOATS) ** 2
    rest = np.stack([random_words(f"float {k}", n) for k in range(3)])
    for k in range(3):
        rest[k, : n // 2] = uniform(f"moderate {k}", n // 2, -4, 4).view(np.uint32)
    # Sums that cancel, where a second rounding would show.
    a, b = (rest[k, : n // 4].view(np.float32) for k in range(2))
    rest[2, : n // 4] = (-(a.astype(np.float64) * b)).astype(np.float32).view(np.uint32)
    return crossed(FLOATS, rest, "floats")


def _half_operands() -> tuple[np.ndarray, ...]:
    n = COUNT - len(_HALVES) ** 2
    rest = np.stack([random_words(f"half {k}", n) for k in range(3)])
    rest[:, : n // 2] &= np.uint32(0xBFFFBFFF)  # half of them small, or sums would be infinite
    a, b, c = crossed(_HALVES, rest, "halves")
    high = random_words("high half", COUNT) & np.uint32(0xFFFF0000)
    return a | high, b | (high << np.uint32(1) & np.uint32(0xFFFF0000)), c | high


_INTEGER_OPS = """
add.s32 %o, %a, %b;
sub.s32 %o, %a, %b;
add.sat.s32 %o, %a, %b;
sub.sat.s32 %o, %a, %b;
add.s64 %od, %da, %db;
sub.s64 %od, %da, %db;
mul.lo.s32 %o, %a, %b;
mul.hi.s32 %o, %a, %b;
mul.hi.u32 %o, %a, %b;
mul.wide.s32 %od, %a, %b;
mul.wide.u32 %od, %a, %b;
mul.wide.u16 %o, %ha, %hb;
mul.wide.s16 %o, %ha, %hb;
mul.lo.s64 %od, %da, %db;
mul.hi.u64 %od, %da, %db;
mul.hi.s64 %od, %da, %db;
mul.lo.u16 %oh, %ha, %hb;
mad.lo.s32 %o, %a, %b, %c;
mad.hi.s32 %o, %a, %b, %c;
mad.hi.u32 %o, %a, %b, %c;
mad.wide.s32 %od, %a, %b, %dc;
mad.wide.u32 %od, %a, %b, %dc;
mad.lo.s64 %od, %da, %db, %dc;
mad.lo.u16 %oh, %ha, %hb, %hc;
min.s32 %o, %a, %b;
max.s32 %o, %a, %b;
min.u32 %o, %a, %b;
max.u32 %o, %a, %b;
min.s64 %od, %da, %db;
max.u64 %od, %da, %db;
min.s16 %oh, %ha, %hb;
max.u16 %oh, %ha, %hb;
min.relu.s32 %o, %a, %b;
max.relu.s32 %o, %a, %b;
abs.s32 %o, %a;
neg.s32 %o, %a;
abs.s64 %od, %da;
neg.s64 %od, %da;
neg.s16 %oh, %ha;
and.b32 %o, %a, %b;
or.b64 %od, %da, %db;
xor.b32 %o, %a, %b;
not.b64 %od, %da;
not.b32 %o, %a;
cnot.b32 %o, %a;
and.b16 %oh, %ha, %hb;
and.pred %op, %p, %q;
or.pred %op, %p, %q;
xor.pred %op, %p, %q;
not.pred %op, %p;
lop3.b32 %o, %a, %b, %c, 0xE8;
lop3.b32 %o, %a, %b, %c, 0x96;
lop3.b32 %o, %a, %b, %c, 0x1B;
lop3.b32 %o, %a, %b, %c, 0xCA;
shl.b32 %o, %a, %b;
shl.b64 %od, %da, %b;
shl.b16 %oh, %ha, %b;
shr.u32 %o, %a, %b;
shr.s32 %o, %a, %b;
shr.u64 %od, %da, %b;
shr.s64 %od, %da, %b;
shr.u16 %oh, %ha, %b;
shr.s16 %oh, %ha, %b;
shl.b32 %o, %a, 7;
shr.s32 %o, %a, 31;
shf.l.wrap.b32 %o, %a, %b, %c;
shf.r.wrap.b32 %o, %a, %b, %c;
shf.l.clamp.b32 %o, %a, %b, %c;
shf.r.clamp.b32 %o, %a, %b, %c;
bfe.u32 %o, %a, %b, %c;
bfe.s32 %o, %a, %b, %c;
bfe.u64 %od, %da, %b, %c;
bfe.s64 %od, %da, %b, %c;
bfi.b32 %o, %a, %b, %c, %b;
bfi.b32 %o, %b, %a, %b, %c;
bfi.b64 %od, %da, %db, %b, %c;
bfind.u32 %o, %a;
bfind.s32 %o, %a;
bfind.u64 %o, %da;
bfind.s64 %o, %da;
bfind.shiftamt.u32 %o, %a;
bfind.shiftamt.s32 %o, %a;
brev.b32 %o, %a;
brev.b64 %od, %da;
popc.b32 %o, %a;
popc.b64 %o, %da;
clz.b32 %o, %a;
clz.b64 %o, %da;
prmt.b32 %o, %a, %b, %c;
prmt.b32 %o, %a, %b, 0x5410;
prmt.b32 %o, %a, %b, 0x9d32;
prmt.b32.f4e %o, %a, %b, %c;
prmt.b32.b4e %o, %a, %b, %c;
prmt.b32.rc8 %o, %a, %b, %c;
prmt.b32.ecl %o, %a, %b, %c;
prmt.b32.ecr %o, %a, %b, %c;
prmt.b32.rc16 %o, %a, %b, %c;
dp4a.u32.u32 %o, %a, %b, %c;
dp4a.s32.s32 %o, %a, %b, %c;
dp4a.u32.s32 %o, %a, %b, %c;
dp4a.s32.u32 %o, %a, %b, %c;
dp2a.lo.s32.s32 %o, %a, %b, %c;
dp2a.hi.u32.s32 %o, %a, %b, %c;
sad.u32 %o, %a, %b, %c;
sad.s32 %o, %a, %b, %c;
add.cc.u32 %t0, %a, %b; addc.u32 %o, %b, %c;
add.cc.u32 %t0, %a, %b; addc.cc.u32 %t1, %b, %c; addc.u32 %o, %a, %c;
sub.cc.u32 %t0, %a, %b; subc.u32 %o, %b, %c;
sub.cc.u32 %t0, %a, %b; subc.cc.u32 %t1, %b, %c; subc.u32 %o, %a, %c;
mad.lo.cc.u32 %t0, %a, %b, %c; madc.hi.u32 %o, %a, %b, %c;
mad.lo.cc.u32 %t0, %a, %b, %c; addc.u32 %o, %a, 0;
add.cc.u64 %od, %da, %db; addc.u64 %od, %db, %dc;
or.b32 %t0, %b, 1; div.s32 %o, %a, %t0;
or.b32 %t0, %b, 1; div.u32 %o, %a, %t0;
or.b32 %t0, %b, 1; rem.s32 %o, %a, %t0;
or.b32 %t0, %b, 1; rem.u32 %o, %a, %t0;
or.b64 %od, %db, 1; div.s64 %od, %da, %od;
or.b64 %od, %db, 1; rem.u64 %od, %da, %od;
selp.b32 %o, %a, %b, %p;
selp.b64 %od, %da, %db, %q;
slct.u32.s32 %o, %a, %b, %c;
setp.eq.u32 %op, %a, %b;
setp.ne.s32 %op, %a, %b;
setp.lt.s32 %op, %a, %b;
setp.lo.u32 %op, %a, %b;
setp.hs.u32 %op, %a, %b;
setp.le.s64 %op, %da, %db;
setp.hi.u64 %op, %da, %db;
setp.gt.s16 %op, %ha, %hb;
setp.lt.and.s32 %op, %a, %b, %p;
setp.ge.or.u32 %op, %a, %b, !%q;
setp.gt.xor.s32 %op, %a, %b, %p;
setp.lt.and.s32 %op|%oq, %a, %b, %p; selp.u32 %t0, 2, 0, %oq; selp.u32 %o, 1, 0, %op; or.b32 %c, %o, %t0; setp.eq.u32 %op, %c, 2;
set.lt.u32.s32 %o, %a, %b;
cvt.s32.s8 %o, %a;
cvt.u32.u8 %o, %a;
cvt.s32.s16 %o, %ha;
cvt.u32.u16 %o, %ha;
cvt.s64.s32 %od, %a;
cvt.u64.u32 %od, %a;
cvt.u32.u64 %o, %da;
cvt.sat.u8.s32 %o, %a;
cvt.sat.s8.s32 %o, %a;
cvt.sat.u16.s32 %oh, %a;
cvt.sat.s16.s32 %oh, %a;
cvt.sat.u32.s32 %o, %a;
cvt.sat.s32.u32 %o, %a;
cvt.sat.s32.s64 %o, %da;
cvt.sat.u32.s64 %o, %da;
cvt.pack.sat.s16.s32 %o, %a, %b;
cvt.pack.sat.u16.s32 %o, %a, %b;
cvt.pack.sat.u8.s32.b32 %o, %a, %b, %c;
cvt.pack.sat.s8.s32.b32 %o, %a, %b, %c;
add.u16x2 %o, %a, %b;
min.s16x2 %o, %a, %b;
max.u16x2 %o, %a, %b;
"""  # noqa: E501

_COMPARISONS = (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
)  # fmt: skip

_FLOAT_OPS = """
add.rn.f32 %o, %a, %b;
add.rn.ftz.f32 %o, %a, %b;
add.rn.sat.f32 %o, %a, %b;
add.rz.f32 %o, %a, %b;
add.rm.f32 %o, %a, %b;
add.rp.f32 %o, %a, %b;
sub.rn.f32 %o, %a, %b;
sub.rn.ftz.f32 %o, %a, %b;
mul.rn.f32 %o, %a, %b;
mul.rn.ftz.f32 %o, %a, %b;
mul.rn.ftz.sat.f32 %o, %a, %b;
mul.rz.f32 %o, %a, %b;
mul.rp.f32 %o, %a, %b;
fma.rn.f32 %o, %a, %b, %c;
fma.rn.ftz.f32 %o, %a, %b, %c;
fma.rn.sat.f32 %o, %a, %b, %c;
fma.rz.f32 %o, %a, %b, %c;
fma.rm.f32 %o, %a, %b, %c;
mad.rn.f32 %o, %a, %b, %c;
div.rn.f32 %o, %a, %b;
div.rn.ftz.f32 %o, %a, %b;
rcp.rn.f32 %o, %a;
sqrt.rn.f32 %o, %a;
sqrt.rn.ftz.f32 %o, %a;
cvt.rni.f32.f32 %o, %a;
cvt.rzi.f32.f32 %o, %a;
cvt.rmi.f32.f32 %o, %a;
cvt.rpi.f32.f32 %o, %a;
cvt.rpi.ftz.f32.f32 %o, %a;
cvt.sat.f32.f32 %o, %a;
cvt.ftz.f32.f32 %o, %a;
min.f32 %o, %a, %b;
max.f32 %o, %a, %b;
min.ftz.f32 %o, %a, %b;
max.ftz.f32 %o, %a, %b;
min.NaN.f32 %o, %a, %b;
max.NaN.f32 %o, %a, %b;
max.ftz.NaN.f32 %o, %a, %b;
min.xorsign.abs.f32 %o, %a, %b;
max.xorsign.abs.f32 %o, %a, %b;
abs.ftz.f32 %o, %a;
neg.ftz.f32 %o, %a;
abs.f32 %o, %a;
neg.f32 %o, %a;
"""

_FLOAT_EXACT_OPS = """
copysign.f32 %o, %a, %b;
selp.f32 %o, %a, %b, %p;
testp.finite.f32 %op, %a;
testp.infinite.f32 %op, %a;
testp.number.f32 %op, %a;
testp.notanumber.f32 %op, %a;
testp.normal.f32 %op, %a;
testp.subnormal.f32 %op, %a;
setp.lt.ftz.f32 %op, %a, %b;
setp.eq.ftz.f32 %op, %a, %b;
setp.geu.ftz.f32 %op, %a, %b;
setp.lt.and.f32 %op, %a, %b, %q;
set.gt.u32.f32 %o, %a, %b;
set.le.f32.f32 %o, %a, %b;
"""

_HALF_OPS = """
add.rn.TYPE OUT, IN_A, IN_B;
sub.rn.TYPE OUT, IN_A, IN_B;
mul.rn.TYPE OUT, IN_A, IN_B;
fma.rn.TYPE OUT, IN_A, IN_B, IN_C;
fma.rn.relu.TYPE OUT, IN_A, IN_B, IN_C;
min.TYPE OUT, IN_A, IN_B;
max.TYPE OUT, IN_A, IN_B;
min.NaN.TYPE OUT, IN_A, IN_B;
max.NaN.TYPE OUT, IN_A, IN_B;
max.xorsign.abs.TYPE OUT, IN_A, IN_B;
"""
_F16_OPS = """
add.rn.ftz.TYPE OUT, IN_A, IN_B;
add.rn.sat.TYPE OUT, IN_A, IN_B;
mul.rn.ftz.TYPE OUT, IN_A, IN_B;
fma.rn.ftz.TYPE OUT, IN_A, IN_B, IN_C;
fma.rn.sat.TYPE OUT, IN_A, IN_B, IN_C;
fma.rn.ftz.relu.TYPE OUT, IN_A, IN_B, IN_C;
max.ftz.TYPE OUT, IN_A, IN_B;
max.ftz.NaN.TYPE OUT, IN_A, IN_B;
"""
_HALF_SIGN_OPS = """
neg.TYPE OUT, IN_A;
abs.TYPE OUT, IN_A;
"""
_HALF_COMPARISONS = """
setp.lt.TYPE %op, %ha, %hb;
setp.geu.TYPE %op, %ha, %hb;
setp.eq.TYPE %op, %ha, %hb;
setp.num.TYPE %op, %ha, %hb;
setp.gt.TYPEx2 %op|%oq, %a, %b; selp.u32 %t0, 2, 0, %oq; selp.u32 %t1, 1, 0, %op; or.b32 %t2, %t0, %t1; setp.eq.u32 %op, %t2, 2;
set.lt.TYPEx2.TYPEx2 %o, %a, %b;
"""  # noqa: E501


def _half(template: str) -> list[Op]:
    """The template for f16 and bf16, as scalars and as pairs."""
    return [op for scalar in ("f16", "bf16") for op in _half_of(template, scalar)]


def _half_of(template: str, scalar: str) -> list[Op]:
    out = []
    for suffix, register in (("", "h{}"), ("x2", "{}")):
        text = template.replace("TYPE", scalar + suffix)
        text = text.replace("OUT", "%oh" if suffix == "" else "%o")
        for operand in "ABC":
            text = text.replace(f"IN_{operand}", "%" + register.format(operand.lower()))
        # A scalar result's upper half is zero, a number of either type.
        out += ops(text, scalar)
    return out


# Errors as the PTX ISA states them, plus half a unit for the reference's own rounding.
_APPROXIMATE = [
    *ops(
        """ex2.approx.f32 %o, %a;
        ex2.approx.ftz.f32 %o, %a;
        rcp.approx.f32 %o, %a;
        rcp.approx.ftz.f32 %o, %a;
        rsqrt.approx.f32 %o, %a;
        rsqrt.approx.ftz.f32 %o, %a;
        sqrt.approx.f32 %o, %a;
        sqrt.approx.ftz.f32 %o, %a;
        div.full.f32 %o, %a, %b;
        div.approx.f32 %o, %a, %c;""",
        "f32",
        Tolerance(ulp=2.5),
    ),
    *ops("lg2.approx.f32 %o, %a;\nlg2.approx.ftz.f32 %o, %a;", "f32", Tolerance(2.5, 2.0**-21.9)),
    *ops("sin.approx.f32 %o, %c;\ncos.approx.f32 %o, %c;", "f32", Tolerance(0, 2.0**-20.4)),
    *ops("tanh.approx.f32 %o, %a;", "f32", Tolerance(ulp=2.0**13)),
    *ops("tanh.approx.f16 %oh, %hb;", "f16", Tolerance(0.5, 2.0**-10.9)),
    *ops("tanh.approx.f16x2 %o, %b;", "f16", Tolerance(0.5, 2.0**-10.9)),
    *ops("tanh.approx.bf16x2 %o, %b;", "bf16", Tolerance(1.0, 2.0**-8)),
    *ops("ex2.approx.f16x2 %o, %b;", "f16", Tolerance(ulp=1.6)),
    *ops("ex2.approx.ftz.bf16x2 %o, %b;", "bf16", Tolerance(ulp=1.6)),
]


def _approximate_operands() -> tuple[np.ndarray, ...]:
    n = 256
    specials = np.array(FLOATS, np.uint32)
    a = uniform("approximate a", n, -40, 40)
    a[64:128] = np.abs(a[64:128])
    a[128:192] = uniform("approximate near one", 64, 0.4, 2.1)
    words = random_words("approximate bits", n)
    a = np.concatenate([specials, a.view(np.uint32)[:192], words])[:n]
    b = words.copy()
    b[: len(_HALVES)] = _HALVES
    c = uniform("approximate c", n, -3.1415926, 3.1415926).view(np.uint32)
    return a, b, c


def cases() -> list[Case]:
    """The arithmetic programs."""
    comparisons = [f"setp.{c}.f32 %op, %a, %b;" for c in _COMPARISONS]
    exact = ops(_FLOAT_EXACT_OPS + "\n".join(comparisons))
    half = _half(_HALF_OPS) + _half_of(_F16_OPS, "f16") + _half(_HALF_SIGN_OPS)
    for scalar in ("f16", "bf16"):
        half += ops(_HALF_COMPARISONS.replace("TYPE", scalar))
    return [
        elementwise("integer", ops(_INTEGER_OPS), _integer_operands()),
        elementwise("float32", ops(_FLOAT_OPS, "f32") + exact, _float_operands()),
        elementwise("half", half, _half_operands()),
        *conversions.programs(),
        elementwise("approximate", _APPROXIMATE, _approximate_operands()),
    ]
