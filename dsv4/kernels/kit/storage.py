"""Shared-memory struct of a plan."""

from __future__ import annotations

import cutlass
from cutlass import cute

from dsv4.kernels.kit.plan import SmemPlan


def storage_struct(plan: SmemPlan):
    """The `cute.struct` whose fields are the buffers of `plan`, each a `MemRange` of its name."""
    fields = {}
    for buffer in plan.buffers:
        array = cute.struct.MemRange[getattr(cutlass, buffer.dtype), buffer.count]
        fields[buffer.name] = cute.struct.Align[array, buffer.alignment]
    storage = cute.struct(type("SharedStorage", (), {"__annotations__": fields}))
    size = storage.size_in_bytes()
    assert size == plan.total_bytes, f"SMEM: storage {size}, plan {plan.total_bytes} bytes"
    return storage
