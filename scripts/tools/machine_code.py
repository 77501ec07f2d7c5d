"""Machine code of compiled kernels: what ptxas serialised, spilled, and put one behind another."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4.ops.runtime.cache import RUNNERS
from dsv4.ops.runtime.registry import ahead_of_time

ELF, CUDA = b"\x7fELF", 190  # magic number, and machine
MIN_CHAIN = 4  # products of a k block
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
KERNEL = re.compile(r"^\.text\.(\S+):", re.MULTILINE)
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
WAIT, LOAD = "ACQBULK", "LDG"
# What ends the run of loads that is looked at.
ENDS = re.compile(r"^(BAR|SYNCS|UBLKCP|UTMA|LDGSTS|STG|STAS|RED|ATOM|EXIT|[QHI]G?MMA)")
WORDS = {"64": 2, "128": 4}


@dataclass(frozen=True)
class Figures:
    """What stands in the machine code of a kernel.

    Attributes:
        products: wgmma.
        waited: of those, with a barrier of their own.
        local: loads and stores of local memory.
        trips: batches of global loads behind a wait, one behind another, at most.
    """

    instructions: int
    products: int
    waited: int
    local: int
    trips: int

    @property
    def is_serialised(self) -> bool:
        return self.products >= MIN_CHAIN and self.waited == self.products


def read(text: str) -> Figures:
    """Figures of a kernel's disassembly."""
    found = INSTRUCTION.findall(text)
    names = [name for name, _ in found]
    products = [operands for name, operands in found if re.match(r"[QHI]GMMA", name)]
    return Figures(
        instructions=len(found),
        products=len(products),
        waited=sum("gsb0" in operands for operands in products),
        local=sum(name.startswith(("LDL", "STL")) for name in names),
        trips=max((_trips(found[i + 1 :]) for i, n in enumerate(names) if n == WAIT), default=0),
    )


def _trips(instructions: list[tuple[str, str]]) -> int:
    """Batches of loads, in the order of the text: one ends where what it brings is read."""
    trips, pending, is_open = 0, set(), False
    for name, operands in instructions:
        if ENDS.match(name):
            break
        own, *sources = operands.split(",")
        if pending & _registers(" ".join(sources)):
            pending, is_open = set(), False
        if name.split(".")[0] == LOAD:
            trips += not is_open
            is_open = True
            first = REGISTER.search(own)
            if first is not None:
                size = max((WORDS.get(part, 1) for part in name.split(".")), default=1)
                pending |= {int(first[1]) + i for i in range(size)}
    return trips


def _registers(operands: str) -> set[int]:
    """Numbers of the registers that operands name."""
    found = set()
    for number, is_pair in REGISTER.findall(operands):
        found |= {int(number), int(number) + 1} if is_pair else {int(number)}
    return found


def kernels(disassembly: str) -> Iterator[tuple[str, str]]:
    """Name and text of each kernel."""
    starts = list(KERNEL.finditer(disassembly))
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(disassembly)]):
        yield start[1], disassembly[start.end() : end]


def cubins(content: bytes) -> Iterator[bytes]:
    """The CUDA ELF files inside an object, each with all that its tables point to."""
    at = content.find(ELF)
    while at >= 0:
        header = content[at : at + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == CUDA:
            programs, sections = struct.unpack_from("<QQ", header, 32)
            sizes = struct.unpack_from("<HHHH", header, 54)
            end = max(programs + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            yield content[at : at + end]
        at = content.find(ELF, at + len(ELF))


def disassemble(nvdisasm: str, cubin: bytes) -> str:
    """Text of a cubin's code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_nvdisasm() -> str | None:
    """That of the path, or of triton."""
    found = shutil.which("nvdisasm")
    if found is None:
        triton = importlib.util.find_spec("triton")
        for folder in (triton.submodule_search_locations or ()) if triton else ():
            path = Path(folder) / "backends/nvidia/bin/nvdisasm"
            found = str(path) if path.is_file() else found
    return found


def short(name: str) -> str:
    """The part of a kernel's name that tells its module and class."""
    found = re.search(r"dsv4kernels(\w+?)_object", name)
    return (found[1] if found else name)[-40:]


def main(description: str, argv: list[str] | None = None) -> int:
    """Read, print and return the exit status."""
    options = _parse(description, argv)
    try:
        return _run(options.arch, options.only, options.nvdisasm or find_nvdisasm())
    except re.error as error:
        return _fail(f"--only: {error}")
    except subprocess.CalledProcessError as error:
        return _fail(f"{options.nvdisasm or 'nvdisasm'}: {error.stderr.strip() or error}")
    except (OSError, ValueError) as error:
        return _fail(str(error))


def _parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "machine_code", description=description, formatter_class=formatter
    )
    parser.add_argument("--arch", default="sm_90a", help="default sm_90a")
    parser.add_argument("--only", default="", metavar="REGEX", help="of labels, anywhere in them")
    parser.add_argument("--nvdisasm", metavar="FILE", help="default: of the path, or of triton")
    # An error of argparse is two lines: usage and reason.
    parser.error = lambda message: sys.exit(_fail(message))
    return parser.parse_args(argv)


def _fail(message: str) -> int:
    print(f"machine_code: {message}", file=sys.stderr)
    return 2


def _run(arch: str, only: str, nvdisasm: str | None) -> int:
    """Print a line for each kernel; 1 where one is serialised."""
    if nvdisasm is None:
        raise ValueError("no nvdisasm on the path and none of triton; see --nvdisasm")
    paths = {label: RUNNERS.path(key) for label, key in ahead_of_time(arch)}
    found = {label: path for label, path in paths.items() if re.search(only, label)}
    found = {label: path for label, path in found.items() if path.is_file()}
    if not found:
        raise ValueError(f"nothing in the cache; first dsv4 compile --arch {arch}")
    is_marked = False
    print("instructions products waited local trips  kernel")
    for label, path in found.items():
        print(label)
        for cubin in cubins(path.read_bytes()):
            for name, text in kernels(disassemble(nvdisasm, cubin)):
                f = read(text)
                is_marked |= f.is_serialised
                numbers = f"{f.instructions:12} {f.products:8} {f.waited:6} {f.local:5} {f.trips:5}"
                print(f"{numbers}  {short(name)}{'  SERIALISED' if f.is_serialised else ''}")
        sys.stdout.flush()
    return int(is_marked)
