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
TABLE = sorted({line for _, line in LINES} - _UNGUARDED)
_TIMELESS = [line for line in TABLE if "clock" not in line and "globaltimer" not in line]


def _module(line: str, guard: str) -> tuple[str, int]:
    """A module that runs the line between a known state of its registers and their store; the
    number of registers. Addresses are those of an array, of shared memory, of mbarriers, of TMEM:
    most lines do something. %p3 is true, %p2 false."""
    registers = sorted(set(_REGISTER.findall(line)))
    predicates = sorted(set(re.findall(r"%p([01])", line)))
    before, after = [], []
    if tmem := re.match(r"tcgen05\.(ld|st|shift)\.", line):
        before.append("mov.b32 %word, 1024;")
        before.append("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%word], 64;")
        after.append("mov.b32 %word, 0;")
        after.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %word, 64;")
    for i, (kind, number) in enumerate(registers):
        bits, name = _WIDTH[kind], f"%{kind}{number}"
        value = 2048 + 128 * i if bits >= 32 else 7 + i
        if tmem and kind == "r":
            value = 0
        if kind == "d" and f"[{name}" in line:
            before.append(f"add.u64 {name}, %data, {128 * i};")
        elif bits > 8:
            before.append(f"mov.b{max(bits, 16)} {name}, {value};")
        if kind == "r" and "mbarrier" in line and "mbarrier.init" not in line:
            before.append(f"@%leader mbarrier.init.shared.b64 [{name}], 65536;")
        store = "st.global.b8" if bits == 8 else f"st.global.b{bits}"
        after.append(f"{store} [%out+{256 * i}], {name};")
    for i, number in enumerate(predicates, len(registers)):
        before.append(f"setp.eq.u32 %p{number}, %tid.x, 1;")
        after.append(f"selp.b32 %word, 1, 0, %p{number};\nst.global.b32 [%out+{256 * i}], %word;")
    text = f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 in, .param .b64 array)
{{
.reg .pred %p<4>, %leader; .reg .b8 %b<4>; .reg .b16 %h<8>; .reg .b32 %r<16>, %x<128>, %word;
.reg .b64 %d<8>, %out, %data, %lane; .reg .f32 %f<8>; .reg .f64 %e<4>; .reg .b128 %q<4>;
ld.param.b64 %out, [in];
ld.param.b64 %data, [array];
setp.eq.u32 %leader, %tid.x, 0;
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


_DATA = torch.zeros(4096, dtype=torch.int32)  # one place, so that addresses are equal in all runs


def outcome(line: str, guard: str) -> tuple[str, torch.Tensor]:
    """The error, without what a guard changes in its words, and what registers and memory held."""
    return _run(*_module(line, guard))


def _run(text: str, count: int) -> tuple[str, torch.Tensor]:
    out = torch.zeros(256 * max(count, 1) // 4, dtype=torch.int32)
    torch.remainder(torch.arange(4096, dtype=torch.int32), 1024, out=_DATA)
    error = ""
    try:
        simulate_ptx(text, "k", grid=(1, 1, 1), block=(32, 1, 1), params=(out, _DATA), shared=65536)
    except SimulatorError as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        # Addresses differ by run, and so does which argument is the nearest to one.
        error = re.sub(r"@!?%p\d|-?(0x)?[0-9a-f]{6,}|nearest is argument \d", "", error)
    return error, torch.cat((out, _DATA))


@pytest.mark.parametrize("line", TABLE)
def test_a_false_guard_leaves_everything_alone(line):
    text, count = _module(line, "")
    _, expected = _run(text.replace(f" {line}", ""), count)
    for guard in ("@%p2", "@!%p3"):
        error, out = outcome(line, guard)
        assert (error, guard) == ("", guard)
        assert torch.equal(out, expected), guard


@pytest.mark.parametrize("line", _TIMELESS)
def test_a_true_guard_changes_nothing(line):
    expected_error, expected = outcome(line, "")
    for guard in ("@%p3", "@!%p2"):
        error, out = outcome(line, guard)
        assert error == expected_error, guard
        assert torch.equal(out, expected), guard


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


@pytest.mark.parametrize(
    ("guard", "leaves"), [("@%p3", True), ("@!%p2", True), ("@%p2", False), ("@!%p3", False)]
)
@pytest.mark.parametrize("line", ["bra END;", "exit;", "ret;"])
def test_control_flow_under_a_guard_of_every_lane(line, guard, leaves):
    out = torch.zeros(256, dtype=torch.int32)
    body = f"""
    setp.eq.u32 %p3, %r1, %r1;
    setp.ne.u32 %p2, %r1, %r1;
    {guard} {line}
    st.global.b32 [%d2], 7;
    END:
    """
    run_body(body, threads=32, out=out)
    assert out[:32].tolist() == [0 if leaves else 7] * 32
