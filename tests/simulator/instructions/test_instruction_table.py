"""What the kernel compiler can emit, and what the simulator does with it.

One entry per operation of CuTeDSL's NVVM dialect: PTX lines the simulator executes, or the reason
why it refuses. Here lines are only translated; other tests check what they compute.
"""

# The table keeps a PTX line on a line.
# ruff: noqa: E501

import pytest

from dsv4.simulator import UnsupportedInstruction
from dsv4.simulator.compile.program import Program
from dsv4.simulator.ptx.parser import parse_module

pytestmark = pytest.mark.stage("simulator")

_SHARED = "shared::cluster.global.mbarrier::complete_tx::bytes"
_MMA = "[%r0], %d0, %d1, %r1"
_TMA = "cp.async.bulk.tensor.2d"
_MAP = "[%d1, {%r2, %r3}]"
_SREGS = (
    "tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z",
    "nctaid.x", "nctaid.y", "nctaid.z", "clusterid.x", "clusterid.y", "clusterid.z",
    "nclusterid.x", "nclusterid.y", "nclusterid.z", "cluster_ctaid.x", "cluster_ctaid.y",
    "cluster_ctaid.z", "cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z", "laneid",
    "lanemask_eq", "lanemask_ge", "lanemask_gt", "lanemask_le", "lanemask_lt", "smid", "nsmid",
    "warpid", "nwarpid", "clock", "globaltimer_lo", "cluster_ctarank", "cluster_nctarank",
    "dynamic_smem_size", "total_smem_size",
)  # fmt: skip


def fragments(count: int, prefix: str = "x") -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


# Executed: lines by operation. Registers: %r 32 bits, %d 64, %h 16, %b 8, %p
# predicates, %f and %e floats of 32 and 64 bits, %q 128 bits, %x 32 bits for fragments.
RUNS: dict[str, list[str]] = {
    "add.packed.f32x2": ["add.rn.f32x2 %d0, %d1, %d2;", "add.ftz.f32x2 %d0, %d1, %d2;"],
    "sub.packed.f32x2": ["sub.rn.f32x2 %d0, %d1, %d2;"],
    "mul.packed.f32x2": ["mul.rn.f32x2 %d0, %d1, %d2;"],
    "fma.packed.f32x2": ["fma.rn.f32x2 %d0, %d1, %d2, %d3;"],
    "addf": ["add.rn.f32 %f0, %f1, %f2;", "add.rz.ftz.f32 %f0, %f1, %f2;",
             "add.f64 %e0, %e1, %e2;", "add.rn.bf16x2 %r0, %r1, %r2;", "add.f16 %h0, %h1, %h2;",
             "add.rn.sat.f32.bf16 %f0, %h1, %f2;"],
    "subf": ["sub.rm.f32 %f0, %f1, %f2;", "sub.f16x2 %r0, %r1, %r2;",
             "sub.rn.f32.f16 %f0, %h1, %f2;"],
    "mul": ["mul.rp.f32 %f0, %f1, %f2;", "mul.bf16x2 %r0, %r1, %r2;", "mul.f64 %e0, %e1, %e2;"],
    "fma": ["fma.rn.f32 %f0, %f1, %f2, %f3;", "fma.rz.ftz.sat.f32 %f0, %f1, %f2, %f3;",
            "fma.rn.relu.bf16x2 %r0, %r1, %r2, %r3;", "fma.rn.f64 %e0, %e1, %e2, %e3;",
            "fma.rn.f32.bf16 %f0, %h1, %h2, %f3;"],
    "fmax": ["max.f32 %f0, %f1, %f2;", "max.NaN.ftz.f32 %f0, %f1, %f2;",
             "max.f32 %f0, %f1, %f2, %f3;", "max.xorsign.abs.f32 %f0, %f1, %f2;",
             "max.NaN.bf16x2 %r0, %r1, %r2;", "max.f64 %e0, %e1, %e2;"],
    "fmin": ["min.f32 %f0, %f1, %f2;", "min.NaN.abs.f32 %f0, %f1, %f2, %f3;",
             "min.f16x2 %r0, %r1, %r2;"],
    "fabs": ["abs.f32 %f0, %f1;", "abs.ftz.f32 %f0, %f1;", "abs.bf16x2 %r0, %r1;"],
    "ex2": ["ex2.approx.ftz.f32 %f0, %f1;", "ex2.approx.ftz.bf16x2 %r0, %r1;",
            "ex2.approx.f16x2 %r0, %r1;"],
    "log2": ["lg2.approx.f32 %f0, %f1;"],
    "rcp.approx.ftz.f": ["rcp.approx.ftz.f32 %f0, %f1;", "rcp.rn.f32 %f0, %f1;"],
    "rsqrt": ["rsqrt.approx.f32 %f0, %f1;"],
    "sin": ["sin.approx.f32 %f0, %f1;"],
    "cos": ["cos.approx.ftz.f32 %f0, %f1;"],
    "atomicrmw": ["atom.global.add.u32 %r0, [%d0], %r1;", "atom.shared.cta.cas.b64 %d0, [%r1], %d1, %d2;",
                  "atom.acq_rel.gpu.global.exch.b32 %r0, [%d0], %r1;",
                  "atom.global.max.s32 %r0, [%d0], %r1;", "atom.global.add.f32 %f0, [%d0], %f1;",
                  "atom.global.add.noftz.f16x2 %r0, [%d0], %r1;",
                  "atom.global.v4.f32.add {%f0, %f1, %f2, %f3}, [%d0], {%f4, %f5, %f6, %f7};",
                  "atom.global.add.f64 %e0, [%d0], %e1;", "atom.global.inc.u32 %r0, [%d0], %r1;",
                  "atom.global.cas.b16 %h0, [%d0], %h1, %h2;",
                  "atom.relaxed.sys.global.exch.b128 %q0, [%d0], %q1;",
                  "atom.relaxed.sys.global.cas.b128 %q0, [%d0], %q1, %q2;"],
    "compare.and.set": ["set.eq.u32.s32 %r0, %r1, %r2;", "set.lt.f32.f32 %f0, %f1, %f2;",
                        "set.gt.bf16x2.bf16x2 %r0, %r1, %r2;", "set.lt.u32.bf16x2 %r0, %r1, %r2;"],
    "bar.warp.sync": ["bar.warp.sync %r0;"],
    "barrier": ["barrier.sync 1, 64;", "bar.sync %r0;"],
    "barrier0": ["bar.sync 0;"],
    "barrier.arrive": ["bar.arrive 1, 64;"],
    "barrier.cta.arrive": ["barrier.cta.arrive.aligned 1, 64;"],
    "barrier.cta.red": ["barrier.cta.red.popc.aligned.u32 %r0, 1, %p0;",
                        "barrier.cta.red.and.pred %p0, 1, 64, %p1;"],
    "barrier.cta.sync": ["barrier.cta.sync.aligned 0;", "barrier.cta.sync 2, 96;"],
    "cluster.arrive": ["barrier.cluster.arrive.aligned;", "barrier.cluster.arrive.release;"],
    "cluster.arrive.relaxed": ["barrier.cluster.arrive.relaxed.aligned;"],
    "cluster.wait": ["barrier.cluster.wait.acquire.aligned;"],
    "clusterlaunchcontrol.try.cancel": [
        "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r0], [%r1];",
        "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128 [%r0], [%r1];"],
    "clusterlaunchcontrol.query.cancel": [
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p0, %q0;",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r0, %r1, %r2, _}, %q0;"],
    "convert.and.pack.integer": ["cvt.pack.sat.u8.s32.b32 %r0, %r1, %r2, %r3;",
                                 "cvt.pack.sat.s16.s32 %r0, %r1, %r2;"],
    "convert.bf16x2.to.f8x2": ["cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r1;"],
    "convert.f16x2.to.f4x2": ["cvt.rn.satfinite.e2m1x2.f16x2 %b0, %r1;"],
    "convert.f16x2.to.f6x2": ["cvt.rn.satfinite.relu.e2m3x2.f16x2 %h0, %r1;"],
    "convert.bf16x2.to.f4x2": ["cvt.rn.satfinite.relu.e2m1x2.bf16x2 %b0, %r1;"],
    "convert.bf16x2.to.f6x2": ["cvt.rn.satfinite.e3m2x2.bf16x2 %h0, %r1;"],
    "convert.f16x2.to.f8x2": ["cvt.rn.satfinite.relu.e5m2x2.f16x2 %h0, %r1;"],
    "convert.f32x2.to.bf16x2": ["cvt.rn.bf16x2.f32 %r0, %f1, %f2;",
                                "cvt.rz.relu.bf16x2.f32 %r0, %f1, %f2;",
                                "cvt.rn.satfinite.bf16x2.f32 %r0, %f1, %f2;"],
    "convert.f32x2.to.f16x2": ["cvt.rn.f16x2.f32 %r0, %f1, %f2;",
                               "cvt.rz.satfinite.f16x2.f32 %r0, %f1, %f2;"],
    "convert.f32x2.to.f8x2": ["cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;",
                              "cvt.rz.satfinite.ue8m0x2.f32 %h0, %f1, %f2;",
                              "cvt.rp.satfinite.ue8m0x2.f32 %h0, %f1, %f2;",
                              "cvt.rp.satfinite.ue8m0x2.bf16x2 %h0, %r1;"],
    "convert.f32x2.to.f6x2": ["cvt.rn.satfinite.e2m3x2.f32 %h0, %f1, %f2;",
                              "cvt.rn.satfinite.relu.e3m2x2.f32 %h0, %f1, %f2;"],
    "convert.f32x2.to.f4x2": ["cvt.rn.satfinite.e2m1x2.f32 %b0, %f1, %f2;"],
    "convert.f4x2.to.f16x2": ["cvt.rn.f16x2.e2m1x2 %r0, %b1;", "cvt.rn.relu.f16x2.e2m1x2 %r0, %b1;"],
    "convert.f6x2.to.f16x2": ["cvt.rn.f16x2.e2m3x2 %r0, %h1;", "cvt.rn.f16x2.e3m2x2 %r0, %h1;"],
    "convert.f8x2.to.f16x2": ["cvt.rn.f16x2.e4m3x2 %r0, %h1;", "cvt.rn.relu.f16x2.e5m2x2 %r0, %h1;"],
    "convert.f8x2.to.bf16x2": ["cvt.rn.bf16x2.ue8m0x2 %r0, %h1;"],
    "convert.s2f6x2.to.bf16x2": ["cvt.rn.bf16x2.s2f6x2 %r0, %h1;",
                                 "cvt.rn.satfinite.relu.scaled::n2::ue8m0.bf16x2.s2f6x2 %r0, %h1, %h2;"],
    "convert.float.to.integer": ["cvt.rni.s32.f32 %r0, %f1;", "cvt.rzi.u64.f64 %d0, %e1;",
                                 "cvt.rmi.ftz.u8.f32 %h0, %f1;", "cvt.rzi.s32.f16 %r0, %h1;"],
    "convert.float.to.tf32": ["cvt.rna.tf32.f32 %r0, %f1;", "cvt.rn.relu.tf32.f32 %r0, %f1;",
                              "cvt.rz.tf32.f32 %r0, %f1;", "cvt.rna.satfinite.tf32.f32 %r0, %f1;"],
    "cp.async.shared.global": ["cp.async.ca.shared.global [%r0], [%d0], 8;",
                               "cp.async.cg.shared.global.L2::128B [%r0], [%d0], 16, %r1;"],
    "cp.async.commit.group": ["cp.async.commit_group;"],
    "cp.async.wait.group": ["cp.async.wait_group 1;", "cp.async.wait_all;"],
    "cp.async.mbarrier.arrive": ["cp.async.mbarrier.arrive.shared.b64 [%r0];",
                                 "cp.async.mbarrier.arrive.noinc.shared.b64 [%r0];"],
    "cp.async.bulk.commit.group": ["cp.async.bulk.commit_group;"],
    "cp.async.bulk.wait_group": ["cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 1;"],
    "cp.async.bulk.global.shared.cta": [
        "cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], %r1;",
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%d0], [%r0], %r1, %d1;",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d0], [%r0], %r1, %h0;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r0], %r1;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s64 [%d0], [%r0], %r1;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d0], [%r0], %r1;"],
    "cp.async.bulk.prefetch": ["cp.async.bulk.prefetch.L2.global [%d0], %r0;"],
    "cp.async.bulk.shared.cluster.global": [
        f"cp.async.bulk.{_SHARED} [%r0], [%d0], %r1, [%r2];",
        f"cp.async.bulk.{_SHARED}.multicast::cluster [%r0], [%d0], %r1, [%r2], %h0;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%d0], %r1, [%r2];"],
    "cp.async.bulk.shared.cluster.shared.cta": [
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r0], [%r1], %r2, [%r3];",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u64 "
        "[%r0], [%r1], %r2, [%r3];",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.and.b32 "
        "[%r0], [%r1], %r2, [%r3];"],
    "cp.async.bulk.tensor.shared.cluster.global": [
        f"{_TMA}.{_SHARED} [%r0], {_MAP}, [%r1];",
        f"{_TMA}.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], {_MAP}, [%r1];",
        f"{_TMA}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        f".cta_group::2.L2::cache_hint [%r0], {_MAP}, [%r1], %h0, %d2;",
        f"{_TMA}.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r0], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r1];"],
    "cp.async.bulk.tensor.global.shared.cta": [
        f"{_TMA}.global.shared::cta.bulk_group {_MAP}, [%r0];",
        f"{_TMA}.global.shared::cta.tile::scatter4.bulk_group "
        "[%d1, {%r2, %r3, %r4, %r5, %r6}], [%r0];"],
    "cp.async.bulk.tensor.prefetch": [f"cp.async.bulk.prefetch.tensor.2d.L2.global.tile {_MAP};"],
    "cp.async.bulk.tensor.reduce": [
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group {_MAP}, [%r0];"
        for op in ("add", "min", "max", "inc", "dec", "and", "or", "xor")],
    "dot.accumulate.2way": ["dp2a.lo.s32.u32 %r0, %r1, %r2, %r3;", "dp2a.hi.u32.u32 %r0, %r1, %r2, %r3;"],
    "dot.accumulate.4way": ["dp4a.s32.s32 %r0, %r1, %r2, %r3;", "dp4a.u32.s32 %r0, %r1, %r2, %r3;"],
    "elect.sync": ["elect.sync %r0|%p0, %r1;", "elect.sync _|%p0, -1;"],
    "fence.mbarrier.init": ["fence.mbarrier_init.release.cluster;"],
    "fence.proxy": ["fence.proxy.async.shared::cta;", "fence.proxy.async;", "fence.proxy.alias;",
                    "fence.proxy.async.global;"],
    "fence.proxy.acquire": ["fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;"],
    "fence.proxy.release": ["fence.proxy.tensormap::generic.release.gpu;"],
    "fence.proxy.sync_restrict": [
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"],
    "fence.sc.cluster": ["fence.sc.cluster;"],
    "fence.sync_restrict": ["fence.acquire.sync_restrict::shared::cluster.cluster;"],
    "memory.barrier": ["membar.gl;", "fence.acq_rel.gpu;", "fence.acq_rel.cta;"],
    "griddepcontrol": ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"],
    "inline_ptx": ["mov.b32 %r0, %r1;"],
    "ldmatrix": ["ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x0, %x1, %x2, %x3}, [%r0];",
                 "ldmatrix.sync.aligned.m8n8.x1.trans.shared::cta.b16 {%x0}, [%r0];",
                 "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%x0, %x1, %x2, %x3}, [%r0];",
                 "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64 {%x0, %x1}, [%r0];",
                 "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.b6x16_p32 {%x0, %x1}, [%r0];"],
    "load.ext": ["ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];",
                 "ld.relaxed.gpu.global.b32 %r0, [%d0];", "ld.volatile.shared.b64 %d0, [%r0];",
                 "ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d0];",
                 "ld.acquire.sys.global.b128 %q0, [%d0];", "ld.shared::cluster.u16 %h0, [%r0];"],
    "store.ext": ["st.global.L1::no_allocate.v2.b64 [%d0], {%d1, %d2};",
                  "st.release.gpu.global.b32 [%d0], %r0;", "st.shared::cluster.b8 [%r0], %h0;",
                  "st.global.v4.b64 [%d0], {%d1, %d2, %d3, %d4};",
                  "st.relaxed.sys.global.b128 [%d0], %q0;"],
    "store.async": [
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r0], {%d0, %d1}, [%r1];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r0], %r2, [%r1];"],
    "red": ["red.global.add.u32 [%d0], %r0;", "red.shared.or.b32 [%r0], %r1;",
            "red.release.gpu.global.add.s32 [%d0], %r0;", "red.global.add.f32 [%d0], %f0;",
            "red.global.v2.f32.add [%d0], {%f0, %f1};",
            "red.global.v4.bf16x2.max.noftz [%d0], {%r0, %r1, %r2, %r3};",
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
            "[%r0], %r2, [%r1];",
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.inc.u32 "
            "[%r0], %r2, [%r1];",
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 "
            "[%r0], %d2, [%r1];"],
    "redux.sync": ["redux.sync.add.u32 %r0, %r1, %r2;", "redux.sync.max.s32 %r0, %r1, -1;",
                   "redux.sync.xor.b32 %r0, %r1, -1;", "redux.sync.min.f32 %f0, %f1, -1;",
                   "redux.sync.max.abs.NaN.f32 %f0, %f1, -1;"],
    "mapa": ["mapa.shared::cluster.u32 %r0, %r1, %r2;", "mapa.u64 %d0, %d1, %r2;"],
    "match.sync": ["match.any.sync.b32 %r0, %r1, -1;", "match.all.sync.b64 %r0|%p0, %d0, -1;"],
    "mbarrier.init": ["mbarrier.init.shared::cta.b64 [%r0], 1;"],
    "mbarrier.inval": ["mbarrier.inval.shared.b64 [%r0];"],
    "mbarrier.arrive": ["mbarrier.arrive.shared.b64 %d0, [%r0];",
                        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r0], %r1;"],
    "mbarrier.arrive.expect_tx": ["mbarrier.arrive.expect_tx.shared.b64 %d0, [%r0], %r1;"],
    "mbarrier.arrive.nocomplete": ["mbarrier.arrive.noComplete.shared.b64 %d0, [%r0], %r1;"],
    "mbarrier.arrive_drop": ["mbarrier.arrive_drop.shared.b64 %d0, [%r0];"],
    "mbarrier.arrive_drop.expect_tx": ["mbarrier.arrive_drop.expect_tx.shared.b64 %d0, [%r0], %r1;"],
    "mbarrier.arrive_drop.nocomplete": ["mbarrier.arrive_drop.noComplete.shared.b64 %d0, [%r0], %r1;"],
    "mbarrier.complete_tx": ["mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r0], %r1;"],
    "mbarrier.expect_tx": ["mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r0], %r1;"],
    "mbarrier.txn": ["mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%r0], %r1;"],
    "mbarrier.txn.cta": ["mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r0], %r1;"],
    "mbarrier.test.wait": ["mbarrier.test_wait.shared.b64 %p0, [%r0], %d0;",
                           "mbarrier.test_wait.parity.shared.b64 %p0, [%r0], %r1;"],
    "mbarrier.try_wait": ["mbarrier.try_wait.shared.b64 %p0, [%r0], %d0;"],
    "mbarrier.try_wait.timelimit": ["mbarrier.try_wait.shared.b64 %p0, [%r0], %d0, %r1;"],
    "mbarrier.try_wait.parity": ["mbarrier.try_wait.parity.shared.b64 %p0, [%r0], %r1;"],
    "mbarrier.try_wait.parity.timelimit": [
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p0, [%r0], %r1, 1000;"],
    "mbarrier.wait": ["mbarrier.try_wait.shared.b64 %p0, [%r0], %d0;"],
    "mbarrier.wait.parity": ["mbarrier.try_wait.parity.shared.b64 %p0, [%r0], %r1;"],
    "mma.sync": ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%x0, %x1, %x2, %x3}, {%x4, %x5, %x6, %x7}, {%x8, %x9}, {%x0, %x1, %x2, %x3};"],
    "mma_smem_desc": ["add.s64 %d0, %d1, 2;"],
    "tcgen05.mma_smem_desc": ["add.s64 %d0, %d1, 2;"],
    "movmatrix": ["movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;"],
    "pmevent": ["pmevent 1;"],
    "nanosleep": ["nanosleep.u32 100;"],
    "prefetch": ["prefetch.global.L2 [%d0];", "prefetchu.L1 [%d0];", "prefetch.tensormap [%d0];",
                 "prefetch.global.L2::evict_last [%d0];"],
    "prmt": ["prmt.b32 %r0, %r1, %r2, %r3;",
             *(f"prmt.b32.{m} %r0, %r1, %r2, %r3;" for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"))],
    "setmaxregister": ["setmaxnreg.inc.sync.aligned.u32 232;", "setmaxnreg.dec.sync.aligned.u32 40;"],
    "shfl.sync": [f"shfl.sync.{m}.b32 %r0|%p0, %r1, %r2, 31, -1;" for m in ("idx", "bfly", "up", "down")],
    "st.bulk": ["st.bulk.weak.shared::cta [%r0], %d0, 0;"],
    "stmatrix": ["stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r0], {%x0, %x1};",
                 "stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r0], {%x0, %x1, %x2, %x3};"],
    "tcgen05.alloc": ["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 64;",
                      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r0], %r1;"],
    "tcgen05.dealloc": ["tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 64;"],
    "tcgen05.relinquish_alloc_permit": ["tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"],
    "tcgen05.commit": [
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];",
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%r0], %h0;"],
    "tcgen05.cp": ["tcgen05.cp.cta_group::1.128x256b [%r0], %d0;",
                   "tcgen05.cp.cta_group::2.64x128b.warpx2::01_23 [%r0], %d0;",
                   "tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b6x16_p32 [%r0], %d0;"],
    "tcgen05.fence": ["tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"],
    "tcgen05.ld": [f"tcgen05.ld.sync.aligned.16x256b.x2.b32 {fragments(8)}, [%r0];",
                   f"tcgen05.ld.sync.aligned.16x32bx2.x2.pack::16b.b32 {fragments(2)}, [%r0], 8;"],
    "tcgen05.st": [f"tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r0], {fragments(2)};"],
    "tcgen05.wait": ["tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"],
    "tcgen05.mma": [
        *(f"tcgen05.mma.cta_group::1.kind::{k} {_MMA}, %p0;" for k in ("f16", "tf32", "f8f6f4", "i8")),
        f"tcgen05.mma.cta_group::1.kind::f16.collector::a::fill {_MMA}, "
        "{%r2, %r3, %r4, %r5}, %p0, 3;",
        "tcgen05.mma.cta_group::2.kind::tf32.ashift [%r0], [%r6], %d1, %r1, "
        "{%r2, %r3, %r4, %r5, %r2, %r3, %r4, %r5}, %p0;"],
    "tcgen05.mma.block_scale": [
        f"tcgen05.mma.cta_group::1.kind::{k}.block_scale{v} {_MMA}, [%r2], [%r3], %p0;"
        for k, v in (("mxf8f6f4", ".scale_vec::1X"), ("mxf4", ""), ("mxf4nvf4", ".scale_vec::4X"),
                     ("mxf4nvf4", ".scale_vec::2X"), ("mxf4nvf4", ".block16"), ("mxf4", ".block32"))],
    "tcgen05.mma.ws": [f"tcgen05.mma.ws.cta_group::1.kind::f16 {_MMA}, %p0;",
                       f"tcgen05.mma.ws.cta_group::1.kind::i8.collector::b2::use {_MMA}, %p0, %d2;"],
    "tcgen05.shift": ["tcgen05.shift.cta_group::1.down [%r0];", "tcgen05.shift.cta_group::2.down [%r0];"],
    "tensormap.replace": [
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r0], %d0;",
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r0], 1, %r1;",
        "tensormap.replace.tile.global_stride.global.b1024.b64 [%d0], 0, %d1;"],
    "tensormap.cp_fenceproxy": [
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%d0], [%r0], 128;"],
    "vote.sync": ["vote.sync.ballot.b32 %r0, %p0, -1;", "vote.sync.any.pred %p0, %p1, -1;",
                  "vote.sync.uni.pred %p0, %p1, -1;"],
    "wgmma.fence.aligned": ["wgmma.fence.sync.aligned;"],
    "wgmma.commit.group.sync.aligned": ["wgmma.commit_group.sync.aligned;"],
    "wgmma.wait.group.sync.aligned": ["wgmma.wait_group.sync.aligned 0;"],
    "wgmma.mma_async": [
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {fragments(4)}, %d0, %d1, %p0, 1, 1, 0, 1;",
        f"wgmma.mma_async.sync.aligned.m64n16k32.f16.e4m3.e5m2 {fragments(4)}, %d0, %d1, %p0, 1, 1;",
        f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {fragments(4)}, {{%x4, %x5, %x6, %x7}}, "
        "%d1, %p0, 1, -1;",
        f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.u8 {fragments(4)}, %d0, %d1, %p0;"],
    **{f"read.ptx.sreg.{name.replace('_', '.')}": [f"mov.u32 %r0, %{name};"] for name in _SREGS},
    "read.ptx.sreg.clock64": ["mov.u64 %d0, %clock64;"],
    "read.ptx.sreg.globaltimer": ["mov.u64 %d0, %globaltimer;"],
    "read.ptx.sreg.gridid": ["mov.u64 %d0, %gridid;"],
    "read.ptx.sreg.warpsize": ["mov.u32 %r0, WARP_SZ;"],
}  # fmt: skip
# Not in the dialect, but in compiled kernels.
PLAIN = [
    "tanh.approx.f32 %f0, %f1;", "tanh.approx.bf16x2 %r0, %r1;", "sqrt.rn.f32 %f0, %f1;",
    "div.full.f32 %f0, %f1, %f2;", "div.rn.f32 %f0, %f1, %f2;", "testp.finite.f32 %p0, %f1;",
    "copysign.f32 %f0, %f1, %f2;", "neg.f32 %f0, %f1;", "neg.f16x2 %r0, %r1;",
    "lop3.b32 %r0, %r1, %r2, %r3, 150;", "lop3.or.b32 %r0|%p0, %r1, %r2, %r3, 150, %p1;",
    "shf.l.wrap.b32 %r0, %r1, %r2, %r3;", "shf.r.clamp.b32 %r0, %r1, %r2, 7;",
    "bfind.u32 %r0, %r1;", "bfind.shiftamt.s64 %r0, %d1;", "fns.b32 %r0, %r1, %r2, %r3;",
    "bfe.s32 %r0, %r1, 3, 5;", "bfi.b64 %d0, %d1, %d2, %r1, %r2;", "brev.b32 %r0, %r1;",
    "popc.b64 %r0, %d1;", "clz.b32 %r0, %r1;", "sad.u32 %r0, %r1, %r2, %r3;",
    "mad.lo.s32 %r0, %r1, %r2, %r3;", "mad.wide.u32 %d0, %r1, %r2, %d3;", "mul24.lo.u32 %r0, %r1, %r2;",
    "mad24.lo.s32 %r0, %r1, %r2, %r3;", "mul.hi.u64 %d0, %d1, %d2;", "div.s32 %r0, %r1, %r2;",
    "rem.u64 %d0, %d1, %d2;", "add.cc.u32 %r0, %r1, %r2;", "addc.u32 %r0, %r1, %r2;",
    "add.sat.s32 %r0, %r1, %r2;", "add.s16x2 %r0, %r1, %r2;", "max.u16x2 %r0, %r1, %r2;",
    "min.relu.s16x2 %r0, %r1, %r2;", "max.relu.s32 %r0, %r1, %r2;", "bmsk.clamp.b32 %r0, %r1, %r2;",
    "szext.wrap.s32 %r0, %r1, %r2;", "selp.b32 %r0, %r1, %r2, %p0;", "slct.f32.s32 %f0, %f1, %f2, %r3;",
    "setp.lt.and.f32 %p0|%p1, %f1, %f2, %p2;", "cvt.s64.s32 %d0, %r1;", "cvt.sat.u8.s32 %h0, %r1;",
    "cvt.rn.f32.s64 %f0, %d1;", "cvt.f64.f32 %e0, %f1;", "cvt.rn.f32.f64 %f0, %e1;",
    "cvt.rp.f32.f64 %f0, %e1;", "cvt.rn.f16.f32 %h0, %f1;", "cvt.rn.bf16.s32 %h0, %r1;",
    "cvta.to.global.u64 %d0, %d1;", "isspacep.shared %p0, %d0;", "getctarank.u64 %r0, %d0;",
    "activemask.b32 %r0;", "createpolicy.fractional.L2::evict_first.b64 %d0, 1.0;",
    "applypriority.global.L2::evict_normal [%d0], 128;", "discard.global.L2 [%d0], 128;",
    "and.b32 %r0, %r1, %r2;", "or.pred %p0, %p0, %p1;", "xor.b64 %d0, %d1, %d2;", "not.b16 %h0, %h1;",
    "not.pred %p0, %p1;", "cnot.b32 %r0, %r1;", "shl.b64 %d0, %d1, %r1;", "shr.s32 %r0, %r1, %r2;",
    "shr.u64 %d0, %d1, 3;", "subc.cc.u32 %r0, %r1, %r2;", "madc.hi.u32 %r0, %r1, %r2, %r3;",
    "ldu.global.b32 %r0, [%d0];", "trap;", "brkpt;", "vprintf %r0, %d0, %d1;",
    "mbarrier.arrive_drop.relaxed.cta.shared::cta.b64 %d0, [%r0], 2;",
    "mbarrier.pending_count.b64 %r0, %d0;", "bar.red.popc.u32 %r0, 1, %p0;",
    "bar.cta.red.or.pred %p0, 1, %p1;", "barrier.red.and.aligned.pred %p0, 1, 64, %p1;",
]  # fmt: skip
_SPARSE = "sparse products: their metadata layouts are not simulated"
_LATER = "not in sm_90a or sm_100a"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ["mma.sp.sync", "tcgen05.mma.sp", "tcgen05.mma.sp.block_scale", "tcgen05.mma.ws.sp"], _SPARSE
    ),
    **dict.fromkeys(
        ["multimem.ld.reduce", "multimem.red", "multimem.st"], "multimem needs several GPUs"
    ),
    **dict.fromkeys(["wmma.load", "wmma.mma", "wmma.store"], "wmma fragments are opaque"),
    **dict.fromkeys(
        ["mma.block_scale", "mma.block_scale.internal", "mma.sp.block_scale",
         "mma.sp.block_scale.internal"], "sm_120a only"),
    "tcgen05.ld.red": "sm_103a and sm_101a only",
    "trace.mark": "a mark for profilers",
    **dict.fromkeys(
        ["convert.f32x4.to.f4x4", "convert.f32x4.to.f6x4", "convert.f32x4.to.f8x4",
         "cvt.to.f4x8.packed"], "stochastic rounding"),
    **dict.fromkeys(
        ["convert.bf16x2.to.s2f6x2", "convert.f32x2.to.s2f6x2"], "fixed point from floats"),
    **dict.fromkeys([f"read.ptx.sreg.envreg{i}" for i in range(32)], "what a driver leaves there"),
    **dict.fromkeys(
        ["add.packed.bf16x2.f32x2.f32x2", "add.packed.f16x2.f32x2.f32x2",
         "add.packed.f32x2.bf16x2.f32x2", "add.packed.f32x2.f16x2.f32x2",
         "sub.packed.bf16x2.f32x2.f32x2", "sub.packed.f16x2.f32x2.f32x2",
         "sub.packed.f32x2.bf16x2.f32x2", "sub.packed.f32x2.f16x2.f32x2",
         "mul.packed.bf16x2.bf16x2.f16x2", "mul.packed.bf16x2.f32x2.f32x2",
         "mul.packed.f16x2.f16x2.bf16x2", "mul.packed.f16x2.f32x2.f32x2",
         "fma.packed.f32x2.bf16x2.f32x2.f32x2", "fma.packed.f32x2.f16x2.f32x2.f32x2", "clmad",
         "cvt.packfloat", "cvt.packfloat.f32",
         "cp.async.bulk.tensor.global.shared.cta.override",
         "cp.async.bulk.tensor.prefetch.override", "cp.async.bulk.tensor.reduce.override",
         "cp.async.bulk.tensor.shared.cluster.global.override", "applypriority.async.bulk",
         "applypriority.async.bulk.tensor", "applypriority.async.bulk.tensor.override",
         "mbarrier.check.layout", "spcompress", "spdecompress", "tcgen05.ld.spcompress",
         "tcgen05.ld.red.spcompress", "tcgen05.mma.decompress_b",
         "tcgen05.mma.block_scale.decompress_b"], _LATER),
}  # fmt: skip


# Lines of what is refused, with words of the error that says why.
REFUSALS = [
    ("multimem.red.relaxed.sys.global.add.f32 [%d0], %f0;", "several GPUs"),
    ("multimem.ld_reduce.relaxed.sys.global.add.f32 %f0, [%d0];", "several GPUs"),
    ("multimem.st.relaxed.sys.global.f32 [%d0], %f0;", "several GPUs"),
    ("tcgen05.ld.red.sync.aligned.32x32b.x2.f32.max {%x0, %x1}, %x2, [%r0];", "sm_103a"),
    ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %d0, %d1, [%r2], %r1, %p0;", "sparse"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%x0, %x1, %x2, %x3}, %d0, %d1, "
     "%r0, 0, %p0, 1, 1, 0, 0;", "sparse"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%x0, %x1, %x2, %x3, %x4, %x5, %x6, %x7}, [%d0];",
     "opaque"),
    ("cvt.rs.satfinite.e4m3x4.f32 %r0, {%f1, %f2, %f3, %f4}, %r1;", "stochastic rounding"),
    ("cvt.rn.satfinite.s2f6x2.f32 %h0, %f1, %f2;", "fixed point from floats"),
    ("cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
     "[%r0], [%d1, {%r2, %r3, %r4}], [%r1], {%h0};", "im2col"),
    ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%x0, %x1, %x2, %x3, %x4, %x5, %x6, %x7}, "
     "{%x8, %x9}, {%x10, %x11}, {%x0, %x1, %x2, %x3, %x4, %x5, %x6, %x7};", "m8n8k4 of f16"),
    ("vadd.s32.s32.s32 %r0, %r1, %r2;", "opcode vadd"),
    ("fma.rn.oob.f16 %h0, %h1, %h2, %h3;", r"modifier \.oob"),
]  # fmt: skip


def _module(line: str) -> str:
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .b64 in)
{{
.reg .pred %p<4>; .reg .b8 %b<4>; .reg .b16 %h<4>; .reg .b32 %r<16>, %x<128>; .reg .b64 %d<8>;
.reg .f32 %f<8>; .reg .f64 %e<4>; .reg .b128 %q<4>;
{line}
ret;
}}
"""


def translate(line: str) -> None:
    """Raise UnsupportedInstruction if the simulator does not execute a line."""
    program = Program(parse_module(_module(line)).entries["k"], {})
    for number in range(program.exit):
        program._compile(number, True)
        program._compile(number, False)


LINES = [(op, line) for op, lines in RUNS.items() for line in lines] + [("", x) for x in PLAIN]


@pytest.mark.parametrize(("operation", "line"), LINES)
def test_executed(operation, line):
    translate(line)


@pytest.mark.parametrize(("line", "reason"), REFUSALS)
def test_refused_with_a_reason(line, reason):
    with pytest.raises(UnsupportedInstruction, match=reason) as caught:
        translate(line)
    assert line.split()[0] in str(caught.value)
    assert "PTX line 9" in str(caught.value)


def test_every_operation_of_the_dialect_is_in_the_table():
    from cutlass._mlir.dialects import nvvm

    names = {
        getattr(nvvm, name).OPERATION_NAME.removeprefix("nvvm.")
        for name in dir(nvvm)
        if name.endswith("Op") and hasattr(getattr(nvvm, name), "OPERATION_NAME")
    }
    assert names - set(RUNS) - set(REFUSED) == set()
