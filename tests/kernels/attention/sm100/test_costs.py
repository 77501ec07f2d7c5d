"""Expected time by number of splits: against what the simulator's time model says."""

from __future__ import annotations

import pytest

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import costs
from dsv4.kernels.attention.sm100.plan_combine import PlanCombine

pytestmark = pytest.mark.stage("H")

NUM_SMS, WINDOW = 148, 128
# [heads, compressed rows, tokens][splits], microseconds of a B200 by `dsv4.simulator.timing`:
# head_dim 512, 128 window keys. Predictions, not measurements.
MODELLED = {
    (16, 1024, 1): {1: 28.2, 2: 17.0, 3: 12.7, 6: 8.4, 9: 7.0, 18: 6.3},
    (16, 1024, 4): {1: 28.0, 2: 17.0, 3: 12.7, 6: 8.4, 9: 7.0, 18: 6.4},
    (16, 1024, 16): {1: 28.0, 2: 17.0, 3: 12.7, 6: 9.4, 9: 9.3, 18: 12.9},
    (16, 1024, 64): {1: 28.3, 2: 19.3, 3: 25.9},
    (64, 512, 1): {1: 17.1, 2: 12.7, 3: 11.3, 4: 9.8, 5: 8.5, 10: 7.7},
    (64, 512, 4): {1: 17.0, 2: 12.8, 3: 11.3, 4: 9.9, 5: 8.6, 10: 7.8},
    (64, 512, 16): {1: 17.0, 2: 13.0, 3: 11.5, 4: 10.4, 5: 10.0, 10: 18.7},
    (64, 512, 64): {1: 17.3, 2: 21.9, 3: 28.1, 4: 27.2},
    (64, 1024, 1): {1: 28.6, 2: 18.5, 3: 14.2, 5: 11.3, 6: 9.9, 9: 8.5, 18: 7.8},
    (64, 1024, 4): {1: 28.4, 2: 18.5, 3: 14.2, 5: 11.4, 6: 10.0, 9: 8.6, 18: 8.6},
    (64, 1024, 16): {1: 28.4, 2: 18.7, 3: 14.4, 5: 12.9, 6: 12.3, 9: 15.7, 18: 23.9},
    (64, 1024, 64): {1: 28.8, 2: 27.6, 3: 35.3},
    (128, 512, 1): {1: 11.3, 2: 10.5, 5: 8.7, 10: 8.1},
    (128, 512, 4): {1: 11.3, 2: 10.7, 5: 9.0, 10: 8.8},
    (128, 512, 16): {1: 11.3, 2: 13.6, 5: 19.3},
    (128, 512, 64): {1: 12.5, 2: 30.5},
    (128, 1024, 1): {1: 16.7, 2: 13.2, 3: 11.2, 4: 10.5, 5: 9.9, 6: 9.3, 9: 8.8, 18: 8.2},
    (128, 1024, 4): {1: 16.7, 2: 13.4, 3: 11.3, 4: 10.7, 5: 10.2, 6: 9.5, 9: 9.5, 18: 13.9},
    (128, 1024, 16): {1: 16.7, 2: 16.3, 3: 14.8, 4: 15.4, 5: 20.0, 6: 20.0, 9: 22.1},
    (128, 1024, 64): {1: 17.9, 2: 38.4},
}


@pytest.mark.parametrize("shape", MODELLED, ids=str)
def test_choice_is_the_fastest_modelled_or_nearly(shape) -> None:
    heads, rows, tokens = shape
    config = FmhaConfig(512, heads, WINDOW, rows)
    chosen = launch_plan.num_splits(config, tokens, rows, WINDOW, NUM_SMS, "sm_100a")
    modelled = MODELLED[shape]
    assert chosen in modelled, f"{chosen} splits have not been modelled"
    assert modelled[chosen] <= 1.05 * min(modelled.values())


def test_times_are_near_the_modelled_ones() -> None:
    errors = []
    for (heads, rows, tokens), modelled in MODELLED.items():
        tiles = launch_plan.key_tiles(rows, WINDOW)
        for splits, microseconds in modelled.items():
            expected = costs.microseconds(512, heads, tokens, splits, tiles, NUM_SMS)
            errors.append(abs(expected / microseconds - 1))
    assert sum(errors) / len(errors) < 0.04 and max(errors) < 0.2


def test_combine_blocks_per_sm() -> None:
    """Shared memory for the most splits bounds blocks of few splits, threads those of many."""
    plan = PlanCombine(512)
    assert plan.smem_bytes == 16 * 1024
    assert [plan.blocks_per_sm(splits) for splits in (2, 4, 5, 8, 9, 32)] == [13, 13, 8, 8, 5, 2]
    assert PlanCombine(64).rows_per_block == 4
