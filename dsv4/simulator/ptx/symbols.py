"""Variables of a PTX module: state space, size and initial bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.types import TYPE_BITS

_DECLARATION = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*?))?;?\s*$",
    flags=re.S,
)
_VALUE = re.compile(
    r"\s*(?:0[fF](?P<float>[0-9a-fA-F]{8})|0[dD](?P<double>[0-9a-fA-F]{16})"
    r"|(?P<integer>-?(?:0[xX][0-9a-fA-F]+|\d+))U?)\s*"
)


@dataclass
class Symbol:
    """A variable in shared, local or global state space; `size` None means `extern ...[]`.

    Attributes:
        refused: why its initial value cannot be had; "" if it can.
    """

    name: str
    space: str
    align: int
    size: int | None
    init: bytes = b""
    refused: str = ""


def symbol(declaration: str) -> Symbol | None:
    """The variable that a statement declares; None if it declares none."""
    match = _DECLARATION.match(declaration.strip())
    if match is None:
        return None
    space, align, kind, name, sizes, init = match.groups()
    if kind not in TYPE_BITS:
        raise UnsupportedInstruction(f"variable {name} of type .{kind} is not simulated")
    unit = TYPE_BITS[kind] // 8
    size = None if sizes.startswith("[]") else unit
    for count in re.findall(r"\d+", sizes):
        size = None if size is None else size * int(count)
    space = "global" if space == "const" else space
    found = Symbol(name, space, int(align or unit), size)
    if init:
        data = _bytes(init, unit)
        if data is None:
            found.refused = f"initial value of variable {name} is not simulated: `{init[:80]}`"
        else:
            found.init = data
    return found


def _bytes(text: str, unit: int) -> bytes | None:
    """Initial values as bytes; None for addresses of other variables."""
    out = []
    for value in re.sub(r"[{}]", " ", text).split(","):
        match = _VALUE.fullmatch(value)
        if match is None:
            return None
        bits = match.group("float") or match.group("double")
        number = int(bits, 16) if bits else int(match.group("integer"), 0)
        out.append((number % (1 << (8 * unit))).to_bytes(unit, "little"))
    return b"".join(out)
