"""Findings of simulations as one self-contained page: findings, timeline, and the source code with
findings and coverage in its margin."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dsv4.simulator.compile.program import Program
from dsv4.simulator.coverage import ran
from dsv4.simulator.merged import MergedReport
from dsv4.simulator.report import Finding, LaunchReport
from dsv4.simulator.timing.engine import Span
from dsv4.simulator.timing.machine import Machine
from dsv4.simulator.timing.prediction import LaunchPrediction
from dsv4.simulator.timing.timeline import colour_of, tracks_of

CONTEXT = 3  # lines shown around those that a kernel has code of
SHADES = 6
MOST_SPANS = 6000  # of a timeline
TRACK_PIXELS, WIDTH_PIXELS, MARGIN_PIXELS = 16, 1100, 190
_STYLE = """
:root { --paper: #fff; --ink: #1c1e21; --dim: #6b7280; --rule: #e5e7eb; --heat: 42, 111, 151;
  --bad: #b42318; --bad-paper: #fef3f2; --warn: #93600b; --warn-paper: #fffaeb; --good: #067647; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e7e9; --dim: #9aa1ab;
  --rule: #2c3037; --heat: 96, 165, 205; --bad: #f97066; --bad-paper: #33201f; --warn: #f0b450;
  --warn-paper: #2e2718; --good: #47cd89; } }
body { margin: 2rem auto; max-width: 1320px; padding: 0 1.5rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
.sum { color: var(--dim); margin: .3rem 0 0; } .good { color: var(--good); }
.bad { color: var(--bad); } .warn { color: var(--warn); }
table { border-collapse: collapse; } .facts td, .facts th { padding: .2rem 1rem .2rem 0;
  text-align: left; border-bottom: 1px solid var(--rule); font-size: .87rem; }
.facts th { color: var(--dim); font-weight: 500; }
code, pre, .code td { font: 12.5px/1.5 ui-monospace, monospace; }
.card { border-left: 4px solid var(--bad); background: var(--bad-paper); padding: .6rem .9rem;
  margin: .7rem 0; overflow-wrap: anywhere; } .card b { color: var(--bad); }
.card.warning { border-color: var(--warn); background: var(--warn-paper); }
.card.warning b { color: var(--warn); } .card code { display: block; margin-top: .35rem; }
a { color: inherit; } details { margin: .8rem 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .code { width: 100%; margin-top: .4rem; }
.code td { padding: 0 .7rem; white-space: pre; vertical-align: top; }
.code .n { color: var(--dim); text-align: right; user-select: none; }
.code .r { text-align: right; color: var(--dim); border-right: 1px solid var(--rule); }
.code .s { text-align: right; } .code tr:target td { outline: 2px solid var(--warn); }
.code .said td { white-space: normal; background: var(--bad-paper); color: var(--bad); }
.code .said.warning td { background: var(--warn-paper); color: var(--warn); }
.gap td { color: var(--dim); text-align: center; }
svg text { font: 11px ui-monospace, monospace; fill: var(--dim); }
"""


class Modelled(NamedTuple):
    """A launch whose time was modelled, and for which GPU."""

    machine: Machine
    launch: LaunchPrediction


@dataclass
class _Line:
    """Activity of the instructions of one source line.

    Attributes:
        run: warp instructions, with those of functions called on it.
        sync, sync_run: instructions that synchronise, and those of them that have run.
        findings: with whether each is only a warning.
    """

    run: int = 0
    sync: int = 0
    sync_run: int = 0
    findings: list[tuple[Finding, bool]] = field(default_factory=list)


def as_html(report: MergedReport, modelled: Sequence[Modelled] = ()) -> str:
    """The page; `modelled` launches are drawn as timelines."""
    lines = _lines(report)
    body = [
        *_head(report),
        *_findings(report),
        *_launches(report.launches),
        *(part for launch in modelled for part in _timeline(launch)),
        *_sources(lines),
    ]
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dsv4 sim</title>'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</html>\n"
    )


def _lines(report: MergedReport) -> dict[str, dict[int, _Line]]:
    """By file and number, every line that a launched kernel has code of."""
    files: dict[str, dict[int, _Line]] = defaultdict(lambda: defaultdict(_Line))
    programs = {id(x.coverage.program): x.coverage.program for x in report.launches}
    for program in programs.values():
        for ins, hits, is_sync in _executed(program):
            for file, number in set(ins.lines):
                line = files[file][number]
                line.run += hits
                line.sync += is_sync
                line.sync_run += is_sync and ran(program, ins, hits)
    for found, is_warning in _all_findings(report):
        for chain in found.lines:
            if chain:
                files[chain[0][0]][chain[0][1]].findings.append((found, is_warning))
    return files


def _executed(program: Program) -> Iterator[tuple]:
    """Instructions with how often they ran and whether they synchronise."""
    for block in program.blocks:
        synchronises = {ins.index for ins in program.sync[block.number]}
        for ins in program.entry.instructions[block.start : block.stop]:
            yield ins, program.hits[block.number], ins.index in synchronises


def _all_findings(report: MergedReport) -> list[tuple[Finding, bool]]:
    return [(f, False) for f in report.findings] + [(f, True) for f in report.warnings]


def _head(report: MergedReport) -> Iterator[str]:
    found, missed = len(report.findings), sum(map(len, report.uncovered.values()))
    instructions = sum(launch.instructions for launch in report.launches)
    yield "<h1>dsv4 sim</h1>"
    yield (
        f'<p class="sum"><span class="{"bad" if found else "good"}">{found} findings</span> · '
        f"{len(report.warnings)} warnings · "
        f'<span class="{"warn" if missed else "good"}">{missed or "no"} synchronisation '
        f"never reached</span> · {len(report.launches)} launches · "
        f"{instructions:,} warp instructions</p>"
    )


def _findings(report: MergedReport) -> Iterator[str]:
    listed = _all_findings(report)
    if listed:
        yield "<h2>Findings</h2>"
    for found, is_warning in listed:
        yield f'<div class="card{" warning" if is_warning else ""}">'
        yield f"<b>{html.escape(found.kind)}</b>: {html.escape(found.message)}"
        for i, place in enumerate(found.places):
            chain = found.lines[i] if i < len(found.lines) else ()
            text = html.escape(place)
            yield (
                f'<code><a href="#{_anchor(*chain[0])}">{text}</a></code>'
                if chain
                else (f"<code>{text}</code>")
            )
        yield "</div>"
    if report.uncovered:
        yield "<h2>Synchronisation never reached</h2>"
    for kernel, places in report.uncovered.items():
        yield f"<details><summary>{html.escape(kernel[:120])}: {len(places)}</summary>"
        yield "".join(f"<code>{html.escape(place)}</code><br>" for place in places) + "</details>"


def _launches(launches: Sequence[LaunchReport]) -> Iterator[str]:
    yield "<h2>Launches</h2><div class='scroll'><table class='facts'>"
    yield _row(("kernel", "grid", "block", "cluster", "shared", "warp instructions", "coverage"))
    for x in launches:
        sizes = (" x ".join(map(str, size)) for size in (x.grid, x.block, x.cluster))
        cells = (x.kernel[:80], *sizes, f"{x.shared_bytes:,}", f"{x.instructions:,}", x.coverage)
        yield _row(cells, "td")
    yield "</table></div>"


def _row(cells: Iterable[object], kind: str = "th") -> str:
    inside = "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells)
    return f"<tr>{inside}</tr>"


# --- timeline ------------------------------------------------------------------------------------
def _timeline(modelled: Modelled) -> Iterator[str]:
    """The first wave of a modelled launch, a row for each unit and each warp."""
    machine, launch = modelled
    spans = sorted(launch.spans, key=lambda span: span.start - span.stop)[:MOST_SPANS]
    end = max((span.stop for span in spans), default=0.0)
    if not end:
        return
    tracks = {name: row for row, name in enumerate(tracks_of(spans))}
    height = TRACK_PIXELS * len(tracks) + 30
    yield f"<h2>Timeline: {html.escape(launch.kernel[:80])}</h2>"
    yield (
        f'<p class="sum">{machine.name} model: {launch.microseconds:.1f} µs, {launch.bound}; '
        f"{machine.assumed}; first wave; grey: a warp waits, orange: copies, blue: other units</p>"
    )
    yield (
        f'<div class="scroll"><svg width="{MARGIN_PIXELS + WIDTH_PIXELS}" height="{height}" '
        'role="img" aria-label="timeline">'
    )
    for name, row in tracks.items():
        yield f'<text x="0" y="{TRACK_PIXELS * row + 12}">{html.escape(name)}</text>'
    scale = WIDTH_PIXELS / end
    for span in spans:
        yield _bar(span, tracks[span.track], scale, machine.microseconds(span.stop - span.start))
    for step in range(6):
        x = MARGIN_PIXELS + WIDTH_PIXELS * step / 5
        at = f"{machine.microseconds(end * step / 5):.1f} µs"
        anchor = "end" if step == 5 else "middle" if step else "start"
        yield f'<text x="{x:.0f}" y="{height - 8}" text-anchor="{anchor}">{at}</text>'
    yield "</svg></div>"


def _bar(span: Span, row: int, scale: float, microseconds: float) -> str:
    x, width = MARGIN_PIXELS + span.start * scale, max((span.stop - span.start) * scale, 0.3)
    return (
        f'<rect x="{x:.1f}" y="{TRACK_PIXELS * row + 2}" width="{width:.1f}" '
        f'height="{TRACK_PIXELS - 4}" fill="{colour_of(span.track)}">'
        f"<title>{html.escape(span.name)}: {microseconds:.2f} µs</title></rect>"
    )


# --- sources -------------------------------------------------------------------------------------
def _sources(files: dict[str, dict[int, _Line]]) -> Iterator[str]:
    """Files with their findings first, then by how much ran of them."""
    if files:
        yield "<h2>Source</h2>"
        yield (
            '<p class="sum">Margin: warp instructions run, with those of functions called there; '
            "synchronisation reached, of all</p>"
        )

    def weight(item: tuple[str, dict[int, _Line]]) -> tuple[int, int]:
        found = sum(len(line.findings) for line in item[1].values())
        return -found, -sum(line.run for line in item[1].values())

    for number, (file, lines) in enumerate(sorted(files.items(), key=weight)):
        path = Path(file)
        try:
            text = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        opened = " open" if not number or any(line.findings for line in lines.values()) else ""
        yield f"<details{opened}><summary>{html.escape(file)}</summary>"
        yield '<div class="scroll"><table class="code">'
        yield from _code(file, text, lines)
        yield "</table></div></details>"


def _code(file: str, text: list[str], lines: dict[int, _Line]) -> Iterator[str]:
    most = max((line.run for line in lines.values()), default=0)
    last = 0
    shown = sorted({n for at in lines for n in range(at - CONTEXT, at + CONTEXT + 1)})
    for number in shown:
        if not 1 <= number <= len(text):
            continue
        if number != last + 1:
            yield '<tr class="gap"><td colspan="4">⋯</td></tr>'
        last = number
        line = lines.get(number)
        run, sync, style = "", "", ""
        if line is not None:
            run = f"{line.run:,}"
            shade = math.log1p(line.run) / math.log1p(most) * SHADES / 20 if most else 0
            style = f' style="background: rgba(var(--heat), {shade:.2f})"'
            if line.sync:
                kind = "good" if line.sync_run == line.sync else "warn"
                sync = f'<span class="{kind}">{line.sync_run}/{line.sync}</span>'
        yield (
            f'<tr id="{_anchor(file, number)}"><td class="n">{number}</td>'
            f'<td class="r"{style}>{run}</td><td class="s">{sync}</td>'
            f"<td>{html.escape(text[number - 1]) or ' '}</td></tr>"
        )
        said = {str(f.kind) + f.message: (f, w) for f, w in (line.findings if line else ())}
        for found, is_warning in said.values():
            kind = "said warning" if is_warning else "said"
            message = html.escape(f"{found.kind}: {found.message}")
            yield f'<tr class="{kind}"><td colspan="3"></td><td>{message}</td></tr>'


def _anchor(file: str, line: int) -> str:
    return html.escape(f"{file}:{line}".replace(" ", "_"))
