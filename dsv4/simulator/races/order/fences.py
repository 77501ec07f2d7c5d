"""Knowledge of the lanes of a warp at their fences, which their relaxed operations hand on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.simulator.ptx.qualifiers import Scope

_EVERY_LANE = np.ones(32, np.bool_)


class Fence(NamedTuple):
    """A fence that a part of a warp executed."""

    lanes: np.ndarray
    scope: Scope
    know: np.ndarray  # [row, agent]


class Fences:
    """The last fences of each warp.

    A fence is the executing thread's own: it makes a release of that thread's later relaxed
    operations, and an acquire of its earlier ones. `shared` [warp, distance, row, agent] holds
    what all lanes of a warp have fenced for threads at a distance.
    """

    def __init__(self, warps: int, rows: int):
        self.shared = np.zeros((warps, len(Scope), rows, 0), np.int32)
        self.own: dict[int, list[Fence]] = {}

    def keep(self, warp: int, fence: Fence | None, scope: Scope, know: np.ndarray) -> None:
        """A fence of all lanes (None), or of some."""
        if fence is None:
            self.shared[warp, : scope + 1] = know
            others = self.own.pop(warp, ())
            kept = [other for other in others if other.scope > scope]
        else:
            kept = [other for other in self.own.get(warp, ()) if not _covers(fence, other)]
            kept.append(fence)
        if kept:
            self.own[warp] = kept

    def told(self, warp: int, lanes: np.ndarray | None) -> np.ndarray:
        """[distance, row, agent] that relaxed operations of these lanes hand on: what any of them
        has fenced. Not to be kept."""
        own = self.own.get(warp)
        if not own:
            return self.shared[warp]
        out = self.shared[warp].copy()
        for fence in own:
            if lanes is None or (fence.lanes & lanes).any():
                part = out[: fence.scope + 1, :, : fence.know.shape[1]]
                np.maximum(part, fence.know, out=part)
        return out


def _covers(new: Fence, old: Fence) -> bool:
    return new.scope >= old.scope and not (old.lanes & ~new.lanes).any()


def both(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Lanes of two sets, each None for all of a warp."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def without(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray:
    """Lanes of the first set that are not in the second."""
    return (_EVERY_LANE if a is None else a) & ~(_EVERY_LANE if b is None else b)
