"""Threads of a CTA that work together: all of them, or warps behind others, with a barrier of their
own."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute


@dataclass(frozen=True)
class Team:
    """Threads of a CTA that work together.

    Attributes:
        threads: their number.
        first: the first of them.
        barrier: named barrier at which they meet; 0: that of all threads of the CTA.
    """

    threads: int
    first: int = 0
    barrier: int = 0

    def thread(self) -> Int32:
        """Number of this thread among them."""
        thread = cute.arch.thread_idx()[0]
        return thread if self.first == 0 else thread - self.first

    def meet(self) -> None:
        """Wait for all of them; orders what they wrote to memory before what they read then."""
        if self.barrier == 0:
            cute.arch.sync_threads()
        else:
            cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)
