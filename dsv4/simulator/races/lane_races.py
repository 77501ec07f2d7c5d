"""Conflicts between lanes of one warp."""

from __future__ import annotations

import numpy as np

from dsv4.simulator.machine.memory import Cta
from dsv4.simulator.machine.warp import ALL
from dsv4.simulator.races.cells.shadow import Earlier, Shadow
from dsv4.simulator.races.findings import CONVERGENCE, Findings


class LaneRaces(Findings):
    """Accesses of lanes that no barrier lies between; see `order.lanes`."""

    def _at(self, w, cta: Cta, where: np.ndarray, earlier: Earlier) -> str:
        offset = w.cluster.state.shared[cta.rank].offset(int(where[earlier.index]))
        return self.shared_place(cta, offset)

    def _between_lanes(
        self, w, cta: Cta, shadow: Shadow, where, lanes, write: bool, what: str
    ) -> None:
        """Conflicts with accesses of other lanes of the warp."""
        order = w.order
        if not shadow.touched_by(w.agent, order.synced, write):
            return
        for since, warning in ((order.converged, False), (order.synced, True)):
            earlier = shadow.write_by_other_lane(where, lanes, w.agent, since)
            kind = "write-write race" if write else "read-write race"
            if earlier is None and write:
                earlier = shadow.read_by_other_lane(where, lanes, w.agent, since)
                kind = "read-write race"
            if earlier is None:
                continue
            text = f"{what} {self._at(w, cta, where, earlier)}"
            self.race(w, CONVERGENCE if warning else kind, text, earlier, warning=warning)
            return

    def _behind_copies(
        self, w, cta: Cta, shadow: Shadow, where, lanes, kind: str, what: str
    ) -> None:
        """Conflicts with what other lanes of the warp copied by cp.async and have waited for."""
        order = w.order
        agent = w.cluster.state.clocks.agent(("cp.async", w.agent))
        converged = max(order.copies_synced, order.copies_converged)
        for since, warning in ((converged, False), (order.copies_synced, True)):
            earlier = shadow.write_by_other_lane(where, lanes, agent, since + 1)
            if earlier is not None:
                text = f"{what} {self._at(w, cta, where, earlier)}"
                self.race(w, CONVERGENCE if warning else kind, text, earlier, warning=warning)
                return

    def _within_store(self, w, offsets: np.ndarray, mask, values) -> None:
        """Lanes of one store that write different values to one place."""
        if (offsets[1:] > offsets[:-1]).all():
            return
        _, first, again = np.unique(offsets, return_index=True, return_inverse=True)
        if len(first) == len(offsets):
            return
        for value in values:
            active = value if mask is ALL else value[mask]
            if (active != active[first][again]).any():
                message = (
                    f"lanes of {w.cta.name} warp {w.number} write different values to one place"
                )
                self.report("write-write race", message, (w.at,), (w.at,))
