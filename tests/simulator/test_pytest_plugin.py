"""The `sim` fixture, as a test suite of somebody else's kernels has it."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.stage("simulator")

# %r1 thread, %r2 its word in shared memory; 64 threads write words and read those of others.
TEST = '''
import torch

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.shared .align 16 .b8 words[256];
.visible .entry k(.param .u64 out)
{
.reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %d<4>;
ld.param.u64 %d1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, words;
shl.b32 %r3, %r1, 2;
add.u32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
BARRIER
xor.b32 %r3, %r3, 252;
add.u32 %r4, %r2, %r3;
ld.shared.b32 %r5, [%r4];
cvt.u64.u32 %d2, %r3;
add.u64 %d3, %d1, %d2;
st.global.b32 [%d3], %r5;
ret;
}
"""


def test_kernel(sim):
    out = torch.zeros(64, dtype=torch.int32)
    sim.coverage = COVERAGE
    sim.ptx(PTX, "k", grid=1, block=64, params=(out,))
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))
'''
SYNC = "bar.sync 0;"
GUARDED = "setp.eq.u32 %p1, %r1, 99;\n@%p1 bar.sync 1;\nbar.sync 0;"


@pytest.mark.parametrize(
    ("barrier", "coverage", "outcomes", "said"),
    [
        (SYNC, True, {"passed": 1}, ""),
        ("", True, {"failed": 1}, "*read-write race*"),
        (GUARDED, True, {"passed": 1, "errors": 1}, "*synchronisation never reached*"),
        (GUARDED, False, {"passed": 1}, ""),
    ],
)
def test_fixture(pytester, barrier, coverage, outcomes, said):
    pytester.makeconftest('pytest_plugins = ["dsv4.simulator.pytest_plugin"]')
    pytester.makepyfile(TEST.replace("BARRIER", barrier).replace("COVERAGE", str(coverage)))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(**outcomes)
    if said:
        result.stdout.fnmatch_lines([said])
