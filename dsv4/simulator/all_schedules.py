"""One call under several schedules, from the same memory: a correct kernel gives equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dsv4.simulator.merged import MergedReport
from dsv4.simulator.report import Finding, Report

DIFFERENT_BITS = "results differ between schedules"


def run_schedules(
    call: Callable[[str], Report],
    tensors: Iterable[torch.Tensor],
    schedules: Sequence[str],
    report: MergedReport,
) -> None:
    """Make a call under each schedule and add what it finds to `report`.

    Args:
        call: simulates under a schedule, on `tensors`.
        tensors: all that the call reads or writes; they end as the last schedule leaves them.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    several = len(schedules) > 1
    before = {start: storage.clone() for start, storage in storages.items()} if several else {}
    first: dict[int, torch.Tensor] | None = None
    differs = False
    for schedule in schedules:
        if first is not None:
            for start, storage in storages.items():
                storage.copy_(before[start])
        found = call(schedule)
        report.add(found)
        if not several:
            continue
        written = {start: _bytes(storage) for start, storage in storages.items()}
        if first is None:
            first = {start: data.clone() for start, data in written.items()}
        elif not differs and any(not torch.equal(first[s], data) for s, data in written.items()):
            differs = True
            names = ", ".join(launch.kernel[:60] for launch in found.launches)
            message = f"{names}: not the same bits under {schedules[0]} and {schedule}"
            report.findings.append(Finding(DIFFERENT_BITS, message))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
