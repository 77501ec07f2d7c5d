"""Timeline of a GPU's kernels as a picture: a line for each kernel of the package, bars in time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OTHERS = "other kernels"
OURS = re.compile(r"dsv4kernels(?P<name>\w+?)_object_at")
LAYERS_SHOWN = 2  # in the lower half of the picture
# Every layer launches one of them.
ROUTERS = ("Gate", "GateMany", "RouterBesideProduct", "RouterWithinProduct")


class Bar(NamedTuple):
    """A launch: microseconds from the first one's start."""

    kernel: str
    start: float
    end: float


def bars(events: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """The launches of a trace in order of their starts.

    Args:
        events: of a Chrome trace, as torch's profiler writes it.

    Raises:
        ValueError: the trace has no kernels.
    """
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    if not kernels:
        raise ValueError("the trace has no kernels")
    first = kernels[0]["ts"]
    return [Bar(_name(e["name"]), e["ts"] - first, e["ts"] - first + e["dur"]) for e in kernels]


def _name(symbol: str) -> str:
    """Class of a kernel of the package: a symbol has folders in lower case, then the class."""
    found = OURS.search(symbol)
    if found is None:
        return OTHERS
    # The folder's name ends where the class begins.
    return re.sub(r"^[a-z0-9_]*?(?=[A-Z])", "", found["name"])


def window(found: Sequence[Bar]) -> tuple[float, float]:
    """From one launch of a router, in the middle of the step, to the one `LAYERS_SHOWN` layers
    later; without, the whole step."""
    starts = [bar.start for bar in found if bar.kernel in ROUTERS]
    if len(starts) <= LAYERS_SHOWN:
        return 0.0, max(bar.end for bar in found)
    middle = (len(starts) - LAYERS_SHOWN) // 2
    return starts[middle], starts[middle + LAYERS_SHOWN]


def draw(trace: Path, path: Path) -> None:
    """Draw a trace: above the whole step, below the layers of `window`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the trace has no kernels.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'dsv4[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = bars(json.loads(trace.read_text())["traceEvents"])
    names = [*dict.fromkeys(bar.kernel for bar in found if bar.kernel != OTHERS), OTHERS]
    height = 1 + 0.22 * len(names)
    figure, axes = pyplot.subplots(2, 1, figsize=(16, 2 * height))
    for ax, (low, high) in zip(axes, ((0.0, max(bar.end for bar in found)), window(found))):
        for place, name in enumerate(names):
            spans = [(bar.start, bar.end - bar.start) for bar in found if bar.kernel == name]
            ax.broken_barh(spans, (place - 0.4, 0.8), color=f"C{place % 10}")
        ax.set(xlim=(low, high), ylim=(len(names) - 0.5, -0.5), xlabel="microseconds")
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
