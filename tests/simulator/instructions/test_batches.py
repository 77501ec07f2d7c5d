"""Operations of a block that are computed together see the registers of their own place."""

import struct

import pytest
import torch

from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")


def _f32(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def test_registers_that_change_in_between():
    products = [f"mul.f32 %r{10 + k}, %r9, {_f32(k)};" for k in range(1, 11)]
    sums = [f"add.f32 %r30, %r30, %r{10 + k};" for k in range(1, 11)]
    body = "\n".join(
        [
            "cvt.rn.f32.u32 %r9, %r1;",
            *products,
            f"add.f32 %r9, %r9, {_f32(1)};",  # a source of the products
            f"mul.f32 %r11, %r9, {_f32(3)};",  # a result of one of them
            f"mul.f32 %r12, %r12, {_f32(5)};",  # a result that is its own source
            f"mov.b32 %r30, {_f32(0)};",
            *sums,
            "cvt.rzi.u32.f32 %r31, %r30;",
            "st.global.b32 [%d2], %r31;",
        ]
    )
    out = torch.zeros(256, dtype=torch.int32)
    run_body(body, out=out)
    thread = torch.arange(64)
    expected = 3 * (thread + 1) + 5 * 2 * thread + sum(range(3, 11)) * thread
    assert out[:64].tolist() == expected.tolist()
