"""How many CTAs fit one multiprocessor at once."""

from __future__ import annotations

from dsv4.simulator.machine.memory import SHARED_BYTES, SYSTEM_SHARED_BYTES

MAX_THREADS, MAX_CTAS = 2048, 32  # of one multiprocessor


def ctas_per_multiprocessor(threads: int, shared: int, available: int = SHARED_BYTES) -> int:
    """CTAs of `threads` threads and `shared` bytes of shared memory, of which the multiprocessor
    has `available`. Registers are not counted: PTX does not say how many a thread takes."""
    by_memory = available // (shared + SYSTEM_SHARED_BYTES)
    return max(1, min(by_memory, MAX_THREADS // max(1, threads), MAX_CTAS))
