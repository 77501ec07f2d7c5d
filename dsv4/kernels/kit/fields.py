"""Values of a configuration's fields, checked against their annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, fields
from numbers import Integral, Real
from typing import Any

from dsv4.quoting import quoted

MAX_INTEGER = 2**31 - 1  # kernels take sizes as int32
MAX_FLOAT = (2 - 2**-23) * 2.0**127  # and factors as fp32
_NEEDS = {
    "int": (Integral, "an integer"),
    "float": (Real, "a real number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
}


def checked_fields(config: type, values: Sequence[Any]) -> tuple[Any, ...]:
    """Values of a dataclass's fields as plain Python objects; missing ones have defaults.

    An operator's configuration is made from what callers pass: a flag is no integer, a tensor no
    number, and no number is infinite, NaN or beyond what kernels hold.

    Raises:
        TypeError: a value is not of its field's annotated type.
        ValueError: a number is out of range. Both name the field.
    """
    return tuple(_checked(*pair) for pair in zip(fields(config), values))


def _checked(field: Field, value: Any) -> Any:
    kind, _, none = str(field.type).partition(" | ")
    if value is None and none == "None":
        return None
    needed, text = _NEEDS[kind]
    if not isinstance(value, needed) or (isinstance(value, bool) and needed is not bool):
        alternative = " or None" if none else ""
        raise TypeError(f"{field.name}: got {quoted(value)}, needs {text}{alternative}")
    if kind == "int":
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{field.name}: got {quoted(value)}, needs at most {MAX_INTEGER}")
        return int(value)
    if kind == "float":
        if not abs(value) <= MAX_FLOAT:
            raise ValueError(f"{field.name}: got {quoted(value)}, needs at most {MAX_FLOAT:.1e}")
        return float(value)
    return value
