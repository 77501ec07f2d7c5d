"""mma.sync, movmatrix and the 8-bit matrix loads and stores against the ISA's index formulas."""

import numpy as np
import pytest
import torch

from dsv4.simulator import UnsupportedInstruction, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
        "s4": 4, "u4": 4, "b1": 1}  # fmt: skip
# Of lane 4 g + q: (elements of A, row of a_i, column of a_i, elements of B, row of b_i), as the ISA
# writes them down shape by shape.
FORMULAS = {
    ("m8n8k4", 64): (1, lambda i, g: g, lambda i, q: q, 1, lambda i, q: q),
    ("m16n8k4", 64): (2, lambda i, g: g + 8 * i, lambda i, q: q, 1, lambda i, q: q),
    ("m16n8k8", 64): (4, lambda i, g: g if i in (0, 2) else g + 8,
                      lambda i, q: q if i in (0, 1) else q + 4, 2, lambda i, q: q + 4 * i),
    ("m16n8k16", 64): (8, lambda i, g: g if i % 2 == 0 else g + 8,
                       lambda i, q: 2 * i + q if i % 2 == 0 else 2 * i - 2 + q,
                       4, lambda i, q: q + 4 * i),
    ("m16n8k4", 32): (2, lambda i, g: g + 8 * i, lambda i, q: q, 1, lambda i, q: q),
    ("m16n8k8", 32): (4, lambda i, g: g if i in (0, 2) else g + 8,
                      lambda i, q: q if i in (0, 1) else q + 4, 2, lambda i, q: q + 4 * i),
    ("m16n8k8", 16): (4, lambda i, g: g if i < 2 else g + 8, lambda i, q: 2 * q + (i & 1),
                      2, lambda i, q: 2 * q + i),
    ("m16n8k16", 16): (8, lambda i, g: g if i < 2 or 4 <= i < 6 else g + 8,
                       lambda i, q: 2 * q + (i & 1) + 8 * (i >= 4),
                       4, lambda i, q: 2 * q + (i & 1) + 8 * (i >= 2)),
    ("m8n8k16", 8): (4, lambda i, g: g, lambda i, q: 4 * q + i, 4, lambda i, q: 4 * q + i),
    ("m16n8k16", 8): (8, lambda i, g: g if i < 4 else g + 8, lambda i, q: 4 * q + (i & 3),
                      4, lambda i, q: 4 * q + i),
    ("m16n8k32", 8): (16, lambda i, g: g if i < 4 or 8 <= i < 12 else g + 8,
                      lambda i, q: 4 * q + (i & 3) + 16 * (i >= 8),
                      8, lambda i, q: 4 * q + (i & 3) + 16 * (i >= 4)),
    ("m8n8k32", 4): (8, lambda i, g: g, lambda i, q: 8 * q + i, 8, lambda i, q: 8 * q + i),
    ("m16n8k32", 4): (16, lambda i, g: g if i < 8 else g + 8, lambda i, q: 8 * q + (i & 7),
                      8, lambda i, q: 8 * q + i),
    ("m16n8k64", 4): (32, lambda i, g: g if i < 8 or 16 <= i < 24 else g + 8,
                      lambda i, q: 8 * q + (i & 7) + 32 * (i >= 16),
                      16, lambda i, q: 8 * q + (i & 7) + 32 * (i >= 8)),
    ("m8n8k128", 1): (32, lambda i, g: g, lambda i, q: 32 * q + i, 32, lambda i, q: 32 * q + i),
    ("m16n8k128", 1): (64, lambda i, g: g if i < 32 else g + 8, lambda i, q: 32 * q + (i & 31),
                       32, lambda i, q: 32 * q + i),
    ("m16n8k256", 1): (128, lambda i, g: g if i < 32 or 64 <= i < 96 else g + 8,
                       lambda i, q: 32 * q + (i & 31) + 128 * (i >= 64),
                       64, lambda i, q: 32 * q + (i & 31) + 128 * (i >= 32)),
}  # fmt: skip
_PLAIN = [
    *(("f16", shape, d, "") for shape in ("m16n8k8", "m16n8k16") for d in ("f32", "f16")),
    ("bf16", "m16n8k8", "f32", ""), ("bf16", "m16n8k16", "f32", ""),
    ("tf32", "m16n8k4", "f32", ""), ("tf32", "m16n8k8", "f32", ""),
    *(("f64", shape, "f64", "") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    *((t, shape, d, "") for t in ("e4m3", "e5m2") for shape in ("m16n8k16", "m16n8k32")
      for d in ("f32", "f16")),
    *((t, shape, "s32", sat) for t, shapes in (("s8", ("m8n8k16", "m16n8k16", "m16n8k32")),
                                              ("u4", ("m8n8k32", "m16n8k32", "m16n8k64")),
                                              ("s4", ("m16n8k64",)), ("u8", ("m16n8k32",)))
      for shape in shapes for sat in ("", ".satfinite")),
    *(("b1", shape, "s32", op) for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
      for op in (".and.popc", ".xor.popc")),
]  # fmt: skip


def _kernel(opcode: str, a: int, b: int, c: int, wide: bool) -> str:
    """Lane t loads a, b and c registers from in[t], runs `opcode` and stores c registers."""
    kind, size = ("b64", 8) if wide else ("b32", 4)
    loads = "\n".join(
        f"ld.global.{kind} %{n}{i}, [%d3+{size * (start + i)}];"
        for n, start, count in (("a", 0, a), ("b", a, b), ("c", a + b, c))
        for i in range(count)
    )
    names = {n: ", ".join(f"%{n}{i}" for i in range(k)) for n, k in (("a", a), ("b", b), ("c", c))}
    stores = "\n".join(f"st.global.{kind} [%d5+{size * i}], %c{i};" for i in range(c))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .b64 in, .param .b64 out)
{{
.reg .b32 %r<4>; .reg .b64 %d<8>; .reg .{kind} %a<{a}>, %b<{b}>, %c<{c}>;
ld.param.b64 %d1, [in];
ld.param.b64 %d2, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d3, %r1, {size * (a + b + c)};
add.u64 %d3, %d1, %d3;
mul.wide.u32 %d5, %r1, {size * c};
add.u64 %d5, %d2, %d5;
{loads}
{opcode} {{{names["c"]}}}, {{{names["a"]}}}, {{{names["b"]}}}, {{{names["c"]}}};
{stores}
ret;
}}
"""


def _draw(generator, name: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes as integers, and values."""
    if name == "f64":
        values = generator.standard_normal(shape)
        return values.view(np.uint64), values
    if name == "f16":
        values = generator.standard_normal(shape).astype(np.float16)
        return values.view(np.uint16).astype(np.uint64), values.astype(float)
    if name in ("bf16", "tf32"):
        bits = generator.standard_normal(shape).astype(np.float32).view(np.uint32)
        keep = bits & (0xFFFF0000 if name == "bf16" else 0xFFFFE000)
        codes = bits >> 16 if name == "bf16" else bits
        return codes.astype(np.uint64), keep.view(np.float32).astype(float)
    if name in ("e4m3", "e5m2"):
        exponent, mantissa = (4, 3) if name == "e4m3" else (5, 2)
        codes = generator.integers(0, 112, shape)  # finite, and not too large for f16 sums
        bias = 2 ** (exponent - 1) - 1
        codes = codes & ((1 << mantissa + 2) - 1) | (bias - 2 << mantissa)
        e, m = codes >> mantissa, codes & (1 << mantissa) - 1
        return codes.astype(np.uint64), (m / (1 << mantissa) + 1) * 2.0 ** (e - bias)
    codes = generator.integers(0, 1 << BITS[name], shape)
    values = codes.astype(float)
    if name in ("s4", "s8"):
        values = np.where(codes >> BITS[name] - 1, values - (1 << BITS[name]), values)
    return codes.astype(np.uint64), values


def _packed(elements: list[int], bits: int, register: int) -> list[int]:
    per = register // bits
    return [
        sum(int(x) << bits * j for j, x in enumerate(elements[i : i + per]))
        for i in range(0, len(elements), per)
    ]


@pytest.mark.parametrize(("name", "shape", "d", "suffix"), _PLAIN)
def test_products(name, shape, d, suffix, seed):
    generator = np.random.default_rng(seed)
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    count_a, row, column, count_b, depth_of = FORMULAS[shape, BITS[name]]
    a_codes, a = _draw(generator, name, (rows, depth))
    b_codes, b = _draw(generator, name, (depth, 8))
    wide = name == "f64"
    register = 64 if wide else 32
    c = {"s32": generator.integers(-1000, 1000, (rows, 8)).astype(float)}.get(
        d, generator.standard_normal((rows, 8)).astype(np.float16).astype(float)
    )
    if suffix == ".satfinite":
        c[:] = 2**31 - 50
    lanes = []
    for lane in range(32):
        g, q = lane // 4, lane % 4
        held_a = [a_codes[row(i, g), column(i, q)] for i in range(count_a)]
        held_b = [b_codes[depth_of(i, q), g] for i in range(count_b)]
        held_c = [c[g + 8 * (i // 2), 2 * q + i % 2] for i in range(rows // 4)]
        held_c = {
            "f64": lambda x: np.array(x).view(np.uint64), "f32": lambda x:
            np.array(x, np.float32).view(np.uint32), "f16": lambda x:
            np.array(x, np.float16).view(np.uint32), "s32": lambda x:
            np.array(x).astype(np.int64).astype(np.int32).view(np.uint32),
        }[d](held_c)  # fmt: skip
        fragment_a = _packed(held_a, BITS[name], register)
        fragment_b = _packed(held_b, BITS[name], register)
        lanes.append([*fragment_a, *fragment_b, *held_c.tolist()])
    before = torch.from_numpy(np.array(lanes, np.uint64 if wide else np.uint32).view(np.uint8))
    out = torch.zeros((32, len(held_c) * register // 8), dtype=torch.uint8)
    satfinite = suffix if suffix == ".satfinite" else ""
    operation = "" if satfinite else suffix
    opcode = f"mma.sync.aligned.{shape}.row.col{satfinite}.{d}.{name}.{name}.{d}{operation}"
    simulate_ptx(
        _kernel(opcode, len(fragment_a), len(fragment_b), len(held_c), wide), "k",
        grid=(1, 1, 1), block=(32, 1, 1), params=(before, out),
    )  # fmt: skip
    kind = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    found = np.zeros((rows, 8))
    for lane, values in enumerate(out.numpy().view(kind)):
        for i, value in enumerate(values):
            found[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = value
    expected = a @ b
    if suffix == ".xor.popc":
        expected = (a[:, :, None] != b[None]).sum(1)
    expected = expected + c
    if d == "s32":
        wrapped = expected.astype(np.int64).astype(np.int32)
        clipped = np.clip(expected, -(2**31), 2**31 - 1)
        np.testing.assert_array_equal(found, clipped if satfinite else wrapped)
    else:
        bound = {"f64": 1e-13, "f32": 2e-6, "f16": 2**-10}[d]
        np.testing.assert_allclose(found, expected, rtol=bound, atol=bound * 8)


@pytest.mark.parametrize(
    ("opcode", "reason"),
    [
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", "sm_120a only"),
        ("mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sparse"),
    ],
)
def test_what_is_refused_names_a_reason(opcode, reason):
    text = _kernel(opcode, 4, 2, 4, False)
    with pytest.raises(UnsupportedInstruction, match=reason) as caught:
        data = torch.zeros(32, 40, dtype=torch.uint8)
        simulate_ptx(text, "k", grid=(1, 1, 1), block=(32, 1, 1), params=(data, data.clone()))
    assert f"PTX line {text[: text.index(opcode)].count(chr(10)) + 1}" in str(caught.value)


def test_movmatrix_transposes(seed):
    matrix = np.random.default_rng(seed).integers(0, 1 << 16, (8, 8), np.uint16)
    text = _kernel("// ", 1, 1, 1, False).replace(
        "//  {%c0}, {%a0}, {%b0}, {%c0};", "movmatrix.sync.aligned.m8n8.trans.b16 %c0, %a0;"
    )
    held = np.zeros((32, 3), np.uint32)
    held[:, 0] = matrix.reshape(32, 2).view(np.uint32)[:, 0]
    out = torch.zeros((32, 1), dtype=torch.int32)
    simulate_ptx(
        text, "k", grid=(1, 1, 1), block=(32, 1, 1),
        params=(torch.from_numpy(held.view(np.int32)), out),
    )  # fmt: skip
    np.testing.assert_array_equal(out.numpy().view(np.uint16).reshape(8, 8), matrix.T)
