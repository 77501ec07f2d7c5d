"""Calls of device functions, indirect branches and what inline assembly declares."""

import numpy as np
import pytest

from dsv4.simulator import KernelFault, UnsupportedInstruction
from dsv4.simulator.ptx.parser import parse_module
from tests.simulator.helpers.lane_kernel import run_lanes

pytestmark = pytest.mark.stage("simulator")

LANES = np.arange(32, dtype=np.uint32)

# 3 a + b by a loop, with an early return where a is even.
TRIPLE = """
.func (.param .b32 triple_result) triple(.param .b32 triple_a, .param .b32 triple_b)
{
.reg .pred %p<3>; .reg .b32 %r<6>;
ld.param.b32 %r1, [triple_a];
ld.param.b32 %r2, [triple_b];
and.b32 %r3, %r1, 1;
setp.eq.u32 %p1, %r3, 0;
@%p1 bra $EVEN;
mov.u32 %r4, 0;
$AGAIN:
add.u32 %r2, %r2, %r1;
add.u32 %r4, %r4, 1;
setp.lt.u32 %p2, %r4, 3;
@%p2 bra $AGAIN;
st.param.b32 [triple_result+0], %r2;
ret;
$EVEN:
st.param.b32 [triple_result+0], %r1;
ret;
}
"""
CALL = """{
.param .b32 a; .param .b32 b; .param .b32 out;
st.param.b32 [a+0], %x0;
st.param.b32 [b+0], 100;
call.uni (out), triple, (a, b);
ld.param.b32 %y, [out+0];
}"""
TRIPLED = np.where(LANES % 2, 3 * LANES + 100, LANES)


def test_call_with_loop_and_early_return():
    assert run_lanes(CALL, [LANES], np.uint32, TRIPLE).tolist() == TRIPLED.tolist()


def test_two_calls_and_one_inside_another_function():
    outer = """
.func (.param .b32 result) twice(.param .b32 given)
{
.reg .b32 %r<4>;
ld.param.b32 %r1, [given];
{
.param .b32 a; .param .b32 b; .param .b32 out;
st.param.b32 [a], %r1;
st.param.b32 [b], 100;
call.uni (out), triple, (a, b);
ld.param.b32 %r2, [out];
}
add.u32 %r3, %r2, 1;
st.param.b32 [result], %r3;
ret;
}
"""
    call = CALL.replace("triple", "twice").replace("(a, b)", "(a)")
    line = f"{call}\nmov.b32 %r3, %y;\n{CALL}\nadd.u32 %y, %y, %r3;"
    expected = 2 * TRIPLED + 1
    assert run_lanes(line, [LANES], np.uint32, TRIPLE + outer).tolist() == expected.tolist()


def test_guarded_call_runs_in_the_lanes_that_make_it():
    call = CALL.replace("call.uni", "@%p1 call").replace("ld.param.b32 %y", "@%p1 ld.param.b32 %y")
    line = f"mov.b32 %y, 7;\nsetp.gt.u32 %p1, %x0, 20;\n{call}"
    expected = np.where(LANES > 20, TRIPLED, 7)
    assert run_lanes(line, [LANES], np.uint32, TRIPLE).tolist() == expected.tolist()


def test_structures_are_passed_by_value():
    functions = """
.func (.param .align 8 .b8 pair_result[16]) swapped(.param .align 8 .b8 pair_given[16])
{
.reg .b64 %rd<3>;
ld.param.v2.b64 {%rd1, %rd2}, [pair_given];
st.param.b64 [pair_result+8], %rd1;
st.param.b64 [pair_result], %rd2;
ret;
}
"""
    line = """{
.param .align 8 .b8 given[16]; .param .align 8 .b8 out[16];
cvt.u64.u32 %d5, %x0;
st.param.b64 [given], %d5;
st.param.b32 [given+8], 5;
st.param.b32 [given+12], 0;
call (out), swapped, (given);
ld.param.b64 %d6, [out];
ld.param.b64 %d7, [out+8];
mad.lo.u64 %d7, %d7, 100, %d6;
cvt.u32.u64 %y, %d7;
}"""
    assert run_lanes(line, [LANES], np.uint32, functions).tolist() == (100 * LANES + 5).tolist()


def test_parameters_in_registers():
    functions = """
.func (.reg .u32 out) plus(.reg .u32 a, .reg .u32 b)
{
add.u32 a, a, b;
mov.u32 out, a;
ret;
}
"""
    line = "call (%y), plus, (%x0, 5);\nadd.u32 %y, %y, %x0;"
    assert run_lanes(line, [LANES], np.uint32, functions).tolist() == (2 * LANES + 5).tolist()


def test_trap_of_a_function_names_the_call_too():
    functions = """
.file 1 "kernel.cu"
.func checked(.param .b32 given)
{
.reg .pred %p<2>; .reg .b32 %r<2>;
.loc 1 5 0
ld.param.b32 %r1, [given];
setp.gt.u32 %p1, %r1, 9;
@%p1 trap;
ret;
}
"""
    line = """{
.param .b32 a;
st.param.b32 [a], %x0;
.loc 1 40 0
call checked, (a);
}
mov.b32 %y, 0;"""
    with pytest.raises(KernelFault, match=r"kernel.cu:5, called from kernel.cu:40"):
        run_lanes(line, [LANES], np.uint32, functions)
    assert not run_lanes(line, [LANES % 4], np.uint32, functions).any()


def test_recursion_is_refused_by_name():
    functions = ".func loops()\n{\ncall loops;\nret;\n}\n"
    with pytest.raises(UnsupportedInstruction, match="loops calls itself"):
        run_lanes("call loops;\nmov.b32 %y, 0;", [LANES], np.uint32, functions)


def test_call_through_a_register_is_refused():
    line = """
mov.b32 %y, 0;
shape: .callprototype (.reg .b32 a) _ (.reg .b32 b);
call (%y), %d1, (%x0), shape;"""
    with pytest.raises(UnsupportedInstruction, match="call through a register"):
        run_lanes(line, [LANES], np.uint32)


@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_indirect_branch(guard):
    line = f"""
mov.b32 %y, 0;
and.b32 %r2, %x0, 3;
setp.lt.u32 %p1, %x0, 16;
ways: .branchtargets $ZERO, $ONE, $TWO, $ONE;
{guard}brx.idx %r2, ways;
mov.b32 %y, 77;
bra $END;
$ZERO: mov.b32 %y, 10;
bra $END;
$ONE: mov.b32 %y, 11;
bra $END;
$TWO: mov.b32 %y, 12;
$END:
"""
    expected = np.array([10, 11, 12, 11])[LANES % 4]
    if guard:
        expected = np.where(LANES < 16, expected, 77)
    assert run_lanes(line, [LANES], np.uint32).tolist() == expected.tolist()


def test_registers_without_a_percent_sign_at_any_depth():
    line = """
.reg .b32 outer_desc;
mov.b32 outer_desc, %x0;
{
.reg .b32 inner, many<3>;
add.u32 inner, outer_desc, 1;
add.u32 many2, inner, outer_desc;
{ .reg .b32 inner; mov.b32 inner, 1000; add.u32 many2, many2, inner; }
add.u32 %y, many2, inner;
}
"""
    assert run_lanes(line, [LANES], np.uint32).tolist() == (3 * LANES + 1002).tolist()


def test_vectors_of_registers():
    line = """{
.reg .v4 .b32 four; .reg .v2 .b32 two;
.shared .align 16 .b8 room[512];
mov.b32 four.x, %x0; mov.b32 four.y, 20; mov.b32 four.z, 30; mov.b32 four.w, 40;
mov.u32 %r2, room;
mad.lo.u32 %r2, %x0, 16, %r2;
st.shared.v4.b32 [%r2], four;
ld.shared.v2.b32 two, [%r2];
add.u32 %y, two.x, two.y;
}"""
    assert run_lanes(line, [LANES], np.uint32).tolist() == (LANES + 20).tolist()


def test_unknown_kinds_of_registers_are_refused_by_name():
    with pytest.raises(UnsupportedInstruction, match=r"\.reg \.v3 \.b32 odd"):
        run_lanes("{ .reg .v3 .b32 odd; }\nmov.b32 %y, 0;", [LANES], np.uint32)


def test_initial_values():
    functions = """
.const .align 4 .f32 factors[2] = {0f3F800000, 0f40A00000};
.global .align 8 .u64 table[1] = {generic(factors)};
"""
    line = "ld.const.f32 %y, [factors+4];"
    assert (run_lanes(line, [LANES], np.float32, functions) == 5).all()
    with pytest.raises(UnsupportedInstruction, match="initial value of variable table"):
        run_lanes("ld.global.u64 %d5, [table];\nmov.b32 %y, 0;", [LANES], np.float32, functions)


def test_cluster_of_the_directive():
    text = ".target sm_90a\n.entry k() .reqntid 64, 2 .reqnctapercluster 2, 1, 1\n{\nret;\n}\n"
    entry = parse_module(text).entries["k"]
    assert (entry.threads, entry.cluster) == ((64, 2, 1), (2, 1, 1))
