"""Kernel parameters: at addresses of each lane, in every form of address."""

import numpy as np
import pytest
import torch

from dsv4.simulator import KernelFault, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .b64 out, .param .align 16 .b8 table[128])
{{
.reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b128 %q;
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
{body}
mul.wide.u32 %d2, %r1, 4;
add.u64 %d1, %d1, %d2;
st.global.b32 [%d1], %r2;
ret;
}}
"""
TABLE = np.random.default_rng(7).integers(0, 2**31, 32, np.int32)
FORMS = {
    "param": "mov.b64 %d3, table;\nmul.wide.u32 %d4, %r1, 4;\nadd.u64 %d3, %d3, %d4;\n"
    "ld.param.b32 %r2, [%d3];",
    "generic": "mov.b64 %d3, table;\ncvta.param.u64 %d3, %d3;\nmad.wide.u32 %d3, %r1, 4, %d3;\n"
    "ld.b32 %r2, [%d3];",
    "32 bits": "mov.b32 %r3, table;\nmad.lo.u32 %r3, %r1, 4, %r3;\ncvt.u64.u32 %d3, %r3;\n"
    "cvta.param.u64 %d3, %d3;\nld.b32 %r2, [%d3];",
}


def _run(body: str) -> list[int]:
    out = torch.zeros(32, dtype=torch.int32)
    text = TEXT.format(body=body)
    simulate_ptx(text, "k", grid=1, block=32, params=(out, TABLE.tobytes()))
    return out.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_each_lane_reads_its_place(form):
    assert _run(FORMS[form]) == TABLE.tolist()


def test_16_bytes_at_once():
    body = "ld.param.b128 %q, [table+16];\nmov.b128 {%d3, %d4}, %q;\ncvt.u32.u64 %r2, %d4;"
    assert _run(body) == [int(TABLE[6])] * 32


def test_behind_the_last_parameter():
    with pytest.raises(KernelFault, match="kernel parameters end at byte 144"):
        _run("mov.b64 %d3, table;\nmad.wide.u32 %d3, %r1, 8, %d3;\nld.param.b32 %r2, [%d3];")
