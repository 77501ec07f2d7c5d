"""A kernel that cannot be read does not keep the others of its module from running."""

import pytest
import torch

from dsv4.simulator import UnsupportedInstruction, simulate_ptx

pytestmark = pytest.mark.stage("simulator")

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
GOOD = """
.visible .entry good(.param .b64 out)
{
.reg .b64 %d<2>;
ld.param.b64 %d1, [out];
st.global.b32 [%d1], 7;
ret;
}
"""
CALLS = """
.visible .entry calls(.param .b64 out)
{
.reg .b32 %r<4>;
{
.param .b32 result;
call.uni (result), slow_path, (%r1);
}
ret;
}
"""


@pytest.mark.parametrize("text", [GOOD + CALLS, CALLS + GOOD], ids=["before", "behind"])
def test_the_other_entries_run(text):
    out = torch.zeros(4, dtype=torch.int32)
    simulate_ptx(HEAD + text, "good", grid=1, block=32, params=(out,), races=False)
    assert out.tolist() == [7, 0, 0, 0]
    with pytest.raises(UnsupportedInstruction, match="call of slow_path, which"):
        simulate_ptx(HEAD + text, "calls", grid=1, block=32, params=(out,))


def test_a_module_of_refused_entries_alone_is_refused():
    with pytest.raises(UnsupportedInstruction, match="slow_path"):
        simulate_ptx(HEAD + CALLS, "calls", grid=1, block=32, params=(0,))
