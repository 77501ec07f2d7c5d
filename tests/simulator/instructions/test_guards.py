"""Guards: an instruction whose guard is false in every lane does nothing, one whose guard is true
in every lane does what it does without."""

import re

import pytest
import torch

from dsv4.simulator import KernelFault, SimulatorError, simulate_ptx
from tests.simulator.helpers.ptx import kinds, run_body
from tests.simulator.instructions.test_instruction_table import LINES

pytestmark = pytest.mark.stage("simulator")

_WIDTH = {"r": 32, "x": 32, "f": 32, "d": 64, "e": 64, "h": 16, "b": 8}
_REGISTER = re.compile(r"%([rxfdehb])(\d+)")
_UNGUARDED = {line for _, line in LINES if line.startswith(("bra", "ret", "exit"))}
_ALL_LINES = sorted({line for _, line in LINES} - _UNGUARDED)
_TIMELESS = [line for line in _ALL_LINES if "clock" not in line and "globaltimer" not in line]


def _module(line: str, guard: str) -> tuple[str, int]:
    """A module that runs the line between a known state of its registers and their store; the
    number of registers. %p3 is true, %p2 false."""
    registers = sorted(set(_REGISTER.findall(line)))
    predicates = sorted(set(re.findall(r"%p([01])", line)))
    before, after = [], []
    for i, (kind, number) in enumerate(registers):
        bits, name = _WIDTH[kind], f"%{kind}{number}"
        value = 2048 + 128 * i if bits >= 32 else 7 + i
        before.append(f"mov.b{max(bits, 16)} {name}, {value};" if bits > 8 else "")
        store = "st.global.b8" if bits == 8 else f"st.global.b{bits}"
        after.append(f"{store} [%out+{256 * i}], {name};")
    for i, number in enumerate(predicates, len(registers)):
        before.append(f"setp.eq.u32 %p{number}, %tid.x, 1;")
        after.append(f"selp.b32 %word, 1, 0, %p{number};\nst.global.b32 [%out+{256 * i}], %word;")
    text = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 in)
{{
.reg .pred %p<4>; .reg .b8 %b<4>; .reg .b16 %h<8>; .reg .b32 %r<16>, %x<128>, %word;
.reg .b64 %d<8>, %out, %lane; .reg .f32 %f<8>; .reg .f64 %e<4>; .reg .b128 %q<4>;
ld.param.b64 %out, [in];
cvt.u64.u32 %lane, %tid.x;
shl.b64 %lane, %lane, 3;
add.u64 %out, %out, %lane;
setp.eq.u32 %p3, %tid.x, %tid.x;
setp.ne.u32 %p2, %tid.x, %tid.x;
{chr(10).join(before)}
bra NEXT;
NEXT:
{guard} {line}
bra LAST;
LAST:
{chr(10).join(after)}
ret;
}}
"""
    return text, len(registers) + len(predicates)


def _outcome(line: str, guard: str) -> tuple[str, torch.Tensor]:
    """Words of the error, without what a guard changes in it, and what the registers held."""
    return _run(*_module(line, guard))


def _run(text: str, count: int) -> tuple[str, torch.Tensor]:
    out = torch.zeros(256 * max(count, 1) // 4, dtype=torch.int32)
    error = ""
    try:
        simulate_ptx(
            text, "k", grid=(1, 1, 1), block=(32, 1, 1), params=(out,), buffers=(out,), shared=65536
        )
    except SimulatorError as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        error = re.sub(r"@!?%p\d|-?(0x)?[0-9a-f]{6,}", "", error)  # addresses differ by run
    return error, out


@pytest.mark.parametrize("guard", ["@%p2", "@!%p3"])
@pytest.mark.parametrize("line", _ALL_LINES)
def test_a_false_guard_leaves_everything_alone(line, guard):
    error, out = _outcome(line, guard)
    assert error == ""
    text, count = _module(line, guard)
    _, expected = _run(text.replace(f"{guard} {line}", ""), count)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("guard", ["@%p3", "@!%p2"])
@pytest.mark.parametrize("line", _TIMELESS)
def test_a_true_guard_changes_nothing(line, guard):
    expected_error, expected = _outcome(line, "")
    error, out = _outcome(line, guard)
    assert error == expected_error
    assert torch.equal(out, expected)


def test_part_of_a_warp_in_an_aligned_instruction():
    body = (
        "setp.eq.u32 %p4, %r6, 0;\n@%p4 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    )
    with pytest.raises(KernelFault, match=r"relinquish_alloc_permit.* in a part of a warp"):
        run_body(body, target="sm_100a")


def test_one_warp_allocates_under_a_guard():
    body = """
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 256;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    bar.sync 0;
    ld.shared.b32 %r10, [%r2];
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 256;
    """
    assert kinds(body, threads=128, target="sm_100a") == []


def test_one_warp_waits_for_its_own_copies_under_a_guard():
    body = """
    @%p1 cp.async.ca.shared.global [%r4], [%d2], 4;
    @%p1 cp.async.commit_group;
    {guard} cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.b32 %r10, [%r2];
    """
    assert kinds(body.format(guard="@%p1")) == []
    assert kinds(body.format(guard="@!%p1")) == ["read-write race"]
