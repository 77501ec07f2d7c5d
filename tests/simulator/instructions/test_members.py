"""Lanes that take part in a collective: those that its member mask names, and no others."""

import pytest
import torch

from dsv4.simulator import KernelFault, UnsupportedInstruction
from tests.simulator.helpers.ptx import run_body

pytestmark = pytest.mark.stage("simulator")

# Each with the member mask to be filled in.
COLLECTIVES = {
    "shuffle": "shfl.sync.idx.b32 %r8, %r6, 3, 31, {0};",
    "vote": "vote.sync.ballot.b32 %r8, %p1, {0};",
    "match": "match.any.sync.b32 %r8, %r6, {0};",
    "reduce": "redux.sync.add.u32 %r8, %r6, {0};",
    "elect": "elect.sync %r8|%p5, {0};",
    "sync": "bar.warp.sync {0};",
}
EACH = pytest.mark.parametrize("line", COLLECTIVES.values(), ids=COLLECTIVES)
HALF = "setp.lt.u32 %p4, %r6, 16;\n@!%p4 bra JOIN;\n{0}\nJOIN:"


@EACH
@pytest.mark.parametrize("members", ["1", "0x7fffffff", "0"])
def test_a_lane_that_is_no_member(line, members):
    run_body(line.format("0xffffffff"), threads=32)
    with pytest.raises(KernelFault, match=r"by lane \d+, which is not among the members"):
        run_body(line.format(members), threads=32)


@EACH
def test_a_member_that_is_elsewhere(line):
    run_body(HALF.format(line.format("0xffff")), threads=32)
    with pytest.raises(KernelFault, match="of lanes 0xffffffff, of which 0xffff0000 are elsewhere"):
        run_body(HALF.format(line.format("-1")), threads=32)


@EACH
def test_members_that_have_exited_are_not_waited_for(line):
    body = "setp.lt.u32 %p4, %r6, 16;\n@!%p4 exit;\n" + line.format("-1")
    run_body(body, threads=32)


def test_groups_of_lanes_may_shuffle_at_once():
    """Each half of the warp names itself; sums over both at once are not simulated."""
    masks = "setp.lt.u32 %p4, %r6, 16;\nselp.b32 %r9, 0xffff, 0xffff0000, %p4;\n"
    out = torch.zeros(256, dtype=torch.int32)
    body = masks + "shfl.sync.bfly.b32 %r8, %r6, 15, 31, %r9;\nst.global.b32 [%d2], %r8;"
    run_body(body, threads=32, out=out)
    assert out[:32].tolist() == [lane ^ 15 for lane in range(32)]
    with pytest.raises(UnsupportedInstruction, match=r"redux.* of several groups of lanes at once"):
        run_body(masks + "redux.sync.add.u32 %r8, %r6, %r9;", threads=32)


def test_nothing_is_defined_of_a_lane_that_does_not_take_part():
    out = torch.zeros(256, dtype=torch.int32)
    shuffle = "shfl.sync.idx.b32 %r8, %r6, {0}, 31, 0xffff;\nst.global.b32 [%d2], %r8;"
    run_body(HALF.format(shuffle.format(7)), threads=32, out=out)
    assert out[:16].tolist() == [7] * 16
    run_body(HALF.format(shuffle.format(20)), threads=32, out=out)
    assert 20 not in out[:16].tolist()
