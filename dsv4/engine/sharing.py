"""Division of an engine's requests into groups that share a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv4.engine.invariance import depends_on_neighbours
from dsv4.engine.request import Request

if TYPE_CHECKING:
    from dsv4.model.model import DeepseekV4


class Sharing:
    """Groups of requests: all together, unless no bit of theirs may depend on others.

    Args:
        batch_invariant: it may not.

    Attributes:
        is_possible: whether requests that take their likeliest tokens share forwards.
    """

    def __init__(self, model: DeepseekV4, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant
        self.is_possible = not (batch_invariant and depends_on_neighbours(model))

    def groups(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Those that share a forward, each group in the order of `requests`.

        Draws and reported probabilities are torch's, which may add over the vocabulary of one row
        in another order than of many: such requests have forwards of their own.
        """
        together = [request for request in requests if self._shares(request)]
        alone = [[request] for request in requests if not self._shares(request)]
        return [together, *alone] if together else alone

    def _shares(self, request: Request) -> bool:
        is_free = not self._batch_invariant or not request.sampling.adds_over_vocabulary
        return self.is_possible and is_free
