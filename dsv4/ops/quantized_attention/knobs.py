"""Knobs of quantised attention in the environment: they override what every call says.

Read once per process, each reported once by the logger `dsv4.quantized_attention`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.kernels.lowp.config import ACCUMULATORS, GRANULARITIES
from dsv4.quoting import quoted

LOG = logging.getLogger("dsv4.quantized_attention")
PREFIXES = ("DSV4_SAGE_", "GGML_SAGE_")  # ours, and what the notes of a C++ port call them


@dataclass(frozen=True)
class Knob:
    """A variable of the environment.

    Attributes:
        variable: without its prefix.
        argument: that it overrides.
        values: text -> value; any text where it is empty.
        help: what it does, for the design page.
        needs: arguments of other knobs, of which one has to be set.
    """

    variable: str
    argument: str
    values: Mapping[str, Any]
    help: str
    needs: tuple[str, ...] = ()


_FLAG = {"0": False, "1": True}
_COUNT = {str(number): number for number in range(4096)}


def _names(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: name for names in table.values() for name in names}


_SAMPLED = ("sample", "report_tiles")
KNOBS = (
    Knob("SMOOTH_K", "smooth_k", _FLAG, "code keys without their mean"),
    Knob("SMOOTH_V", "smooth_v", _FLAG, "code values without their mean"),
    Knob("PV_ACCUM", "pv_accum_dtype", _names(ACCUMULATORS), "accumulation of P V"),
    Knob("GRANULARITY", "qk_quant_gran", _names(GRANULARITIES), "rows that share a scale"),
    Knob("DUMP", "dump", {}, "write every stage of a call to PREFIX.NAME.bin"),
    Knob("DUMP_QKV", "dump_qkv", {}, "write the inputs alone"),
    Knob("DUMP_QK_INT8", "dump_codes", {}, "write codes and scales alone"),
    Knob("DUMP_OUT", "dump_out", {}, "write outputs alone"),
    Knob("SAMPLE_PREFIX", "sample", {}, "write the stages of some queries of a head"),
    Knob("SAMPLE_HEAD", "sample_head", _COUNT, "the head, default 0", _SAMPLED),
    Knob("SAMPLE_BLOCK", "sample_block", _COUNT, "the block of 64 queries, default 0", _SAMPLED),
    Knob("SAMPLE_WARP", "sample_warp", _COUNT, "16 queries of it, default all", _SAMPLED),
    Knob("SAMPLE_LIMIT", "sample_limit", _COUNT, "calls that are sampled, default 1", ("sample",)),
    Knob("FORCE_HOST_QK", "host_codes", _FLAG, "code keys and values on the CPU, for the kernel"),
    Knob("FORCE_SIMPLE_QK", "torch_code", _FLAG, "run the torch code in place of the kernel"),
    Knob("Q_SERIAL", "serial_heads", _FLAG, "code and attend a head at a time, a launch each"),
    Knob("DEBUG_QUANT", "report_scales", _FLAG, "report the scales of every call"),
    Knob("DEBUG_QUANT_HOST", "report_host_scales", _FLAG, "the same of calls on the CPU alone"),
    Knob("DEBUG_QUANT_DEV", "report_device_scales", _FLAG, "the same of calls on a GPU alone"),
    Knob(
        "DEBUG_KERNEL_ITERS",
        "report_tiles",
        _COUNT,
        "report maxima and sums of the sampled queries after so many tiles of keys",
    ),
    Knob(
        "KERNEL_PRINT_LIMIT",
        "report_limit",
        _COUNT,
        "lines that DEBUG_KERNEL_ITERS reports at most, default 256",
        ("report_tiles",),
    ),
)


@functools.cache
def overrides() -> Mapping[str, Any]:
    """Values by argument, of the variables that are set.

    Raises:
        ValueError: a variable has a value that it cannot have.
    """
    found: dict[str, Any] = {}
    for knob in KNOBS:
        for prefix in PREFIXES:
            name = prefix + knob.variable
            if name not in os.environ:
                continue
            text = os.environ[name]
            if knob.values and text not in knob.values:
                needs = "a number below 4096" if knob.values is _COUNT else ""
                needs = needs or f"one of {', '.join(knob.values)}"
                raise ValueError(f"{name}: got {quoted(text)}, needs {needs}")
            found[knob.argument] = knob.values[text] if knob.values else text
            LOG.warning("%s=%s overrides %s in every call", name, text, knob.argument)
            break
    for knob in KNOBS:
        if knob.argument in found and knob.needs and not any(map(found.get, knob.needs)):
            others = " or ".join(
                PREFIXES[0] + k.variable for k in KNOBS if k.argument in knob.needs
            )
            LOG.warning("%s is ignored: it needs %s", PREFIXES[0] + knob.variable, others)
            del found[knob.argument]
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Report something that a call asked for and does not get, once per process."""
    LOG.warning("%s", text)


@torch.compiler.assume_constant_result
def is_set(argument: str) -> bool:
    """Whether a flag of the environment is 1."""
    return bool(overrides().get(argument))


def dump_prefixes() -> dict[str, str]:
    """Prefixes of dumps by what is to be written; empty without any."""
    given = overrides()
    return {name: given[name] for name in _DUMPS if name in given}


def wants_stages() -> bool:
    """Whether stages of a call are to be written or reported."""
    return bool(dump_prefixes() or overrides().get("report_tiles"))


def reports_scales(device: torch.device) -> bool:
    """Whether scales of a call on a device are to be reported."""
    of_device = "report_device_scales" if device.type == "cuda" else "report_host_scales"
    return is_set("report_scales") or is_set(of_device)


_DUMPS: tuple[str, ...] = tuple(
    knob.argument for knob in KNOBS if knob.variable[:4] == "DUMP" or knob.argument == "sample"
)
