"""Modifiers that each opcode may carry: one that no emitter looks at would be silently ignored."""

from __future__ import annotations

import re
from functools import cache

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.entry import Instruction
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
_BULK_BYTES = "mbarrier::complete_tx::bytes "
# Sums of 8- and 16-bit elements in one register of 32.
_PACKED = "s16x2 u16x2 "

# Opcode -> its modifiers beside the types, as regular expressions. What an emitter refuses with a
# reason of its own is listed, too.
_MODIFIERS: dict[str, str] = {
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
    "bar": "sync arrive red warp cta aligned popc and or",
    "barrier": "sync arrive red wait cta cluster aligned popc and or release acquire relaxed",
    "mbarrier": "init inval arrive arrive_drop expect_tx complete_tx pending_count test_wait "
                "try_wait parity noComplete relaxed acquire release cta cluster " + _SHARED,
    "fence": "proxy alias async async::generic tensormap::generic mbarrier_init acquire release "
             "acq_rel sc global sync_restrict::shared::(cta|cluster) " + _SCOPES + _SHARED,
    "membar": "cta gl sys", "griddepcontrol": "wait launch_dependents", "nanosleep": "",
    "setmaxnreg": "inc dec sync aligned", "pragma": "", "nop": "", "pmevent": "mask",
    "clusterlaunchcontrol": "try_cancel query_cancel async is_canceled multicast::cluster::all v4 "
                            r"get_first_ctaid(::[xyz])? shared::cta " + _BULK_BYTES,
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
    "cp": r"async reduce bulk tensor prefetch [1-5]d tile tile::(gather4|scatter4) im2col.* "
          "bulk_group commit_group wait_group wait_all read mbarrier arrive noinc ca cg L2 cp_mask "
          r"multicast::cluster cta_group::[12] global add min max and or xor inc dec noftz "
          + _BULK_BYTES + _SHARED + _CACHING,
    "tensormap": "replace tile cp_fenceproxy global_address rank box_dim global_dim global_stride "
                 "element_stride elemtype interleave_layout swizzle_mode fill_mode global b1024 "
                 "tensormap::generic release sync aligned " + _SCOPES + _SHARED,
    # Products.
    "mma": r"sync aligned m\d+n\d+k\d+ row col satfinite and xor popc e4m3 e5m2 tf32 s4 u4 b1 "
           r"sp sp::ordered_metadata block_scale kind::\w+ scale_vec::[124]X ue8m0 ue4m3 "
           "e2m1 e2m3 e3m2",
    "movmatrix": "sync aligned m8n8 trans",
    "wgmma": r"mma_async fence commit_group wait_group sync aligned sp satfinite m64n\d+k\d+ "
             "e4m3 e5m2 tf32",
    "tcgen05": "alloc dealloc relinquish_alloc_permit ld st mma cp shift commit fence red down "
               "fence::(before|after)_thread_sync wait::(ld|st) sync aligned cta_group::[12] "
               r"16x(64|128|256)b 32x32b 16x32bx2 x\d+ pack::16b unpack::16b ws sp ashift max min "
               r"kind::\w+ block_scale scale_vec::[124]X block(16|32) abs NaN "
               r"collector::(a|b[0-3])::(fill|use|lastuse|discard) mbarrier::arrive::one "
               r"multicast::cluster (4|128)x256b (128|64|32)x128b warpx4 warpx2::(02_13|01_23) "
               "b8x16 b6x16_p32 b4x16_p64 " + _SHARED,
    # Refused whatever their modifiers.
    "multimem": ".*", "wmma": ".*",
}  # fmt: skip


@cache
def _known(stem: str) -> re.Pattern:
    return re.compile("|".join(_MODIFIERS[stem].split()) or "(?!)")


@cache
def _unknown(parts: tuple[str, ...]) -> str | None:
    """The first modifier that nothing implements."""
    for part in parts[1:]:
        if part not in TYPE_BITS and not _known(parts[0]).fullmatch(part):
            return part
    return None


def check_modifiers(ins: Instruction) -> None:
    """Raise UnsupportedInstruction for a modifier that nothing implements."""
    part = _unknown(ins.parts)
    if part is not None:
        what = " (stochastic rounding)" if part == "rs" else ""
        raise UnsupportedInstruction(
            f"modifier .{part} of {ins.opcode}{what} is not simulated: {ins.where()}"
        )
