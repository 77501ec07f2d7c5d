"""printf in kernels, against the C library's own."""

import ctypes
import random

import numpy as np
import pytest

from dsv4.simulator import UnsupportedInstruction
from tests.simulator.helpers.lane_kernel import run_lanes

pytestmark = pytest.mark.stage("simulator")

LIBC = ctypes.CDLL(None)


def _c_text(form: bytes, *values) -> str:
    buffer = ctypes.create_string_buffer(4096)
    LIBC.snprintf(buffer, 4096, form, *values)
    return buffer.value.decode()


def _print(stores: str, form: bytes) -> str:
    """PTX that prints the arguments `stores` leave at [%a], the way compilers emit it."""
    padded = form + bytes(8)
    data = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(form) + 1, 8)]
    text = "\n".join(
        f"mov.b64 %v, {word:#x};\nst.local.b64 [%a+{256 + 8 * i}], %v;"
        for i, word in enumerate(data)
    )
    return f"""
.local .align 8 .b8 frame[1024];
.reg .b64 %a; .reg .b64 %g; .reg .b64 %f; .reg .b64 %v;
mov.b64 %a, frame;
cvta.local.u64 %g, %a;
add.s64 %f, %g, 256;
{text}
{stores}
{{
.param .b64 param0;
.param .b64 param1;
.param .b32 retval0;
st.param.b64 [param0], %f;
st.param.b64 [param1+0], %g;
call.uni (retval0), vprintf, (param0, param1);
ld.param.b32 %y, [retval0];
}}
"""


def test_every_conversion(capsys):
    form = b"%d|%5u|%#x|%c|%-8.3f|%ld|%12llu|%+e|%g|%i|%08X|%o|100%%\n"
    ints = np.random.default_rng().integers(0, 2**32, 32, np.uint32)
    longs = np.random.default_rng().integers(0, 2**64, 32, np.uint64)
    floats = np.random.default_rng().standard_normal(32) * 10.0 ** random.randint(-3, 6)
    places = [(0, 0), (4, 0), (8, 0), (12, "c"), (16, 2), (24, 1), (32, 1), (40, 2), (48, 2),
              (56, 0), (60, 0), (64, 0)]  # fmt: skip
    stores = "\n".join(
        "mov.b32 %y, 65;\nst.local.b32 [%a+12], %y;" if what == "c"
        else f"st.local.b{64 if what else 32} [%a+{at}], %x{what};"
        for at, what in places
    )  # fmt: skip
    count = run_lanes(_print(stores, form), [ints, longs, floats], np.uint32)
    assert (count == len(places)).all()
    expected = ""
    for n, long, x in zip(ints.tolist(), longs.tolist(), floats.tolist()):
        word, wide, real = ctypes.c_uint32(n), ctypes.c_uint64(long), ctypes.c_double(x)
        of = {0: word, 1: wide, 2: real, "c": ctypes.c_int(65)}
        expected += _c_text(form, *(of[what] for _, what in places))
    assert capsys.readouterr().out == expected


def test_only_active_lanes_print(capsys):
    values = np.arange(32, dtype=np.uint32)
    body = _print("st.local.b32 [%a], %x0;", b"%u ")
    frame, call = body.split("{\n.param", 1)
    skip = "mov.b32 %y, 0;\nsetp.lt.u32 %p1, %x0, 29;\n@%p1 bra done;\n"
    line = f"{frame}{skip}{{\n.param{call}done:"
    count = run_lanes(line, [values], np.uint32)
    assert capsys.readouterr().out == "29 30 31 "
    assert count.tolist() == [0] * 29 + [1] * 3


def test_a_string(capsys):
    stores = f"add.s64 %v, %g, 512;\nst.local.b64 [%a], %v;\nmov.b64 %v, {0x006F6C6C6548:#x};\n"
    line = _print(stores + "st.local.b64 [%a+512], %v;", b"<%7s>")
    run_lanes(line, [np.zeros(32, np.uint32)], np.uint32)
    assert capsys.readouterr().out == "<  Hello>" * 32


def test_another_function_is_named():
    line = "{ .param .b32 r;\ncall.uni (r), elsewhere, ();\nld.param.b32 %y, [r];\n}"
    with pytest.raises(UnsupportedInstruction, match=r"call of elsewhere.*PTX line \d+"):
        run_lanes(line, [np.zeros(32, np.uint32)], np.uint32)
