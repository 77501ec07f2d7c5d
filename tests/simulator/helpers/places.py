"""Where an instruction of compiled code comes from: the kernel's function it is in."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from dsv4.simulator.ptx.entry import Instruction


def places(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """Each instruction's stem and the kernel's function it is in.

    Fences of Tensor Memory go with the wait before or the arrival after them: they share two
    functions, whatever they are for.
    """
    functions = [function_of(*ins.source) for ins in instructions]
    for i, ins in enumerate(instructions):
        if ins.opcode == "tcgen05.fence::after_thread_sync":
            functions[i] = functions[i - 1]
        elif ins.opcode == "tcgen05.fence::before_thread_sync":
            functions[i] = functions[i + 1]
    return [(".".join(ins.parts[:2]), name) for ins, name in zip(instructions, functions)]


def function_of(path: str, line: int) -> str:
    """The innermost function that a line stands in; "" outside of all."""
    begun = [found for found in _functions(path) if found[0] <= line]
    # The compiler counts lines of an inlined library function on from its call: past the end, too.
    names = [name for _, last, name in begun if line <= last] or [name for *_, name in begun]
    return names[-1] if names else ""


@functools.cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions in a file, inner ones last."""
    tree = ast.parse(Path(path).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return sorted((n.lineno, n.end_lineno, n.name) for n in found)
