"""Loads of global memory that stay where they are written."""

from cutlass import Int32, cute


def load_words(source: cute.Pointer, count: int, *, past_l1: bool = False) -> tuple[Int32, ...]:
    """One, two or four words at an aligned address, asked for here: a compiler moves other loads
    behind the next branch, and so behind what that branch waits for.

    Args:
        past_l1: find what L2 holds, and leave no line in L1: coherent in the GPU's scope.
    """
    targets = ", ".join(f"{{$w{i}}}" for i in range(count))
    vector, order = "", ".relaxed.gpu" if past_l1 else ""
    if count > 1:
        vector, targets = f".v{count}", f"{{{targets}}}"
    found = cute.arch.inline_ptx(
        f"ld{order}.global{vector}.b32 {targets}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[source.toint()],
    )
    return tuple(found) if count > 1 else (found,)
