"""Shuffles, votes, matches, warp reductions and lane special registers."""

from __future__ import annotations

import numpy as np

from tests.simulator.hardware.case import Case
from tests.simulator.hardware.elementwise import Op, elementwise, ops
from tests.simulator.hardware.inputs import random_words

_LOW_HALF = "mov.u32 %t3, %laneid; mov.u32 %o, 0; setp.lt.u32 %oq, %t3, 16; @%oq "
_MIDDLE = (
    "mov.u32 %t3, %laneid; mov.u32 %o, 0; add.u32 %t3, %t3, -4; setp.lt.u32 %oq, %t3, 8; @%oq "
)


def _shuffles() -> list[Op]:
    out = []
    for mode in ("idx", "bfly", "up", "down"):
        for lane, control in (
            (5, 0 if mode == "up" else 31),
            (3, (24 << 8) | (0 if mode == "up" else 7)),
            (9, (16 << 8) | (2 if mode == "up" else 11)),
            (40, 0 if mode == "up" else 31),
        ):
            operands = f"%a, {lane}, {control}, -1;"
            out += ops(f"shfl.sync.{mode}.b32 %o, {operands}")
            out += ops(f"shfl.sync.{mode}.b32 %t0|%op, {operands}")
        clamp = 0 if mode == "up" else 31
        # The lane operand differs between lanes.
        out += ops(f"and.b32 %t0, %b, 31; shfl.sync.{mode}.b32 %o, %a, %t0, {clamp}, -1;")
        out += ops(f"and.b32 %t0, %b, 7; shfl.sync.{mode}.b32 %t1|%op, %a, %t0, {clamp}, -1;")
    out += ops(f"{_LOW_HALF}shfl.sync.bfly.b32 %o, %a, 6, 31, 0xffff;")
    out += ops(f"{_LOW_HALF}shfl.sync.idx.b32 %o, %a, 11, 31, 0xffff;")
    out += ops(f"{_MIDDLE}shfl.sync.bfly.b32 %o, %a, 1, 31, 0xff0;")
    return out


_COLLECTIVES = f"""
vote.sync.ballot.b32 %o, %p, -1;
vote.sync.any.pred %op, %p, -1;
vote.sync.all.pred %op, %p, -1;
vote.sync.uni.pred %op, %p, -1;
setp.ne.u32 %oq, %a, %a; vote.sync.any.pred %op, %oq, -1;
setp.eq.u32 %oq, %a, %a; vote.sync.all.pred %op, %oq, -1;
setp.ne.u32 %oq, %a, %a; vote.sync.uni.pred %op, %oq, -1;
setp.ne.u32 %oq, %a, %a; vote.sync.all.pred %op, !%oq, -1;
{_LOW_HALF}vote.sync.ballot.b32 %o, %q, 0xffff;
{_MIDDLE}vote.sync.ballot.b32 %o, %p, 0xff0;
and.b32 %t0, %a, 3; match.any.sync.b32 %o, %t0, -1;
and.b32 %t0, %a, 1; cvt.u64.u32 %od, %t0; match.any.sync.b64 %t1, %od, -1; mov.b64 %od, {{%t1, %t1}};
and.b32 %t0, %a, 0; match.all.sync.b32 %o|%oq, %t0, -1;
match.all.sync.b32 %o|%oq, %a, -1;
match.all.sync.b32 %t0|%op, %a, -1;
mov.u32 %t0, 7; match.all.sync.b32 %t1|%op, %t0, -1;
{_LOW_HALF}match.any.sync.b32 %o, %q1, 0xffff;
redux.sync.add.s32 %o, %a, -1;
redux.sync.add.u32 %o, %a, -1;
redux.sync.min.s32 %o, %a, -1;
redux.sync.max.s32 %o, %a, -1;
redux.sync.min.u32 %o, %a, -1;
redux.sync.max.u32 %o, %a, -1;
redux.sync.and.b32 %o, %a, -1;
redux.sync.or.b32 %o, %a, -1;
redux.sync.xor.b32 %o, %a, -1;
{_LOW_HALF}redux.sync.add.s32 %o, %a, 0xffff;
{_MIDDLE}redux.sync.max.u32 %o, %a, 0xff0;
elect.sync %t0|%op, -1;
mov.u32 %t1, 99; elect.sync %o|%oq, -1;
mov.u32 %o, %laneid;
mov.u32 %o, %lanemask_eq;
mov.u32 %o, %lanemask_lt;
mov.u32 %o, %lanemask_le;
mov.u32 %o, %lanemask_gt;
mov.u32 %o, %lanemask_ge;
mov.u32 %o, %tid.x;
mov.u32 %o, %ntid.x;
mov.u32 %o, %ctaid.x;
mov.u32 %o, %nctaid.x;
mov.u32 %o, %warpid;
"""  # noqa: E501


def cases() -> list[Case]:
    """The warp programs."""
    text = _COLLECTIVES.replace("%q1", "%t2").replace(
        f"{_LOW_HALF}match", f"and.b32 %t2, %b, 1; {_LOW_HALF}match"
    )
    operands = tuple(random_words(f"collectives {k}", 256) for k in range(3))
    operands[0][200:] &= np.uint32(0xFF)
    return [elementwise("collectives", _shuffles() + ops(text), operands)]
