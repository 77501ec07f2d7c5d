"""Options of a call, complete: what the caller left out, what the environment overrides, what
another option forces off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsv4.kernels.lowp.config import (
    ACCUMULATORS,
    GRANULARITIES,
    QUANTIZERS,
    SMOOTH_V_ACCUMULATOR,
)
from dsv4.ops.quantized_attention.knobs import overrides, warn_once
from dsv4.quoting import quoted

# In the order of `QuantizeKvConfig` behind head_dim and dtype.
FORMAT_OPTIONS = (
    "qk",
    "pv",
    "qk_quant_gran",
    "geometry",
    "quantizer",
    "pv_accum_dtype",
    "smooth_k",
    "smooth_v",
    "smooth_q",
    "km_scope",
)
_FLAGS = ("smooth_k", "smooth_v", "smooth_q")


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `FORMAT_OPTIONS`; None in `given` stands for the default.

    Raises:
        TypeError, ValueError: an option is of the wrong type, or no choice.
    """
    for name in FORMAT_OPTIONS:
        needed, text = (bool, "True or False") if name in _FLAGS else (str, "a string")
        value = given.get(name)
        if value is not None and not isinstance(value, needed):
            raise TypeError(f"{name}: got a {type(value).__name__}, needs {text}")
    found = {name: given.get(name) for name in FORMAT_OPTIONS}
    qk = found["qk"] = found["qk"] or "int8"
    if qk not in GRANULARITIES:
        raise ValueError(f"qk: got {quoted(qk)}, needs one of {', '.join(GRANULARITIES)}")
    pv = found["pv"] = found["pv"] or ("nvfp4" if qk == "nvfp4" else "fp8")
    if pv not in ACCUMULATORS:
        raise ValueError(f"pv: got {quoted(pv)}, needs one of {', '.join(ACCUMULATORS)}")
    forced = _fitting_overrides(qk, pv)
    found |= forced
    granularity = found["qk_quant_gran"] = found["qk_quant_gran"] or GRANULARITIES[qk][0]
    accumulator = found["pv_accum_dtype"] = found["pv_accum_dtype"] or ACCUMULATORS[pv][0]
    roundings = QUANTIZERS.get(granularity, ("",))
    if found["quantizer"] is None or "qk_quant_gran" in forced:
        found["quantizer"] = roundings[0]
    found["geometry"] = found["geometry"] or "sm90"
    found["km_scope"] = found["km_scope"] or "sequence"
    found["smooth_k"] = True if found["smooth_k"] is None else found["smooth_k"]
    found["smooth_v"] = bool(found["smooth_v"])
    found["smooth_q"] = bool(found["smooth_q"])
    if found["smooth_v"] and accumulator != SMOOTH_V_ACCUMULATOR.get(pv):
        warn_once(
            f"smooth_v is ignored: pv {pv!r} with pv_accum_dtype {accumulator!r} does not add the "
            "mean again"
        )
        found["smooth_v"] = False
    return found


def _fitting_overrides(qk: str, pv: str) -> dict[str, Any]:
    """What the environment overrides of a call in these formats; one that does not fit them is
    reported and left."""
    found = {name: value for name, value in overrides().items() if name in FORMAT_OPTIONS}
    for name, choices in (
        ("qk_quant_gran", GRANULARITIES[qk]),
        ("pv_accum_dtype", ACCUMULATORS[pv]),
    ):
        if name in found and found[name] not in choices:
            warn_once(
                f"{name} {found[name]!r} of the environment does not fit qk {qk!r}, pv {pv!r}"
            )
            del found[name]
    return found
