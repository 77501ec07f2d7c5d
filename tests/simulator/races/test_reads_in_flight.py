"""A copy over shared memory that a released load may not have read yet.

On an H200 the load then gets what the copy wrote, if the multiprocessor's other warps keep its load
queue long.
"""

import pytest

from dsv4.simulator.ptx.parser import parse_module
from dsv4.simulator.races.reads_in_flight import incomplete_loads
from tests.simulator.helpers.ptx import kinds, run_body

pytestmark = pytest.mark.stage("simulator")

RACE = "copy over a read in flight"
_WAIT = "{0}: mbarrier.try_wait.parity.shared.b64 %p6, [%r30+{1}], {2};\n@!%p6 bra {0};"
# Warp 1 reads the tile and hands it to warp 0, whose copy overwrites it.
_HANDOVER = f"""
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 1;
@%p2 mbarrier.init.shared.b64 [%r30+8], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.sync 0;
@!%p1 bra READER;
{_WAIT.format("WA", 0, 0)}
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r30+8], 256;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r30+8];
bra.uni LANDED;
READER:
{{read}}
bar.warp.sync -1;
setp.eq.u32 %p7, %r6, 0;
@%p7 mbarrier.arrive.shared.b64 %d5, [%r30];
LANDED:
{_WAIT.format("WB", 8, 0)}
{{after}}
"""
_READS = {
    "ld": "ld.shared.b32 %r10, [%r4+-128];",
    "vector": "ld.shared.v2.b32 {%r10, %r11}, [%r2];",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10, %r11}, [%r2];",
}
_USE = "add.u32 %r12, %r10, 1;"


def _kinds(read: str, after: str = "", handover: str = _HANDOVER, **options) -> list[str]:
    # What the tile holds first came by a copy too: nothing else needs a fence.
    fill = (
        "@%p2 mbarrier.init.shared.b64 [%r2+3072], 1;\n@%p2 fence.mbarrier_init.release.cluster;\n"
        "bar.sync 0;\n@%p2 mbarrier.arrive.expect_tx.shared.b64 %d5, [%r2+3072], 256;\n"
        "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, "
        "[%r2+3072];\nF: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+3072], 0;\n@!%p6 bra F;\n"
    )
    return kinds(fill + handover.format(read=read, after=after), **options)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
@pytest.mark.parametrize("read", _READS.values(), ids=_READS)
def test_a_load_whose_registers_nobody_used(read, schedule):
    assert _kinds(read, _USE, schedule=schedule) == [RACE]
    assert _kinds(f"{read}\nmov.u32 %r13, %r10;", _USE, schedule=schedule) == [RACE]


@pytest.mark.parametrize("read", _READS.values(), ids=_READS)
def test_what_completes_a_load(read):
    assert _kinds(f"{read}\n{_USE}") == []
    for fence in ("fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", "membar.cta;"):
        assert _kinds(f"{read}\n{fence}") == []
    assert _kinds(f"{read}\nfence.proxy.async.global;", _USE) == [RACE]
    # Loads need not come back in order.
    other = "ld.shared.b32 %r14, [%r2+4];"
    assert _kinds(f"{read}\n{other}\nadd.u32 %r12, %r14, 1;") == [RACE]


@pytest.mark.parametrize("read", _READS.values(), ids=_READS)
def test_a_release_to_the_cluster_waits(read):
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r30];"
    body = _HANDOVER.replace("mbarrier.arrive.shared.b64 %d5, [%r30];", arrive)
    assert _kinds(read, _USE, handover=body) == []


def test_both_places_are_named():
    fill = "st.shared.b32 [%r4], %r1;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
    report = run_body(fill + _HANDOVER.format(read=_READS["ld"], after=_USE))
    (race,) = (f for f in report.races if f.kind == RACE)
    assert "ld.shared.b32" in race.places[0] and "cp.async.bulk" in race.places[1]


def test_stores_come_behind_the_load():
    body = _HANDOVER.format(read=_READS["ld"], after=_USE)
    copy = next(line for line in body.splitlines() if "cp.async.bulk" in line)
    body = body.replace(copy, "st.shared.b32 [%r4], %r1;\n@%p2 mbarrier.complete_tx.relaxed.cta"
                              ".shared::cta.b64 [%r30+8], 256;")  # fmt: skip
    assert RACE not in kinds(f"st.shared.b32 [%r4], %r1;\nbar.sync 0;\n{body}")


@pytest.mark.parametrize("use", ["", _USE])
def test_loads_of_a_loop(use):
    """A use in the next round comes after the release."""
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 out)
{{
.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<8>;
mov.u32 %r2, smem;
mov.u32 %r5, 0;
mov.u32 %r10, 0;
NEXT:
add.u32 %r6, %r10, %r6;
ld.shared.b32 %r10, [%r2];
{use}
mbarrier.arrive.shared.b64 %d5, [%r2+1024];
add.u32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, 4;
@%p1 bra NEXT;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 256, [%r2+1024];
ret;
}}
"""
    entry = parse_module(text).entries["k"]
    found = {
        entry.instructions[at].opcode: [entry.instructions[i].opcode for i in loads]
        for at, loads in incomplete_loads(entry).items()
    }
    assert found == ({} if use else {"mbarrier.arrive.shared.b64": ["ld.shared.b32"]})
