"""PTX fragments the programs share."""

from __future__ import annotations

PROLOGUE = """
.reg .b32 %thread, %lane, %smem, %bar, %r<16>;
.reg .b64 %out, %in, %at, %d<8>;
.reg .pred %leader, %p<4>;
mov.u32 %thread, %tid.x;
mov.u32 %lane, %laneid;
mov.u32 %smem, smem;
setp.eq.u32 %leader, %thread, 0;
"""
# Polls before a wait counts as hung: a wrong program must end.
_POLLS = 500


def wait(barrier: str, parity: str) -> str:
    """Wait for a phase of an mbarrier; trap when it never completes."""
    return f"""{{
.reg .pred w;
.reg .b32 n;
mov.u32 n, 0;
POLL:
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 w, [{barrier}], {parity};
@w bra DONE;
add.u32 n, n, 1;
setp.gt.u32 w, n, {_POLLS};
@w trap;
bra POLL;
DONE:
}}"""


def initialise(barrier: str, count: int = 1) -> str:
    """The leader initialises a barrier; all threads may use it afterwards."""
    return f"""@%leader mbarrier.init.shared::cta.b64 [{barrier}], {count};
@%leader fence.mbarrier_init.release.cluster;
bar.sync 0;"""


def copy_in(source: str, target: str, size: int, threads: int) -> str:
    """All threads copy `size` bytes from global address register to shared address register."""
    return _loop(
        size,
        threads,
        f"cvt.u64.u32 a, i; add.u64 a, a, {source}; ld.global.v4.b32 {{x, y, z, t}}, [a];\n"
        f"add.u32 s, i, {target}; st.shared.v4.b32 [s], {{x, y, z, t}};",
    )


def copy_out(source: str, target: str, size: int, threads: int) -> str:
    """All threads copy `size` bytes from shared address register to global address register."""
    return _loop(
        size,
        threads,
        f"add.u32 s, i, {source}; ld.shared.v4.b32 {{x, y, z, t}}, [s];\n"
        f"cvt.u64.u32 a, i; add.u64 a, a, {target}; st.global.v4.b32 [a], {{x, y, z, t}};",
    )


def _loop(size: int, threads: int, body: str) -> str:
    return f"""{{
.reg .b32 i, s, x, y, z, t;
.reg .b64 a;
.reg .pred w;
shl.b32 i, %thread, 4;
setp.ge.u32 w, i, {size};
@w bra DONE;
AGAIN:
{body}
add.u32 i, i, {16 * threads};
setp.lt.u32 w, i, {size};
@w bra AGAIN;
DONE:
}}
bar.sync 0;"""
