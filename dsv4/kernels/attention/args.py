"""The attention kernels' arguments, as the compiler sees them."""

from __future__ import annotations

from cutlass import BFloat16, Float32, Int32, cute

from dsv4.kernels.attention.config import FmhaConfig


def fake_arguments(config: FmhaConfig) -> tuple[tuple, dict]:
    """Arguments of a kernel's call without data: every size and outer stride is symbolic."""
    tokens, rows, batch, width = (cute.sym_int() for _ in range(4))
    heads = config.num_query_heads
    fake = cute.runtime.make_fake_tensor

    def rows_of(*shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape), 1)
        return fake(BFloat16, (*shape, config.head_dim), strides, assumed_align=16)

    args = (
        rows_of(tokens, heads),
        rows_of(tokens, rows),
        rows_of(batch, width),
        fake(Int32, (batch,), (1,), assumed_align=4),
        fake(Float32, (heads,), (1,), assumed_align=4),
        fake(Int32, (tokens,), (1,), assumed_align=4),
        rows_of(tokens, heads),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    optional = {
        "compressed_lens": fake(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        "lse": fake(Float32, (cute.sym_int(), heads), (cute.sym_int64(), 1), assumed_align=4),
        "workspace": fake(Float32, (cute.sym_int64(),), (1,), assumed_align=16),
        "num_splits": Int32(1),
        "num_ctas": Int32(1),
    }
    return args, optional
