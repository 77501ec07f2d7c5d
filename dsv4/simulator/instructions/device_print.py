"""printf of device code: C formats over arguments packed in the thread's own memory."""

from __future__ import annotations

import re
import sys

import numpy as np

from dsv4.simulator.compile.codegen import BlockEmitter, emits
from dsv4.simulator.instructions.load_store import load_generic
from dsv4.simulator.machine.warp import Warp
from dsv4.simulator.ptx.entry import Instruction

_CONVERSION = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|j|z|t)?([diouxXeEfFgGaAcsp%])")
_LONG = ("l", "ll", "j", "z", "t")
_LONGEST_TEXT = 1 << 16


def vprintf(w: Warp, form: np.ndarray, arguments: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Print for each active thread, in order of lanes; returns how many arguments each printed."""
    printed = np.zeros(32, np.uint32)
    forms: dict[int, str] = {}
    text = []
    for lane in np.flatnonzero(mask).tolist():
        reader = _Arguments(w, lane, int(arguments[lane]))
        address = int(form[lane])
        if address not in forms:
            forms[address] = reader.text(address)
        text.append(_CONVERSION.sub(reader.convert, forms[address]))
        printed[lane] = reader.count
    sys.stdout.write("".join(text))
    sys.stdout.flush()
    return printed


class _Arguments:
    """The arguments of one thread, in turn: each at a multiple of its own size."""

    def __init__(self, w: Warp, lane: int, start: int):
        self.w, self.lane, self.at, self.count = w, lane, start, 0
        self.mask = np.arange(32) == lane

    def word(self, address: int, bits: int) -> int:
        """The unsigned value of `bits` bits at a generic address."""
        addresses = np.full(32, address, np.uint64)
        return int(load_generic(self.w, addresses, 1, bits, self.mask)[0][self.lane])

    def text(self, address: int) -> str:
        """The zero-terminated string at a generic address."""
        data = bytearray()
        while len(data) < _LONGEST_TEXT and (byte := self.word(address + len(data), 8)):
            data.append(byte)
        return data.decode(errors="replace")

    def _next(self, bits: int) -> int:
        size = bits // 8
        start = -(-self.at // size) * size
        self.at, self.count = start + size, self.count + 1
        return self.word(start, bits)

    def convert(self, match: re.Match) -> str:
        """What takes the place of one conversion."""
        flags, length, kind = match.groups()
        if kind == "%":
            return "%"
        if kind in "aAeEfFgG":
            value = float(np.uint64(self._next(64)).view(np.float64))
            return value.hex() if kind in "aA" else f"%{flags}{kind}" % value
        if kind in "sp":
            address = self._next(64)
            shown = self.text(address) if kind == "s" else f"{address:#x}"
            return f"%{flags}s" % shown
        bits = 64 if length in _LONG else 32
        value = self._next(bits)
        if kind in "di" and value >> (bits - 1):
            value -= 1 << bits
        return f"%{flags}{'d' if kind == 'u' else kind}" % value


# --- emitters ------------------------------------------------------------------------------------
@emits("vprintf")
def emit_print(e: BlockEmitter, ins: Instruction) -> None:
    """A call of printf, as the parser writes it: result, format, packed arguments."""
    form, arguments = (e.value(operand, "u64") for operand in ins.operands[1:])
    e.mark()
    out = e.temporary()
    e.line(f"{out} = vprintf(w, {form}, {arguments}, {e.mask})")
    e.define(ins.operands[0], out, "u32")
