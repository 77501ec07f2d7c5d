"""Instructions of one lane against the ISA's definitions, on random and on extreme operands."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.simulator.helpers.lane_kernel import run_lanes
from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")

_ONES = 0xFFFFFFFF


def _fns(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if mask >> base & 1 else _ONES
    position, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += step
    return _ONES


def test_fns(seed):
    generator = np.random.default_rng(seed)
    mask = generator.integers(0, 1 << 32, 32, np.uint32)
    base = generator.integers(0, 32, 32, np.uint32)
    offset = generator.integers(-6, 7, 32, np.int32)
    found = run_lanes("fns.b32 %y, %x0, %x1, %x2;", [mask, base, offset], np.uint32)
    expected = [_fns(*v) for v in zip(mask.tolist(), base.tolist(), offset.tolist())]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bmsk(mode):
    a = np.repeat(np.array([0, 1, 5, 31, 32, 37, 63, 200], np.uint32), 4)
    b = np.tile(np.array([0, 3, 31, 32], np.uint32), 8)
    found = run_lanes(f"bmsk.{mode}.b32 %y, %x0, %x1;", [a, b], np.uint32)
    for i, (p, n) in enumerate(zip(a.tolist(), b.tolist())):
        mask0 = _ONES << (p & 31) & _ONES
        total = (p & 31) + (n & 31)
        mask1 = _ONES << total & _ONES
        if mode == "clamp" and p >= 32:
            mask0 = 0
        if total >= 32 or (mode == "clamp" and (p >= 32 or n >= 32)):
            mask1 = 0
        elif n & 31 == 0:
            mask1 = _ONES
        assert found[i] == mask0 & ~mask1, (p, n)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_szext(mode, kind, seed):
    a = np.random.default_rng(seed).integers(0, 1 << 32, 32, np.uint32)
    b = np.arange(4, 36, dtype=np.uint32)
    found = run_lanes(f"szext.{mode}.{kind} %y, %x0, %x1;", [a, b], np.uint32)
    for i, (value, n) in enumerate(zip(a.tolist(), b.tolist())):
        width = min(n, 32) if mode == "clamp" else n & 31
        low = value & (1 << width) - 1
        if kind == "s32" and width and low >> width - 1:
            low |= _ONES << width & _ONES
        assert found[i] == low, (value, n)


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_24_bit_products(kind, half, seed):
    generator = np.random.default_rng(seed)
    a, b, c = (generator.integers(0, 1 << 32, 32, np.uint32) for _ in range(3))

    def low24(x: int) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if kind == "s32" and x >> 23 else x

    products = [low24(x) * low24(y) for x, y in zip(a.tolist(), b.tolist())]
    words = [(p >> (16 if half == "hi" else 0)) & _ONES for p in products]
    found = run_lanes(f"mul24.{half}.{kind} %y, %x0, %x1;", [a, b], np.uint32)
    np.testing.assert_array_equal(found, words)
    found = run_lanes(f"mad24.{half}.{kind} %y, %x0, %x1, %x2;", [a, b, c], np.uint32)
    np.testing.assert_array_equal(found, [(w + z) & _ONES for w, z in zip(words, c.tolist())])


@pytest.mark.parametrize("kind", ["u16", "s16"])
def test_high_halves_of_16_bit_products(kind, seed):
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(0, 1 << 16, 32, np.uint32) for _ in range(2))
    found = run_lanes(
        ".reg .b16 %h<3>;\ncvt.u16.u32 %h0, %x0;\ncvt.u16.u32 %h1, %x1;\n"
        f"mul.hi.{kind} %h2, %h0, %h1;\ncvt.u32.u16 %y, %h2;",
        [a, b],
        np.uint32,
    )
    narrow = np.int16 if kind == "s16" else np.uint16
    wide = [x.astype(np.uint16).view(narrow).astype(np.int64) for x in (a, b)]
    np.testing.assert_array_equal(found, wide[0] * wide[1] >> 16 & 0xFFFF)


@pytest.mark.parametrize("combine", ["or", "and"])
def test_lop3_with_a_predicate(combine, seed):
    generator = np.random.default_rng(seed)
    a, b, c = (generator.integers(0, 4, 32, np.uint32) for _ in range(3))
    found = run_lanes(
        f"setp.gt.u32 %p1, %x0, 1;\nlop3.{combine}.b32 %r2|%p2, %x0, %x1, %x2, {0x96}, %p1;\n"
        "selp.b32 %y, 256, 0, %p2;\nor.b32 %y, %y, %r2;",
        [a, b, c], np.uint32,
    )  # fmt: skip
    three = a ^ b ^ c
    other = a > 1
    predicate = (three != 0) | other if combine == "or" else (three != 0) & other
    np.testing.assert_array_equal(found, three | predicate * 256)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_packed_16_bit_extrema(op, relu, seed):
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-(1 << 15), 1 << 15, 64, np.int16) for _ in range(2))
    found = run_lanes(
        f"{op}{relu}.s16x2 %y, %x0, %x1;", [a.view(np.uint32), b.view(np.uint32)], np.uint32
    )
    expected = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    expected = np.maximum(expected, 0) if relu else expected
    np.testing.assert_array_equal(found.view(np.int16), expected)


def _halves(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits with zeros, infinities and NaN among them, and the values."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, 32, np.uint16)
    bits[:6] = [0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x3F80]
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def _close(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, or both NaN."""
    both = np.isnan(found) & np.isnan(expected)
    np.testing.assert_array_equal(found[~both].view(np.uint32), expected[~both].view(np.uint32))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_mixed_precision_arithmetic(seed):
    """f32 = bf16 * bf16 + f32 rounded once: the exact product of bf16 fits float64 with room."""
    a_bits, a = _halves(seed)
    b_bits, b = _halves(seed + 1)
    c = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
    found = run_lanes("fma.rn.f32.bf16 %y, %x0, %x1, %x2;", [a_bits, b_bits, c], np.float32)
    wide = a.astype(float) * b + c
    expected = wide.astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-7)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    _close(run_lanes("add.rn.f32.bf16 %y, %x0, %x1;", [a_bits, c], np.float32), a + c)
    _close(run_lanes("sub.rn.f32.bf16 %y, %x0, %x1;", [a_bits, c], np.float32), a - c)


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_exponent_scales(rounding, saturate):
    """The exponent that is not above (rz) or not below (rp) the magnitude; too large is NaN."""
    values = np.array(
        [1, 1.5, 2, 3, 2.0**-127, 2.0**-126 * 1.25, 0, 2.0**127, 1.75 * 2.0**127, np.inf, np.nan,
         -6, 2.0**-149, 0.9, 448, 1e-3] * 2, np.float32,
    )  # fmt: skip
    high = np.roll(values, 5)
    found = run_lanes(
        f"cvt.{rounding}{saturate}.ue8m0x2.f32 %y, %x0, %x1;", [high, values], np.uint16
    )
    codes = found.view(np.uint8).reshape(32, 2)
    for column, source in ((0, values), (1, high)):
        for code, value in zip(codes[:, column].tolist(), np.abs(source.astype(float)).tolist()):
            if math.isnan(value):
                assert code == 255
                continue
            limit = 254 if saturate else 255
            if math.isinf(value):
                assert code == limit
                continue
            floor = math.floor(math.log2(value)) if value else -127
            exponent = floor + (rounding == "rp" and value > 2.0**floor)
            assert code == min(max(exponent + 127, 0), limit), value


@pytest.mark.parametrize("rounding", ["rna", "rn", "rz"])
def test_tf32_without_infinity(rounding):
    largest = np.float32(np.finfo(np.float32).max)
    values = np.array([np.inf, -np.inf, largest, -largest, 1.0, np.nan, 0, -2.5] * 4, np.float32)
    found = run_lanes(f"cvt.{rounding}.satfinite.tf32.f32 %y, %x0;", [values], np.uint32)
    for bits, value in zip(found.tolist(), values.tolist()):
        if math.isnan(value):
            assert bits & 0x7FFFFFFF > 0x7F800000
        elif abs(value) > 1e38:
            assert bits == (0x7F7FE000 | (value < 0) << 31)
        else:
            assert bits == np.float32(value).view(np.uint32)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_double_to_single(rounding, seed):
    values = np.random.default_rng(seed).standard_normal(32) * 10.0 ** np.arange(-16, 16)
    found = run_lanes(f"cvt.{rounding}.f32.f64 %y, %x0;", [values], np.float32)
    nearest = values.astype(np.float32)
    up = np.where(nearest >= values, nearest, np.nextafter(nearest, np.float32(np.inf)))
    down = np.where(nearest <= values, nearest, np.nextafter(nearest, np.float32(-np.inf)))
    expected = {"rn": nearest, "rp": up, "rm": down, "rz": np.where(values > 0, down, up)}
    np.testing.assert_array_equal(found, expected[rounding])


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
@pytest.mark.parametrize("stem", ["add", "sub", "mul", "div", "fma", "rcp", "sqrt"])
def test_directed_rounding(stem, rounding, seed):
    """Beside the exact result, and both halves of a pair beside single numbers."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((3, 64)) * 10.0 ** rng.integers(-4, 4, (3, 64))).astype(
        np.float32
    )
    if stem == "sqrt":
        values = np.abs(values)
    count = {"fma": 3, "rcp": 1, "sqrt": 1}.get(stem, 2)
    given = ", ".join(f"%x{i}" for i in range(count))
    line = f"{stem}.{rounding}.f32 %y, {given};"
    found = np.concatenate(
        [
            run_lanes(line, list(values[:count, part]), np.float32)
            for part in np.split(np.arange(64), 2)
        ]
    )
    a, b, c = ([Fraction(float(v)) for v in row] for row in values)
    exact = {
        "add": lambda x, y, z: x + y, "sub": lambda x, y, z: x - y, "mul": lambda x, y, z: x * y,
        "div": lambda x, y, z: x / y, "fma": lambda x, y, z: x * y + z,
        "rcp": lambda x, y, z: 1 / x, "sqrt": lambda x, y, z: x,
    }[stem]  # fmt: skip
    power = 2 if stem == "sqrt" else 1  # compared by squares
    for value, x, y, z in zip(found, a, b, c):
        wanted = exact(x, y, z)
        up = rounding == "rp" or (rounding == "rz" and wanted < 0)
        nearer = np.nextafter(value, np.float32(-np.inf if up else np.inf))
        here, there = Fraction(float(value)) ** power, Fraction(float(nearer)) ** power
        assert (there < wanted <= here) if up else (here <= wanted < there)
    if stem in ("add", "mul", "fma"):
        pairs = [row.view(np.uint64) for row in values[:count]]
        line = f"{stem}.{rounding}.f32x2 %y, {given};"
        np.testing.assert_array_equal(run_lanes(line, pairs, np.uint64).view(np.float32), found)


@pytest.mark.parametrize("kind", ["u32", "bf16x2"])
def test_packed_comparisons(kind, seed):
    a_bits, a = _halves(seed)
    b_bits = np.roll(a_bits, 3)
    b = np.roll(a, 3)
    pairs = [np.stack((x, np.roll(x, 7)), 1).reshape(-1).view(np.uint32) for x in (a_bits, b_bits)]
    found = run_lanes(f"set.lt.{kind}.bf16x2 %y, %x0, %x1;", pairs, np.uint32).view(np.uint16)
    with np.errstate(invalid="ignore"):
        less = a < b
    wanted = np.stack((less, np.roll(less, 7)), 1).reshape(-1)
    np.testing.assert_array_equal(found, wanted * {"u32": 0xFFFF, "bf16x2": 0x3F80}[kind])


def test_old_values_of_a_vector_atomic_are_numbers():
    """Arithmetic on what the atomic returns, guarded or not."""
    for guard in ("", "@%p1"):
        out = torch.arange(256, dtype=torch.float32)
        body = f"""
        .reg .f32 %f<8>;
        mov.b32 %f4, 0x3F800000;
        {guard} atom.global.v2.f32.add {{%f1, %f2}}, [%d1+8], {{%f4, %f4}};
        add.f32 %f3, %f1, %f2;
        st.global.f32 [%d1], %f3;
        """
        run_body(body, threads=1, out=out)
        assert out[:5].tolist() == [5, 1, 3, 4, 4], guard
