"""Findings of simulations for machines: JSON, and SARIF 2.1.0 for annotations in code review."""

from __future__ import annotations

import re

from dsv4.simulator.errors import SimulatorError
from dsv4.simulator.merged import MergedReport
from dsv4.simulator.report import Finding, LaunchReport

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LINE = re.compile(r"\((/[^():]+|[\w./-]+\.\w+):(\d+)")
NOT_COVERED = "synchronisation never reached"


def finding_of(error: SimulatorError) -> Finding:
    """An error that ended a simulation, as a finding at the first source line it names."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    place = _LINE.search(str(error))
    lines = (((place.group(1), int(place.group(2))),),) if place else ()
    return Finding(name, str(error), (), lines)


def as_json(report: MergedReport) -> dict[str, object]:
    """Findings, warnings, launches, and what synchronisation no launch reached."""
    return {
        "findings": [_finding(found) for found in report.findings],
        "warnings": [_finding(found) for found in report.warnings],
        "synchronisation_never_reached": report.uncovered,
        "launches": [_launch(launch) for launch in report.launches],
    }


def _finding(found: Finding) -> dict[str, object]:
    lines = found.lines or ((),) * len(found.places)
    texts = found.places or ("",) * len(lines)
    return {
        "kind": found.kind,
        "message": found.message,
        "places": [
            {"text": text, "lines": [{"file": file, "line": line} for file, line in chain]}
            for text, chain in zip(texts, lines)
        ],
    }


def _launch(launch: LaunchReport) -> dict[str, object]:
    return {
        "kernel": launch.kernel,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "shared_bytes": launch.shared_bytes,
        "warp_instructions": launch.instructions,
        "coverage": str(launch.coverage),
    }


def as_sarif(report: MergedReport) -> dict[str, object]:
    """One SARIF run. A finding is at the last source line it has, the others are related."""
    uncovered = [
        Finding(NOT_COVERED, f"{kernel}: {place}", (), _lines_in(place))
        for kernel, places in report.uncovered.items()
        for place in places
    ]
    results = [_result(found, "error") for found in report.findings]
    results += [_result(found, "warning") for found in [*report.warnings, *uncovered]]
    rules = sorted({result["ruleId"] for result in results})
    driver = {"name": "dsv4 sim", "rules": [{"id": rule} for rule in rules]}
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _lines_in(place: str) -> tuple[tuple[tuple[str, int], ...], ...]:
    found = _LINE.search(place)
    return (((found.group(1), int(found.group(2))),),) if found else ()


def _result(found: Finding, level: str) -> dict[str, object]:
    lines = [line for chain in reversed(found.lines) for line in chain]
    where = [_location(file, line) for file, line in lines]
    out = {
        "ruleId": re.sub(r"[^a-z0-9]+", "-", found.kind.lower()).strip("-"),
        "level": level,
        "message": {"text": str(found)},
        "locations": where[:1],
    }
    if where[1:]:
        out["relatedLocations"] = where[1:]
    return out


def _location(file: str, line: int) -> dict[str, object]:
    return {"physicalLocation": {"artifactLocation": {"uri": file}, "region": {"startLine": line}}}
