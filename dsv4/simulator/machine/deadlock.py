"""Message of a deadlock: its root cause first, then the warps that wait."""

from __future__ import annotations

from dsv4.simulator.instructions.mbarrier import Awaited
from dsv4.simulator.instructions.setmaxnreg import AwaitedRegisters
from dsv4.simulator.machine.warp import Warp


def describe_deadlock(warps: list[Warp]) -> str:
    """The root cause, then each wait; warps that wait for the same thing at the same
    place share a line."""
    ordered = sorted(warps, key=lambda warp: (not _hopeless(warp), warp.moved_in))
    first = ordered[0]
    lines = [
        "no warp can make progress",
        f"  root cause: {_waits(first)}{_reason(first)}\n    at {_where(first)}",
    ]
    others: dict[tuple[str, str], list[Warp]] = {}
    for warp in ordered[1:]:
        others.setdefault((_what(warp), _where(warp)), []).append(warp)
    if others:
        lines.append("  warps that wait, the first to stop first:")
    for (what, where), same in others.items():
        names = ", ".join(_name(warp) for warp in same[:4])
        more = f" and {len(same) - 4} more" if len(same) > 4 else ""
        lines.append(f"  {names}{more} waits for {what}\n    at {where}")
    return "\n".join(lines)


def _name(warp: Warp) -> str:
    return f"{warp.cta.name} warp {warp.number}"


def _what(warp: Warp) -> str:
    return str(warp.waiting) or "a word in memory to change"


def _waits(warp: Warp) -> str:
    return f"{_name(warp)} waits for {_what(warp)}"


def _where(warp: Warp) -> str:
    return warp.program.entry.instructions[warp.at].where()


def _hopeless(warp: Warp) -> bool:
    return bool(_reason(warp))


def _reason(warp: Warp) -> str:
    """Why what the warp waits for cannot come, if that is certain."""
    if isinstance(warp.waiting, Awaited):
        barrier = warp.waiting.barrier
        if not barrier.pending and barrier.transactions > 0:
            return ": all have arrived, but no copy under way brings the bytes it expects"
    if isinstance(warp.waiting, AwaitedRegisters):
        return warp.waiting.reason
    if warp.bar_ticket is not None:
        barrier = warp.cta.named[warp.bar_ticket[0]]
        left = 32 * sum(not other.done for other in warp.cta.warps)
        if barrier.expected > left:
            return f": only {left} threads of the CTA have not exited"
    return ""
