"""Choice of the KV splits, their workspace, and what a launch passes on; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops import fmha_splits

pytestmark = pytest.mark.stage("H")

MULTIPROCESSORS = 132


@pytest.mark.parametrize("heads", [8, 64, 128])
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


def test_fixed_splits_size_the_workspace() -> None:
    config = FmhaConfig(64, 8, 128, 1024, num_splits=3)
    assert fmha_splits.max_workspace_size(config, 10, MULTIPROCESSORS) == 10 * 8 * 3 * (64 + 4)
    single = FmhaConfig(64, 8, 128, 1024, num_splits=1)
    assert fmha_splits.max_workspace_size(single, 10, MULTIPROCESSORS) == 0


class Recorder:
    """Stands for a warmed-up runner on a device of its own."""

    def __init__(self, config: FmhaConfig) -> None:
        self.config = config
        self.calls: list[tuple] = []
        self.multiprocessors = MULTIPROCESSORS
        self.absent = (torch.empty(0).int(), torch.empty(0, 8), torch.empty(0))
        self.no_lens, self.no_lse, self.no_workspace = self.absent

    def num_splits(self, tokens: int, rows: int, width: int) -> int:
        return self.config.num_splits

    def run(self, *arguments) -> None:
        self.calls.append(arguments)


@pytest.fixture
def launch(monkeypatch):
    """`launch(num_splits, compressed_lens, lse, workspace)` of three tokens, and its recorder."""
    from dsv4.ops import fmha_cuda

    tensors = (
        torch.zeros(3, 8, 64),
        torch.zeros(3, 70, 64),
        torch.zeros(2, 20, 64),
        torch.zeros(2).int(),
        torch.zeros(8),
        torch.zeros(3).int(),
        torch.zeros(3, 8, 64),
    )

    def call(num_splits, compressed_lens=None, lse=None, workspace=None):
        config = FmhaConfig(64, 8, 128, 1024, num_splits=num_splits)
        recorder = Recorder(config)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setitem(fmha_cuda._STATES, (id(config), -1), recorder)
        fmha_cuda.launch(config, *tensors, compressed_lens, lse, workspace)
        (arguments,) = recorder.calls
        assert arguments[:7] == tensors
        return recorder, arguments[7:]

    return call


def test_absent_arguments_are_empty_tensors(launch) -> None:
    recorder, rest = launch(1)
    assert rest == (*recorder.absent, 1, MULTIPROCESSORS)


def test_given_arguments_are_passed_on(launch) -> None:
    lens, lse, workspace = torch.zeros(3).int(), torch.zeros(3, 8), torch.zeros(3 * 8 * 2 * 68)
    _, rest = launch(2, lens, lse, workspace)
    assert rest == (lens, lse, workspace, 2, MULTIPROCESSORS)


@pytest.mark.parametrize("name", ["compressed_lens", "lse", "workspace"])
def test_an_argument_of_the_wrong_size_is_named(launch, name) -> None:
    good = {
        "compressed_lens": torch.zeros(3).int(),
        "lse": torch.zeros(3, 8),
        "workspace": torch.zeros(3 * 8 * 2 * 68),
    }
    bad = good | {name: good[name][:-1]}
    with pytest.raises(ValueError, match=name):
        launch(2, **bad)
