"""Strong loads of global memory against what others write there."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.ptx.qualifiers import Order
from dsv4.simulator.races.cells.histories import UNTOUCHED, History, Read
from dsv4.simulator.races.cells.shadow import place
from dsv4.simulator.races.order.clocks import SEEN
from dsv4.simulator.races.owners import owner_of


class StrongLoads:
    """Part of the checker of global memory: polls, and other loads that synchronise."""

    def _is_guess(self, active) -> bool:
        """Whether a load before the wait may find anything: of words that are compared with what is
        there behind it. A weak load may not: it could leave a line in L1."""
        return bool(self.guessed) and all(
            any(start <= address < stop for start, stop in self.guessed)
            for address in active.tolist()
        )

    def _strong_load_of_earlier(self, w, active, know, size: int) -> None:
        """A strong load against the writes of launches before."""
        for address in active.tolist():
            history = self.history(w.cluster.memory.find(address, address + size))
            words = (address - history.region.start >> 2) + np.arange(-(-size // 4))
            owner = np.minimum(history.writer[words], UNTOUCHED)
            late = self._late(w, owner, history.write_clock[words], know, SEEN)
            for i in np.flatnonzero(late)[:1]:
                where, whose = int(words[i]), int(owner[i])
                self._report_launch(w, history, "strong read of", where, "writes", whose)

    def _strong_load(self, w, active, mask, lanes, size: int, order: Order) -> None:
        """A strong load against ordinary writes, and against strong ones of too narrow a scope."""
        state, what = w.cluster.state, "strong read of"
        know, clock = state.clocks.view(w.agent, lanes), int(state.clocks.seen[w.agent, w.agent])
        for number, address in zip(np.flatnonzero(mask), active.tolist()):
            history = self.history(w.cluster.memory.find(address, address + size))
            offset, one = np.array([address - history.region.start]), np.array([number])
            if history.written:
                self._after_writes(w, history, history.cells(offset, size, one)[0], know, what)
            strong = history.strong_reads(needed=True)
            words, whose = strong.cells(offset & ~3, max(size, 4), one)
            if strong.polled != (address, w.agent, w.cluster.number, clock):
                strong.polled = address, w.agent, w.cluster.number, clock
                code = place(w.at, whose)
                strong.note_read(Read(words, 0, owner_of(w, w.agent), clock, code))
            others = history.atomics(needed=False)
            if others is not None and self.narrow:
                words, _ = others.cells(offset & ~3, max(size, 4), one)
                self._within_scope(w, others, words, know, order, what)

    def _after_strong_reads(self, w, history: History, where, know, what: str, owner) -> None:
        """Ordinary writes come after the strong loads of the word, polls above all."""
        strong = history.strong_reads(needed=False)
        if strong is not None:
            strong.settle_reads()
            self._after_reads(w, strong, history.words_of(where), know, what, owner)
