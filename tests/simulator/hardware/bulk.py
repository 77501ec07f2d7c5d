"""One-dimensional bulk copies and reductions, mbarrier phases and named barriers."""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware.case import Buffer, Case, Row, module, poisoned
from tests.simulator.hardware.inputs import random_bytes, random_words, uniform
from tests.simulator.hardware.snippets import PROLOGUE, copy_in, copy_out, initialise, wait

THREADS = 128
_POINTERS = "ld.param.u64 %out, [out];\nld.param.u64 %in, [in];\n"
_BARRIER = "mov.u32 %bar, %smem;\nadd.u32 %smem, %smem, 1024;\n"


def _copies() -> Case:
    """Global to shared in pieces of several sizes, and from there to another place in global."""
    pieces = (16, 48, 1024, 2048 + 16)
    total = sum(pieces)
    lines = [PROLOGUE, _POINTERS, _BARRIER, initialise("%bar")]
    lines.append("@!%leader bra ISSUED;")
    lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], {total};")
    offset = 0
    for piece in pieces:
        lines.append(
            f"add.u32 %r0, %smem, {total - offset - piece}; add.u64 %at, %in, {offset};\n"
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[%r0], [%at], {piece}, [%bar];"
        )
        offset += piece
    lines.append("mbarrier.arrive.shared::cta.b64 _, [%bar];\nISSUED:")
    lines.append(wait("%bar", "0"))
    lines.append(copy_out("%smem", "%out", total, THREADS))
    lines.append("@!%leader bra STORED;")
    for k, piece in enumerate(pieces):
        lines.append(
            f"add.u32 %r0, %smem, {256 * k}; add.u64 %at, %out, {total + 2304 * k};\n"
            f"cp.async.bulk.global.shared::cta.bulk_group [%at], [%r0], {piece};"
        )
    lines.append("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nSTORED:")
    return Case(
        "bulk copy",
        module("\n".join(lines), "u64 out, u64 in"),
        (Row("loaded", total), *(Row(f"stored {p}", 2304) for p in pieces)),
        (poisoned(total + 2304 * len(pieces)), random_bytes("bulk copy", total)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=4352,
    )


_REDUCTIONS = (
    "add.u32", "min.u32", "max.u32", "inc.u32", "dec.u32", "and.b32", "or.b32", "xor.b32",
    "add.s32", "min.s32", "max.s32", "add.u64", "min.u64", "max.u64", "min.s64", "max.s64",
    "and.b64", "or.b64", "xor.b64", "add.f32", "add.f64", "add.noftz.f16", "min.f16", "max.f16",
    "add.noftz.bf16", "min.bf16", "max.bf16",
)  # fmt: skip
_SIZE = 1024


def _contents(seed: str, dtype: str) -> np.ndarray:
    """Random words; the first half of floating-point data moderate numbers."""
    data = random_bytes(f"{seed} {dtype}", _SIZE)
    half = _SIZE // 2
    numbers = uniform(f"{seed} {dtype} numbers", half, -100, 100)
    if dtype == "f16":
        data[:half] = numbers[: half // 2].astype(np.float16).view(np.uint8)
    elif dtype == "bf16":
        top = (numbers[: half // 2].view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        data[:half] = top.view(np.uint8)
    elif dtype == "f32":
        data[:half] = numbers[: half // 4].view(np.uint8)
    elif dtype == "f64":
        data[:half] = numbers[: half // 8].astype(np.float64).view(np.uint8)
    return data


def _reductions() -> Case:
    """cp.reduce.async.bulk into global memory, one operation per row."""
    lines, rows, cells, values = [PROLOGUE, _POINTERS], [], [], []
    for op in _REDUCTIONS:
        dtype = op.split(".")[-1]
        lines.append(copy_in("%in", "%smem", _SIZE, THREADS))
        lines.append("fence.proxy.async.shared::cta;\nbar.sync 0;")
        lines.append(
            f"@%leader cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%out], [%smem], "
            f"{_SIZE};\n@%leader cp.async.bulk.commit_group;\n"
            f"@%leader cp.async.bulk.wait_group 0;\nbar.sync 0;"
        )
        lines.append(f"add.u64 %in, %in, {_SIZE};\nadd.u64 %out, %out, {_SIZE};")
        rows.append(
            Row(f"cp.reduce {op}", _SIZE, dtype if dtype in ("f16", "bf16", "f32", "f64") else None)
        )
        cells.append(_contents(f"cells {op}", dtype))
        values.append(_contents(f"values {op}", dtype))
    return Case(
        "bulk reduce",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (np.concatenate(cells), np.concatenate(values)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=_SIZE,
    )


# Steps of one thread on one barrier; after each the phase parities are tested.
_PHASES = (
    "mbarrier.init.shared::cta.b64 [%bar], 3;",
    "mbarrier.arrive.shared::cta.b64 %d0, [%bar];",
    "mbarrier.arrive.shared::cta.b64 _, [%bar], 2;",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 48;",
    "mbarrier.arrive.shared::cta.b64 %d1, [%bar], 2;",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 16;",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 32;",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 64;",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 64;",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 80;",
    "mbarrier.arrive.shared::cta.b64 _, [%bar], 3;",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 80;",
    "mbarrier.arrive_drop.shared::cta.b64 _, [%bar];",
    "mbarrier.arrive.shared::cta.b64 _, [%bar], 2;",
    "mbarrier.arrive.shared::cta.b64 _, [%bar], 2;",
    "mbarrier.arrive_drop.shared::cta.b64 _, [%bar];",
    "mbarrier.arrive.shared::cta.b64 %d1, [%bar];",
    "mbarrier.arrive.shared::cta.b64 _, [%bar];",
    "mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d1, [%bar2], 1;",
    "mbarrier.inval.shared::cta.b64 [%bar];\nmbarrier.init.shared::cta.b64 [%bar], 1;",
)  # fmt: skip


def _phases() -> Case:
    """Arrivals, transaction bytes before and after expect_tx, dropped arrivals, state tokens."""
    tests = "mbarrier.test_wait{0}.shared::cta.b64 %p0, [%bar], {1}; selp.u32 %r0, 1, 0, %p0;\n"
    tests += "st.global.b32 [%out+{2}], %r0;"
    lines = [PROLOGUE, ".reg .b32 %bar2;", _POINTERS, _BARRIER, "@!%leader bra FINISHED;"]
    lines.append("add.u32 %bar2, %bar, 16;\nmbarrier.init.shared::cta.b64 [%bar2], 4;")
    rows = []
    for k, step in enumerate(_PHASES):
        lines.append(step)
        for j, parity in enumerate((0, 1)):
            lines.append(tests.format(".parity", parity, 12 * k + 4 * j))
        # The token of the first arrival: its phase stays complete from the second step on.
        operands = (".parity", 1) if k < 1 or k == len(_PHASES) - 1 else ("", "%d0")
        if 1 <= k <= 3:
            lines.append(tests.format(*operands, 12 * k + 8))
        elif 4 <= k <= 6:
            lines.append(tests.format("", "%d1", 12 * k + 8))
        else:
            lines.append(f"mov.u32 %r0, {k};\nst.global.b32 [%out+{12 * k + 8}], %r0;")
        rows.append(Row(f"after {k}: {step.splitlines()[-1]}", 12))
    lines.append("FINISHED:")
    return Case(
        "mbarrier phases",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(12 * len(rows)), random_bytes("unused", 16)),
        (Buffer(0), Buffer(1)),
        shared=1024,
    )


def _pending() -> Case:
    """pending_count of the tokens that arrivals return."""
    lines = [PROLOGUE, _POINTERS, "mov.u32 %bar, %smem;", initialise("%bar", 9)]
    lines.append("@!%leader bra FINISHED;")
    rows = []
    for k, count in enumerate((1, 3, 1, 2, 2, 5)):
        lines.append(f"mbarrier.arrive.shared::cta.b64 %d0, [%bar], {count};")
        lines.append(f"mbarrier.pending_count.b64 %r0, %d0;\nst.global.b32 [%out+{4 * k}], %r0;")
        rows.append(Row(f"arrival {k} of {count}", 4))
    lines.append("FINISHED:")
    return Case(
        "mbarrier pending_count",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(4 * len(rows)), random_bytes("unused", 16)),
        (Buffer(0), Buffer(1)),
        shared=1024,
    )


def _pipeline() -> Case:
    """A two-stage ring: warp 0 copies pieces in, warps 1 to 3 consume, full and empty barriers."""
    pieces, size, stages = 9, 384, 2
    lines = [
        PROLOGUE,
        ".reg .b32 %full, %empty, %stage, %parity, %buffer, %i;",
        _POINTERS,
        _BARRIER,
    ]
    for k in range(stages):
        lines.append(f"@%leader mbarrier.init.shared::cta.b64 [%bar+{8 * k}], 1;")
        lines.append(f"@%leader mbarrier.init.shared::cta.b64 [%bar+{32 + 8 * k}], 96;")
    lines.append("@%leader fence.mbarrier_init.release.cluster;\nbar.sync 0;")
    lines.append("mov.u32 %i, 0;\nNEXT:")
    lines.append(
        f"and.b32 %stage, %i, 1;\nmad.lo.u32 %full, %stage, 8, %bar;\nadd.u32 %empty, %full, 32;\n"
        f"mad.lo.u32 %buffer, %stage, {size}, %smem;\nshr.u32 %parity, %i, 1;\n"
        "and.b32 %parity, %parity, 1;\nsetp.ge.u32 %p0, %thread, 32;\n@%p0 bra CONSUME;\n"
        "xor.b32 %parity, %parity, 1;"
    )
    lines.append(wait("%empty", "%parity"))
    lines.append(
        f"@!%leader bra ADVANCE;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {size};\n"
        f"mad.wide.u32 %at, %i, {size}, %in;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%buffer], [%at], {size}, [%full];\nbra ADVANCE;\nCONSUME:"
    )
    lines.append(wait("%full", "%parity"))
    lines.append(
        "add.u32 %r0, %thread, -32;\nmad.lo.u32 %r1, %r0, 4, %buffer;\nld.shared.b32 %r2, [%r1];\n"
        "xor.b32 %r2, %r2, %i;\n"
        f"mad.lo.u32 %r1, %i, {size}, 0;\nmad.lo.u32 %r1, %r0, 4, %r1;\n"
        "cvt.u64.u32 %at, %r1;\nadd.u64 %at, %at, %out;\nst.global.b32 [%at], %r2;\n"
        "mbarrier.arrive.shared::cta.b64 _, [%empty];\nADVANCE:\nadd.u32 %i, %i, 1;\n"
        f"setp.lt.u32 %p0, %i, {pieces};\n@%p0 bra NEXT;"
    )
    return Case(
        "mbarrier pipeline",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(Row(f"piece {k}", size) for k in range(pieces)),
        (poisoned(size * pieces), random_bytes("pipeline", size * pieces)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=1024 + stages * size,
    )


def _nothing() -> Case:
    """Copies of no bytes: nothing moves, the barrier's count stays."""
    test = (
        "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%bar], 0;\nselp.u32 %r1, 1, 0, %p0;\n"
        "st.global.b32 [%out+{0}], %r1;\n"
    )
    lines = [PROLOGUE, _POINTERS, _BARRIER, initialise("%bar"), "@!%leader bra FINISHED;"]
    lines.append("ld.global.b32 %r0, [%in];\nmov.u32 %r1, 7;\nst.shared.b32 [%smem], %r1;")
    lines.append(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%in], %r0, "
        f"[%bar];\n{test.format(0)}mbarrier.arrive.shared::cta.b64 _, [%bar];\n{test.format(4)}"
        "ld.shared.b32 %r1, [%smem];\nst.global.b32 [%out+8], %r1;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], %r0;\n"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%smem], %r0;\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nFINISHED:"
    )
    return Case(
        "bulk copy of nothing",
        module("\n".join(lines), "u64 out, u64 in"),
        (Row("tests and memory", 12), Row("untouched", 4)),
        (poisoned(16), np.zeros(16, np.uint8)),
        (Buffer(0), Buffer(1)),
        shared=2048,
    )


def _named_barriers() -> Case:
    """bar.red, and bar.sync / bar.arrive between two pairs of warps."""
    lines = [PROLOGUE, _POINTERS, "mad.wide.u32 %at, %thread, 4, %in;\nld.global.b32 %r0, [%at];"]
    lines.append("mad.wide.u32 %at, %thread, 4, %out;\nand.b32 %r1, %r0, 3;")
    lines.append("setp.eq.u32 %p0, %r1, 0;\nsetp.ne.u32 %p1, %r0, %thread;")
    rows = []
    for predicate in ("%p0", "%p1", "!%p1"):
        for op in ("popc.u32 %r2", "and.pred %p2", "or.pred %p2"):
            lines.append(f"barrier.cta.red.{op.split()[0]} {op.split()[1]}, 2, {predicate};")
            if "pred" in op:
                lines.append("selp.u32 %r2, 1, 0, %p2;")
            lines.append(f"st.global.b32 [%at+{4 * THREADS * len(rows)}], %r2;")
            rows.append(Row(f"barrier.red.{op} {predicate}", 4 * THREADS))
    # Warps 0, 1 write words that warps 2, 3 read, then the other way round.
    lines.append(
        "mad.lo.u32 %r3, %thread, 4, %smem;\nxor.b32 %r4, %r3, 256;\n"
        "setp.ge.u32 %p0, %thread, 64;\n@%p0 bra READER;\n"
        "st.shared.b32 [%r3], %r0;\nbar.arrive 3, 128;\nbar.sync 4, 128;\n"
        "ld.shared.b32 %r5, [%r4];\nbra JOIN;\nREADER:\n"
        "bar.sync 3, 128;\nld.shared.b32 %r5, [%r4];\nst.shared.b32 [%r3], %r0;\n"
        f"bar.arrive 4, 128;\nJOIN:\nst.global.b32 [%at+{4 * THREADS * len(rows)}], %r5;"
    )
    rows.append(Row("bar.sync and bar.arrive", 4 * THREADS))
    return Case(
        "named barriers",
        module("\n".join(lines), "u64 out, u64 in"),
        tuple(rows),
        (poisoned(4 * THREADS * len(rows)), random_words("named barriers", THREADS).view(np.uint8)),
        (Buffer(0), Buffer(1)),
        block=THREADS,
        shared=1024,
    )


def cases() -> list[Case]:
    """The bulk-copy and barrier programs."""
    return [
        _copies(), _nothing(), _reductions(), _phases(), _pending(), _pipeline(), _named_barriers(),
    ]  # fmt: skip
