"""Choice of kernel, KV splits and tiles of a launch, and the size of its workspace."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import SWAP_AB_TILE_HEADS, combine_sizes, counter_words

pytestmark = pytest.mark.stage("H")

MULTIPROCESSORS = 132


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "width"), [(1024, 128), (512, 128), (0, 128), (64, 0), (8192, 128)]
)
def test_choice_fills_the_gpu_once_at_most(heads, rows, width) -> None:
    config = FmhaConfig(512, heads, 128, 1024)
    blocks = launch_plan.key_tiles(rows, width)
    bound = launch_plan.max_workspace_size(config, 300, MULTIPROCESSORS)
    for tokens in range(1, 300):
        splits = launch_plan.num_splits(config, tokens, rows, width, MULTIPROCESSORS)
        tiles = tokens * -(-heads // 64)
        assert 1 <= splits <= min(blocks, launch_plan.MAX_SPLITS)
        assert splits == 1 or tiles * splits <= MULTIPROCESSORS
        assert splits == 1 or launch_plan.workspace_size(config, tokens, splits) <= bound


def test_one_token_is_split_and_a_full_gpu_is_not() -> None:
    config = FmhaConfig(512, 128, 128, 1024)
    assert launch_plan.num_splits(config, 1, 1024, 128, MULTIPROCESSORS) > 8
    assert launch_plan.num_splits(config, 66, 1024, 128, MULTIPROCESSORS) == 1


# [heads, compressed rows, tokens][splits], in microseconds on an H200, with 128 window keys.
MEASURED = {
    (128, 1024, 1): {9: 6.87, 12: 7.04, 16: 7.51, 18: 7.40},
    (128, 1024, 2): {6: 8.34, 8: 8.66, 9: 8.52},
    (128, 1024, 3): {6: 9.74, 9: 9.75, 12: 10.76, 18: 11.67},
    (128, 1024, 4): {2: 14.34, 3: 11.65, 4: 10.90, 5: 10.23, 6: 9.73, 9: 9.86},
    (128, 1024, 6): {5: 11.90, 6: 13.15, 8: 12.39, 9: 12.88},
    (128, 1024, 8): {2: 15.59, 3: 13.07, 4: 11.63, 5: 12.76, 6: 12.65},
    (128, 1024, 12): {3: 18.07, 4: 15.57, 5: 15.02},
    (128, 1024, 16): {1: 22.92, 2: 18.77, 3: 18.01, 4: 16.23},
    (128, 1024, 24): {1: 27.50, 2: 22.67},
    (64, 512, 1): {5: 6.88, 10: 5.66},
    (64, 512, 2): {5: 6.70, 10: 5.84},
    (64, 512, 3): {5: 6.73, 10: 6.53},
    (64, 512, 4): {4: 7.67, 5: 6.86, 8: 7.45, 10: 7.63},
    (64, 512, 6): {4: 8.12, 5: 7.69, 10: 8.44},
    (64, 512, 8): {3: 9.08, 4: 8.84, 5: 8.58, 8: 8.88, 10: 11.23},
    (64, 512, 12): {2: 10.66, 3: 10.12, 4: 9.41, 5: 9.23, 6: 10.93, 9: 10.63},
    (64, 512, 16): {2: 11.54, 3: 10.93, 4: 9.79, 5: 11.71, 6: 12.30},
    (64, 512, 24): {2: 12.44, 3: 14.81, 4: 13.08, 5: 13.13},
    (64, 512, 32): {1: 14.66, 2: 13.39},
    (64, 512, 64): {1: 20.45, 2: 22.19},
    (8, 1024, 1): {9: 5.69, 18: 5.00},
    (8, 1024, 4): {9: 5.87, 18: 5.57},
    (8, 1024, 16): {4: 9.11, 6: 8.72, 8: 9.02},
    (8, 1024, 32): {2: 13.31, 3: 14.57, 4: 13.47},
    (8, 1024, 64): {1: 19.95, 2: 21.84},
    (16, 1024, 4): {9: 7.32, 18: 6.16},
    (16, 1024, 16): {3: 11.30, 4: 10.01, 6: 9.88},
    (16, 1024, 32): {2: 14.84, 3: 15.70, 4: 14.70},
    (16, 1024, 64): {1: 22.22, 2: 23.88},
    (16, 512, 64): {1: 13.79, 2: 15.69},
    (24, 1024, 64): {1: 25.95, 2: 25.87},
    (32, 1024, 1): {9: 7.19, 18: 5.63},
    (32, 1024, 4): {9: 7.50, 12: 7.62, 16: 7.49},
    (32, 1024, 8): {5: 9.17, 6: 8.61, 8: 8.85},
    (32, 1024, 16): {2: 14.49, 3: 11.88, 4: 11.30},
    (32, 1024, 32): {1: 21.92, 2: 16.20},
    (32, 1024, 64): {1: 23.32, 2: 26.87},
}


@pytest.mark.parametrize("launch", MEASURED)
def test_choice_is_close_to_the_fastest_that_was_measured(launch) -> None:
    heads, rows, tokens = launch
    config = FmhaConfig(512, heads, 128, rows)
    splits = launch_plan.num_splits(config, tokens, rows, 128, MULTIPROCESSORS)
    assert MEASURED[launch][splits] <= 1.03 * min(MEASURED[launch].values())


def test_only_hopper_has_tiles_of_few_heads() -> None:
    """Where splits for these are the fastest on Hopper, Blackwell's are for its one kernel."""
    config = FmhaConfig(512, 64, 128, 512)
    hopper, blackwell = (
        launch_plan.num_splits(config, 4, 512, 128, MULTIPROCESSORS, arch)
        for arch in ("sm_90a", "sm_100a")
    )
    tiles = 4 * 64 // SWAP_AB_TILE_HEADS
    assert tiles * hopper <= MULTIPROCESSORS < tiles * blackwell


def test_every_warp_has_one_turn_to_join() -> None:
    """As few units at a time as that takes, of a tile of 16 heads, and at most four."""
    pytest.importorskip("cutlass")
    from dsv4.kernels.attention.sm90.swap_ab_combine import MOST_LOADS, batch_sizes

    sizes = batch_sizes(32, 2)
    assert [most for _, most in sizes][-1] == launch_plan.MAX_SPLITS
    for splits in range(4, launch_plan.MAX_SPLITS + 1):
        together = next(together for together, most in sizes if splits <= most)
        assert together == 1 or together * splits <= MOST_LOADS
        turns = 2 * 32 / together / (4 * splits)
        assert turns <= 1 or 2 * together * splits > MOST_LOADS


@pytest.fixture(scope="module")
def make_tiling():
    """`make_tiling` of the heads-in-M kernel as plain Python: its source, on integers."""
    tree = ast.parse((Path(launch_plan.__file__).parent / "sm90/heads_m_tiling.py").read_text())
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "make_tiling"
    )
    function.decorator_list = []
    for argument in function.args.args:
        argument.annotation = None
    names = {
        "cutlass": SimpleNamespace(Int32=int, const_expr=bool, max=max),
        "cute": SimpleNamespace(fast_divmod_create_divisor_v2=lambda x: x),
        "counter_words": counter_words,
        "HeadsMTiling": lambda *fields: fields,
    }
    exec(compile(ast.Module([function], []), "heads_m_tiling", "exec"), names)
    return names["make_tiling"]


@pytest.mark.parametrize("heads", [32, 40, 64, 72, 128])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_plans_are_what_the_hopper_kernel_makes_of_them(heads, head_dim, make_tiling) -> None:
    """The compiled host function divides a launch by the same rules as the plan of its costs."""
    is_even = heads <= 64 or heads % 64 == 0
    shape = (heads, 64, is_even)
    for tokens in (1, 2, 3, 4, 7, 8, 16, 33, 66, 132, 133):
        for splits in (1, 2, 3, 4, 8, 16, 32):
            config = FmhaConfig(head_dim, heads, 128, 1024, num_splits=splits)
            plan = launch_plan.make_plan(config, tokens, 1024, 128, MULTIPROCESSORS)
            sizes = (tokens, splits, MULTIPROCESSORS, head_dim == 512, head_dim // 16)
            combined = combine_sizes(head_dim // 16)
            _, _, tile_heads, work_tiles, _, slices, *_ = make_tiling(*shape, *sizes, combined, 0)
            assert plan == launch_plan.LaunchPlan(
                "heads_m", splits, tile_heads, slices, work_tiles
            ), (tokens, splits)


@pytest.mark.parametrize(
    ("heads", "tokens", "num_splits", "kernel", "tile_heads"),
    [
        (16, 64, None, "swap_ab", 16),
        (24, 1, None, "swap_ab", 24),
        (64, 1, None, "swap_ab", 16),
        (64, 33, None, "swap_ab", 16),
        (64, 34, None, "heads_m", 64),
        (64, 1, 10, "heads_m", 32),
        (40, 1, None, "heads_m", 48),
    ],
)
def test_kernel_of_a_hopper_launch(heads, tokens, num_splits, kernel, tile_heads) -> None:
    """Swap-AB serves few heads, and small launches whose number of splits is free."""
    config = FmhaConfig(512, heads, 128, 1024, num_splits=num_splits)
    plan = launch_plan.make_plan(config, tokens, 100, 30, MULTIPROCESSORS)
    assert (plan.kernel, plan.tile_heads) == (kernel, tile_heads)


def test_kernel_of_a_blackwell_launch() -> None:
    """The constructor's choice: 128 heads of 512 are one pair of CTAs, all else one CTA each."""
    pytest.importorskip("cutlass")
    from dsv4.kernels.attention.sm100.fmha import Fmha1Cta, Fmha2Cta, FmhaKernel

    kinds = {"1cta": Fmha1Cta, "2cta": Fmha2Cta}
    for heads, head_dim in ((8, 512), (64, 512), (72, 512), (128, 512), (128, 256), (64, 64)):
        config = FmhaConfig(head_dim, heads, 128, 1024)
        plan = launch_plan.make_plan(config, 4, 1024, 128, 148, "sm_100a")
        assert type(FmhaKernel.from_config(config).variant) is kinds[plan.kernel]


@pytest.mark.parametrize("heads", [8, 64, 72, 128])
@pytest.mark.parametrize("multiprocessors", [1, 78, 132, 148])
def test_from_some_number_of_tokens_nothing_is_split(heads, multiprocessors) -> None:
    config = FmhaConfig(512, heads, 128, 1024)
    first = launch_plan.unsplit_from(config, multiprocessors)
    for tokens in range(first, first + 200):
        assert launch_plan.num_splits(config, tokens, 8192, 128, multiprocessors) == 1


def test_fixed_splits_size_the_workspace() -> None:
    config = FmhaConfig(64, 8, 128, 1024, num_splits=3)
    # Head tiles are padded to 16 rows; counters and alignment are the rest.
    partials = 10 * 16 * 3 * (64 + 2)
    assert partials < launch_plan.max_workspace_size(config, 10, MULTIPROCESSORS) < 1.1 * partials
    single = FmhaConfig(64, 8, 128, 1024, num_splits=1)
    assert launch_plan.max_workspace_size(single, 10, MULTIPROCESSORS) == 0


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 72, 128])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_counters_and_partials_do_not_overlap(heads, head_dim) -> None:
    config = FmhaConfig(head_dim, heads, 128, 1024)
    rows = -(-heads // 16) * 16 if heads <= 64 else -(-heads // 64) * 64
    for tokens, splits in ((1, 2), (1, 32), (7, 3), (1000, 2)):
        size = launch_plan.workspace_size(config, tokens, splits)
        counters = counter_words(size)
        # The smallest tiles have 16 heads, and up to two shares of their columns. Each has a
        # counter of two words for each half.
        shares = 2 if head_dim == 512 else 1
        assert tokens * rows // 16 * shares * 4 <= counters
        assert counters + tokens * rows * splits * (head_dim + 2) <= size
        assert counters % 32 == 0
