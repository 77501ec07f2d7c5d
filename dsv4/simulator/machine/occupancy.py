"""Occupancy: CTAs that fit one multiprocessor at once, and the registers of their threads."""

from __future__ import annotations

from dsv4.simulator.machine.memory import SHARED_BYTES, SYSTEM_SHARED_BYTES
from dsv4.simulator.ptx.entry import Entry

MAX_THREADS, MAX_CTAS = 2048, 32  # of one multiprocessor
REGISTERS = 65536  # of one multiprocessor, a quarter of them for every fourth warp
MOST_REGISTERS = 256  # of a thread at launch: 255 and one that rounds them up to eights


def ctas_per_multiprocessor(threads: int, shared: int, available: int = SHARED_BYTES) -> int:
    """CTAs of `threads` threads and `shared` bytes of shared memory, of which the multiprocessor
    has `available`. Registers are not counted: PTX does not say how many a thread takes."""
    by_memory = available // (shared + SYSTEM_SHARED_BYTES)
    return max(1, min(by_memory, MAX_THREADS // max(1, threads), MAX_CTAS))


def registers_at_launch(entry: Entry, warps: int) -> int:
    """Registers that each thread of a CTA may have when it starts, at most: ptxas, which PTX says
    no more to than a bound, takes all of them in a kernel that changes them (setmaxnreg)."""
    shared_by = entry.least_ctas * -(-warps // 4)  # warps of a quarter
    most = min(MOST_REGISTERS, entry.most_registers or MOST_REGISTERS)
    return min(most, REGISTERS // 4 // 32 // shared_by) // 8 * 8
