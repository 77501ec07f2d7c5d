"""All test programs, by family."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.hardware import (
    arithmetic,
    bulk,
    clusters,
    collectives,
    fp8_sums,
    memory,
    tma,
    wgmma,
)
from tests.simulator.hardware.case import Case

FAMILIES: dict[str, Callable[[], list[Case]]] = {
    "arithmetic": arithmetic.cases,
    "collectives": collectives.cases,
    "memory": memory.cases,
    "bulk": bulk.cases,
    "clusters": clusters.cases,
    "tma": tma.cases,
    "wgmma": wgmma.cases,
    "fp8": fp8_sums.cases,
}
