"""The smallest bad kernel of each kind of finding, and its cure: tested, and shown in the docs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from dsv4.simulator.frontend.ptx_text import single_launch
from tests.simulator.helpers.ptx import INIT_BARRIER, holding_map, module_of, run_body


@dataclass(frozen=True)
class Example:
    """A body of `run_body` with `cure` where FIX stands is clean; without it, it has a finding.

    Attributes:
        bad: what stands there instead of the cure.
        words: the cure for people.
        warns: whether it is a warning.
        launches: of the kernel, each of which may start before the one before it is complete.
    """

    kind: str
    body: str
    cure: str
    words: str
    bad: str = ""
    options: dict = field(default_factory=dict)
    warns: bool = False
    launches: int = 1

    @property
    def wrong(self) -> str:
        """The bad kernel's body."""
        return self.body.replace("FIX", self.bad).strip()

    @property
    def right(self) -> str:
        """The cured one's."""
        return self.body.replace("FIX", self.cure).strip()

    def findings(self, body: str) -> list:
        """What the checker says of a body."""
        if self.launches > 1:
            return _overlapping(body, self.launches)
        report = run_body(body, **self.options)
        return report.warnings if self.warns else report.races


def _overlapping(body: str, launches: int) -> list:
    """Findings of launches of one kernel under programmatic dependent launch."""
    out = torch.zeros(256, dtype=torch.int32)
    simulation = single_launch(module_of(body), "k", grid=1, block=64, params=(out,), shared=4096)
    chained = [replace(simulation.host.config, programmatic=i > 0) for i in range(launches)]
    simulation.host.run = lambda arguments, keywords: chained
    return simulation.run((out,), {}, (), "eager", 0, True).races


_WAIT = """
W: mbarrier.try_wait.parity.shared.b64 %p4, [%r30], 0;
@!%p4 bra W;
"""
_COPY_IN = """
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d4, [%r30], 64;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 64, [%r30];
""".strip()
_LOAD = f"""{INIT_BARRIER}
{_COPY_IN}
FIX
ld.shared.b32 %r8, [%r2];
"""
_EDITED_MAP = f"""{INIT_BARRIER}
add.u64 %d7, %d1, 256;
mov.b32 %r40, 0;
@!%p2 bra END;
tensormap.replace.tile.global_dim.global.b1024.b32 [%d7], 0, 8;
fence.proxy.tensormap::generic.release.gpu;
FIX
mbarrier.arrive.expect_tx.shared.b64 %d4, [%r30], 256;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r2], [%d7, {{%r40, %r40}}], [%r30];
{_WAIT.strip()}
END:
"""
_CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
_FENCE = "wgmma.fence.sync.aligned;"
_PRODUCT = """
st.shared.b32 [%r4], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r8, %r2, 4;
cvt.u64.u32 %d8, %r8;
setp.eq.u32 %p8, %r1, %r1;
mov.b32 %r40, 0;
mov.b32 %r41, 0;
mov.b32 %r42, 0;
mov.b32 %r43, 0;
FENCE
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {%r40, %r41, %r42, %r43}, %d8, %d8, %p8, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
USE
wgmma.wait_group.sync.aligned 0;
"""
_TMEM_STORE = """
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.b32 %r8, [%r2];
FIX
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r1};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
"""
_STORE = """
st.shared.b32 [%r4], %r1;
FIX
bar.sync 0;
@!%p2 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
_FLAG = """
@!%p2 bra END;
@!%p3 bra READ;
st.global.b32 [%d1], 7;
FIX
bra END;
READ:
ld.acquire.gpu.global.b32 %r8, [%d1+128];
setp.eq.u32 %p4, %r8, 0;
@%p4 bra READ;
ld.global.b32 %r9, [%d1];
END:
"""

CATALOGUE = (
    Example(
        "read-write race",
        "st.shared.b32 [%r4], %r1;\nFIX\nxor.b32 %r8, %r4, 128;\nld.shared.b32 %r9, [%r8];",
        "bar.sync 0;",
        "a barrier between the threads that write and those that read",
    ),
    Example(
        "write-write race",
        _LOAD.replace("ld.shared.b32 %r8, [%r2];", "st.shared.b32 [%r4], %r1;"),
        _WAIT.strip(),
        "the wait for the copy before anything else touches its target",
    ),
    Example(
        "missing proxy fence",
        _STORE,
        "fence.proxy.async.shared::cta;",
        "the fence, by the threads that wrote, before the barrier",
    ),
    Example(
        "missing tensor map fence",
        _EDITED_MAP,
        "fence.proxy.tensormap::generic.acquire.gpu [%d7], 128;",
        "the acquire of the map's 128 bytes, by the CTA that copies, behind what tells it of the "
        "edit; and a release by the thread that wrote the map, or `tensormap.cp_fenceproxy`",
        options={"out": holding_map()},
    ),
    Example(
        "uninitialised read",
        "FIX\nbar.sync 0;\nld.shared.b32 %r8, [%r4];",
        "st.shared.b32 [%r4], %r1;",
        "a write first; shared memory holds nothing when a CTA starts",
    ),
    Example(
        "scope too narrow",
        "@%p2 FIX [%d1], 1;",
        "red.relaxed.gpu.global.add.u32",
        "`.gpu` between CTAs, `.cluster` within a cluster, `.sys` between GPUs",
        bad="red.relaxed.cta.global.add.u32",
        options={"grid": 2},
    ),
    Example(
        "read-write race",
        _FLAG,
        "st.release.gpu.global.b32 [%d1+128], 1;",
        "a release at the scope of the reader: a relaxed flag hands nothing over",
        bad="st.relaxed.gpu.global.b32 [%d1+128], 1;",
        options={"grid": 2},
    ),
    Example(
        "non-coherent read of data written in the launch",
        "st.global.b32 [%d2], %r1;\nbar.sync 0;\nFIX %r8, [%d2];",
        "ld.global.b32",
        "`ld.global`: `.nc` is for data that no thread writes while the kernel runs",
        bad="ld.global.nc.b32",
    ),
    Example(
        "barrier used before its init is visible",
        """
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 64;
@%p2 fence.mbarrier_init.release.cluster;
FIX
mbarrier.arrive.shared.b64 %d4, [%r30];
""",
        "bar.sync 0;",
        "a barrier of the CTA (of the cluster, if others arrive) after the init",
    ),
    Example(
        "mbarrier overwritten",
        f"{INIT_BARRIER}\nFIX\n@%p2 st.shared.b32 [%r30], 0;",
        "@%p2 mbarrier.inval.shared.b64 [%r30];",
        "`mbarrier.inval` before the place is used for something else",
    ),
    Example(
        "wait may pass two phases early",
        f"""{INIT_BARRIER}
@!%p1 bra BOTH;
@%p2 mbarrier.arrive.shared.b64 %d4, [%r30];
W: mbarrier.try_wait.parity.shared.b64 %p4, [%r30], 0;
@!%p4 bra W;
BOTH:
FIX
@%p2 mbarrier.arrive.shared.b64 %d4, [%r30];
mov.u32 %r8, 0;
WORK:
add.s32 %r8, %r8, 1;
setp.lt.s32 %p4, %r8, 100;
@%p4 bra WORK;
V: mbarrier.try_wait.parity.shared.b64 %p4, [%r30], 1;
@!%p4 bra V;""",
        "bar.sync 0;",
        "a wait of each warp for each phase, or a barrier with those who wait for the others; "
        "warps that take the stages of a ring by turns need a multiple of the turns",
    ),
    Example(
        "leak",
        f"{INIT_BARRIER}\n@%p2 mbarrier.arrive.expect_tx.shared.b64 %d4, [%r30], 64;\nFIX",
        "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%r2], [%d1], 64, [%r30];\n" + _WAIT.strip(),
        "every byte that is expected has to come, and to be waited for",
    ),
    Example(
        "setmaxnreg of part of a warpgroup",
        "FIX",
        "setmaxnreg.dec.sync.aligned.u32 40;",
        "the same registers in all four warps of a warpgroup, idle ones included: else PTX "
        "defines nothing",
        bad="@%p1 setmaxnreg.dec.sync.aligned.u32 40;",
        options={"threads": 128},
    ),
    Example(
        "missing mbarrier_init fence",
        f"""
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 1;
FIX
bar.sync 0;
{_COPY_IN}
{_WAIT.strip()}""",
        "@%p2 fence.mbarrier_init.release.cluster;",
        "the fence, by the thread that initialised the mbarrier, before a barrier tells of it",
    ),
    Example(
        "mbarrier initialised again",
        f"{INIT_BARRIER}\nFIX\n@%p2 mbarrier.init.shared.b64 [%r30], 2;",
        "@%p2 mbarrier.inval.shared.b64 [%r30];",
        "`mbarrier.inval` before",
    ),
    Example(
        "tcgen05.ld without wait",
        """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.warp.sync -1;
ld.shared.b32 %r8, [%r2];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r1};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r8];
FIX
add.u32 %r10, %r9, 1;
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
""",
        "tcgen05.wait::ld.sync.aligned;",
        "the wait before the first use that is more than a copy",
        options={"threads": 32, "target": "sm_100a"},
    ),
    Example(
        "missing wgmma.fence",
        _PRODUCT.replace("USE", "").replace("FENCE", "FIX"),
        "wgmma.fence.sync.aligned;",
        "the fence between what writes registers of a product and the product",
        options={"threads": 128},
    ),
    Example(
        "wgmma register in flight",
        _PRODUCT.replace("USE", "FIX\nst.global.b32 [%d2], %r40;").replace("FENCE", _FENCE),
        "wgmma.wait_group.sync.aligned 0;",
        "the wait for the product before its registers are read or written",
        options={"threads": 128},
    ),
    Example(
        "copy over a read in flight",
        f"""{INIT_BARRIER}
{_COPY_IN}
{_WAIT.strip()}
@%p2 mbarrier.init.shared.b64 [%r30+8], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.sync 0;
ld.shared.b32 %r8, [%r2];
FIX
bar.sync 0;
{_COPY_IN.replace("[%r30]", "[%r30+8]")}
{_WAIT.strip().replace("W", "V").replace("[%r30]", "[%r30+8]")}
add.u32 %r9, %r8, 1;""",
        "add.u32 %r9, %r8, 1;",
        "a use of the loaded registers, or a fence, before others are told that the place is free",
    ),
    Example(
        "race with the launch before",
        "FIX\nld.global.b32 %r8, [%d2];\nst.global.b32 [%d2], %r8;",
        "griddepcontrol.wait;",
        "the wait before the first access to what the launch before writes or reads; here each "
        "of two launches may start early",
        launches=2,
    ),
    Example(
        "access to a CTA that may not have started",
        f"""
FIX
mapa.shared::cluster.u32 %r8, %r4, 1;
@%p3 st.shared::cluster.b32 [%r8], %r1;
{_CLUSTER_SYNC}""",
        _CLUSTER_SYNC,
        "a cluster barrier before the first access to another CTA; a relaxed one is enough",
        options={"grid": 2, "cluster": 2},
    ),
    Example(
        "access to a CTA that may have exited",
        f"""
{_CLUSTER_SYNC}
mapa.shared::cluster.u32 %r8, %r4, 1;
@%p3 st.shared::cluster.b32 [%r8], %r1;
FIX""",
        _CLUSTER_SYNC,
        "a cluster barrier behind the last access to another CTA",
        options={"grid": 2, "cluster": 2},
    ),
    Example(
        "use of TMEM that a pair may have freed",
        f"""
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.b32 %r8, [%r2];
{_CLUSTER_SYNC}
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {{%r1}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
FIX
tcgen05.fence::after_thread_sync;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r8, 32;""",
        _CLUSTER_SYNC,
        "a cluster barrier between the last use by either CTA and the dealloc, which frees both",
        options={"threads": 32, "grid": 2, "cluster": 2, "target": "sm_100a"},
    ),
    Example(
        "lanes ordered by convergence alone",
        "st.shared.b32 [%r4], %r1;\nshfl.sync.bfly.b32 %r8, %r1, 1, 31, -1;\nFIX\n"
        "xor.b32 %r8, %r4, 4;\nld.shared.b32 %r9, [%r8];",
        "bar.warp.sync -1;",
        "`bar.warp.sync` between lanes that write and lanes that read: other collectives bring "
        "them together, but order no memory",
        warns=True,
        options={"threads": 32},
    ),
    Example(
        "register never written",
        "FIX\nadd.u32 %r9, %r8, 1;",
        "mov.u32 %r8, 0;",
        "a value for it, unless nothing needs the result",
        warns=True,
    ),
    Example(
        "cp.async without proxy fence",
        """
cp.async.ca.shared.global [%r4], [%d2], 4;
cp.async.wait_all;
FIX
bar.sync 0;
@!%p2 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d1+512], [%r2], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
""",
        "fence.proxy.async.shared::cta;",
        "the fence, by the threads that copied, behind their wait",
        warns=True,
    ),
    Example(
        "st.async without proxy fence",
        f"""
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 1;
@%p2 fence.mbarrier_init.release.cluster;
{_CLUSTER_SYNC}
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d4, [%r30], 256;
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r10, %r10, 1;
mapa.shared::cluster.u32 %r8, %r4, %r10;
mapa.shared::cluster.u32 %r9, %r30, %r10;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8], %r1, [%r9];
{_WAIT.strip()}
FIX
bar.sync 0;
@!%p2 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
{_CLUSTER_SYNC}""",
        "fence.proxy.async.shared::cta;",
        "the fence between the wait for the stores and the copy",
        warns=True,
        options={"grid": 2, "cluster": 2},
    ),
    Example(
        "missing tcgen05.fence",
        """
setp.eq.u32 %p4, %r5, 4;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.b32 %r8, [%r2];
@%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r1};
@%p1 tcgen05.wait::st.sync.aligned;
FIX
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p4 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r8];
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 32;
""",
        "tcgen05.fence::before_thread_sync;",
        "the pair of fences around what hands tensor memory from warp to warp",
        warns=True,
        options={"threads": 160, "target": "sm_100a"},
    ),
    Example(
        "tcgen05.ld/st lane",
        _TMEM_STORE,
        "shl.b32 %r9, %r5, 21;\nadd.u32 %r9, %r9, %r8;",
        "the warp's first lane in the upper half of the address: 32 for each warp of four",
        bad="mov.u32 %r9, %r8;",
        warns=True,
        options={"target": "sm_100a"},
    ),
    Example(
        "tcgen05.ld/st address",
        _TMEM_STORE,
        "mov.u32 %r9, %r8;",
        "one address for all lanes of the warp: hardware takes that of one of them",
        bad="add.u32 %r9, %r8, %r6;",
        warns=True,
        options={"threads": 32, "target": "sm_100a"},
    ),
)
