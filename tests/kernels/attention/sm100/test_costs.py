"""Expected time by number of splits: against what the simulator's time model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.sm100 import costs
from dsv4.kernels.attention.sm100.plan_combine import PlanCombine

pytestmark = pytest.mark.stage("H")

NUM_SMS, WINDOW = 148, 128
RECORD = Path(__file__).with_name("modelled_splits.json")
# [heads, compressed rows, tokens][splits], microseconds of a B200 by `dsv4.simulator.timing`:
# head_dim 512, 128 window keys. Predictions, not measurements; simulator_split_costs.py makes them.
MODELLED = {
    (shape["heads"], shape["rows"], shape["tokens"]): {
        int(splits): microseconds for splits, microseconds in shape["splits"].items()
    }
    for shape in json.loads(RECORD.read_text())["shapes"]
}
AGAIN = ((64, 512, 4), 5)  # a launch that is modelled anew


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
    assert sum(errors) / len(errors) < 0.03 and max(errors) < 0.2


@pytest.mark.slow
def test_record_is_of_the_time_model() -> None:
    pytest.importorskip("cutlass", reason="compiles kernels: needs CuTeDSL")
    from dsv4.cli.sim_attention import Workload
    from dsv4.cli.sim_table import Subject, rows
    from dsv4.testing.attention import Case

    (heads, top_k, tokens), splits = AGAIN
    work = Workload("sm_100a", Case.decode(tokens, heads, top_k), splits)
    (row,) = rows([Subject("", work)])
    modelled = MODELLED[heads, top_k, tokens][splits]
    assert row.prediction.microseconds == pytest.approx(modelled, rel=0.01)


def test_combine_blocks_per_sm() -> None:
    """Shared memory for the most splits bounds blocks of few splits, threads those of many."""
    plan = PlanCombine(512)
    assert plan.smem_bytes == 16 * 1024
    assert [plan.blocks_per_sm(splits) for splits in (2, 4, 5, 8, 9, 32)] == [13, 13, 8, 8, 5, 2]
    assert PlanCombine(64).rows_per_block == 4
