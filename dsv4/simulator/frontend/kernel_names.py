"""Names of what a CuTeDSL kernel allocates, and the calls in it, kept while it is compiled.

    with named():
        compiled = cute.compile(...)

Findings of such a kernel name buffers in shared memory by the fields of their struct or the line
that allocated them, and the role of a warp by the branch of the kernel that it runs. Nothing else
of the compiled code changes, and a simulation takes no longer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

from dsv4.simulator.ptx.shared_names import Allocation
from dsv4.simulator.ptx.source import assigned_at, describe, kernel_at

# By the compiler's context, of which each compilation has one of its own, and by the kernel: its
# allocations. A context lives as long as what was compiled in it.
_allocations: WeakKeyDictionary = WeakKeyDictionary()
_MOST_FRAMES = 200


@contextmanager
def named() -> Iterator[None]:
    """Keep names while kernels are compiled here; nothing where the compiler is not installed, or
    one whose inside is another."""
    try:
        from cutlass._mlir_helpers import op
        from cutlass.memory.smem import SmemAllocator

        allocate, transform = SmemAllocator._smem_alloca, op.loc_transform
    except (ImportError, AttributeError):
        yield
        return

    @functools.wraps(allocate)
    def recorded(allocator, layout, dtype, alignment, *args, **options):
        pointer = allocate(allocator, layout, dtype, alignment, *args, **options)
        fields = options.get("struct_fields") or (args[1] if len(args) > 1 else None)
        _record(pointer, dtype, layout, alignment, fields)
        return pointer

    SmemAllocator._smem_alloca = recorded
    try:
        with transform(_with_call):
            yield
    finally:
        SmemAllocator._smem_alloca = allocate


def allocations_of(compiled) -> dict[str, list[Allocation]]:
    """Allocations of the kernels in a compiled function, by name; none unless it was `named`."""
    context = getattr(getattr(compiled, "ir_module", None), "context", None)
    return {} if context is None else _allocations.get(context, {})


# ---- shared memory -------------------------------------------------------------------------------


def _record(pointer, dtype, layout, alignment: int, fields) -> None:
    from cutlass import cute
    from cutlass._mlir import ir

    operation, kernel = ir.InsertionPoint.current.block.owner, ""
    while operation is not None and operation.operation.name != "builtin.module":
        attributes = operation.operation.attributes
        if "sym_name" in attributes and not kernel:
            kernel = ir.StringAttr(attributes["sym_name"]).value
        operation = operation.operation.parent
    size = cute.cosize(layout) * max(dtype.width, 8) // 8
    found = Allocation(_allocator(), size, max(alignment, dtype.width // 8), tuple(fields or ()))
    kernels = _allocations.setdefault(ir.Context.current, {})
    kernels.setdefault(kernel, []).append(found)


def _allocator() -> str:
    """What the memory is assigned to, or the lines that allocate it: the innermost ones outside
    the compiler."""
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and len(lines) < 2:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if not _is_compilers(line[0]):
            lines.append(line)
            if _is_in_kernel(*line):
                break
        frame = frame.f_back
    name = assigned_at(lines[0]) if lines else ""
    short = tuple((Path(path).name, number) for path, number in lines)
    return name or f"the buffer of {describe(short)}"


# ---- lines ---------------------------------------------------------------------------------------


def _with_call(location):
    """A line of an inlined function, with the line of the kernel that calls it."""
    if location is None:
        return None
    from cutlass._mlir import ir

    frame: FrameType | None = sys._getframe(2)
    depth, inside = 0, False
    while frame is not None and depth < _MOST_FRAMES:
        path = frame.f_code.co_filename
        if not _is_compilers(path):
            if _is_in_kernel(path, frame.f_lineno):
                if not inside:
                    return location  # written in the kernel itself
                outer = ir.Location.file(path, frame.f_lineno, 0)
                return ir.Location.callsite(location, [outer])
            inside = True
        frame, depth = frame.f_back, depth + 1
    return location


@functools.cache
def _is_compilers(path: str) -> bool:
    """Whether a file is no part of the user's code."""
    return "/dsl_packages/cutlass/" in path or path.startswith("<") or path == __file__


@functools.cache
def _is_in_kernel(path: str, line: int) -> bool:
    """Whether a line is in a function that is decorated as a kernel, closures of it included."""
    return kernel_at((path, line)) is not None
