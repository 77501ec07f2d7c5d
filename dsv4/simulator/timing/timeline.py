"""Timelines of a modelled launch: lines of text, Perfetto JSON, and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dsv4.simulator.timing.engine import Span
from dsv4.simulator.timing.machine import Machine
from dsv4.simulator.timing.prediction import LaunchPrediction

PICTURE_WIDTH = 16  # inches
TRACK_HEIGHT = 0.32
TEXT_WIDTH = 64  # steps of a line
SHADES = " ░▒▓█"  # none, up to a quarter ... of a step
WAIT_COLOUR, UNIT_COLOUR, COPY_COLOUR = "#d9d9d9", "#2a6f97", "#e07a3f"


def text_lines(launch: LaunchPrediction, machine: Machine) -> list[str]:
    """The first wave in `TEXT_WIDTH` steps: how much of each a unit works or a warp waits."""
    end = max((span.stop for span in launch.spans), default=0.0)
    if not end:
        return []
    step = end / TEXT_WIDTH
    tracks = tracks_of(launch.spans)
    margin = max(map(len, tracks))
    title = f"{machine.microseconds(step):.3f} us a column; dark where a unit works or a warp waits"
    lines = [title]
    for track in tracks:
        spans = [span for span in launch.spans if span.track == track]
        # Spans of one track overlap where several copies are under way: at most all of a step.
        shares = [
            min(sum(_overlap(span, i * step, (i + 1) * step) for span in spans) / step, 1.0)
            for i in range(TEXT_WIDTH)
        ]
        shades = "".join(SHADES[math.ceil(share * (len(SHADES) - 1) - 1e-6)] for share in shares)
        lines.append(f"{track:<{margin}} |{shades}|")
    return lines


def _overlap(span: Span, start: float, stop: float) -> float:
    return max(min(span.stop, stop) - max(span.start, start), 0.0)


def write_perfetto(path: Path, launch: LaunchPrediction, machine: Machine) -> None:
    """Write the first wave as trace events that https://ui.perfetto.dev opens; every process says
    that it is a model. Work that overlaps on a unit gets rows of its own, because the viewer drops
    slices of a row that overlap."""
    events: list[dict] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": sm,
            "args": {"name": f"{machine.name} model, SM {sm}"},
        }
        for sm in sorted({span.sm for span in launch.spans})
    ]
    row = 0
    for track in tracks_of(launch.spans):
        spans = [span for span in launch.spans if span.track == track]
        for number, lane in enumerate(_lanes(spans)):
            name = f"{track} ({number + 1})" if number else track
            events += _row_events(row, name, lane, machine)
            row += 1
    other = {"model": machine.name, "kernel": launch.kernel, "microseconds": launch.microseconds}
    path.write_text(json.dumps({"traceEvents": events, "otherData": other}))


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of one track in as few rows without overlaps as they need."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].stop <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _row_events(row: int, name: str, spans: Sequence[Span], machine: Machine) -> list[dict]:
    """The trace events of one row: its name, its place, its slices."""
    place = {"pid": spans[0].sm, "tid": row}
    slices = [
        {
            "ph": "X",
            "name": span.name,
            "cat": "model",
            **place,
            "ts": machine.microseconds(span.start),
            "dur": machine.microseconds(span.stop - span.start),
        }
        for span in spans
    ]
    return [
        {"ph": "M", "name": "thread_name", **place, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": row}},
        *slices,
    ]


def write_plot(path: Path, launch: LaunchPrediction, machine: Machine) -> None:
    """Draw the first wave: waits of each warp, work of the tensor pipe and of the copies.

    Raises: ImportError naming the extra, when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'dsv4[bench]'") from error
    tracks = tracks_of(launch.spans)
    figure = Figure(figsize=(PICTURE_WIDTH, 1.2 + TRACK_HEIGHT * len(tracks)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, track in enumerate(tracks):
        spans = [span for span in launch.spans if span.track == track]
        bars = [(machine.microseconds(s.start), machine.microseconds(s.stop - s.start))
                for s in spans]  # fmt: skip
        axes.broken_barh(bars, (place + 0.1, 0.8), facecolors=colour_of(track))
    axes.set_yticks([place + 0.5 for place in range(len(tracks))], tracks, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("µs from the start of the first CTA (model)")
    axes.set_title(
        f"{machine.name} model: {launch.microseconds:.1f} µs, {launch.bound}; "
        "grey: a warp waits, blue: tensor pipe, orange: copies",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def tracks_of(spans: Sequence[Span]) -> list[str]:
    """Track names: units first, then warps by number."""

    def order(name: str) -> tuple[bool, list[str]]:
        return "warp" in name, [word.zfill(6) for word in name.replace(".", " ").split()]

    return sorted({span.track for span in spans}, key=order)


def colour_of(track: str) -> str:
    """Of the bars of a track."""
    if "warp" in track:
        return WAIT_COLOUR
    return COPY_COLOUR if "TMA" in track else UNIT_COLOUR
