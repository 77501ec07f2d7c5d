"""Where a step's keys are written and found: rings in place, and chunks behind them."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache.entries import EntryPool
from dsv4.cache.formats import KvFormat
from dsv4.cache.step import Step
from dsv4.cache.window import WindowPool

pytestmark = pytest.mark.stage("cache")

FORMAT = KvFormat("fp32", 2, 0, is_rounded=False)
ROWS, WINDOW = 3, 5


def _step(slots: list[int], starts: list[int], lens: list[int], chunk: int, table=None) -> Step:
    table = torch.full((len(slots), 1), -1) if table is None else torch.tensor(table)
    slots, starts, lens = (torch.tensor(v) for v in (slots, starts, lens))
    return Step(slots, starts, lens, table, chunk, 1 << 20)


def _write(pool: WindowPool, step: Step, slots: torch.Tensor) -> None:
    """Position and request of every token, where its slot is one."""
    values = torch.stack((step.positions, step.slots[:, None].expand_as(step.positions)), -1)
    kept = slots >= 0
    assert slots[kept].unique().numel() == int(kept.sum()), "a slot is written twice"
    rows = pool.data.view(-1, 2)
    rows[slots[kept].long()] = values.flatten(0, 1)[kept].float()


def _seen(pool: WindowPool, step: Step, token: int) -> list[list[float]]:
    """What a token sees of the pool, oldest first."""
    view = pool.view(step)
    if view.table is None:
        slots = view.indices[token, : int(view.lens[token])]
    else:
        row, last = divmod(token, step.chunk)
        positions = torch.arange(int(step.starts[row]) + last + 1)[-WINDOW:]
        slots = view.table[row] * pool.size + positions % pool.size
    return pool.data.view(-1, 2)[slots.long()].tolist()


@pytest.mark.parametrize("max_draft", [0, 2])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9, 14])
def test_every_token_sees_its_window(chunk: int, max_draft: int, seed: int) -> None:
    """Whatever was written before: other requests, drafts that were taken back, earlier chunks."""
    pool = WindowPool(FORMAT, ROWS, WINDOW, max_draft, 3 * chunk, "cpu")
    pool.data.fill_(float("nan"))
    lengths = [0] * ROWS
    for _ in range(25):
        slots = [*torch.randperm(ROWS)[:2].tolist(), -1]
        lens = [int(torch.randint(0, chunk + 1, ())) for _ in slots[:2]] + [0]
        starts = [lengths[s] for s in slots[:2]] + [4]
        step = _step(slots, starts, lens, chunk)
        view = pool.view(step)
        assert (view.kept is None) == (chunk <= 1 + max_draft)
        _write(pool, step, view.slots)
        for row, slot in enumerate(slots[:2]):
            for offset in range(lens[row]):
                position = starts[row] + offset
                first = max(0, position - WINDOW + 1)
                expected = [[p, slot] for p in range(first, position + 1)]
                assert _seen(pool, step, row * chunk + offset) == expected, (position, slot)
        if view.kept is not None:
            _write(pool, step, view.kept)
        for row, slot in enumerate(slots[:2]):
            taken_back = int(torch.randint(0, min(max_draft, max(lens[row] - 1, 0)) + 1, ()))
            lengths[slot] += lens[row] - taken_back
    assert max(lengths) > pool.size or chunk == 1


def test_padding_sees_and_writes_nothing() -> None:
    pool = WindowPool(FORMAT, 2, WINDOW, 0, 8, "cpu")
    view = pool.view(_step([1, -1], [7, 0], [2, 0], 4))
    assert view.lens.tolist() == [5, 5, 0, 0, 0, 0, 0, 0]
    assert view.slots.tolist() == [10, 11, -1, -1, -1, -1, -1, -1]
    assert view.kept.tolist() == [7, 8, -1, -1, -1, -1, -1, -1]
    single = pool.view(_step([1, -1], [7, 0], [1, 0], 1))
    assert single.slots.tolist() == [7, -1] and single.table.tolist() == [[1], [-1]]


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    pool = WindowPool(FORMAT, 2, WINDOW, 1, 7, "cpu")
    with pytest.raises(ValueError, match=r"2 x 4 tokens, .* max_tokens = 7"):
        pool.view(_step([0, 1], [0, 0], [4, 4], 4))
    pool.view(_step([0, 1], [0, 0], [2, 2], 2))  # in place


def test_entries_that_a_step_completes() -> None:
    pool = EntryPool(FORMAT, 6, 2, 4, "cpu")
    step = _step([0, 1, -1], [6, 3, 0], [7, 1, 0], 7, table=[[4, 1], [0, -1], [-1, -1]])
    ends = pool.completed(step)
    # Request 0 ends entries 1 and 2, request 1 its entry 0; what lies past the table is dropped.
    assert ends.flatten().tolist() == [9, 2, 0, -1, -1, -1]
    later = _step([0, 1], [13, 7], [7, 1], 7, table=[[4, 1], [0, -1]])
    assert pool.completed(later).flatten().tolist() == [3, -1, 1, -1]
