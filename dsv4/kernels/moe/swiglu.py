"""Gated unit of a channel; any architecture."""

import cutlass
from cutlass import Float32, cute

LOG2_E = 1.4426950408889634


def swiglu(gate: Float32, up: Float32, limit: float) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); NaN stays NaN: comparisons with it are
    false."""
    bound = Float32(limit)
    gate = cutlass.select_(gate > bound, bound, gate)
    up = cutlass.select_(up > bound, bound, up)
    up = cutlass.select_(up < -bound, -bound, up)
    decay = cute.math.exp2(gate * Float32(-LOG2_E), fastmath=True)
    return gate * cute.arch.rcp_approx(Float32(1.0) + decay) * up
