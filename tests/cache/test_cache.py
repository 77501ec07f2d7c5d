"""Rings and pages by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.cache.model_cache import ModelCache, block_size
from dsv4.cache.step import Step
from dsv4.config.model_config import ModelConfig
from tests.model.tiny import tiny_config

pytestmark = pytest.mark.stage("cache")


def _step(slots: list[int], starts: list[int], lens: list[int], chunk: int, table=None) -> Step:
    table = torch.full((len(slots), 1), -1) if table is None else torch.tensor(table)
    slots, starts, lens = (torch.tensor(v) for v in (slots, starts, lens))
    return Step(slots, starts, lens, table, chunk, 1 << 20)


def _positions(step: Step) -> torch.Tensor:
    """Values that tell position and slot: [B, C, 2]."""
    slots = step.slots[:, None].expand_as(step.positions)
    return torch.stack((step.positions, slots), -1).float()


def test_step_marks_padding() -> None:
    step = _step([2, -1, 0], [5, 0, 9], [2, 0, 3], 3)
    assert step.positions.tolist() == [[5, 6, 7], [0, 1, 2], [9, 10, 11]]
    assert step.valid.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert step.request_ids.tolist() == [0, 0, -1, -1, -1, -1, 2, 2, 2]
    assert step.request_ids.dtype == torch.int32
    assert step.live_tokens.tolist() == [9] and step.live_tokens.dtype == torch.int32
    # Behind the last real token all is padding; before it, padding counts.
    assert _step([2, 1, -1, -1], [5, 0, 0, 0], [1, 2, 0, 0], 3).live_tokens.tolist() == [5]
    assert _step([-1, -1], [0, 0], [0, 0], 2).live_tokens.tolist() == [0]


def _starts_plus(step: Step, more: int) -> torch.Tensor:
    return step.starts + more


def _starts_times(step: Step, factor: int) -> torch.Tensor:
    return step.starts * factor


def test_a_step_derives_once_per_function_and_arguments() -> None:
    step = _step([0], [5], [1], 1)
    first = step.derive(_starts_plus, 3)
    assert first.tolist() == [8]
    assert step.derive(_starts_plus, 3) is first
    assert step.derive(_starts_plus, 4).tolist() == [9]
    # Equal arguments of another function are other arithmetic: nothing can be mistaken for it.
    assert step.derive(_starts_times, 3).tolist() == [15]
    assert step.derive(_starts_times, factor=3).tolist() == [15]
    later = replace(step, starts=step.starts + 1)
    assert later.derive(_starts_plus, 3).tolist() == [9]


@pytest.mark.parametrize(
    "kinds, rates, expected",
    [("SCH", (4, 128), 128), ("SCH", (3, 7), 147), ("CH", (4, 200), 200), ("SS", (4, 16), 128)],
)
def test_a_block_holds_whole_entries_of_every_rate(
    kinds: str, rates: tuple[int, int], expected: int
) -> None:
    assert block_size(tiny_config(kinds, rates=rates)) == expected


def test_model_cache_gives_every_layer_what_it_needs() -> None:
    config = replace(tiny_config("SCH", rates=(4, 16)), num_nextn_predict_layers=1)
    cache = ModelCache(config, 3, 10, 4, torch.bfloat16, "cpu", max_draft=2, max_tokens=30)
    swa, csa, hca, mtp = cache.layers
    assert cache.block_size == 128 and cache.max_context == 512
    for layer in (swa, mtp):
        # A ring per request, and pages for 30 tokens of a chunk.
        assert layer.window.data.shape == (3 + 3, 9 + 2, 32) and layer.entries is None
        assert layer.state.compressor is None and layer.index_keys is None
    assert csa.entries.data.shape == (10, 32, 32) and csa.index_keys.data.shape == (10, 32, 16)
    assert csa.state.compressor.data.shape == (3, 8 + 2, 2, 64)
    assert csa.state.indexer.data.shape == (3, 8 + 2, 2, 32)
    assert hca.entries.data.shape == (10, 8, 32) and hca.index_keys is None
    assert hca.state.compressor.data.shape == (3, 16 + 2, 2, 32)
    assert csa.entries.data.dtype == torch.bfloat16
    assert hca.state.compressor.data.dtype == torch.float32


@pytest.mark.parametrize("name", ["max_requests", "num_blocks", "max_blocks_per_request"])
def test_impossible_cache_sizes_are_refused(name: str) -> None:
    sizes = dict(max_requests=1, num_blocks=1, max_blocks_per_request=1)
    with pytest.raises(ValueError, match=name):
        ModelCache(ModelConfig.flash(), **{**sizes, name: 0}, dtype=torch.float32, device="meta")
    for name in ("max_draft", "max_tokens"):
        with pytest.raises(ValueError, match=name):
            ModelCache(ModelConfig.flash(), 1, 1, 1, torch.float32, "meta", **{name: -1})
