"""Modifiers, semantics and scopes: what PTX does not let an opcode carry is an error, for each."""

import pytest

from dsv4.simulator import UnsupportedInstruction
from dsv4.simulator.compile import codegen
from dsv4.simulator.ptx.modifiers import MODIFIERS
from tests.simulator.instructions.test_instruction_table import (
    LINES,
    REFUSALS,
    fragments,
    translate,
)

pytestmark = pytest.mark.stage("simulator")


def _with_modifier(line: str) -> str:
    """The line with a modifier that does not exist, behind its opcode."""
    opcode, *rest = line.partition(" ") if " " in line else (line.rstrip(";"), ";")
    return "".join((opcode, ".bogus", *rest))


@pytest.mark.parametrize("line", sorted({line for _, line in LINES} | {"bra L;", "ret;", "exit;"}))
def test_an_unknown_modifier_is_refused(line):
    with pytest.raises(UnsupportedInstruction, match=r"modifier \.bogus of"):
        translate(_with_modifier(line))


@pytest.mark.parametrize(
    ("line", "modifier"),
    [
        ("ld.release.gpu.global.b32 %r0, [%d0];", "release"),
        ("st.acquire.gpu.global.b32 [%d0], %r0;", "acquire"),
        ("red.acq_rel.gpu.global.add.u32 [%d0], %r0;", "acq_rel"),
        ("mbarrier.arrive.release.gpu.shared.b64 %d0, [%r0];", "gpu"),
        ("bar.sync.gpu 0;", "gpu"),
        ("shl.wrap.b32 %r0, %r1, %r2;", "wrap"),
        ("cp.async.commit_group.read;", "read"),
        ("cp.async.ca.add.shared.global [%r0], [%d0], 8;", "add"),
        ("cp.async.bulk.wait_group.ca 0;", "ca"),
        ("mbarrier.init.relaxed.shared.b64 [%r0], 1;", "relaxed"),
        ("mbarrier.arrive.parity.shared.b64 %d0, [%r0];", "parity"),
        ("bar.sync.popc 0;", "popc"),
        ("griddepcontrol.wait.launch_dependents;", "launch_dependents"),
        ("wgmma.fence.satfinite.sync.aligned;", "satfinite"),
        ("tcgen05.wait::ld.sync.aligned.x4;", "x4"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.ws.shared::cta.b32 [%r0], 64;", "ws"),
        ("tcgen05.mma.cta_group::1.kind::f64 [%r0], %d0, %d1, %r1, %p0;", "kind::f64"),
        (f"tcgen05.ld.sync.aligned.32x32b.x3.b32 {fragments(3)}, [%r0];", "x3"),
    ],
)
def test_a_modifier_of_other_opcodes_is_refused(line, modifier):
    with pytest.raises(UnsupportedInstruction, match=rf"modifier \.{modifier} of"):
        translate(line)


@pytest.mark.parametrize(
    "line",
    [
        "ld.acquire.global.b32 %r0, [%d0];",
        "ld.acquire.relaxed.gpu.global.b32 %r0, [%d0];",
        "ld.volatile.gpu.global.b32 %r0, [%d0];",
        "ld.weak.gpu.global.b32 %r0, [%d0];",
        "st.relaxed.global.b32 [%d0], %r0;",
        "atom.relaxed.acquire.gpu.global.add.u32 %r0, [%d0], %r1;",
        "red.relaxed.cta.gpu.global.add.u32 [%d0], %r0;",
        "mbarrier.try_wait.acquire.relaxed.cta.shared.b64 %p0, [%r0], %d0;",
        "barrier.cluster.arrive.acquire;",
        "barrier.cluster.wait.release;",
        "fence;",
        "fence.acq_rel;",
        "fence.proxy;",
        "fence.proxy.async.gpu;",
        "fence.proxy.async.shared;",
        "fence.mbarrier_init;",
        "fence.mbarrier_init.release.gpu;",
        "membar;",
        "membar.gl.sys;",
    ],
)
def test_semantics_and_scopes_that_ptx_does_not_have(line):
    """Each part is one of the opcode's, but together they mean nothing."""
    with pytest.raises(UnsupportedInstruction, match="by its semantics and scope"):
        translate(line)


@pytest.mark.parametrize(
    "line",
    [
        "fence.gpu;", "fence.acquire.sys;", "fence.release.sync_restrict::shared::cta.cluster;",
        "membar.cta;", "ld.mmio.relaxed.sys.global.b32 %r0, [%d0];", "barrier.cluster.wait;",
        "atom.global.gpu.acq_rel.add.u32 %r0, [%d0], %r1;", "red.gpu.global.add.u32 [%d0], %r0;",
    ],
)  # fmt: skip
def test_semantics_and_scopes_in_every_order(line):
    translate(line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {fragments(6)}, %d0, %d1, %p0, 1, "
         "1, 0, 1;", "shape"),
        (f"wgmma.mma_async.sync.aligned.m64n8k32.f32.bf16.bf16 {fragments(4)}, %d0, %d1, %p0, 1, "
         "1, 0, 1;", "shape"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%x0, %x1, %x2, %x3}, "
         "{%x4, %x5, %x6, %x7}, {%x8, %x9}, {%x0, %x1, %x2, %x3};", "register count"),
        ("tcgen05.ld.sync.aligned.x1.b32 {%x0}, [%r0];", "StopIteration"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
         "[%r0], [%d1, {%r2, %r3, %r4}], [%r1];", "3 coordinates"),
        ("cp.async.bulk.tensor.4d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
         "[%r0], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r1];", "two dimensions"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_exist(line, reason):
    with pytest.raises(UnsupportedInstruction, match=f"form of .*{reason}"):
        translate(line)


def _keys(line: str, table) -> str:
    """The key of a table by dotted opcode prefixes, as the simulator looks it up."""
    parts = line.split()[0].rstrip(";").split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(name for name in names if name in table)


CONTROL = {"bra", "ret", "exit"}  # tests of their own


@pytest.mark.parametrize("table", [codegen.EMITTERS, MODIFIERS], ids=["emitters", "modifiers"])
def test_every_opcode_of_the_simulator_is_in_the_table(table):
    """So that what tests do with the lines of the table, they do with every opcode."""
    lines = [line for _, line in LINES] + [line for line, _ in REFUSALS if "vadd" not in line]
    assert set(table) - CONTROL == {_keys(line, table) for line in lines}
