"""Replays of captured decode steps of Flash in great number: every one has the bits of the first.

Kernels of a step hand over while their predecessors still run. What goes wrong there goes wrong
seldom, with the timing of one replay in thousands.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.bench.random_model import random_cache, random_model, truncated
from dsv4.bench.timing import captured
from dsv4.cache.manager import CacheManager
from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from dsv4.model.model import DeepseekV4

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.stage("model")]

LAYERS = 4  # of Flash: SWA, SWA, CSA, HCA
CONTEXT = 2048
STARTS = (1000, 1021, 130, 7, 1404)  # the first row passes an end of a block of 128, others of 4
ROUND = 32  # steps after which a request is set back


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    config = truncated(ModelConfig.flash(), LAYERS, has_drafts=False)
    torch.manual_seed(11)
    with torch.no_grad():
        return random_model(config, LAYERS, torch.device("cuda")).model


class Rounds:
    """Steps i = 0 .. ROUND - 1 of some requests, again and again, each held against the first.

    Everything is on the device: a replay takes tokens and bits of step `number`, and counts the
    elements that differ from them.
    """

    def __init__(self, model: DeepseekV4, rows: int) -> None:
        self.model, self.cache = model, random_cache(model, rows, CONTEXT, 0)
        device = self.cache.device
        manager = CacheManager(self.cache)
        slots = [manager.admit(CONTEXT) for _ in range(rows)]
        manager.step(slots, list(STARTS[:rows]), max(STARTS))
        self.step = manager.step(slots, [1] * rows, 1)
        self.starts = self.step.starts.clone()
        self.tokens = torch.randint(model.config.vocab_size, (ROUND, rows, 1), device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self.known: list[Tensor] = []  # by output, [ROUND, ...]
        self.kept = [tensor.clone() for tensor in _written(self.cache)]
        self.forward = captured(self._forward)
        self.back = captured(self._back)

    def run(self, replays: int) -> int:
        """Elements of outputs that were not those of the first round."""
        for place in range(replays):
            if place % ROUND == 0:
                self.back.replay()
            self.forward.replay()
            if place == ROUND - 1:
                self.differing.zero_()  # of memory that had no bits to be held against
        return int(self.differing)

    def _outputs(self) -> tuple[Tensor, ...]:
        # A step keeps what was derived from it, which a graph must derive itself.
        step: Step = replace(self.step)
        tokens = self.tokens.index_select(0, self.number)[0]
        streams = self.model.unwritten_streams(tokens, self.cache, step)
        best = self.model.best(streams)
        assert best is not None, "the head's kernel does not run"
        return best

    def _forward(self) -> None:
        outputs = [output.contiguous().view(torch.uint8) for output in self._outputs()]
        if not self.known:
            self.known = [
                torch.zeros(ROUND, *x.shape, dtype=x.dtype, device=x.device) for x in outputs
            ]
        for known, output in zip(self.known, outputs):
            self.differing += (known.index_select(0, self.number)[0] != output).sum()
            known.index_copy_(0, self.number, output[None])
        self.number.add_(1).remainder_(ROUND)
        self.step.starts.add_(1)

    def _back(self) -> None:
        for tensor, kept in zip(_written(self.cache), self.kept):
            tensor.copy_(kept)
        self.step.starts.copy_(self.starts)
        self.number.zero_()


def _written(cache: ModelCache) -> list[Tensor]:
    """What steps write."""
    found = []
    for layer in cache.layers:
        pools = [
            pool for pool in (layer.window, layer.entries, layer.index_keys) if pool is not None
        ]
        found += [part.data for part in (*pools, *layer.state.rings())]
    return found


@pytest.mark.parametrize(
    "replays",
    [pytest.param(100_000, marks=pytest.mark.slow, id="100000"), pytest.param(1000, id="1000")],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_replay_has_the_bits_of_the_first(model, rows: int, replays: int) -> None:
    with torch.inference_mode():
        rounds = Rounds(model, rows)
        assert rounds.run(replays) == 0


def test_a_differing_bit_is_counted(model) -> None:
    """The embedding of one token is another in the second round."""
    with torch.inference_mode():
        rounds = Rounds(model, 1)
        assert rounds.run(ROUND) == 0
        row = model.embed.weight[int(rounds.tokens[3])]
        row.neg_()
        try:
            rounds.back.replay()
            for _ in range(ROUND):
                rounds.forward.replay()
            assert int(rounds.differing) > 0
        finally:
            row.neg_()
