"""Gather of single rows into swizzled tiles: cp.async, 16 bytes a thread, or 4.

Hopper has no instruction that gathers rows into a swizzled tile: bulk copies do not swizzle, and a
tensor-map box of one row costs as much as one of sixty-four.
"""

from cutlass import cute

from dsv4.kernels.kit.swizzle import VECTOR_BYTES

WORD_BYTES = 4


def copy_vector(target, source, size, target_offset: int = 0, source_offset: int = 0) -> None:
    """Start a copy of 16 bytes from global to shared memory; of a `size` of 0 nothing is read, and
    zeros are written.

    Args:
        target: address in shared memory.
        source: address in global memory.
        size: 16 or 0.
        target_offset, source_offset: bytes, known when the kernel is compiled.
    """
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{target_offset}], [{{$r1}}+{source_offset}], "
        f"{VECTOR_BYTES}, {{$r2}};",
        read_only_args=[target, source, size],
    )


def copy_word(target, source, size, target_offset: int = 0, source_offset: int = 0) -> None:
    """Start a copy of 4 bytes, likewise; the size is 4 or 0."""
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{target_offset}], [{{$r1}}+{source_offset}], "
        f"{WORD_BYTES}, {{$r2}};",
        read_only_args=[target, source, size],
    )


def vectors_per_span(span_bytes: int) -> int:
    """16-byte vectors of a row of a swizzle span."""
    return span_bytes // VECTOR_BYTES


def vector_offset(row, vector, span_bytes: int):
    """Byte offset of a vector of a row in a tile of rows of one swizzle span of 32, 64 or 128
    bytes."""
    # Bits of the row's number, behind those that count rows within 128 bytes.
    rows = 128 // span_bytes
    key = (row // rows if rows > 1 else row) % (span_bytes // VECTOR_BYTES)
    return row * span_bytes + (vector ^ key) * VECTOR_BYTES
