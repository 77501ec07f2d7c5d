"""Targets of projections and of experts: what the project set itself on one H200.

A figure is that of a launch, or a layer's experts, by itself; beside it some have a budget, what
they may take in the chain of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("target", "in a chain us")
FEW = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Target:
    """A bound of one row of a table; a row has one kind of bound at most.

    Attributes:
        microseconds: at most.
        gigabytes: per second, at least.
        floor_share: of the time of the row's bytes or FLOPs, at least.
        fp8_share: of the FP8 rate of the machine, at least.
        budget: microseconds in the chain of a layer.
    """

    microseconds: float | None = None
    gigabytes: float | None = None
    floor_share: float | None = None
    fp8_share: float | None = None
    budget: float | None = None

    @property
    def text(self) -> str:
        """The bound."""
        if self.microseconds is not None:
            return f"{self.microseconds:g} us"
        if self.gigabytes is not None:
            return f"{self.gigabytes:g} GB/s"
        if self.floor_share is not None:
            return f"{self.floor_share:.0%} of floor"
        return "-" if self.fp8_share is None else f"{self.fp8_share:.0%} of FP8 rate"

    def is_met(self, row: Mapping[str, Any]) -> bool | None:
        """Whether a row of a record is within the bound; None where there is none."""
        time = row["microseconds"]
        if self.microseconds is not None:
            return time <= self.microseconds
        if self.gigabytes is not None:
            return row["gigabytes_per_second"] >= self.gigabytes
        if self.floor_share is not None:
            return row["floor"] / time >= self.floor_share
        if self.fp8_share is None or row.get("fp8_share") is None:
            return None
        return row["fp8_share"] >= self.fp8_share


Rows = dict[tuple[str, int], Target]


def _few(label: str, times: Sequence[float], budgets: Mapping[int, float] | None = None) -> Rows:
    """Microseconds for the numbers of tokens in `FEW`."""
    budgets = budgets or {}
    pairs = zip(FEW, times, strict=True)
    return {(label, t): Target(time, budget=budgets.get(t)) for t, time in pairs}


def _at(label: str, times: Mapping[int, float], budgets: Mapping[int, float] | None = None) -> Rows:
    budgets = budgets or {}
    return {
        (label, t): Target(times.get(t), budget=budgets.get(t))
        for t in sorted({*times, *budgets})
    }  # fmt: skip


MANY = 4096
# Linears of many tokens with FP8 weights, beside bf16 ones or not.
OF_BOTH = ("wq_a", "wq_b", "wkv", "wo_b", "shared w1", "shared w2", "indexer wq_b")
OF_BOTH += ("CSA x", "HCA x", "SWA x", "CSA latent")
MANY_FP8 = [(model, name) for model in ("Flash", "Pro") for name in OF_BOTH]
MANY_FP8.append(("Flash", "shared x"))
HALVES = (1, 4, 16, 64)  # tokens of a step whose output projection has one budget
# 92 % of 4.4 TB/s.
CHAIN_RATE = Target(gigabytes=4048)
LINEAR: Rows = {
    **_few("Flash wq_b", (9, 9, 9.5, 10.5, 20)),
    **_few("Flash wo_b", (9.5, 9.5, 10, 11, 18), dict.fromkeys(HALVES, 9.3) | {256: 18}),
    **_few("Flash CSA x", (9, 9, 9, 9.5, 15), {1: 8, 16: 8, 64: 8, 256: 14}),
    **_at("Flash CSA latent", {}, {1: 11.5, 16: 12, 64: 13, 256: 29}),
    **_few("Flash wo_a", (9.5, 9.5, 10, 11, 27), dict.fromkeys(HALVES, 9.3) | {256: 18}),
    **_at("Flash wo_a, act fp8", {256: 18}),
    **_at("Flash head", {1: 245, 64: 265}),
    **_at("Pro wq_b", {1: 27, 64: 29, 256: 54}),
    **_at("Pro wo_b", {1: 31, 64: 33, 256: 58}, dict.fromkeys(HALVES, 31) | {256: 62}),
    **_at("Pro CSA x", {}, {1: 14.5, 16: 15, 64: 15, 256: 25}),
    **_at("Pro CSA latent", {}, {1: 30, 16: 30, 64: 32, 256: 72}),
    **_at("Pro wo_a", {1: 18, 64: 20, 256: 52}, dict.fromkeys(HALVES, 18) | {256: 36}),
    **_at("Pro wo_a, act fp8", {256: 34}),
    **_at("Pro head", {1: 425, 64: 465}),
    **{("chain of 8192 x 4096 and 4096 x 8192", t): CHAIN_RATE for t in (1, 16)},
    **{(f"{model} {name}", MANY): Target(fp8_share=0.65) for model, name in MANY_FP8},
    # Its floor is that of the bf16 rate.
    **{(f"{model} wo_a", MANY): Target(floor_share=0.65) for model in ("Flash", "Pro")},
}
MOE: Rows = {
    **_few("Flash", (31, 90, 280, 670, 890), {1: 32, 16: 300, 64: 725, 256: 940}),
    **_few("Pro", (80, 225, 790, 2200, 3500), {1: 80, 16: 830, 64: 2330, 256: 3600}),
    **{(model, MANY): Target(fp8_share=0.5) for model in ("Flash", "Pro")},
    **{("Flash-Base", t): Target(floor_share=0.8) for t in HALVES},
    **{("Flash-NVFP4", t): Target(floor_share=0.55) for t in HALVES},
}
NONE = Target()


def cells(target: Target) -> list[str]:
    """Of a table's row, under `COLUMNS`."""
    return [target.text, "-" if target.budget is None else f"{target.budget:g}"]


def met(found: Iterator[tuple[Target, Mapping[str, Any]]]) -> str:
    """A line that counts targets that rows meet."""
    known = [target.is_met(row) for target, row in found]
    reached = [is_met for is_met in known if is_met is not None]
    return f"Targets met: {sum(reached)} of {len(reached)}."
