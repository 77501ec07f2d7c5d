"""Small kernels in PTX, for tests that put a fault in and take it out again."""

from __future__ import annotations

import struct

import torch

from dsv4.simulator import Report, simulate_ptx

# %r1 thread, %r2 shared memory, %r3 4 * thread, %r4 its word there, %r5 warp, %r6 lane, %r7 CTA;
# %p1 warp 0, %p2 thread 0, %p3 CTA 0; %d1 the output's address, %d2 the thread's word there.
_HEADER = """
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .b64 out{parameters}) {directives}
{{
.reg .pred %p<16>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %d<16>;
ld.param.b64 %d1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, smem;
shl.b32 %r3, %r1, 2;
add.s32 %r4, %r2, %r3;
shr.u32 %r5, %r1, 5;
and.b32 %r6, %r1, 31;
mov.u32 %r7, %ctaid.x;
setp.eq.u32 %p1, %r5, 0;
setp.eq.u32 %p2, %r1, 0;
setp.eq.u32 %p3, %r7, 0;
cvt.u64.u32 %d2, %r3;
add.u64 %d2, %d1, %d2;
"""
# An mbarrier at %r30, 2048 bytes into shared memory, which one arrival completes.
INIT_BARRIER = """
add.s32 %r30, %r2, 2048;
@%p2 mbarrier.init.shared.b64 [%r30], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


def module_of(body: str, target: str = "sm_90a", maps: int = 0, directives: str = "") -> str:
    """A module with a body as its kernel, `k`; arguments as of `run_body`."""
    declared = "".join(f", .param .align 64 .b8 map{i}[128]" for i in range(maps))
    head = _HEADER.format(target=target, parameters=declared, directives=directives)
    return head + body + "\nret;\n}\n"


def run_body(
    body: str,
    *,
    threads: int = 64,
    out: torch.Tensor | None = None,
    grid: int = 1,
    cluster: int = 1,
    target: str = "sm_90a",
    shared: int = 4096,
    maps: tuple[bytes, ...] = (),
    directives: str = "",
    **options,
) -> Report:
    """Run a body on `out` (int32, 256 by default); tensor maps are parameters `map0`, `map1`...,
    `directives` those of the entry."""
    text = module_of(body, target, len(maps), directives)
    out = torch.zeros(256, dtype=torch.int32) if out is None else out
    return simulate_ptx(
        text, "k", grid=(grid, 1, 1), block=(threads, 1, 1), cluster=(cluster, 1, 1),
        params=(out, *maps), shared=shared, **options,
    )  # fmt: skip


def kinds(body: str, **options) -> list[str]:
    """The kinds of races found in a body."""
    return sorted({f.kind for f in run_body(body, **options).races})


def tensor_map(tensor: torch.Tensor, box: tuple[int, int]) -> bytes:
    """A 2-D map of int32 without swizzle."""
    rows, columns = tensor.shape
    w = [0] * 16
    w[0] = tensor.data_ptr()
    w[1] = 2 << 7 | 1 << 4 | (columns * 4 >> 4) << 32
    w[4] = columns - 1 | (rows - 1) << 32
    w[6] = (box[1] - 1) << 56
    w[7] = box[0] - 1
    return struct.pack("<16Q", *w)


def holding_map() -> torch.Tensor:
    """An output whose words 64 to 95 are the map of words 128 to 191, as 8 x 8."""
    out = torch.zeros(256, dtype=torch.int32)
    raw = bytearray(tensor_map(out[128:192].view(8, 8), (8, 8)))
    out[64:96] = torch.frombuffer(raw, dtype=torch.int32)
    return out
