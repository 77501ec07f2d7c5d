"""Random use of an engine with injected failures: every token is delivered, nothing leaks."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch

from dsv4.engine.engine import Engine
from dsv4.engine.sampling_params import SamplingParams
from tests.engine.driving import alone
from tests.engine.tiny_model import BLOCK, VOCAB, assert_same_tokens, tiny_model
from tests.fuzz.values import LONG, assert_one_line


class Injected(Exception):
    """A failure from outside, at a place that the engine cannot foresee."""


class Failures:
    """Makes calls of the engine's collaborators raise, before or after they did their work.

    Only so often: a failure sends all running requests back to their first token.
    """

    def __init__(self, dice: random.Random, engine: Engine, rate: float) -> None:
        self.dice = dice
        self.rate = rate
        self.left = 8
        for owner, name in (
            (engine._manager, "step"),
            (engine._manager, "advance"),
            (engine._manager, "extend"),
            (engine._manager, "truncate"),
            (engine._manager, "admit"),
            (engine._state, "seat"),
            (engine._reuse, "restore"),
            (engine._reuse, "save"),
            (engine, "_decode"),
            (engine, "_read_results"),
        ):
            called = getattr(owner, name)
            setattr(owner, name, self._failing(called, name in ("_decode", "_read_results")))

    def _failing(self, call, after: bool):
        def run(*args, **options):
            self._maybe_fail()
            result = call(*args, **options)
            if after:
                self._maybe_fail()
            return result

        return run

    def _maybe_fail(self, *_: object) -> None:
        if self.left and self.dice.random() < self.rate:
            self.left -= 1
            raise self.dice.choice((Injected, MemoryError, KeyboardInterrupt))


class Session:
    """One engine under random use, and what is known of its requests."""

    def __init__(self, dice: random.Random, seed: int) -> None:
        self.dice = dice
        self.model = tiny_model(seed)
        drafts = dice.choice((0, 0, 2))
        self.engine = Engine(
            self.model,
            max_requests=dice.randrange(1, 4),
            max_context=2 * BLOCK,
            num_draft_tokens=drafts,
            prefill_chunk=dice.choice((7, 16, 64)),
            num_blocks=dice.randrange(2, 6),
            batch_invariant=not drafts and dice.random() < 0.3,
            async_scheduling=dice.random() < 0.6,
            prefix_snapshots=dice.choice((0, 1, 3)),
        )
        self.stem = [dice.randrange(VOCAB) for _ in range(BLOCK + 2)]  # of several prompts
        self.blocks = self.engine.num_free_blocks
        self.failures = Failures(dice, self.engine, rate=0.0)
        self.hooks = [
            layer.register_forward_pre_hook(self.failures._maybe_fail)
            for layer in self.model.layers
        ]
        self.requests: dict[int, tuple[list[int], SamplingParams]] = {}
        self.new: dict[int, list[int]] = defaultdict(list)
        self.finished: set[int] = set()
        self.cancelled: set[int] = set()
        self.outcomes: Counter[str] = Counter()

    def add(self) -> None:
        dice = self.dice
        prompt = [dice.randrange(VOCAB) for _ in range(dice.choice((1, 2, 9, 30, BLOCK - 3)))]
        if dice.random() < 0.3:
            prompt = self.stem + prompt[:9]
        sampling = SamplingParams(
            max_new_tokens=dice.randrange(1, 9),
            temperature=dice.choice((0.0, 0.8)),
            seed=dice.randrange(100),
            stop_tokens=dice.choice(((), (3, 5))),
        )
        self.requests[self.engine.add(prompt, sampling)] = (prompt, sampling)
        self.outcomes["added"] += 1

    def add_wrongly(self) -> None:
        prompt = self.dice.choice(([], [VOCAB], ["a"], [1.5], [1] * 1000, None, 3, *LONG))
        before = self.engine.num_requests
        with pytest.raises((TypeError, ValueError), match="prompt_ids") as refusal:
            self.engine.add(prompt, SamplingParams(max_new_tokens=2))
        assert_one_line(str(refusal.value))
        assert self.engine.num_requests == before
        self.outcomes["refused"] += 1

    def cancel(self) -> None:
        if not self.requests:
            return
        request = self.dice.choice(list(self.requests))
        known = request not in self.finished | self.cancelled
        assert self.engine.cancel(request) == known
        if known:
            self.cancelled.add(request)
            self.outcomes["cancelled"] += 1

    def step(self) -> None:
        try:
            outputs = self.engine.step()
        except (Injected, MemoryError, KeyboardInterrupt):
            self.outcomes["failed steps"] += 1
        else:
            seen = [output.request for output in outputs]
            assert len(set(seen)) == len(seen)
            for request, tokens, finished, *_ in outputs:
                assert tokens and request not in self.cancelled | self.finished
                self.new[request] += tokens
                if finished:
                    self.finished.add(request)
            self.outcomes["steps"] += 1
        open_requests = self.requests.keys() - self.finished - self.cancelled
        assert self.engine.num_requests == len(open_requests)
        assert self.engine.num_free_blocks <= self.blocks

    def close(self) -> None:
        """Step until nothing is left, then compare every request with itself alone."""
        while self.engine.num_requests:
            self.step()
        assert self.engine.num_free_blocks == self.blocks
        self.outcomes["tokens found"] = self.engine.stats.prefix_tokens
        assert self.finished == self.requests.keys() - self.cancelled
        self.failures.rate = 0.0
        for hook in self.hooks:
            hook.remove()
        for request in self.dice.sample(sorted(self.finished), min(3, len(self.finished))):
            prompt, sampling = self.requests[request]
            expected = alone(self.model, prompt, sampling)
            assert_same_tokens(self.model, prompt, self.new[request], expected, sampling)
            self.outcomes["compared"] += 1


@pytest.mark.parametrize("sessions", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_random_use_with_failures(sessions: int, seed: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    for number in range(sessions):
        dice = random.Random(seed + number)
        session = Session(dice, seed + number)
        session.failures.rate = (0.01, 0.3, 0.0)[number % 3]
        session.add()
        session.add_wrongly()
        session.cancel()
        session.add()
        actions = [session.step] * 6 + [session.add] * 3 + [session.add_wrongly, session.cancel]
        for _ in range(20):
            dice.choice(actions)()
        session.close()
        outcomes += session.outcomes
    torch.set_num_threads(threads)
    for kind in (
        "added",
        "refused",
        "cancelled",
        "steps",
        "failed steps",
        "compared",
        "tokens found",
    ):
        assert outcomes[kind], f"no session had {kind}: {outcomes}"
