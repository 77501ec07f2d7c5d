"""Compiler's report on a kernel: registers, spills, shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Options and settings that make the compiler say it.
REMARKS = "remarks{ptx}"
KEEP_IR = {"CUTE_DSL_KEEP": "ir"}  # together with CUTE_DSL_DUMP_DIR

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# Products whose registers the compiler cannot follow wait for each other: twice the time.
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .*?function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ALIAS = re.compile(r"^(!\w+) = (!cute\.memref<.*>)$", re.MULTILINE)
_KERNEL = re.compile(r"cuda\.kernel @(\w+)\(")
_ALLOCATION = re.compile(r"cute\.memref\.alloca\(.* : (!.+)$", re.MULTILINE)
_SHARED_BYTES = re.compile(r'!cute\.memref<i8, smem, .*"(\d+):1">')
_CLASS = re.compile(r"([A-Z][A-Za-z0-9]*)_object_at")


@dataclass(frozen=True)
class KernelReport:
    """One GPU kernel of a compiled runner; sizes in bytes, registers per thread at launch.

    Attributes:
        serialized: whether wgmma products that could overlap wait for each other.
        entry: the kernel's name in the machine code.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    serialized: bool = False
    entry: str = field(default="", compare=False)


def kernel_reports(remarks: str, ir: str) -> list[KernelReport]:
    """Reports of every kernel.

    Args:
        remarks: what the compiler printed under the option `REMARKS`.
        ir: the kept IR; empty counts as no shared memory.
    """
    # A kernel that spills is reported in a paragraph, wrapped in the middle of what we look for.
    remarks = " ".join(remarks.split())
    shared = _shared_memory(ir)
    serialized = set(_SERIALIZED.findall(remarks))
    starts = list(_ENTRY.finditer(remarks))
    ends = [start.start() for start in starts[1:]] + [len(remarks)]
    reports = []
    for start, end in zip(starts, ends):
        text = remarks[start.end() : end]
        stack, stores, loads = (int(n) for n in _SPILLS.search(text).groups())
        name = start[1]
        readable = _CLASS.search(name)
        reports.append(
            KernelReport(
                name=readable[1] if readable else name,
                registers=int(_REGISTERS.search(text)[1]),
                stack=stack,
                spill_stores=stores,
                spill_loads=loads,
                shared_memory=shared.get(name, 0),
                serialized=name in serialized,
                entry=name,
            )
        )
    return reports


def _shared_memory(ir: str) -> dict[str, int]:
    """Bytes of shared memory that each kernel of the IR allocates."""
    aliases = dict(_ALIAS.findall(ir))
    starts = list(_KERNEL.finditer(ir))
    ends = [start.start() for start in starts[1:]] + [len(ir)]
    sizes = {}
    for start, end in zip(starts, ends):
        types = _ALLOCATION.findall(ir, start.end(), end)
        found = (_SHARED_BYTES.fullmatch(aliases.get(name, name)) for name in types)
        sizes[start[1]] = sum(int(match[1]) for match in found if match)
    return sizes
