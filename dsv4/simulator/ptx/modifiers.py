"""Modifiers that each opcode may carry: one that no emitter looks at would be silently ignored."""

from __future__ import annotations

import re
from functools import cache

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.entry import Instruction
from dsv4.simulator.ptx.qualifiers import is_defined
from dsv4.simulator.ptx.types import TYPE_BITS

_ROUNDINGS = "rn rz rm rp "
_FLOAT = _ROUNDINGS + "ftz sat relu "
_EXTREMUM = "ftz NaN xorsign abs relu s16x2 u16x2 "
_COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz "
_SCOPES = "cta cluster gpu sys "
_SHARED = "shared shared::cta shared::cluster "
_SPACES = _SHARED + "global local param const "
_CACHING = (
    r"L1::evict_(normal|unchanged|first|last) L1::no_allocate L2::evict_(normal|first|last) "
    r"L2::cache_hint L2::(64|128|256)B "
)
_ATOMICS = "add min max and or xor exch cas inc dec noftz "
_MATRICES = r"sync aligned trans x[124] m8n8 m16n16 m8n16 m16n8 "
_PAIR = "cta_group::[12] "
_BULK_BYTES = "mbarrier::complete_tx::bytes "
_CLUSTER = "cta cluster " + _SHARED
_VOTES = "popc and or aligned"
_REDUCED = "add min max and or xor inc dec noftz "
_TENSOR = (
    "[1-5]d tile tile::(gather4|scatter4) im2col.* bulk_group multicast::cluster global " + _PAIR
)
_FRAGMENTS = "sync aligned 16x(64|128|256)b 32x32b 16x32bx2 x(1|2|4|8|16|32|64|128) "
# Sums of 8- and 16-bit elements in one register of 32.
_PACKED = "s16x2 u16x2 "

# Opcode, or its first parts -> the modifiers behind them beside the types, as regular expressions;
# the longest key counts. What an emitter refuses with a reason of its own is listed, too.
MODIFIERS: dict[str, str] = {
    # Arithmetic.
    "add": _FLOAT + _PACKED + "cc", "sub": _FLOAT + _PACKED + "cc", "addc": "cc", "subc": "cc",
    "mul": _FLOAT + "lo hi wide", "mad": _FLOAT + "lo hi wide cc", "madc": "lo hi cc",
    "fma": _FLOAT, "mul24": "lo hi", "mad24": "lo hi", "div": _ROUNDINGS + "ftz approx full",
    "rem": "", "min": _EXTREMUM, "max": _EXTREMUM, "abs": "ftz", "neg": "ftz", "sad": "",
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh"), "approx ftz"),
    **dict.fromkeys(("rcp", "sqrt"), _ROUNDINGS + "approx ftz"), "rsqrt": "approx ftz",
    "copysign": "", "testp": "finite infinite number notanumber normal subnormal",
    "dp2a": "lo hi", "dp4a": "", "bfe": "", "bfi": "", "bfind": "shiftamt", "bmsk": "clamp wrap",
    "brev": "", "clz": "", "popc": "", "cnot": "", "fns": "", "szext": "clamp wrap",
    "and": "", "or": "", "xor": "", "not": "", "shl": "", "shr": "", "lop3": "or and",
    "shf": "l r clamp wrap", "prmt": "f4e b4e rc8 ecl ecr rc16",
    # Comparison, conversion, moves.
    "set": _COMPARISONS, "setp": _COMPARISONS, "selp": "", "slct": "ftz", "isspacep": _SPACES,
    "cvt": _FLOAT + "rna rni rzi rmi rpi satfinite pack "
           "tf32 (e4m3|e5m2|e2m3|e3m2|e2m1|ue8m0)x[24] s2f6x2 scaled::n2::ue8m0",
    "mov": "", "cvta": "to " + _SPACES, "mapa": _SHARED, "getctarank": _SHARED,
    # Control and collectives.
    "bra": "uni", "ret": "uni", "exit": "", "trap": "", "brkpt": "", "vprintf": "",
    "shfl": "sync up down bfly idx", "vote": "sync all any uni ballot", "activemask": "",
    "elect": "sync", "match": "sync any all", "redux": "sync add min max and or xor abs NaN",
    # Barriers, fences and launches.
    "bar": "sync arrive cta aligned", "bar.warp": "sync",
    "barrier": "sync arrive cta aligned",
    "barrier.cluster": "arrive wait aligned release acquire relaxed",
    **dict.fromkeys(("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red"), _VOTES),
    **dict.fromkeys(("mbarrier.init", "mbarrier.inval", "mbarrier.pending_count"), _SHARED),
    **dict.fromkeys(("mbarrier.expect_tx", "mbarrier.complete_tx"), "relaxed " + _CLUSTER),
    **dict.fromkeys(("mbarrier.arrive", "mbarrier.arrive_drop"),
                    "expect_tx noComplete relaxed release " + _CLUSTER),
    **dict.fromkeys(("mbarrier.test_wait", "mbarrier.try_wait"),
                    "parity relaxed acquire " + _CLUSTER),
    "fence": "proxy alias async async::generic tensormap::generic mbarrier_init acquire release "
             "acq_rel sc global sync_restrict::shared::(cta|cluster) " + _SCOPES + _SHARED,
    "membar": "cta gl sys", "nanosleep": "",
    "griddepcontrol.wait": "", "griddepcontrol.launch_dependents": "",
    "setmaxnreg": "inc dec sync aligned", "pmevent": "mask",
    "clusterlaunchcontrol.try_cancel": "async multicast::cluster::all shared::cta " + _BULK_BYTES,
    "clusterlaunchcontrol.query_cancel": "is_canceled get_first_ctaid(::[xyz])? v4",
    # Memory.
    "ld": "weak relaxed acquire volatile mmio nc ca cg cs lu cv v[248] param::(entry|func) "
          + _SCOPES + _SPACES + _CACHING,
    "ldu": "global v[24]",
    "st": "weak relaxed release volatile mmio wb cg cs wt v[248] async bulk "
          + _BULK_BYTES + _SCOPES + _SPACES + _CACHING,
    "atom": "relaxed acquire release acq_rel global v[248] L2::cache_hint "
            + _ATOMICS + _SCOPES + _SHARED,
    "red": "relaxed release global v[248] async L2::cache_hint "
           + _BULK_BYTES + _ATOMICS + _SCOPES + _SHARED,
    "prefetch": r"global local L1 L2 L2::evict_(last|normal) tensormap param const",
    "prefetchu": "L1", "applypriority": "global L2::evict_normal", "discard": "global L2",
    "createpolicy": r"fractional range global cvt L2 L2::evict_(last|normal|first|unchanged)",
    "ldmatrix": _MATRICES + "b8x16 b6x16_p32 b4x16_p64 " + _SHARED, "stmatrix": _MATRICES + _SHARED,
    "cp.async": "ca cg global " + _SHARED + _CACHING,
    **dict.fromkeys(("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"), ""),
    "cp.async.mbarrier": "arrive noinc " + _SHARED,
    "cp.async.bulk": "bulk_group multicast::cluster cp_mask global "
                     + _BULK_BYTES + _SHARED + _CACHING,
    "cp.async.bulk.tensor": _TENSOR + _BULK_BYTES + _SHARED + _CACHING,
    "cp.async.bulk.prefetch": _TENSOR + "tensor L2 " + _CACHING,
    "cp.async.bulk.commit_group": "", "cp.async.bulk.wait_group": "read",
    "cp.reduce.async.bulk": "bulk_group global " + _REDUCED + _BULK_BYTES + _SHARED + _CACHING,
    "cp.reduce.async.bulk.tensor": _TENSOR + _REDUCED + _SHARED + _CACHING,
    "tensormap.replace": "tile (global|box|element)_(address|dim|stride) rank elemtype fill_mode "
                         "interleave_layout swizzle_(mode|atomicity) global b1024 " + _SHARED,
    "tensormap.cp_fenceproxy": "global tensormap::generic release sync aligned "
                               + _SCOPES + _SHARED,
    # Products.
    "mma": r"sync aligned m8n8k(4|16|32|128) m16n8k(4|8|16|32|64|128|256) row col satfinite and "
           r"xor popc e4m3 e5m2 tf32 s4 u4 b1 sp sp::ordered_metadata block_scale ue8m0 ue4m3 "
           r"scale_vec::[124]X kind::(f8f6f4|mxf8f6f4|mxf4|mxf4nvf4) e2m1 e2m3 e3m2",
    "movmatrix": "sync aligned m8n8 trans",
    "wgmma.mma_async": r"sync aligned sp satfinite m64n\d+k(8|16|32|64) e4m3 e5m2 tf32",
    **dict.fromkeys(("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"), "sync aligned"),
    "tcgen05.alloc": _PAIR + "sync aligned " + _SHARED,
    **dict.fromkeys(("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit"), _PAIR + "sync aligned"),
    "tcgen05.ld": _FRAGMENTS + "pack::16b red max min abs NaN",
    "tcgen05.st": _FRAGMENTS + "unpack::16b",
    **dict.fromkeys(("tcgen05.wait::ld", "tcgen05.wait::st"), "sync aligned"),
    **dict.fromkeys(("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"), ""),
    "tcgen05.mma": _PAIR + "kind::(f16|tf32|f8f6f4|i8|mxf8f6f4|mxf4|mxf4nvf4) ws sp ashift "
                   r"block_scale scale_vec::[124]X block(16|32) "
                   r"collector::(a|b[0-3])::(fill|use|lastuse|discard)",
    "tcgen05.cp": _PAIR + "(4|128)x256b (128|64|32)x128b warpx4 warpx2::(02_13|01_23) b8x16 "
                  "b6x16_p32 b4x16_p64",
    "tcgen05.shift": _PAIR + "down",
    "tcgen05.commit": _PAIR + "mbarrier::arrive::one multicast::cluster " + _SHARED,
    # Refused whatever their modifiers.
    "multimem": ".*", "wmma": ".*",
}  # fmt: skip


@cache
def _known(key: str) -> re.Pattern:
    return re.compile("|".join(MODIFIERS[key].split()) or "(?!)")


@cache
def _unknown(parts: tuple[str, ...]) -> str | None:
    """The first modifier that nothing implements."""
    keys = ((n, ".".join(parts[:n])) for n in range(len(parts), 0, -1))
    count, key = next(((n, key) for n, key in keys if key in MODIFIERS), (1, ""))
    for part in parts[count:]:
        if not key or (part not in TYPE_BITS and not _known(key).fullmatch(part)):
            return part
    return None


def check_modifiers(ins: Instruction) -> None:
    """Raise UnsupportedInstruction for a modifier that nothing implements, and for semantics or a
    scope that mean nothing here."""
    part = _unknown(ins.parts)
    if part is not None:
        what = " (stochastic rounding)" if part == "rs" else ""
        raise UnsupportedInstruction(
            f"modifier .{part} of {ins.opcode}{what} is not simulated: {ins.where()}"
        )
    if not is_defined(ins.parts):
        raise UnsupportedInstruction(
            f"PTX defines no {ins.opcode}, by its semantics and scope: {ins.where()}"
        )
