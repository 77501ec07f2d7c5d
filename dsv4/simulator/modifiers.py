"""Which modifiers arithmetic may carry: one that no emitter looks at would be silently ignored."""

from __future__ import annotations

from dsv4.simulator.errors import UnsupportedInstruction
from dsv4.simulator.ptx.parser import TYPE_BITS, Instruction

_ROUNDINGS = {"rn", "rz", "rm", "rp"}
_FLOAT = _ROUNDINGS | {"ftz", "sat", "relu"}
_EXTREMUM = {"ftz", "NaN", "xorsign", "abs", "relu"}
_MODIFIERS: dict[str, set[str]] = {
    "add": _FLOAT | {"cc"},
    "sub": _FLOAT | {"cc"},
    "mul": _FLOAT | {"lo", "hi", "wide"},
    "mad": _FLOAT | {"lo", "hi", "wide", "cc"},
    "fma": _FLOAT,
    "div": _ROUNDINGS | {"ftz", "approx", "full"},
    "min": _EXTREMUM,
    "max": _EXTREMUM,
    "abs": {"ftz"},
    "neg": {"ftz"},
    **{name: {"approx", "ftz"} for name in ("ex2", "lg2", "sin", "cos", "tanh")},
    **{name: {"approx", "ftz", "rn"} for name in ("rcp", "sqrt", "rsqrt")},
    "cvt": _FLOAT | {"rna", "rni", "rzi", "rmi", "rpi", "satfinite", "pack"},
}
# Of conversions only.
_CONVERTED = {"tf32", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2"}
_PACKED_INTEGERS = {"u16x2", "s16x2"}


def check_modifiers(ins: Instruction) -> None:
    """Raise UnsupportedInstruction for arithmetic with a modifier that nothing implements."""
    known = _MODIFIERS.get(ins.parts[0])
    if known is None:
        return
    types = TYPE_BITS.keys() | (_CONVERTED if ins.parts[0] == "cvt" else _PACKED_INTEGERS)
    for part in ins.parts[1:]:
        if part not in known and part not in types:
            what = " (stochastic rounding)" if part == "rs" else ""
            raise UnsupportedInstruction(
                f"modifier .{part} of {ins.opcode}{what} is not simulated: {ins.where()}"
            )
