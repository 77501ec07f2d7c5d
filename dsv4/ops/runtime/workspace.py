"""Workspaces of an operator's launches: one per (device, stream), and one per device for graphs.

A workspace is zeros when new, and every launch leaves its counters as it found them. Where counters
lie is known to the operator alone: another one's partial results would be counts to it, so that no
two share a workspace. Launches of a stream run one after the other, and share one. A graph keeps
the address that it was captured with and may be replayed on any stream: graphs of a device share
the device's capture workspace, so replays that may overlap need workspaces of their own, passed to
the operator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Elements (64 MiB) up to which a workspace is made with room to grow, and once more for captures.
MOST_SPARE = 1 << 24

_EAGER: dict[tuple[str, int, int], Tensor] = {}  # by operator, device and stream
_CAPTURE: dict[tuple[str, int], Tensor] = {}  # by operator and device
# Those whose capture workspace is in a graph.
_CAPTURED: set[tuple[str, int]] = set()
# Outgrown workspaces of captures: graphs hold their addresses.
_RETIRED: list[Tensor] = []


def workspace(
    owner: str, device: torch.device, size: int, most: int, refuse_cold: Callable[[], None]
) -> Tensor:
    """Workspace of at least `size` elements for a launch on the current stream.

    A launch outside a capture also makes what a capture of the same launch needs, on whatever
    stream. Only where that would take much memory, a captured launch takes its workspace from the
    graph's own memory, which every replay zeroes again.

    Args:
        owner: the operator's name.
        device: of the launch; with an index.
        size: fp32 elements that this launch needs.
        most: elements that all launches like this one need at most, so that it grows once.
        refuse_cold: raises; called during a capture before which nothing was launched.
    """
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        known = _CAPTURE.get((owner, index))
        if known is None:
            refuse_cold()
        if known.numel() < size:
            return torch.zeros(size, dtype=torch.float32, device=device)
        _CAPTURED.add((owner, index))
        return known
    stream = torch._C._cuda_getCurrentRawStream(index)
    known = _EAGER.get((owner, index, stream))
    if known is None or known.numel() < size:
        known = reserve(owner, device, stream, max(size, min(most, MOST_SPARE)))
    return known


def reserve(owner: str, device: torch.device, stream: int, size: int) -> Tensor:
    """Make or grow an operator's workspaces, of a stream and of the device's captures; return the
    first."""
    place, of_captures = (owner, device.index, stream), (owner, device.index)
    known = _EAGER.get(place)
    if known is None or known.numel() < size:
        known = _EAGER[place] = torch.zeros(size, dtype=torch.float32, device=device)
    spare = size if size <= MOST_SPARE else 0
    captured = _CAPTURE.get(of_captures)
    if captured is None or captured.numel() < spare:
        if of_captures in _CAPTURED:
            _RETIRED.append(captured)
            _CAPTURED.remove(of_captures)
        _CAPTURE[of_captures] = torch.zeros(spare, dtype=torch.float32, device=device)
        # A graph may be replayed on any stream: the zeros must not be on their way on this one.
        torch.cuda.current_stream(device).synchronize()
    return known
