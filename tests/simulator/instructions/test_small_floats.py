"""Conversions to and from 4-, 6- and 8-bit floats against nearest-even from the formats' values."""

import numpy as np
import pytest

from tests.simulator.helpers.lane_kernel import run_lanes

pytestmark = pytest.mark.stage("simulator")

# Exponent and mantissa bits, the largest finite code, the code of NaN if there is one.
FORMATS = {
    "e4m3": (4, 3, 0x7E, 0x7F), "e5m2": (5, 2, 0x7B, 0x7F), "e2m3": (2, 3, 0x1F, None),
    "e3m2": (3, 2, 0x1F, None), "e2m1": (2, 1, 0x7, None),
}  # fmt: skip


def _magnitudes(name: str) -> np.ndarray:
    """Value of every finite code without sign, ascending."""
    exponent, mantissa, largest, _ = FORMATS[name]
    codes = np.arange(largest + 1)
    e, m = codes >> mantissa, codes & (1 << mantissa) - 1
    bias = 2 ** (exponent - 1) - 1
    small = m * 2.0 ** (1 - bias - mantissa)
    return np.where(e == 0, small, (m + (1 << mantissa)) * 2.0 ** (e - bias - mantissa))


def _encode(value: float, name: str, relu: bool) -> int:
    exponent, mantissa, largest, nan = FORMATS[name]
    if np.isnan(value):
        return largest if nan is None else nan
    if relu and (value < 0 or np.signbit(value)):
        return 0
    distance = np.abs(_magnitudes(name) - min(abs(value), _magnitudes(name)[-1]))
    nearest = np.flatnonzero(distance == distance.min())
    code = int(nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))
    return code | int(np.signbit(value)) << (exponent + mantissa)


def _values(name: str, seed: int) -> np.ndarray:
    """Numbers, their midpoints, just beside those, and what saturates; float32 [32]."""
    generator = np.random.default_rng(seed)
    held = _magnitudes(name)
    middle = (held[:-1] + held[1:]) / 2
    out = np.concatenate([
        generator.choice(held, 6), generator.choice(middle, 8),
        np.nextafter(generator.choice(middle, 6).astype(np.float32), np.float32(np.inf)),
        generator.uniform(0, held[-1], 6), [0, np.inf, held[-1] * 1.5, np.nan, 1e-30, held[-1]],
    ]).astype(np.float32)  # fmt: skip
    return out * generator.choice([-1, 1], len(out)).astype(np.float32)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_from_single(name, relu, seed):
    """The first operand goes to the upper half."""
    low, high = _values(name, seed), _values(name, seed + 1)
    line = f"cvt.rn.satfinite{relu}.{name}x2.f32"
    if name == "e2m1":
        found = run_lanes(f"{line} %y, %x0, %x1;", [high, low], np.uint8)
        codes = np.stack((found & 15, found >> 4), 1)
    else:
        found = run_lanes(f"{line} %y, %x0, %x1;", [high, low], np.uint16)
        codes = found.view(np.uint8).reshape(32, 2)
    for column, source in ((0, low), (1, high)):
        wanted = [_encode(v, name, bool(relu)) for v in source.astype(float)]
        got = codes[:, column]
        for value, a, b in zip(source, got.tolist(), wanted):
            assert a == b, (value, hex(a), hex(b), f"seed {seed}")


@pytest.mark.parametrize("name", FORMATS)
def test_to_half(name, seed):
    """Every code, among the others of its pair."""
    exponent, mantissa, largest, _ = FORMATS[name]
    bits = 1 + exponent + mantissa
    codes = np.random.default_rng(seed).permutation(1 << bits)
    codes = np.resize(codes, -(-len(codes) // 64) * 64)
    magnitude = codes & (1 << bits - 1) - 1
    with np.errstate(invalid="ignore"):
        values = np.where(
            magnitude <= largest, _magnitudes(name)[np.minimum(magnitude, largest)],
            np.where((name == "e5m2") & (magnitude == 0x7C), np.inf, np.nan),
        )  # fmt: skip
    values = np.where(codes >> bits - 1, -values, values)
    for start in range(0, len(codes), 64):
        part = codes[start : start + 64].astype(np.uint8)
        if name == "e2m1":
            operand = part[0::2] | part[1::2] << 4
        else:
            operand = part.view(np.uint16)
        found = run_lanes(f"cvt.rn.f16x2.{name}x2 %y, %x0;", [operand], np.uint32)
        halves = found.view(np.float16).astype(float)
        wanted = values[start : start + 64]
        np.testing.assert_array_equal(np.isnan(halves), np.isnan(wanted))
        real = ~np.isnan(wanted)
        np.testing.assert_array_equal(halves[real], wanted[real])
        np.testing.assert_array_equal(np.signbit(halves[real]), np.signbit(wanted[real]))


def test_from_exponent_scales():
    codes = np.arange(64, dtype=np.uint8) * 4
    codes[-1] = 255
    found = run_lanes("cvt.rn.bf16x2.ue8m0x2 %y, %x0;", [codes.view(np.uint16)], np.uint32)
    values = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
    np.testing.assert_array_equal(values[:-1], 2.0 ** (codes[:-1].astype(float) - 127))
    assert np.isnan(values[-1])


@pytest.mark.parametrize("relu", ["", ".relu"])
def test_from_fixed_point(relu):
    """Every value, with scales of its own in both halves; what is too large ends at the largest."""
    for start in range(0, 256, 64):
        codes = np.arange(start, start + 64).astype(np.uint8)
        scales = (117 + codes % 23).astype(np.uint8)
        scales[-2:] = 254, 255
        operands = [codes.view(np.uint16), scales.view(np.uint16)]
        found = run_lanes(
            f"cvt.rn.satfinite{relu}.scaled::n2::ue8m0.bf16x2.s2f6x2 %y, %x0, %x1;",
            operands,
            np.uint32,
        )
        values = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        wanted = codes.view(np.int8) / 64 * 2.0 ** (scales.astype(float) - 127)
        if relu:
            wanted = np.maximum(wanted, 0)
        np.testing.assert_array_equal(values[:-2], wanted[:-2])
        largest = float.fromhex("0x1.fep127")
        assert values[-2] == np.clip(wanted[-2], -largest, largest)
        assert np.isnan(values[-1])
        plain = run_lanes("cvt.rn.bf16x2.s2f6x2 %y, %x0;", operands[:1], np.uint32)
        values = (plain.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(values, codes.view(np.int8) / 64)


@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_from_packed_halves(name, source, seed):
    values = np.random.default_rng(seed).standard_normal(64).astype(np.float32) * np.float32(3)
    if source == "f16":
        halves = values.astype(np.float16)
        values = halves.astype(np.float32)
    else:
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (halves.astype(np.uint32) << 16).view(np.float32)
    line = f"cvt.rn.satfinite.{name}x2.{source}x2 %y, %x0;"
    if name == "e2m1":
        found = run_lanes(line, [halves.view(np.uint32)], np.uint8)
        codes = np.stack((found & 15, found >> 4), 1).reshape(-1)
    else:
        codes = run_lanes(line, [halves.view(np.uint32)], np.uint16).view(np.uint8)
    np.testing.assert_array_equal(codes, [_encode(float(v), name, False) for v in values])


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
def test_redux_of_floats(op, modifiers, seed):
    """The smallest or largest of all lanes; a NaN counts only with .NaN."""
    values = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
    with_nan = values.copy()
    with_nan[seed % 32] = np.nan
    for source in (values, with_nan):
        found = run_lanes(f"redux.sync.{op}{modifiers}.f32 %y, %x0, -1;", [source], np.float32)
        numbers = np.abs(source) if ".abs" in modifiers else source
        best = (np.nanmin if op == "min" else np.nanmax)(numbers)
        if ".NaN" in modifiers and np.isnan(source).any():
            assert np.isnan(found).all()
        else:
            np.testing.assert_array_equal(found, np.full(32, best))
