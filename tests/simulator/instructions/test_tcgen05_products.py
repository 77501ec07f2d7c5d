"""tcgen05.mma, every kind, against products of operands laid out by hand from the PTX ISA.

Nothing here uses the simulator's own formats, layouts or masks: element values come from the
formats' definitions, images from the canonical layouts, lanes from the data paths.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from dsv4.simulator import KernelFault
from tests.simulator.helpers.tmem_kernel import run_tcgen05

pytestmark = pytest.mark.stage("simulator")

# Exponent and mantissa bits; the codes of all ones in e4m3, and the top exponent of e5m2, are not
# finite and not drawn.
FLOATS = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}
CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5,
        "u8": 0, "s8": 1}  # fmt: skip
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
B_PLACE = 65536  # of operand B in shared memory; A is at 0
SHARED = 2 * B_PLACE
A_COLUMN = 64  # of operand A in TMEM; D is at 0


def small_float(codes: np.ndarray, name: str) -> np.ndarray:
    """Value of sign-exponent-mantissa codes."""
    exponent, mantissa = FLOATS[name]
    bias = 2 ** (exponent - 1) - 1
    e = codes >> mantissa & (1 << exponent) - 1
    m = codes & (1 << mantissa) - 1
    magnitude = np.where(
        e == 0,
        m * 2.0 ** (1 - bias - mantissa),
        (m + (1 << mantissa)) * 2.0 ** (e.astype(float) - bias - mantissa),
    )
    return np.where(codes >> (exponent + mantissa) & 1, -magnitude, magnitude)


def draw(generator, name: str, rows: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes and the values they stand for."""
    shape = (rows, depth)
    if name in ("u8", "s8"):
        codes = generator.integers(0, 256, shape, np.uint8)
        return codes, codes.view(np.int8 if name == "s8" else np.uint8).astype(float)
    if name in FLOATS:
        exponent, mantissa = FLOATS[name]
        magnitudes = (1 << (exponent + mantissa)) - {"e4m3": 1, "e5m2": 4}.get(name, 0)
        codes = generator.integers(0, magnitudes, shape, np.uint8)
        codes |= generator.integers(0, 2, shape, np.uint8) << (exponent + mantissa)
        return codes, small_float(codes, name)
    if name == "f16":
        values = generator.standard_normal(shape).astype(np.float16)
        return values.view(np.uint16), values.astype(float)
    bits = generator.standard_normal(shape).astype(np.float32).view(np.uint32)
    if name == "bf16":
        codes = (bits >> 16).astype(np.uint16)
        return codes, (codes.astype(np.uint32) << 16).view(np.float32).astype(float)
    return bits, (bits & 0xFFFFE000).view(np.float32).astype(float)  # tf32 drops 13 bits


def shared_rows(codes: np.ndarray, name: str) -> np.ndarray:
    """Bytes of each row along K: 4- and 6-bit elements in groups of 16, padded to 16 bytes."""
    if name not in ("e2m1", "e2m3", "e3m2"):
        return np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)
    bits = 4 if name == "e2m1" else 6
    rows = np.full(codes.shape, 0xEE, np.uint8)
    for i in range(len(codes)):
        for k in range(0, codes.shape[1], 16):
            packed = sum(int(c) << bits * j for j, c in enumerate(codes[i, k : k + 16]))
            rows[i, k : k + 2 * bits] = list(packed.to_bytes(2 * bits, "little"))
    return rows


@dataclass
class Image:
    """An operand in shared memory: its bytes, and the descriptor without the address."""

    data: np.ndarray
    descriptor: int


def _descriptor(leading: int, stride: int, mode: int) -> int:
    return (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | mode << 61


def k_major_plain(codes, name) -> Image:
    rows = shared_rows(codes, name)
    image = np.zeros(B_PLACE, np.uint8)
    for i, row in enumerate(rows):
        for chunk in range(len(row) // 16):
            at = i // 8 * 512 + chunk * 128 + i % 8 * 16
            image[at : at + 16] = row[16 * chunk : 16 * chunk + 16]
    return Image(image, _descriptor(128, 512, 0))


def k_major_swizzled(codes, name) -> Image:
    """128-byte rows in groups of 8; chunk c of row i at c xor i mod 8."""
    rows = shared_rows(codes, name)
    image = np.zeros(B_PLACE, np.uint8)
    for i, row in enumerate(rows):
        for chunk in range(len(row) // 16):
            at = i // 8 * 1024 + i % 8 * 128 + (chunk ^ i % 8) * 16
            image[at : at + 16] = row[16 * chunk : 16 * chunk + 16]
    return Image(image, _descriptor(16, 1024, 2))


def mn_major(codes, name) -> Image:
    """128-byte runs along M or N, 8 K rows each (4, 32 bytes kept together, for tf32)."""
    size = codes.dtype.itemsize
    run = 128 // size
    image = np.zeros(B_PLACE, np.uint8)
    rows, depth = codes.shape
    leading = depth * 128
    for i in range(rows):
        for k in range(depth):
            inside = i % run * size
            if size == 4:
                inside ^= k % 4 * 32
                at = i // run * leading + k // 4 * 512 + k % 4 * 128 + inside
            else:
                inside ^= k % 8 * 16
                at = i // run * leading + k // 8 * 1024 + k % 8 * 128 + inside
            image[at : at + size] = codes[i, k : k + 1].view(np.uint8)
    stride, mode = (512, 1) if size == 4 else (1024, 2)
    return Image(image, _descriptor(leading, stride, mode))


LAYOUTS = {"plain": k_major_plain, "swizzled": k_major_swizzled, "mn": mn_major}


def tmem_words(codes: np.ndarray, name: str) -> np.ndarray:
    """Operand A in TMEM: one byte per element of 8 bits or less, 00xxxx00 and 0xxxxxx0."""
    shift = {"e2m1": 2, "e2m3": 1, "e3m2": 1}.get(name, 0)
    data = codes << shift if shift else codes
    return np.ascontiguousarray(data).view(np.uint32).reshape(len(codes), -1)


def descriptor(kind, a, b, m, n, accumulator, layouts=("plain", "plain"), negate=(0, 0), more=0):
    """The 32-bit instruction descriptor, field by field."""
    d = {"f16": 0, "f32": 1, "s32": 2}[accumulator]
    return (
        d << 4 | CODE[a] << 7 | CODE[b] << 10 | negate[0] << 13 | negate[1] << 14
        | (layouts[0] == "mn") << 15 | (layouts[1] == "mn") << 16 | n >> 3 << 17 | m >> 4 << 24
        | more
    )  # fmt: skip


def lanes_and_columns(m: int, n: int, group: int, stationary: bool) -> list[tuple]:
    """(row of this CTA, column of D) -> as pieces (rows, columns of D, first lane of each row)."""
    rows = m // group
    if stationary or (group == 2 and m == 128):
        parts = 128 // rows
        share = n // parts
        return [(range(rows), range(p * share, p * share + share), p * rows) for p in range(parts)]
    if rows == 64:
        return [(range(16 * w, 16 * w + 16), range(n), 32 * w) for w in range(4)]
    return [(range(rows), range(n), 0)]


def unpack(tmem: np.ndarray, m: int, n: int, group: int, stationary: bool) -> np.ndarray:
    """D [M, N] of 32-bit words from TMEM [CTAs, columns, lanes]."""
    out = np.zeros((m, n), np.uint32)
    rows = m // group
    for cta in range(group):
        for held, wide, lane in lanes_and_columns(m, n, group, stationary):
            block = tmem[cta, : len(wide), lane : lane + len(held)].T
            out[cta * rows + held.start : cta * rows + held.stop, wide.start : wide.stop] = block
    return out


@dataclass
class Problem:
    """One product: operand types, sizes, layouts; draws operands and runs the statement."""

    kind: str
    a: str
    b: str
    m: int
    n: int
    group: int = 1
    layouts: tuple[str, str] = ("plain", "swizzled")
    accumulator: str = "f32"
    stationary: bool = False

    def operands(self, seed: int, extra: int = 0):
        """Values of A [M, K], B [N + extra, K]; shared memory [CTAs, bytes]; A's codes."""
        generator = np.random.default_rng(seed)
        depth = DEPTH[self.kind]
        a_codes, a = draw(generator, self.a, self.m, depth)
        b_codes, b = draw(generator, self.b, self.n + extra, depth)
        shared = np.zeros((self.group, SHARED), np.uint8)
        rows, share = self.m // self.group, (self.n + extra) // self.group
        for cta in range(self.group):
            self.a_image = LAYOUTS[self.layouts[0]](a_codes[cta * rows : (cta + 1) * rows], self.a)
            self.b_image = LAYOUTS[self.layouts[1]](
                b_codes[cta * share : (cta + 1) * share], self.b
            )
            shared[cta, :B_PLACE], shared[cta, B_PLACE:] = self.a_image.data, self.b_image.data
        return a, b, shared, a_codes

    def setup(self, idesc: int) -> str:
        return (
            f"add.u64 %a, %smem, {self.a_image.descriptor};\n"
            f"add.u64 %b, %smem, {self.b_image.descriptor + (B_PLACE >> 4)};\n"
            f"mov.b32 %idesc, {idesc};\n"
        )

    def statement(self, a: str = "%a", masks: str = "", rest: str = "", qualifiers: str = "",
                  predicate: str = "%new") -> str:  # fmt: skip
        ws = ".ws" if self.stationary else ""
        return (
            f"tcgen05.mma{ws}.cta_group::{self.group}.kind::{self.kind}{qualifiers} "
            f"[%tmem], {a}, %b, %idesc, {masks}{predicate}{rest};\n"
        )

    def descriptor(self, **fields) -> int:
        return descriptor(
            self.kind, self.a, self.b, self.m, self.n, self.accumulator, self.layouts, **fields
        )


def tmem_before(group: int, n: int = 64) -> np.ndarray:
    """All -7.5; room for `n` columns of D, and more."""
    columns = max(32, 1 << n.bit_length())
    return np.full((group, min(columns, 512), 128), np.float32(-7.5).view(np.uint32), np.uint32)


def as_float(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32).astype(float)


def close(found: np.ndarray, expected: np.ndarray, seed: int) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(
        found, expected, atol=2e-6 * scale, rtol=2e-6, err_msg=f"seed {seed}"
    )


F8 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
PRODUCTS = [
    Problem("f16", "f16", "bf16", 128, 8), Problem("f16", "bf16", "f16", 64, 40),
    Problem("f16", "bf16", "bf16", 128, 256, layouts=("mn", "mn")),
    Problem("f16", "f16", "f16", 256, 64, 2, ("swizzled", "plain")),
    Problem("f16", "f16", "f16", 128, 96, 2, ("mn", "swizzled")),
    Problem("tf32", "tf32", "tf32", 128, 64), Problem("tf32", "tf32", "tf32", 64, 8),
    Problem("tf32", "tf32", "tf32", 128, 64, layouts=("mn", "mn")),
    Problem("tf32", "tf32", "tf32", 256, 128, 2, ("mn", "plain")),
    Problem("f8f6f4", "e4m3", "e5m2", 128, 128, layouts=("mn", "mn")),
    Problem("f8f6f4", "e2m1", "e3m2", 64, 24), Problem("f8f6f4", "e2m3", "e4m3", 256, 48, 2),
    Problem("f8f6f4", "e3m2", "e2m1", 128, 64, 2, ("plain", "plain")),
    *(Problem("f16", "bf16", "f16", m, 64, stationary=True) for m in (32, 64, 128)),
    Problem("f8f6f4", "e2m1", "e2m3", 32, 128, stationary=True),
    Problem("tf32", "tf32", "tf32", 64, 256, stationary=True),
]  # fmt: skip


MIXED = [Problem("f8f6f4", a, b, 128, 32, layouts=("swizzled", "plain")) for a in F8 for b in F8]
DAILY = {*range(0, len(PRODUCTS), 2), *range(len(PRODUCTS), len(PRODUCTS) + len(MIXED), 6)}


def _name(problem: Problem) -> str:
    ws = "-ws" if problem.stationary else ""
    majors = "-".join(problem.layouts)
    return f"{problem.a}-{problem.b}-{problem.m}x{problem.n}-{problem.group}cta{ws}-{majors}"


@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=() if i in DAILY else pytest.mark.slow, id=_name(p))
     for i, p in enumerate(PRODUCTS + MIXED)],
)  # fmt: skip
def test_products(problem, seed):
    a, b, shared, _ = problem.operands(seed)
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + problem.statement(), shared,
        tmem_before(problem.group, problem.n),
    )  # fmt: skip
    found = unpack(after, problem.m, problem.n, problem.group, problem.stationary)
    close(as_float(found), a @ b.T, seed)
    # What the product does not cover stays.
    columns = len(lanes_and_columns(problem.m, problem.n, problem.group, problem.stationary)[0][1])
    assert (as_float(after[:, columns:]) == -7.5).all()


@pytest.mark.parametrize("types", [("u8", "u8"), ("s8", "s8"), ("u8", "s8")])
@pytest.mark.parametrize(
    ("m", "n", "group", "layouts", "stationary"),
    [(128, 48, 1, ("swizzled", "plain"), False), (64, 24, 1, ("plain", "plain"), False),
     (128, 128, 1, ("mn", "mn"), False), (256, 64, 2, ("plain", "swizzled"), False),
     (32, 64, 1, ("plain", "plain"), True)],
)  # fmt: skip
def test_integer_products_are_exact(types, m, n, group, layouts, stationary, seed):
    problem = Problem("i8", *types, m, n, group, layouts, "s32", stationary)
    a, b, shared, _ = problem.operands(seed)
    before = np.full((group, 128, 128), 1000, np.uint32)
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + problem.statement(predicate="%add"), shared, before
    )
    found = unpack(after, m, n, group, stationary).view(np.int32)
    np.testing.assert_array_equal(found, (a @ b.T + 1000).astype(np.int64))


@pytest.mark.parametrize("saturate", [0, 1])
def test_integer_overflow(saturate, seed):
    problem = Problem("i8", "u8", "u8", 128, 32, accumulator="s32")
    a, b, shared, _ = problem.operands(seed)
    start = (1 << 31) - 1000
    after = run_tcgen05(
        problem.setup(problem.descriptor(more=saturate << 3)) + problem.statement(predicate="%add"),
        shared, np.full((1, 32, 128), start, np.uint32),
    )  # fmt: skip
    total = (a @ b.T).astype(np.int64) + start
    assert (total >= 1 << 31).any()
    expected = np.minimum(total, (1 << 31) - 1) if saturate else total.astype(np.int32)
    np.testing.assert_array_equal(unpack(after, 128, 32, 1, False).view(np.int32), expected)


@pytest.mark.parametrize("negate", [(0, 1), (1, 0), (1, 1)])
def test_negated_operands(negate, seed):
    problem = Problem("f8f6f4", "e4m3", "e2m1", 128, 32)
    a, b, shared, _ = problem.operands(seed)
    after = run_tcgen05(
        problem.setup(problem.descriptor(negate=negate)) + problem.statement(), shared,
        tmem_before(1),
    )  # fmt: skip
    sign = (-1) ** sum(negate)
    close(as_float(unpack(after, 128, 32, 1, False)), sign * (a @ b.T), seed)


@pytest.mark.parametrize("kind", ["f16", "f8f6f4"])
def test_half_accumulators_take_the_low_half_of_a_word(kind, seed):
    types = {"f16": ("f16", "f16"), "f8f6f4": ("e2m1", "e2m3")}[kind]
    problem = Problem(kind, *types, 128, 64, accumulator="f16")
    a, b, shared, _ = problem.operands(seed)
    before = np.full((1, 64, 128), 0xDEAD0000 | int(np.float16(2.5).view(np.uint16)), np.uint32)
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + problem.statement(predicate="%add"), shared, before
    )
    words = unpack(after, 128, 64, 1, False)
    found = (words & 0xFFFF).astype(np.uint16).view(np.float16).astype(float)
    np.testing.assert_allclose(found, a @ b.T + 2.5, rtol=2**-10, atol=2e-3)


@pytest.mark.parametrize("kind", ["f16", "tf32"])
@pytest.mark.parametrize("shift", [0, 1, 15])
def test_scaled_input(kind, shift, seed):
    types = {"f16": ("bf16", "f16"), "tf32": ("tf32", "tf32")}[kind]
    problem = Problem(kind, *types, 128, 32)
    a, b, shared, _ = problem.operands(seed)
    after = run_tcgen05(
        problem.setup(problem.descriptor())
        + problem.statement(masks="{0, 0, 0, 0}, ", rest=f", {shift}", predicate="%add"),
        shared, tmem_before(1),
    )  # fmt: skip
    close(as_float(unpack(after, 128, 32, 1, False)), a @ b.T - 7.5 * 2.0**-shift, seed)


def test_scaled_input_is_for_f16_and_tf32(seed):
    problem = Problem("f8f6f4", "e4m3", "e4m3", 128, 32)
    _, _, shared, _ = problem.operands(seed)
    with pytest.raises(KernelFault, match="scale-input-d of 3 for kind::f8f6f4"):
        run_tcgen05(
            problem.setup(problem.descriptor())
            + problem.statement(masks="{0, 0, 0, 0}, ", rest=", 3", predicate="%add"),
            shared, tmem_before(1),
        )  # fmt: skip


@pytest.mark.parametrize(("m", "group"), [(128, 1), (64, 1), (256, 2), (128, 2)])
def test_disabled_output_lanes(m, group, seed):
    """Bit i of word v of a CTA's four words keeps lane 32 v + i as it was."""
    problem = Problem("f16", "f16", "f16", m, 64, group, ("plain", "plain"))
    a, b, shared, _ = problem.operands(seed)
    words = np.random.default_rng(seed).integers(0, 1 << 32, 4 * group, np.uint32)
    masks = "{" + ", ".join(f"%v{i}" for i in range(len(words))) + "}, "
    moves = "".join(f"mov.b32 %v{i}, {w};\n" for i, w in enumerate(words.tolist()))
    before = tmem_before(group)
    after = run_tcgen05(
        moves + problem.setup(problem.descriptor()) + problem.statement(masks=masks), shared, before
    )
    free = run_tcgen05(problem.setup(problem.descriptor()) + problem.statement(), shared, before)
    close(as_float(unpack(free, m, 64, group, False)), a @ b.T, seed)
    bits = words.reshape(group, 4, 1) >> np.arange(32, dtype=np.uint32) & 1
    off = bits.reshape(group, 1, 128).astype(bool)
    np.testing.assert_array_equal(after, np.where(off, before, free))


A_IN_TMEM = [("f16", "f16"), ("f16", "bf16"), ("tf32", "tf32"), ("i8", "s8"),
             *(("f8f6f4", name) for name in F8)]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), A_IN_TMEM)
@pytest.mark.parametrize(
    ("m", "group", "stationary"),
    [(128, 1, False), (64, 1, False), *(pytest.param(*p, marks=pytest.mark.slow) for p in
     [(256, 2, False), (128, 2, False), (64, 1, True)])],
)  # fmt: skip
def test_operand_a_in_tmem(kind, name, m, group, stationary, seed):
    """Rows of A lie where D's do; the halves of a 2 x 2 data path both hold all of A's columns."""
    other = {"f16": "f16", "tf32": "tf32", "i8": "u8", "f8f6f4": "e4m3"}[kind]
    accumulator = "s32" if kind == "i8" else "f32"
    problem = Problem(kind, name, other, m, 64, group, ("plain", "plain"), accumulator, stationary)
    a, b, shared, codes = problem.operands(seed)
    shared[:, :B_PLACE] = 0
    words = tmem_words(codes, name)
    before = tmem_before(group)
    rows = m // group
    for cta in range(group):
        for held, _, lane in lanes_and_columns(m, 64, group, stationary):
            part = words[cta * rows + held.start : cta * rows + held.stop]
            before[cta, A_COLUMN : A_COLUMN + words.shape[1], lane : lane + len(held)] = part.T
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + f"add.u32 %off, %tmem, {A_COLUMN};\n"
        + problem.statement(a="[%off]"), shared, before,
    )  # fmt: skip
    found = unpack(after, m, 64, group, stationary)
    if kind == "i8":
        np.testing.assert_array_equal(found.view(np.int32), (a @ b.T).astype(np.int64))
    else:
        close(as_float(found), a @ b.T, seed)


@pytest.mark.parametrize(("m", "group"), [(128, 1), (256, 2)])
def test_a_shift_moves_the_rows_of_a_afterwards(m, group, seed):
    problem = Problem("f16", "bf16", "f16", m, 32, group, ("plain", "plain"))
    a, b, shared, codes = problem.operands(seed)
    before = tmem_before(group)
    words = tmem_words(codes, "bf16")
    a_columns = slice(A_COLUMN, A_COLUMN + 8)
    before[:, a_columns] = words.reshape(group, 128, 8).transpose(0, 2, 1)
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + f"add.u32 %off, %tmem, {A_COLUMN};\n"
        + problem.statement(a="[%off]", qualifiers=".ashift"), shared, before,
    )  # fmt: skip
    close(as_float(unpack(after, m, 32, group, False)), a @ b.T, seed)
    rows = np.arange(128)
    source = np.where(rows % 32 == 31, rows, rows + 1)
    np.testing.assert_array_equal(after[:, a_columns], before[:, a_columns][:, :, source])


@pytest.mark.parametrize("collector", ["", ".collector::b0::fill", ".collector::b3::lastuse"])
@pytest.mark.parametrize(
    ("m", "n", "mask", "shift", "zeroed"),
    [
        # Runs of skip + 1 zeroed and use + 1 used columns, from the kind in the first-span bit.
        (128, 64, dict(skip=2, use=3, first=[0], start=[0]), 0, ["0000111"]),
        (64, 128, dict(skip=2, use=3, first=[1, 0], start=[0, 0]), 0, ["1110000", "0000111"]),
        (32, 128, dict(skip=2, use=3, first=[1, 1, 0, 0], start=[0, 1, 2, 1]), 2,
         ["1110000", "1100001", "0011100", "0001110"]),
        (128, 256, dict(skip=0, use=0, first=[1], start=[0]), 0, ["10"]),
    ],
)  # fmt: skip
def test_zero_column_masks(m, n, mask, shift, zeroed, collector, seed):
    """The examples of the PTX ISA; every pattern repeats over its share of N."""
    problem = Problem("f16", "f16", "f16", m, n, layouts=("plain", "plain"), stationary=True)
    a, b, shared, _ = problem.operands(seed, extra=shift)
    bits = 1 << 39 | mask["skip"] << 40 | mask["use"] << 48 | shift << 56
    for i, (first, start) in enumerate(zip(mask["first"], mask["start"])):
        bits |= first << 32 + i | start << 8 * i
    after = run_tcgen05(
        problem.setup(problem.descriptor()) + f"mov.b64 %d9, {bits};\n"
        + problem.statement(rest=", %d9", qualifiers=collector), shared, tmem_before(1, n),
    )  # fmt: skip
    share = n // len(zeroed)
    keep = np.concatenate(
        [[pattern[i % len(pattern)] == "0" for i in range(share)] for pattern in zeroed]
    )
    expected = (a @ b[shift:].T) * keep
    close(as_float(unpack(after, m, n, 1, True)), expected, seed)


@pytest.mark.parametrize(
    ("kind", "m", "n", "group", "stationary"),
    [("f16", 256, 24, 2, False), ("i8", 128, 40, 1, False), ("i8", 256, 48, 2, False),
     ("f16", 128, 192, 1, True), ("f16", 32, 64, 1, False)],
)  # fmt: skip
def test_sizes_that_do_not_exist(kind, m, n, group, stationary):
    name = {"f16": "f16", "i8": "s8"}[kind]
    problem = Problem(kind, name, name, m, n, group, ("plain", "plain"),
                      {"f16": "f32", "i8": "s32"}[kind], stationary)  # fmt: skip
    problem.a_image = problem.b_image = Image(np.zeros(16, np.uint8), 0)
    with pytest.raises(KernelFault, match=f"M={m}, N={n}"):
        run_tcgen05(
            problem.setup(problem.descriptor()) + problem.statement(),
            np.zeros((group, 16), np.uint8), tmem_before(group, n),
        )  # fmt: skip
