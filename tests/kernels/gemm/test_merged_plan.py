"""Plans of the merged linear: budgets, and which tiling a launch takes."""

from __future__ import annotations

import pytest

from dsv4.arch import SM_90A
from dsv4.kernels.gemm.config import Kind, num_slices
from dsv4.kernels.gemm.merged_config import MergedLinearConfig
from dsv4.kernels.gemm.merged_plan import choose, plans, row_tiles, tilings
from dsv4.ops.merged_linear import MODEL_INPUTS

pytestmark = pytest.mark.stage("projections")

CONFIGS = [
    MergedLinearConfig(*given, has_codes)
    for given in (*MODEL_INPUTS.values(), (16384, "1 float32 float32, 1 bfloat16 float32"))
    for has_codes in (False, True)
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tiling_fits_and_covers_k(config) -> None:
    for tiling in tilings(config):
        kinds = plans(config, tiling)
        assert [plan.kind for plan in kinds] == list(config.kinds)
        for plan in kinds:
            assert plan.slices == num_slices(config.in_features)
            assert plan.slices * plan.slice_blocks * plan.kind.step == config.in_features
            assert plan.smem.total_bytes <= plan.capacity
            assert plan.capacity * tiling.ctas_per_sm < SM_90A.smem_per_sm
            assert plan.stages >= 2
        # One launch has one shape of CTA.
        assert len({(plan.warps, plan.rows, plan.tokens) for plan in kinds}) == 1


def test_row_tiles_hold_rows_of_one_weight() -> None:
    config = MergedLinearConfig(512, "136 float32 float32, 8 float32 float32, 64 bfloat16 float32")
    assert (row_tiles(config, Kind.FP8, 64), row_tiles(config, Kind.BF16, 64)) == (4, 1)


def test_choice() -> None:
    """By tokens: of a tile, CTAs that share its slices."""
    found = {}
    for label in ("Flash CSA x", "Flash CSA latent", "Pro CSA x"):
        config = MergedLinearConfig(*MODEL_INPUTS[label])
        chosen = [tilings(config)[choose(config, tokens, 132)] for tokens in (1, 16, 64, 256, 4096)]
        found[label] = [(tiling.tokens, tiling.cluster) for tiling in chosen]
    assert found == {
        "Flash CSA x": [(8, 2), (16, 4), (64, 2), (128, 2), (128, 1)],
        "Flash CSA latent": [(8, 1), (16, 1), (64, 1), (128, 1), (128, 1)],
        "Pro CSA x": [(8, 2), (16, 4), (64, 2), (128, 2), (128, 1)],
    }


def test_rings_are_deep_where_every_cluster_finds_a_place() -> None:
    """21 tiles of bf16 and 12 of FP8, of half as many bytes, are 27 for 28 clusters of four."""
    found = {}
    for label in ("Flash CSA x", "Flash HCA x", "Flash CSA latent", "Pro CSA x"):
        config = MergedLinearConfig(*MODEL_INPUTS[label], True)
        found[label] = tilings(config)[choose(config, 1, 132)].is_deep
    assert found == {
        "Flash CSA x": True, "Flash HCA x": True, "Flash CSA latent": False, "Pro CSA x": False,
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_choice_exists_for_any_number_of_tokens(config) -> None:
    for tokens in (1, 8, 9, 16, 17, 64, 65, 1000, 100_000):
        assert 0 <= choose(config, tokens, 132) < len(tilings(config))
