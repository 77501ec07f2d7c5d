"""Runs tcgen05 statements on given shared memory and TMEM, and gives TMEM back."""

from __future__ import annotations

import numpy as np
import torch

from dsv4.simulator import simulate_ptx

_CHUNK = 32  # columns moved by one tcgen05.ld or .st


def _registers(prefix: str) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(_CHUNK)) + "}"


def _kernel(statements: str, group: int, columns: int, shared: int) -> str:
    cta = f"cta_group::{group}"
    everyone = ".multicast::cluster" if group == 2 else ""
    mask = ", %h1" if group == 2 else ""
    fill = "\n".join(
        "\n".join(f"ld.global.b32 %v{i}, [%d6+{512 * (c + i)}];" for i in range(_CHUNK))
        + f"\nadd.u32 %r16, %r15, {c};\n"
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r16], {_registers('v')};\n"
        "tcgen05.wait::st.sync.aligned;"
        for c in range(0, columns, _CHUNK)
    )
    dump = "\n".join(
        f"add.u32 %r16, %r15, {c};\n"
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers('v')}, [%r16];\n"
        "tcgen05.wait::ld.sync.aligned;\n"
        + "\n".join(f"st.global.b32 [%d7+{512 * (c + i)}], %v{i};" for i in range(_CHUNK))
        for c in range(0, columns, _CHUNK)
    )
    sync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 images, .param .b64 before, .param .b64 after)
{{
.reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<32>; .reg .b32 %v<{_CHUNK}>; .reg .b64 %d<16>;
.reg .b32 %tmem, %idesc, %off; .reg .b64 %smem, %a, %b; .reg .pred %add, %new;
ld.param.b64 %d1, [images];
ld.param.b64 %d2, [before];
ld.param.b64 %d3, [after];
mov.u32 %r2, %tid.x;
shr.u32 %r3, %r2, 5;
mov.u32 %r4, %cluster_ctarank;
mov.b32 %r5, smem;
add.u32 %r12, %r5, {shared};
add.u32 %r13, %r5, {shared + 8};
add.u32 %r14, %r5, {shared + 16};
setp.eq.u32 %p1, %r2, 0;
setp.ne.u32 %p2, %r3, 0;
@!%p1 bra READY;
mbarrier.init.shared.b64 [%r12], 1;
mbarrier.init.shared.b64 [%r13], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r13], {shared};
mul.wide.u32 %d4, %r4, {shared};
add.u64 %d4, %d1, %d4;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d4], {shared}, [%r13];
READY:
@%p2 bra ALLOCATED;
tcgen05.alloc.{cta}.sync.aligned.shared::cta.b32 [%r14], {columns};
ALLOCATED:
{sync}
W1: mbarrier.try_wait.parity.shared.b64 %p3, [%r13], 0, 1000;
@!%p3 bra W1;
ld.shared.b32 %tmem, [%r14];
shl.b32 %r8, %r3, 21;
add.u32 %r15, %tmem, %r8;
mul.wide.u32 %d5, %r4, {512 * columns};
mul.wide.u32 %d8, %r2, 4;
add.u64 %d5, %d5, %d8;
add.u64 %d6, %d2, %d5;
add.u64 %d7, %d3, %d5;
{fill}
tcgen05.fence::before_thread_sync;
{sync}
tcgen05.fence::after_thread_sync;
setp.ne.u32 %p4, %r4, 0;
@%p4 bra ISSUED;
@!%p1 bra ISSUED;
and.b32 %r7, %r5, 0xffffff;
shr.u32 %r7, %r7, 4;
cvt.u64.u32 %smem, %r7;
setp.eq.u32 %add, %r2, %r2;
setp.ne.u32 %new, %r2, %r2;
{statements}
mov.b16 %h1, 3;
tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster{everyone}.b64 [%r12]{mask};
ISSUED:
W2: mbarrier.try_wait.parity.shared.b64 %p6, [%r12], 0, 1000;
@!%p6 bra W2;
tcgen05.fence::after_thread_sync;
{dump}
tcgen05.fence::before_thread_sync;
{sync}
@%p2 bra DONE;
tcgen05.dealloc.{cta}.sync.aligned.b32 %tmem, {columns};
DONE:
ret;
}}
"""


def run_tcgen05(
    statements: str, shared: np.ndarray, tmem: np.ndarray, schedule: str = "eager"
) -> np.ndarray:
    """Run `statements` in thread 0 of the first CTA and wait for their commit.

    Args:
        statements: PTX; `%tmem` is the TMEM address of column 0, `%smem` the first CTA's shared
            memory in units of 16 bytes (a u64, to add to descriptors), `%add` and `%new` are
            predicates that are true and false, and `%a`, `%b` (64 bits), `%idesc`, `%off` and
            `%v0..%v31` (32 bits) are free.
        shared: uint8 [CTAs, bytes] of shared memory, 1024-byte aligned; 1 or 2 CTAs.
        tmem: uint32 [CTAs, columns, 128 lanes] before; a power of two of columns, 32 at least.

    Returns: TMEM afterwards. The checker finds no race.
    """
    group, columns = len(shared), tmem.shape[1]
    before = torch.from_numpy(tmem.view(np.int32))
    after = torch.zeros_like(before)
    report = simulate_ptx(
        _kernel(statements, group, columns, shared.shape[1]), "k", grid=(group, 1, 1),
        block=(128, 1, 1), cluster=(group, 1, 1), shared=shared.shape[1] + 64,
        params=(torch.from_numpy(shared), before, after), schedule=schedule,
    )  # fmt: skip
    report.raise_if_racy()
    return after.numpy().view(np.uint32)
