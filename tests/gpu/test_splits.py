"""Choice of the KV splits, their workspace, and what a launch passes on; no GPU needed."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.kernels.attention.split_kv import TILE_OF_HEADS, counter_words
from dsv4.ops.attention import splits as fmha_splits

pytestmark = pytest.mark.stage("H")

MULTIPROCESSORS = 132
# Of three tokens of 8 heads in two splits.
WORKSPACE_SIZE = fmha_splits.workspace_size(FmhaConfig(64, 8, 128, 1024), 3, 2)
ABSENT = (torch.empty(0).int(), torch.empty(0, 8), torch.empty(0))


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "width"), [(1024, 128), (512, 128), (0, 128), (64, 0), (8192, 128)]
)
def test_choice_fills_the_gpu_once_at_most(heads, rows, width) -> None:
    config = FmhaConfig(512, heads, 128, 1024)
    blocks = fmha_splits.key_blocks(rows, width)
    bound = fmha_splits.max_workspace_size(config, 300, MULTIPROCESSORS)
    for tokens in range(1, 300):
        splits = fmha_splits.choose(config, tokens, rows, width, MULTIPROCESSORS)
        tiles = tokens * -(-heads // 64)
        assert 1 <= splits <= min(blocks, fmha_splits.MAX_SPLITS)
        assert splits == 1 or tiles * splits <= MULTIPROCESSORS
        assert splits == 1 or fmha_splits.workspace_size(config, tokens, splits) <= bound


def test_one_token_is_split_and_a_full_gpu_is_not() -> None:
    config = FmhaConfig(512, 128, 128, 1024)
    assert fmha_splits.choose(config, 1, 1024, 128, MULTIPROCESSORS) > 8
    assert fmha_splits.choose(config, 66, 1024, 128, MULTIPROCESSORS) == 1


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
    splits = fmha_splits.choose(config, tokens, rows, 128, MULTIPROCESSORS)
    assert MEASURED[launch][splits] <= 1.03 * min(MEASURED[launch].values())


def test_only_hopper_has_tiles_of_few_heads() -> None:
    """Where splits for these are the fastest on Hopper, Blackwell's are for its one kernel."""
    config = FmhaConfig(512, 64, 128, 512)
    hopper, blackwell = (
        fmha_splits.choose(config, 4, 512, 128, MULTIPROCESSORS, arch)
        for arch in ("sm_90a", "sm_100a")
    )
    tiles = 4 * 64 // TILE_OF_HEADS
    assert tiles * hopper <= MULTIPROCESSORS < tiles * blackwell


def test_every_warp_has_one_turn_to_join() -> None:
    """As few units at a time as that takes, of a tile of 16 heads, and at most four."""
    pytest.importorskip("cutlass")
    from dsv4.kernels.attention.sm90.swap_ab_combine import MOST_LOADS, batch_sizes

    sizes = batch_sizes(32, 2)
    assert [most for _, most in sizes][-1] == fmha_splits.MAX_SPLITS
    for splits in range(4, fmha_splits.MAX_SPLITS + 1):
        together = next(together for together, most in sizes if splits <= most)
        assert together == 1 or together * splits <= MOST_LOADS
        turns = 2 * 32 / together / (4 * splits)
        assert turns <= 1 or 2 * together * splits > MOST_LOADS


@pytest.mark.parametrize("heads", [8, 64, 72, 128])
@pytest.mark.parametrize("multiprocessors", [1, 78, 132, 148])
def test_from_some_number_of_tokens_nothing_is_split(heads, multiprocessors) -> None:
    config = FmhaConfig(512, heads, 128, 1024)
    first = fmha_splits.unsplit_from(config, multiprocessors)
    for tokens in range(first, first + 200):
        assert fmha_splits.choose(config, tokens, 8192, 128, multiprocessors) == 1


def test_fixed_splits_size_the_workspace() -> None:
    config = FmhaConfig(64, 8, 128, 1024, num_splits=3)
    # Head tiles are padded to 16 rows; counters and alignment are the rest.
    partials = 10 * 16 * 3 * (64 + 2)
    assert partials < fmha_splits.max_workspace_size(config, 10, MULTIPROCESSORS) < 1.1 * partials
    single = FmhaConfig(64, 8, 128, 1024, num_splits=1)
    assert fmha_splits.max_workspace_size(single, 10, MULTIPROCESSORS) == 0


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 72, 128])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_counters_and_partials_do_not_overlap(heads, head_dim) -> None:
    config = FmhaConfig(head_dim, heads, 128, 1024)
    rows = -(-heads // 16) * 16 if heads <= 64 else -(-heads // 64) * 64
    for tokens, splits in ((1, 2), (1, 32), (7, 3), (1000, 2)):
        size = fmha_splits.workspace_size(config, tokens, splits)
        counters = counter_words(size)
        # The smallest tiles have 16 heads, and up to two shares of their columns. Each has a
        # counter of two words for each half.
        shares = 2 if head_dim == 512 else 1
        assert tokens * rows // 16 * shares * 4 <= counters
        assert counters + tokens * rows * splits * (head_dim + 2) <= size
        assert counters % 32 == 0


class Recorder:
    """Stands for a compiled kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *arguments) -> None:
        self.calls.append(arguments)


@pytest.fixture
def launch(monkeypatch):
    """`launch(num_splits, compressed_lens, lse, workspace)` of three tokens; returns what the
    kernel got after the tensors that every call has."""
    from dsv4.ops.attention import launch as fmha_cuda

    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    recorder = Recorder()
    # Several devices: of CPU tensors, and the current one, the index is -1.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(fmha_cuda, "_absent", lambda index, heads: ABSENT)
    monkeypatch.setattr(fmha_cuda.RUNNERS, "get", lambda *args, **options: recorder)
    tensors = (
        torch.zeros(3, 8, 64).bfloat16(),
        torch.zeros(3, 70, 64).bfloat16(),
        torch.zeros(2, 20, 64).bfloat16(),
        torch.zeros(2).int(),
        torch.zeros(8),
        torch.zeros(3).int(),
        torch.zeros(3, 8, 64).bfloat16(),
    )

    def call(num_splits, compressed_lens=None, lse=None, workspace=None):
        config = FmhaConfig(64, 8, 128, 1024, num_splits=num_splits)
        state = fmha_cuda._State(config, SimpleNamespace(index=-1))
        state.launch(*tensors, compressed_lens, lse, workspace)
        arguments = recorder.calls.pop()
        assert arguments[:7] == tensors
        return arguments[7:]

    return call


def test_absent_arguments_are_empty_tensors(launch) -> None:
    assert launch(1) == (*ABSENT, 1, MULTIPROCESSORS)


def test_a_fixed_number_of_splits_holds_for_any_number_of_tokens(launch, monkeypatch) -> None:
    monkeypatch.setattr(fmha_splits, "unsplit_from", lambda config, multiprocessors: 1)
    assert launch(2, workspace=torch.zeros(WORKSPACE_SIZE))[3] == 2
    assert launch(None)[3] == 1


def test_given_arguments_are_passed_on(launch) -> None:
    lens, lse, workspace = torch.zeros(3).int(), torch.zeros(3, 8), torch.zeros(WORKSPACE_SIZE)
    assert launch(2, lens, lse, workspace) == (lens, lse, workspace, 2, MULTIPROCESSORS)


@pytest.mark.parametrize("name", ["compressed_lens", "lse", "workspace"])
def test_an_argument_of_the_wrong_size_is_named(launch, name) -> None:
    good = {
        "compressed_lens": torch.zeros(3).int(),
        "lse": torch.zeros(3, 8),
        "workspace": torch.zeros(WORKSPACE_SIZE),
    }
    bad = good | {name: good[name][:-1]}
    with pytest.raises(ValueError, match=name):
        launch(2, **bad)


@pytest.mark.parametrize("other", ["dtype", "current device", "device of q"])
def test_a_launch_passes_on_what_is_not_its_own(other, launch, monkeypatch) -> None:
    """float32 and tensors of another device go where they belong, with that device current."""
    from dsv4.ops.attention import launch as fmha_cuda

    config = FmhaConfig(64, 8, 128, 1024, num_splits=1)
    q = torch.zeros(3, 8, 64, dtype=torch.float32 if other == "dtype" else torch.bfloat16)
    rest = tuple(range(9))
    passed_on, entered = Recorder(), []

    def launch_for(*asked):
        passed_on.calls.append(asked)
        return passed_on

    monkeypatch.setattr(fmha_cuda, "launch_for", launch_for)

    @contextmanager
    def enter(where):
        entered.append(where)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", enter)
    index = 3 if other == "device of q" else q.get_device()
    current = 1 if other == "current device" else index
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current)
    fmha_cuda._State(config, SimpleNamespace(index=index)).launch(q, *rest)
    assert passed_on.calls == [(config, q), (q, *rest)]
    assert entered == [q.device, None]
