"""Runs one PTX line on 32 lanes."""

from __future__ import annotations

import numpy as np
import torch

from dsv4.simulator import simulate_ptx


def run_lanes(
    line: str, operands: list[np.ndarray], result: np.dtype, functions: str = ""
) -> np.ndarray:
    """`line` with %x0, %x1, .. (of the operands' sizes) on 32 lanes; what it leaves in %y. The
    kernel's module begins with `functions`."""
    sizes = [x.dtype.itemsize for x in operands]
    loads = "\n".join(
        f"mul.wide.u32 %d4, %r1, {size};\nadd.u64 %d4, %d1, %d4;\n"
        f"ld.global.b{8 * size} %x{i}, [%d4+{32 * sum(sizes[:i])}];"
        for i, size in enumerate(sizes)
    )
    declared = " ".join(f".reg .b{8 * size} %x{i};" for i, size in enumerate(sizes))
    width = np.dtype(result).itemsize
    text = f"""
.version 8.7
.target sm_100a
.address_size 64
{functions}
.visible .entry k(.param .b64 in, .param .b64 out)
{{
.reg .pred %p<4>; .reg .b32 %r<4>; .reg .b64 %d<8>; .reg .b{8 * width} %y; {declared}
ld.param.b64 %d1, [in];
ld.param.b64 %d2, [out];
mov.u32 %r1, %tid.x;
{loads}
{line}
mul.wide.u32 %d4, %r1, {width};
add.u64 %d4, %d2, %d4;
st.global.b{8 * width} [%d4], %y;
ret;
}}
"""
    data = np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in operands])
    out = torch.zeros(32 * width, dtype=torch.uint8)
    simulate_ptx(text, "k", grid=(1, 1, 1), block=(32, 1, 1), params=(torch.from_numpy(data), out))
    return out.numpy().view(result)
