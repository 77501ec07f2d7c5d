"""Tables of BENCHMARKS.md, made from the records in benchmarks/*.json.

A page names what belongs into it:

    <!-- benchmarks: attention attention_h200_2.json -->
    (the table, rewritten by `scripts/benchmarks --write`)
    <!-- /benchmarks -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4.bench import (
    attention_report,
    compress,
    engine,
    fp8_linear,
    index_topk,
    latent_rows,
    linear,
    lowp,
    merged_linear,
    mhc_seam,
    moe,
    paged_attention,
    prefill,
    rms_norm_fp8,
    sampler,
    step,
    targets,
)
from dsv4.bench.report import table_head, table_line
from dsv4.quoting import quoted

Record = Mapping[str, Any]
BLOCK = re.compile(
    r"(<!-- benchmarks: (?P<kind>\S+) (?P<files>[^>]+?) -->\n)(?P<body>.*?)(<!-- /benchmarks -->)",
    re.DOTALL,
)
OPENING = "<!-- benchmarks:"
TARGETS = "attention_targets.json"
PAGED_TARGETS = "paged_attention_targets.json"
FLASH_MLA = "FlashMLA"  # how the names of its kernels begin


def rendered(page: str, folder: Path) -> str:
    """A page with its tables made anew.

    Args:
        page: Markdown.
        folder: of the records that it names.

    Raises:
        ValueError: a marker is not closed, or names a table or a record that is not there.
    """
    blocks = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal blocks
        blocks += 1
        kind, files = match["kind"], match["files"].split()
        if kind not in TABLES:
            known = ", ".join(TABLES)
            raise ValueError(f"benchmarks: got table {quoted(kind)}, needs one of {known}")
        records = [_load(folder / name) for name in files]
        return f"{match[1]}\n{TABLES[kind](records, folder)}\n\n{match[5]}"

    text = BLOCK.sub(replace, page)
    if blocks != page.count(OPENING):
        raise ValueError(f"benchmarks: {page.count(OPENING)} markers, of which {blocks} are closed")
    return text


def _load(path: Path) -> Record:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"benchmarks: {path} cannot be read ({error})") from None


def circumstances(record: Record) -> str:
    """Machine, date, commit and command of a record, and the ceilings that were measured."""
    machine, gpu = record["machine"], record.get("gpu") or {}
    known = [
        machine["name"],
        *(f"{label} {gpu[key]}" for key, label in GPU_LABELS.items() if gpu.get(key)),
        *(f"{name} {version}" for name, version in record["software"].items() if version),
        record["date"][:10],
        f"commit {record['commit'][:7]}" if record.get("commit") else "",
        f"`{record['command']}`",
    ]
    said = f"{', '.join(filter(None, known))}."
    return said + (
        f" Copy {machine['copy'] / 1e12:.2f} TB/s, read {machine['read'] / 1e12:.2f} TB/s, "
        f"matmul {machine['rate'] / 1e12:.0f} TFLOP/s."
    )


GPU_LABELS = {
    "driver": "driver",
    "max_sm_clock": "SM clock up to",
    "max_memory_clock": "memory clock up to",
    "power_limit": "power limit",
}


def attention_table(records: Sequence[Record], folder: Path) -> str:
    """Everything that one run of the attention benchmark measured."""
    (record,) = records
    peers = list(dict.fromkeys(name for row in record["results"] for name in row["peers"]))
    lines = [circumstances(record), "", table_head(attention_report.columns(peers))]
    for row in record["results"]:
        lines.append(table_line(attention_report.cells(row, peers, is_bold=True)))
    return "\n".join(lines)


def attention_machines_table(records: Sequence[Record], folder: Path) -> str:
    """Runs on several machines side by side, with the targets and the better FlashMLA kernel."""
    targets = _load(folder / TARGETS)["results"]
    ordinals = [_ordinal(i) for i in range(len(records))]
    head = ["shape", "T", "target", *(f"ours, {i}" for i in ordinals)]
    lines = [table_head([*head, *(f"FlashMLA, {i}" for i in ordinals)])]
    met, gains = [0] * len(records), [[] for _ in records]
    for target in targets:
        name, tokens, bound = target["name"], target["tokens"], target["microseconds"]
        rows = [_row_of(record, name, tokens) for record in records]
        times = [row["microseconds"] for row in rows]
        others = [_better_flash_mla(row) for row in rows]
        for place, (time, other) in enumerate(zip(times, others, strict=True)):
            met[place] += time <= bound
            gains[place].append(other / time)
        # A time that one decimal would show as the target has two.
        close = any(round(time, 1) == bound != time for time in times)
        shown = [f"{time:.{2 if close else 1}f}" for time in times]
        lines.append(
            table_line([name, f"{tokens}", f"{bound}", *shown, *(f"{x:.1f}" for x in others)])
        )
    every = [gain for machine in gains for gain in machine]
    faster = [sum(gain > 1 for gain in machine) for machine in gains]
    lines += [
        "",
        f"Targets met, of {len(targets)}: {_listed(met)}. Faster than the better FlashMLA kernel: "
        f"{_listed(faster)}, {min(every):.2f} to {max(every):.2f} times.",
    ]
    return "\n".join(lines)


def rows_table(family: ModuleType, records: Sequence[Record], folder: Path) -> str:
    """What one run of a family's benchmark measured; the family has `COLUMNS` and `cells`."""
    (record,) = records
    lines = [circumstances(record), "", table_head(family.COLUMNS)]
    for row in record["results"]:
        lines.append(table_line(family.cells(row, is_bold=True)))
    return "\n".join(lines)


def targets_table(family: ModuleType, records: Sequence[Record], folder: Path) -> str:
    """`rows_table` of a family whose rows have targets, and how many are met."""
    (record,) = records
    rows = ((family.target_of(row), row) for row in record["results"])
    return f"{rows_table(family, records, folder)}\n\n{targets.met(rows)}"


def paged_table(records: Sequence[Record], folder: Path) -> str:
    """What one run of the paged benchmark measured, beside the targets."""
    (record,) = records
    names = ("name", "tokens", "kv_format", "compute")
    targets = {
        tuple(row[name] for name in names): row["microseconds"]
        for row in _load(folder / PAGED_TARGETS)["results"]
    }
    columns = (*paged_attention.COLUMNS, "target us")
    lines = [circumstances(record), "", table_head(columns)]
    met = []
    for row in record["results"]:
        bound = targets.get(tuple(row["shape"][name] for name in names))
        if bound is not None:
            met.append(row["microseconds"] <= bound)
        cells = paged_attention.cells(row, is_bold=True)
        lines.append(table_line([*cells, "-" if bound is None else f"{bound}"]))
    return "\n".join([*lines, "", f"Targets met: {sum(met)} of {len(met)}."])


def lowp_table(records: Sequence[Record], folder: Path) -> str:
    """What one run of the benchmark of quantised attention measured, with its peers."""
    (record,) = records
    rows = record["results"]
    columns = (*lowp.COLUMNS, *(f"{name}, TFLOP/s" for name in rows[0]["peers"]))
    lines = [circumstances(record), "", table_head(columns)]
    lines += [table_line(lowp.cells(row, is_bold=True)) for row in rows]
    return "\n".join([*lines, "", lowp.summary(rows)])


TABLES: dict[str, Callable[[Sequence[Record], Path], str]] = {
    "attention": attention_table,
    "attention-machines": attention_machines_table,
    "linear": partial(targets_table, linear),
    "lowp": lowp_table,
    "fp8_linear": partial(rows_table, fp8_linear),
    "merged_linear": partial(rows_table, merged_linear),
    "mhc_seam": partial(rows_table, mhc_seam),
    "index_topk": partial(rows_table, index_topk),
    "compress": partial(rows_table, compress),
    "latent_rows": partial(rows_table, latent_rows),
    "moe": partial(targets_table, moe),
    "paged_attention": paged_table,
    "engine": partial(rows_table, engine),
    "prefill": partial(rows_table, prefill),
    "rms_norm_fp8": partial(rows_table, rms_norm_fp8),
    "sampler": partial(rows_table, sampler),
    "step": partial(rows_table, step),
}


def _row_of(record: Record, name: str, tokens: int) -> Mapping[str, Any]:
    for row in record["results"]:
        if (row["shape"]["name"], row["shape"]["tokens"]) == (name, tokens):
            return row
    raise ValueError(f"benchmarks: a record of {record['date']} has no {name} at T = {tokens}")


def _better_flash_mla(row: Mapping[str, Any]) -> float:
    return min(time for name, time in row["peers"].items() if name.startswith(FLASH_MLA))


def _ordinal(place: int) -> str:
    return ("1st", "2nd", "3rd")[place] if place < 3 else f"{place + 1}th"


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
