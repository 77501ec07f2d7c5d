"""Clusters: distributed shared memory, remote barriers, multicast, cluster-wide addresses."""

from __future__ import annotations

from tests.simulator.hardware.case import Buffer, Case, Row, TensorMap, module, poisoned
from tests.simulator.hardware.inputs import random_bytes
from tests.simulator.hardware.snippets import PROLOGUE, copy_in, copy_out, initialise, wait

THREADS = 64
_POINTERS = """
.reg .b32 %rank, %size, %next, %remote, %remotebar;
ld.param.u64 %out, [out];
ld.param.u64 %in, [in];
mov.u32 %rank, %cluster_ctarank;
mov.u32 %size, %cluster_nctarank;
add.u32 %next, %rank, 1;
rem.u32 %next, %next, %size;
mov.u32 %bar, %smem;
add.u32 %smem, %smem, 1024;
mapa.shared::cluster.u32 %remote, %smem, %next;
mapa.shared::cluster.u32 %remotebar, %bar, %next;
"""
_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
_OWN = (
    "mov.u32 %r15, %ctaid.x;\nmad.wide.u32 %out, %r15, {0}, %out;\n"
    "mad.wide.u32 %in, %r15, {0}, %in;\n"
)


def _case(name: str, body: str, size: int, *, cluster: int = 4, clusters: int = 2, params="",
          more=(), rows: tuple[Row, ...] = (), shared: int = 0) -> Case:  # fmt: skip
    """Every CTA has `size` bytes of input and of output."""
    grid = cluster * clusters
    rows = rows or tuple(Row(f"CTA {k}", size) for k in range(grid))
    return Case(
        name,
        module(f"{PROLOGUE}{_POINTERS}{_OWN.format(size)}{body}", f"u64 out, u64 in{params}"),
        rows,
        (poisoned(size * grid), random_bytes(name, size * grid)),
        (Buffer(0), Buffer(1), *more),
        block=THREADS,
        grid=grid,
        cluster=cluster,
        shared=shared or 1024 + size,
    )


def _specials() -> Case:
    names = (
        "%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%nclusterid.x",
        "%cluster_ctaid.x", "%cluster_nctaid.x", "%ctaid.x", "%nctaid.x", "%cluster_ctaid.y",
        "%cluster_nctaid.z",
    )  # fmt: skip
    lines = [f"mov.u32 %r0, {n};\n@%leader st.global.b32 [%out+{4 * k}], %r0;"
             for k, n in enumerate(names)]  # fmt: skip
    lines.append(
        "mov.pred %p0, %is_explicit_cluster;\nselp.u32 %r0, 1, 0, %p0;\n"
        f"@%leader st.global.b32 [%out+{4 * len(names)}], %r0;\n"
        "getctarank.shared::cluster.u32 %r0, %remote;\n"
        f"@%leader st.global.b32 [%out+{4 * len(names) + 4}], %r0;"
    )
    return _case("cluster registers", "\n".join(lines), 4 * len(names) + 8)


def _remote_access() -> Case:
    """Stores to the next CTA, loads from the one after; each lane may name another CTA."""
    size = 16 * THREADS
    return _case(
        "remote loads and stores",
        f"""
mad.wide.u32 %at, %thread, 16, %in;
ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%at];
{copy_in("%in", "%smem", size, THREADS)}
{_SYNC}
mad.lo.u32 %r4, %thread, 16, %remote;
st.shared::cluster.b32 [%r4+4], %r1;
st.shared::cluster.v2.b32 [%r4+8], {{%r3, %r2}};
{_SYNC}
add.u32 %r5, %thread, %rank;
rem.u32 %r5, %r5, %size;
mad.lo.u32 %r6, %thread, 16, %smem;
mapa.shared::cluster.u32 %r7, %r6, %r5;
ld.shared::cluster.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r7];
xor.b32 %r8, %r8, %r0;
mad.wide.u32 %at, %thread, 16, %out;
st.global.v4.b32 [%at], {{%r8, %r9, %r10, %r11}};
{_SYNC}""",
        size,
    )


def _generic_access() -> Case:
    """The same through generic addresses."""
    size = 8 * THREADS
    return _case(
        "remote generic access",
        f"""
mad.wide.u32 %at, %thread, 8, %in;
ld.global.b64 %d0, [%at];
mad.lo.u32 %r4, %thread, 8, %smem;
cvt.u64.u32 %d1, %r4;
cvta.shared.u64 %d1, %d1;
mapa.u64 %d2, %d1, %next;
st.b64 [%d2], %d0;
{_SYNC}
ld.shared.b64 %d3, [%r4];
ld.b64 %d4, [%d2];
xor.b64 %d3, %d3, %d4;
mad.wide.u32 %at, %thread, 8, %out;
st.global.b64 [%at], %d3;
{_SYNC}""",
        size,
    )


def _remote_atomics() -> Case:
    """All CTAs add to the cells of CTA 0."""
    size = 4 * THREADS
    return _case(
        "remote atomics",
        f"""
mad.wide.u32 %at, %thread, 4, %in;
ld.global.b32 %r0, [%at];
mad.lo.u32 %r4, %thread, 4, %smem;
mov.u32 %r1, 0;
st.shared.b32 [%r4], %r1;
{_SYNC}
mapa.shared::cluster.u32 %r5, %r4, 0;
red.relaxed.cluster.shared::cluster.add.u32 [%r5], %r0;
atom.relaxed.cluster.shared::cluster.max.u32 %r6, [%r5], %r1;
{_SYNC}
ld.shared.b32 %r2, [%r4];
mad.wide.u32 %at, %thread, 4, %out;
st.global.b32 [%at], %r2;
{_SYNC}""",
        size,
    )


def _asynchronous_stores() -> Case:
    """st.async of every width to the next CTA, which waits for the bytes on its own barrier."""
    size = 32 * THREADS
    return _case(
        "st.async",
        f"""
mad.wide.u32 %at, %thread, 32, %in;
ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%at];
ld.global.v2.b64 {{%d0, %d1}}, [%at+16];
{copy_in("%in", "%smem", size, THREADS)}
{initialise("%bar")}
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {28 * THREADS};
{_SYNC}
mad.lo.u32 %r4, %thread, 32, %remote;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r3, [%remotebar];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r4+8], {{%r1, %r0}}, [%remotebar];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r4+16], {{%d1, %d0}}, [%remotebar];
{wait("%bar", "0")}
{copy_out("%smem", "%out", size, THREADS)}
{_SYNC}""",  # noqa: E501
        size,
    )


def _remote_arrivals() -> Case:
    """Every CTA arrives on every CTA's barrier; mapa gives the barriers' addresses."""
    size = 4 * THREADS
    return _case(
        "remote arrivals",
        f"""
mad.wide.u32 %at, %thread, 4, %in;
ld.global.b32 %r0, [%at];
{initialise("%bar", 4)}
{_SYNC}
mov.u32 %r1, 0;
NEXT:
mapa.shared::cluster.u32 %r2, %smem, %r1;
mapa.shared::cluster.u32 %r3, %bar, %r1;
mad.lo.u32 %r4, %thread, 16, %r2;
mad.lo.u32 %r4, %rank, 4, %r4;
st.shared::cluster.b32 [%r4], %r0;
fence.acq_rel.cluster;
bar.sync 0;
@%leader mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
add.u32 %r1, %r1, 1;
setp.lt.u32 %p0, %r1, %size;
@%p0 bra NEXT;
{wait("%bar", "0").replace(".acquire.cta", ".acquire.cluster")}
mad.lo.u32 %r4, %thread, 16, %smem;
ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r4];
sub.u32 %r5, %r5, %r6;
xor.b32 %r5, %r5, %r7;
sub.u32 %r5, %r5, %r8;
mad.wide.u32 %at, %thread, 4, %out;
st.global.b32 [%at], %r5;
{_SYNC}""",
        size,
        shared=1024 + 16 * THREADS,
    )


def _bulk_between() -> Case:
    """cp.async.bulk from this CTA's shared memory to the next one's."""
    size = 1024
    return _case(
        "bulk copy to a peer",
        f"""
{copy_in("%in", "%smem", size, THREADS)}
fence.proxy.async.shared::cta;
{initialise("%bar")}
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size // 2};
{_SYNC}
add.u32 %r0, %smem, {size // 2};
@%leader cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%remote], [%r0], {size // 2}, [%remotebar];
{wait("%bar", "0")}
{copy_out("%smem", "%out", size, THREADS)}
{_SYNC}""",  # noqa: E501
        size,
    )


_REDUCTIONS = (
    "add.u32", "min.u32", "max.u32", "inc.u32", "dec.u32", "add.s32", "min.s32", "max.s32",
    "and.b32", "or.b32", "xor.b32", "add.u64",
)  # fmt: skip


def _bulk_reductions() -> Case:
    """cp.reduce.async.bulk into the next CTA's shared memory, each operation on its own bytes."""
    each = 256
    size = each * len(_REDUCTIONS)
    copies = "\n".join(
        "@%leader cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        f".{op} [%remote+{each * k}], [%r0+{each * k}], {each}, [%remotebar];"
        for k, op in enumerate(_REDUCTIONS)
    )
    return _case(
        "bulk reduce to a peer",
        f"""
{copy_in("%in", "%smem", 2 * size, THREADS)}
fence.proxy.async.shared::cta;
{initialise("%bar")}
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
{_SYNC}
add.u32 %r0, %smem, {size};
{copies}
{wait("%bar", "0")}
{copy_out("%smem", "%out", 2 * size, THREADS)}
{_SYNC}""",
        2 * size,
    )


def _multicast(tensor: bool) -> Case:
    """Each CTA multicasts its piece to itself and to CTA 0 and 3; all wait for all their bytes."""
    piece, cluster = 1024, 4
    size = piece * cluster
    masks = [0b1001 | 1 << k for k in range(cluster)]
    receives = [sum(m >> k & 1 for m in masks) * piece for k in range(cluster)]
    table = " ".join(
        f"setp.eq.u32 %p0, %rank, {k};\n@%p0 mov.u32 %r0, {masks[k]};\n"
        f"@%p0 mov.u32 %r1, {receives[k]};\n"
        for k in range(cluster)
    )
    if tensor:
        copy = (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%r2], [%d0, {%r4, %r3}], [%bar], %h0;"
        )
        # 16 rows of 64 bytes per CTA, of a tensor of 40 columns.
        more = (TensorMap(1, "bf16", (40, 8 * 16), (256,), (32, 16), (), 64),)
    else:
        copy = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            f"[%r2], [%in], {piece}, [%bar], %h0;"
        )
        more = ()
    return _case(
        "multicast tensor" if tensor else "multicast bulk",
        f"""
.reg .b16 %h0;
{copy_in("%in", "%smem", size, THREADS)}
fence.proxy.async.shared::cta;
{table}
cvt.u16.u32 %h0, %r0;
{initialise("%bar")}
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %r1;
{_SYNC}
mad.lo.u32 %r2, %rank, {piece}, %smem;
mov.u32 %r4, 16;
mov.u32 %r3, %ctaid.x;
shl.b32 %r3, %r3, 4;
{"mov.b64 %d0, tensor; cvta.param.u64 %d0, %d0;" if tensor else ""}
@%leader {copy}
{wait("%bar", "0")}
{copy_out("%smem", "%out", size, THREADS)}
{_SYNC}""",
        size,
        cluster=cluster,
        params=", map tensor" if tensor else "",
        more=more,
    )


def cases() -> list[Case]:
    """The cluster programs."""
    return [
        _specials(), _remote_access(), _generic_access(), _remote_atomics(),
        _asynchronous_stores(), _remote_arrivals(), _bulk_between(), _bulk_reductions(),
        _multicast(False), _multicast(True),
    ]  # fmt: skip
