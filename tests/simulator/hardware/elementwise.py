"""Instructions that work on each thread's own registers: one output row per instruction.

Every program loads three 32-bit words %a, %b, %c per thread, runs each instruction on them and
stores its result. Names in the instruction texts:
    %a %b %c         32-bit operands           %o   32-bit result
    %ha %hb %hc      their low halves          %oh  16-bit result
    %da %db %dc      {a,b} {c,a} {b,c}         %od  64-bit result
    %p %q            odd a, odd b              %op  predicate result
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.simulator.hardware.case import Buffer, Case, Row, Tolerance, module, poisoned

THREADS = 128
_REGISTERS = (
    ".reg .b32 %a, %b, %c, %o, %i, %t<4>;\n.reg .b16 %ha, %hb, %hc, %oh, %hx;\n"
    ".reg .b64 %da, %db, %dc, %od, %in, %out, %at;\n.reg .pred %p, %q, %op, %oq;\n"
)
_LOADS = """
ld.param.u64 %out, [out];
ld.param.u64 %in, [in];
mov.u32 %t0, %ctaid.x;
mov.u32 %t1, %tid.x;
mad.lo.u32 %i, %t0, {threads}, %t1;
mad.wide.u32 %at, %i, 4, %in;
ld.global.b32 %a, [%at];
ld.global.b32 %b, [%at+{second}];
ld.global.b32 %c, [%at+{third}];
mov.b32 {{%ha, %hx}}, %a;
mov.b32 {{%hb, %hx}}, %b;
mov.b32 {{%hc, %hx}}, %c;
mov.b64 %da, {{%a, %b}};
mov.b64 %db, {{%c, %a}};
mov.b64 %dc, {{%b, %c}};
and.b32 %t0, %a, 1;
setp.ne.u32 %p, %t0, 0;
and.b32 %t0, %b, 1;
setp.ne.u32 %q, %t0, 0;
mad.wide.u32 %at, %i, 4, %out;
"""
_RESULTS = {"%oh": "cvt.u32.u16 %o, %oh;", "%op": "selp.u32 %o, 1, 0, %op;"}


@dataclass(frozen=True)
class Op:
    """One row: the instructions, and how the result compares (see `Row`)."""

    text: str
    floats: str | None = None
    tolerance: Tolerance | None = None

    @property
    def wide(self) -> bool:
        """True for 64-bit results."""
        return "%od" in self.text


def ops(text: str, floats: str | None = None, tolerance: Tolerance | None = None) -> list[Op]:
    """One Op per line."""
    return [Op(line.strip(), floats, tolerance) for line in text.strip().splitlines()]


def elementwise(name: str, listed: list[Op], operands: tuple[np.ndarray, ...]) -> Case:
    """The program that runs `listed` on `operands`, three uint32 arrays of the same length."""
    count = len(operands[0]) // THREADS * THREADS
    lines = [_REGISTERS, _LOADS.format(threads=THREADS, second=4 * count, third=8 * count)]
    rows, offset = [], 0
    for op in listed:
        convert = next((v for k, v in _RESULTS.items() if k in op.text), "")
        lines.append(f"{{ {op.text} {convert} }}")
        if op.wide:
            lines.append("mov.b64 {%t0, %t1}, %od;")
            lines.append(f"st.global.b32 [%at+{offset}], %t0;")
            lines.append(f"st.global.b32 [%at+{offset + 4 * count}], %t1;")
        else:
            lines.append(f"st.global.b32 [%at+{offset}], %o;")
        size = (8 if op.wide else 4) * count
        rows.append(Row(op.text, size, op.floats, op.tolerance))
        offset += size
    data = np.concatenate([x[:count] for x in operands]).view(np.uint8)
    return Case(
        name=name,
        ptx=module("\n".join(lines), "u64 out, u64 in"),
        rows=tuple(rows),
        buffers=(poisoned(offset), data),
        params=(Buffer(0), Buffer(1)),
        block=THREADS,
        grid=count // THREADS,
    )
