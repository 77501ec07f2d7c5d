"""Kernels that only issue MMAs, in PTX: what a microbenchmark of the tensor pipe runs."""

from __future__ import annotations

SHARED_BYTES = 64 << 10
_SETUP = """.version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry mma()
.reqntid 32
{
.reg .b32 %smem, %bar, %slot, %tmem, %a_tmem, %count, %form;
.reg .b64 %a, %b;
.reg .pred %leader, %first, %more, %done;
mov.u32 %smem, smem;
add.u32 %bar, %smem, 65536;
add.u32 %slot, %smem, 65552;
"""


def mma_kernel(ctas: int, m: int, n: int, a_in_tmem: bool, count: int) -> str:
    """PTX of a kernel whose warp issues `count` bf16 tcgen05.mma, commits and waits.

    Args:
        ctas: 1, or 2 for a CTA pair (launch with a cluster of 2).
        m, n: shape of the accumulator; K is 16.
        a_in_tmem: A from TMEM instead of shared memory.
    """
    group = f"cta_group::{ctas}"
    # f32 accumulator, bf16 operands, both K-major.
    form = 1 << 4 | 1 << 7 | 1 << 10 | n // 8 << 17 | m // 16 << 24
    # Plain layout: core matrices of 8 rows x 16 bytes, 128 bytes apart along rows, K-halves far.
    layout = (128 >> 4) << 32 | (16384 >> 4) << 16 | 1 << 46
    a = "[%a_tmem]" if a_in_tmem else "%a"
    leader = "mov.u32 %count, %cluster_ctarank;\nsetp.eq.u32 %leader, %count, 0;\n"
    target, multicast = "", ""
    if ctas == 2:
        target, multicast = ".multicast::cluster", ", 3"
    return (
        _SETUP
        + leader
        + f"""{{
.reg .pred one;
elect.sync _|one, 0xffffffff;
@one mbarrier.init.shared::cta.b64 [%bar], 1;
@one fence.mbarrier_init.release.cluster;
and.pred %leader, %leader, one;
}}
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%slot], 512;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ld.shared.b32 %tmem, [%slot];
add.u32 %a_tmem, %tmem, 256;
mov.u32 %form, {form};
{{
.reg .b32 t;
.reg .b64 w;
shr.u32 t, %smem, 4;
cvt.u64.u32 w, t;
or.b64 %a, w, {layout};
add.u64 %b, %a, {32768 >> 4};
}}
mov.u32 %count, 0;
@!%leader bra ISSUED;
NEXT:
setp.ne.u32 %first, %count, 0;
tcgen05.mma.{group}.kind::f16 [%tmem], {a}, %b, %form, %first;
add.u32 %count, %count, 1;
setp.lt.u32 %more, %count, {count};
@%more bra NEXT;
tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{target}.b64 [%bar]{multicast};
ISSUED:
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0, 1000;
@!%done bra WAIT;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
tcgen05.dealloc.{group}.sync.aligned.b32 %tmem, 512;
ret;
}}
"""
    )
