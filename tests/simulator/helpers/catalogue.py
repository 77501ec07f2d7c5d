"""The smallest bad kernel of each kind of finding, and its cure: tested, and shown in the docs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulator.helpers.ptx import INIT_BARRIER, run_body


@dataclass(frozen=True)
class Example:
    """A body of `run_body` with `cure` where FIX stands is clean; without it, it has a finding.

    Attributes:
        bad: what stands there instead of the cure.
        words: the cure for people.
    """

    kind: str
    body: str
    cure: str
    words: str
    bad: str = ""
    options: dict = field(default_factory=dict)

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
        return run_body(body, **self.options).races


_WAIT = """
W: mbarrier.try_wait.parity.shared.b64 %p4, [%r30], 0;
@!%p4 bra W;
"""
_LOAD = f"""{INIT_BARRIER}
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d4, [%r30], 64;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 64, [%r30];
FIX
ld.shared.b32 %r8, [%r2];
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
)
