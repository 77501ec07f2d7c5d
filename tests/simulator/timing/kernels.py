"""Small PTX kernels that keep one unit busy."""

from __future__ import annotations

_HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""


def bulk_load_kernel(copies: int, size: int) -> str:
    """Each CTA of one warp loads `copies` times `size` bytes from `source` to shared memory and
    waits for all of them."""
    loads = "\n".join(
        f"""add.u32 %to, %smem, {i * size};
@%leader cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%to], [%from], """
        f"""{size}, [%bar];
add.u64 %from, %from, {size};"""
        for i in range(copies)
    )
    return f"""{_HEAD}
.visible .entry load(.param .u64 source)
.reqntid 32
{{
.reg .b32 %smem, %bar, %to;
.reg .b64 %from;
.reg .pred %leader, %done;
mov.u32 %smem, smem;
add.u32 %bar, %smem, {copies * size};
ld.param.u64 %from, [source];
elect.sync _|%leader, 0xffffffff;
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader fence.mbarrier_init.release.cluster;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {copies * size};
{loads}
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0, 1000;
@!%done bra WAIT;
ret;
}}
"""


def arithmetic_kernel(instruction: str, count: int, threads: int) -> str:
    """Every warp runs `count` independent instructions on registers %f0, %f1, ... of floats.

    `instruction` is a format string with {i}, the number of its register.
    """
    body = "\n".join(instruction.format(i=i) for i in range(count))
    return f"""{_HEAD}
.visible .entry arithmetic()
.reqntid {threads}
{{
.reg .f32 %f<{count}>;
{body}
ret;
}}
"""


def streaming_kernel(stages: int, size: int, copies: int) -> str:
    """Each CTA of one warp loads `copies` times `size` bytes, `stages` of them in flight.

    A stage is loaded again as soon as it has arrived.
    """

    def load(stage: int) -> str:
        return f"""add.u32 %to, %smem, {stage * size};
add.u32 %bar, %smem, {stages * size + 8 * stage};
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
@%leader cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%to], [%from], """ + (
            f"{size}, [%bar];\nadd.u64 %from, %from, {size};"
        )

    def wait(copy: int) -> str:
        return f"""add.u32 %bar, %smem, {stages * size + 8 * (copy % stages)};
WAIT{copy}:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], {copy // stages % 2}, 1000;
@!%done bra WAIT{copy};"""

    initialise = "\n".join(
        f"add.u32 %bar, %smem, {stages * size + 8 * stage};\n"
        "@%leader mbarrier.init.shared::cta.b64 [%bar], 1;"
        for stage in range(stages)
    )
    body = [load(stage) for stage in range(stages)]
    for copy in range(copies):
        body.append(wait(copy))
        if copy + stages < copies:
            body.append(load(copy % stages))
    lines = "\n".join(body)
    return f"""{_HEAD}
.visible .entry stream(.param .u64 source)
.reqntid 32
{{
.reg .b32 %smem, %bar, %to;
.reg .b64 %from;
.reg .pred %leader, %done;
mov.u32 %smem, smem;
ld.param.u64 %from, [source];
elect.sync _|%leader, 0xffffffff;
{initialise}
@%leader fence.mbarrier_init.release.cluster;
{lines}
ret;
}}
"""


def flag_kernel(load: str) -> str:
    """A warp that reads a word by the given instruction and stores what it read plus one."""
    return f"""{_HEAD}
.visible .entry wait(.param .u64 flag)
.reqntid 32
{{
.reg .b32 %value;
.reg .b64 %at;
ld.param.u64 %at, [flag];
{load} %value, [%at];
add.u32 %value, %value, 1;
st.global.b32 [%at+4], %value;
ret;
}}
"""


def copied_loads_kernel(count: int, copies: str) -> str:
    """A warp that loads `count` words, 128 bytes apart, and adds them when all are under way.

    `copies` is what follows each load: it makes %c{i} of the loaded %v{i}.
    """
    loads = "\n".join(
        f"ld.global.b32 %v{i}, [%at+{128 * i}];\n{copies.format(i=i)}" for i in range(count)
    )
    sums = "\n".join(f"add.u32 %c0, %c0, %c{i};" for i in range(1, count))
    return f"""{_HEAD}
.visible .entry copied(.param .u64 words)
.reqntid 32
{{
.reg .b32 %v<{count}>, %c<{count}>;
.reg .b64 %at;
ld.param.u64 %at, [words];
{loads}
{sums}
st.global.b32 [%at], %c0;
ret;
}}
"""


def tensor_load_kernel(copies: int, mode: str, size: int) -> str:
    """One thread loads `copies` boxes of `size` bytes in a mode, all to one place, and waits."""
    at = "{0, 0, 1, 2, 3}" if mode == "tile::gather4" else "{0, 0}"
    loads = "\n".join(
        f"@%leader cp.async.bulk.tensor.2d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes "
        f"[%smem], [%map, {at}], [%bar];"
        for _ in range(copies)
    )
    return f"""{_HEAD.replace("sm_90a", "sm_100a")}
.visible .entry load(.param .align 64 .b8 tensor[128])
.reqntid 32
{{
.reg .b32 %smem, %bar;
.reg .b64 %map;
.reg .pred %leader, %done;
mov.u32 %smem, smem;
add.u32 %bar, %smem, 1024;
mov.b64 %map, tensor;
elect.sync _|%leader, 0xffffffff;
@%leader mbarrier.init.shared::cta.b64 [%bar], 1;
@%leader fence.mbarrier_init.release.cluster;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {copies * size};
{loads}
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0, 1000;
@!%done bra WAIT;
ret;
}}
"""


def remote_stores_kernel(count: int) -> str:
    """Each warp of a cluster of two stores `count` times 512 bytes to the other CTA, and waits for
    what the other one stores there."""
    stores = "\n".join(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%to], "
        "{%lane, %lane, %lane, %lane}, [%bar];"
        for _ in range(count)
    )
    return f"""{_HEAD}
.visible .entry stores()
.reqntid 32
{{
.reg .b32 %lane, %rank, %own, %to, %bar;
.reg .pred %leader, %done;
mov.u32 %lane, %tid.x;
mov.u32 %rank, %cluster_ctarank;
xor.b32 %rank, %rank, 1;
mov.u32 %own, smem;
elect.sync _|%leader, 0xffffffff;
@%leader mbarrier.init.shared::cta.b64 [%own], 1;
@%leader fence.mbarrier_init.release.cluster;
@%leader mbarrier.arrive.expect_tx.shared::cta.b64 _, [%own], {512 * count};
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
shl.b32 %to, %lane, 4;
add.u32 %to, %to, %own;
add.u32 %to, %to, 16;
mapa.shared::cluster.u32 %to, %to, %rank;
mapa.shared::cluster.u32 %bar, %own, %rank;
{stores}
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%own], 0, 1000;
@!%done bra WAIT;
ret;
}}
"""
