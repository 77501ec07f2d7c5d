"""Names in findings: arguments, buffers in shared memory, roles of warps."""

from __future__ import annotations

import pytest
import torch

from dsv4.simulator import simulate_ptx
from dsv4.simulator.ptx.shared_names import Allocation, SharedNames
from dsv4.simulator.ptx.source import kernel_at, role_at

pytestmark = pytest.mark.stage("simulator")

_STATIC = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .b64 out)
{
.reg .b32 %r<8>; .reg .b64 %d<4>;
.shared .align 16 .b8 header[32];
.shared .align 4 .b8 tile[512];
mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, tile;
add.u32 %r4, %r3, %r2;
st.shared.b32 [%r4], %r1;
xor.b32 %r5, %r4, 128;
ld.shared.b32 %r6, [%r5];
ret;
}
"""


def test_static_shared_memory_is_named_by_its_variable():
    out = torch.zeros(4, dtype=torch.int32)
    report = simulate_ptx(_STATIC, "k", grid=1, block=64, params=(out,))
    races = [race.message for race in report.races if race.kind == "read-write race"]
    assert races and all("shared memory at tile" in text for text in races), report.races


def test_allocations_follow_each_other_as_they_are_aligned():
    names = SharedNames()
    fields = (("full", 16, 0), ("tile", 64, 1024))
    names.add_allocations(1000, [Allocation("a", 20, 8), Allocation("", 1088, 1024, fields)])
    places = [names.place(offset) for offset in (1000, 1019, 1020, 1024, 1040, 2049, 2112)]
    assert places == [
        "a (offset 0x3e8)",
        "a + 0x13 (offset 0x3fb)",
        "offset 0x3fc",
        "full (offset 0x400)",
        "offset 0x410",
        "tile + 0x1 (offset 0x801)",
        "offset 0x840",
    ]


def test_findings_of_a_named_kernel_name_buffer_role_and_argument():
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.simulator import named, simulate
    from tests.simulator.helpers.support import compile_kernel
    from tests.simulator.kernels.roles import Unordered

    values, sums = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with named():
        compiled = compile_kernel(Unordered(), "sm_90a", values, sums)
    messages = [found.message for found in simulate(compiled, values, sums).races]
    condition = "(not (cute.arch.warp_idx() == 0))"
    in_tile = [text for text in messages if "shared memory at tile (offset 0x420)" in text]
    assert in_tile and condition in in_tile[0] and "warp 0 (produce)" in in_tile[0], messages
    of_values = [text for text in messages if "read of values at byte 0" in text]
    assert of_values and condition in of_values[0] and "(produce)" in of_values[0], messages


def test_roles_are_the_outermost_branches_by_warp(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(
        "@cute.kernel\n"
        "def kernel(self, ctx):\n"
        "    prologue()\n"
        "    if warp < 4:\n"
        "        raise_registers()\n"
        "        self.softmax(ctx)\n"
        "    elif warp == 4:\n"
        "        x = 1\n"
        "    else:\n"
        "        if lane == 0:\n"
        "            y = 2\n"
        "def other():\n"
        "    pass\n"
    )
    roles = {line: role_at(((str(path), line),)) for line in (3, 5, 6, 8, 11, 13)}
    assert roles == {
        3: "", 5: "softmax", 6: "softmax", 8: "warp == 4", 11: "not (warp == 4)", 13: "",
    }  # fmt: skip
    # An instruction of an inlined function is of the branch that calls it.
    assert role_at((("helper.py", 1), (str(path), 6))) == "softmax"
    assert kernel_at((str(path), 13)) is None
