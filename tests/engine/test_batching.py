"""Requests that share forwards get the logits they get alone."""

from __future__ import annotations

import random

import pytest
import torch

from dsv4.cache.manager import CacheManager
from tests.engine.tiny_model import BLOCK, VOCAB, WINDOW, tiny_model, tokens
from tests.model.tiny import poison

pytestmark = pytest.mark.stage("cache")

MAX_TOKENS = 1024  # of a forward, padding included
# Every entry is selected: rounding cannot swap two index scores that are nearly equal.
SELECT_ALL = {"index_topk": 512}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


class Sharing:
    """Feeds known sequences through one cache, several per forward, and keeps the logits."""

    def __init__(self, model, max_requests: int, num_blocks: int, max_blocks: int, max_draft=0):
        self.model = model
        self.cache = model.new_cache(max_requests, num_blocks, max_blocks, max_draft, MAX_TOKENS)
        # Whatever a request reads that it has not written shows as NaN.
        poison(self.cache)
        self.manager = CacheManager(self.cache)
        self.sequences: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def admit(self, sequence: list[int]) -> int:
        slot = self.manager.admit(len(sequence))
        self.sequences[slot], self.logits[slot] = sequence, []
        return slot

    @torch.inference_mode()
    def forward(self, counts: dict[int, int], chunk: int, rows: int) -> None:
        """Run the next `counts[slot]` tokens of each slot; padding holds arbitrary tokens."""
        ids = torch.randint(VOCAB, (rows, chunk))
        for row, (slot, count) in enumerate(counts.items()):
            start = self.manager.length(slot)
            ids[row, :count] = torch.tensor(self.sequences[slot][start : start + count])
        step = self.manager.step(list(counts), list(counts.values()), chunk, rows)
        logits = self.model.logits(self.model.streams(ids, self.cache, step))
        for row, (slot, count) in enumerate(counts.items()):
            self.logits[slot].append(logits[row, :count])

    def remaining(self, slot: int) -> int:
        return len(self.sequences[slot]) - self.manager.length(slot)

    def leave(self, slot: int) -> tuple[list[int], torch.Tensor]:
        self.manager.release(slot)
        return self.sequences.pop(slot), torch.cat(self.logits.pop(slot))


def test_random_neighbours_change_no_logits(seed: int) -> None:
    """Requests of many lengths join, advance by different counts, idle, and leave their blocks."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed, **SELECT_ALL)
    sharing = Sharing(model, max_requests=3, num_blocks=5, max_blocks=3)
    lengths = [1, 2, 5, WINDOW, WINDOW + 1, 127, 128, 129, 200, 255, 256, 257, 300]
    rng.shuffle(lengths)
    queue = [tokens(generator, length) for length in lengths]
    finished = 0
    while queue or sharing.sequences:
        while queue and sharing.manager.num_free_slots:
            if sharing.manager.allocator.num_free < -(-len(queue[-1]) // BLOCK):
                break
            sharing.admit(queue.pop())
        active = [slot for slot in sharing.sequences if rng.random() < 0.7]
        chunk = rng.choice([1, 1, 2, 7, 64, 200])
        counts = {s: min(rng.randint(1, chunk), sharing.remaining(s)) for s in active}
        sharing.forward(counts, chunk, rows=rng.randint(max(1, len(active)), 3))
        for slot in [s for s in sharing.sequences if not sharing.remaining(s)]:
            sequence, shared = sharing.leave(slot)
            alone = model(torch.tensor([sequence]))[0]
            assert relative(shared, alone) < 1e-5, f"{len(sequence)} tokens"
            finished += 1
    assert finished == len(lengths)
    assert sharing.manager.allocator.num_free == 5


@pytest.mark.parametrize("length", [4, WINDOW - 1, WINDOW, 127, 128, 129, 131, 255, 256, 257])
def test_truncation_leaves_no_trace(seed: int, length: int) -> None:
    """Rejected tokens around every boundary of windows, entries and blocks are forgotten."""
    drafts = 5
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(seed, **SELECT_ALL)
    sharing = Sharing(model, 2, 6, 3, max_draft=drafts)
    true = tokens(generator, length + 12)
    slot = sharing.admit(true)
    neighbour = sharing.admit(tokens(generator, 300))
    sharing.forward({slot: length - 3, neighbour: 20}, chunk=max(20, length - 3), rows=2)
    while sharing.remaining(slot):
        position = sharing.manager.length(slot)
        kept = min(1 + position % (drafts + 1), sharing.remaining(slot))
        wrong = tokens(generator, 1 + drafts - kept)
        sharing.sequences[slot] = true[: position + kept] + wrong
        sharing.manager.extend(slot, 1 + drafts)
        sharing.forward({neighbour: 1, slot: len(sharing.sequences[slot]) - position}, 6, rows=2)
        sharing.manager.truncate(slot, position + kept)
        sharing.logits[slot][-1] = sharing.logits[slot][-1][:kept]
        sharing.sequences[slot] = true
    sequence, logits = sharing.leave(slot)
    assert relative(logits, model(torch.tensor([sequence]))[0]) < 1e-5
