"""`step_indices`: against the definition, token by token; errors; what a cache makes of a step."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache.model_cache import ModelCache
from dsv4.cache.step import Step
from dsv4.kernels.step.config import StepIndicesConfig
from dsv4.ops import step_indices
from dsv4.ops.step_indices import STEP_INDICES
from dsv4.testing.step_indices import Case, Inputs
from tests.model.tiny import tiny_config

pytestmark = pytest.mark.stage("rows")

SIZES = {"ring": 129, "block": 128}


def test_every_number_is_that_of_its_definition(seed) -> None:
    inputs = Inputs.make(Case(23, 3), seed)
    found = step_indices(**inputs.requests, chunk=3, **SIZES, ratios=(4, 128))
    last = 0
    for row in range(23):
        slot, start, count = (int(x[row]) for x in (inputs.slots, inputs.starts, inputs.lens))
        assert found.requests[:, row].tolist() == [slot, start, count]
        for offset in range(3):
            position, is_valid = start + offset, slot >= 0 and offset < count
            assert found.positions[row, offset] == position
            assert found.request_ids[row, offset] == (row if is_valid else -1)
            place = slot * 129 + position % 129
            assert found.window_slots[row, offset] == (place if is_valid else -1)
            assert [int(x[row, offset]) for x in found.visible] == [
                len([n for n in range(position) if (n + 1) * ratio <= position + 1])
                for ratio in (4, 128)
            ]
            last = 3 * row + offset + 1 if is_valid else last
        for ratio, completed in zip((4, 128), found.completed):
            # Three positions end at most one entry of either kind.
            ended = [n for n in range(start // ratio, start) if (n + 1) * ratio <= start + count]
            slots = [_slot(inputs.block_table[row].tolist(), n, 128 // ratio) for n in ended]
            assert completed[row].tolist() == (slots or [-1])
    assert found.live_tokens.tolist() == [last]
    assert torch.equal(found.pages, inputs.block_table.int())


def _slot(blocks: list[int], number: int, size: int) -> int:
    block = blocks[number // size] if number // size < len(blocks) else -1
    return -1 if block < 0 else block * size + number % size


def test_a_step_that_has_them_says_the_same(seed) -> None:
    inputs = Inputs.make(Case(23, 2), seed)
    plain = Step(**inputs.requests, chunk=2, capacity=128 * 9)
    found = step_indices(**inputs.requests, chunk=2, **SIZES, ratios=(4, 128))
    step = plain.having(found, (4, 128))
    for name in ("request_ids", "token_positions", "pages", "live_tokens"):
        one, other = getattr(plain, name), getattr(step, name)
        assert one.dtype == other.dtype == torch.int32 and torch.equal(one, other), name
    assert all(map(torch.equal, plain.requests, step.requests))
    for ratio in (4, 128):
        assert torch.equal(plain.completed(ratio, 128), step.completed(ratio, 128))
        assert torch.equal(plain.visible(ratio), step.visible(ratio))


def test_a_cache_prepares_steps_whose_tensors_lie_apart(seed) -> None:
    """Those of an engine are columns of one tensor."""
    cache = ModelCache(tiny_config("SCH"), 40, 9, 9, torch.float32, "cpu", max_draft=1)
    ratios = sorted({spec.ratio for spec in cache.config.schedule if spec.ratio})
    sizes = StepIndicesConfig(cache.layers[0].window.size, cache.block_size, *ratios)
    given = Inputs.make(Case(7, 2, 9, sizes), seed).requests
    apart = {name: torch.stack((x, x), -1)[..., 0] for name, x in given.items()}
    assert not apart["slots"].is_contiguous()
    one, other = (
        cache.prepared(Step(**tensors, chunk=2, capacity=9 * cache.block_size)).indices
        for tensors in (given, apart)
    )
    assert torch.equal(one.requests, other.requests) and torch.equal(one.pages, other.pages)
    assert all(map(torch.equal, one.completed, other.completed))


def test_bad_arguments_are_named(seed) -> None:
    given = Inputs.make(Case(3), seed).requests
    with pytest.raises(ValueError, match="block: got 128, needs a multiple of ratio 3"):
        step_indices(**given, chunk=1, **SIZES, ratios=(3,))
    with pytest.raises(ValueError, match="ratios: got 3, at most 2 are possible"):
        step_indices(**given, chunk=1, **SIZES, ratios=(2, 4, 8))
    with pytest.raises(TypeError, match="starts"):
        step_indices(**given | {"starts": given["starts"].int()}, chunk=1, **SIZES)
    with pytest.raises(ValueError, match="lens"):
        step_indices(**given | {"lens": given["lens"][:2]}, chunk=1, **SIZES)


def test_the_operator_is_one_of_torch(seed) -> None:
    inputs = Inputs.make(Case(5), seed)
    outputs = [x for name, x in inputs.arguments.items() if name not in inputs.requests]
    others = [torch.empty(3, 5), torch.empty(5, 9), torch.empty(1)]
    requests, pages, live = (x.to(torch.int32) for x in others)
    identity = STEP_INDICES.runner_id(129, 128, 4, 128)
    call = (*inputs.requests.values(), requests, pages, *outputs[:3], live, identity, *outputs[3:])
    torch.library.opcheck(torch.ops.dsv4.step_indices.default, call)
