"""Barriers of the whole grid: the workspace that cooperative launches find in %envreg1 and 2."""

import pytest
import torch

from dsv4.simulator import KernelFault, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

# Every CTA adds one to a counter of the workspace, waits for all, and writes what the next wrote.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .b64 first, .param .b64 out)
{
.reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %d<10>;
ld.param.b64 %d1, [first];
ld.param.b64 %d2, [out];
mov.u32 %r1, %envreg2;
mov.u32 %r2, %envreg1;
mov.b64 %d3, {%r1, %r2};
mov.u32 %r3, %ctaid.x;
mov.u32 %r4, %nctaid.x;
mul.wide.u32 %d4, %r3, 4;
add.u64 %d5, %d1, %d4;
add.u32 %r5, %r3, 100;
st.global.b32 [%d5], %r5;
atom.acq_rel.gpu.global.add.u32 %r6, [%d3+4], 1;
WAIT:
ld.acquire.gpu.global.u32 %r6, [%d3+4];
setp.lt.u32 %p1, %r6, %r4;
@%p1 bra WAIT;
add.u32 %r7, %r3, 1;
rem.u32 %r7, %r7, %r4;
mul.wide.u32 %d6, %r7, 4;
add.u64 %d6, %d1, %d6;
ld.global.b32 %r8, [%d6];
add.u64 %d7, %d2, %d4;
st.global.b32 [%d7], %r8;
ret;
}
"""


# More CTAs than the GPU has multiprocessors: a cooperative launch may count on all.
@pytest.mark.parametrize(
    ("schedule", "ctas", "races"),
    [("eager", 16, True), ("random", 16, True), ("eager", 140, False)],
)
def test_ctas_wait_for_each_other(schedule, ctas, races):
    for _ in range(2):  # each launch has a workspace of its own
        first, out = (torch.zeros(ctas, dtype=torch.int32) for _ in range(2))
        report = simulate_ptx(
            TEXT, "k", grid=ctas, block=1, params=(first, out), schedule=schedule, races=races
        )  # fmt: skip
        assert not report.races
        assert out.tolist() == [(i + 1) % ctas + 100 for i in range(ctas)]


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(KernelFault, match="cooperative launch too large"):
        simulate_ptx(TEXT, "k", grid=5000, block=1, params=(0, 0))
