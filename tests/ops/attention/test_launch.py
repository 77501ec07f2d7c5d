"""What a launch of the attention kernel passes on, and its workspaces; no GPU needed."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels.attention import launch_plan
from dsv4.kernels.attention.config import FmhaConfig
from dsv4.ops.attention import launch as attention_launch
from dsv4.ops.attention.sparse_fmha import SPARSE_FMHA
from dsv4.ops.runtime import workspace as workspaces
from tests.ops.fake_cuda import FakeCuda, Recorder

pytestmark = pytest.mark.stage("H")

NUM_SMS = 132
# Of three tokens of 8 heads in two splits.
WORKSPACE_SIZE = launch_plan.workspace_size(FmhaConfig(64, 8, 128, 1024), 3, 2)
RUNNER = 0  # the launch of a configuration does not look at the id


def tensors_of(tokens: int, *, heads: int = 8, head_dim: int = 64, rows: int = 70) -> tuple:
    return (
        torch.zeros(tokens, heads, head_dim).bfloat16(),
        torch.zeros(tokens, rows, head_dim).bfloat16(),
        torch.zeros(2, 20, head_dim).bfloat16(),
        torch.zeros(2).int(),
        torch.zeros(heads),
        torch.zeros(tokens).int(),
        torch.zeros(tokens, heads, head_dim).bfloat16(),
    )


@pytest.fixture
def launch(fake_cuda: FakeCuda):
    """`launch(num_splits, compressed_lens, lse, workspace)` of three tokens; returns what the
    kernel got after the tensors that every call has."""
    tensors = tensors_of(3)

    def call(num_splits, compressed_lens=None, lse=None, workspace=None):
        config = FmhaConfig(64, 8, 128, 1024, num_splits=num_splits)
        state = fake_cuda.state(SPARSE_FMHA, config)
        state.launch(*tensors, RUNNER, compressed_lens, lse, workspace)
        arguments = fake_cuda.kernel.calls.pop()
        assert arguments[:7] == tensors
        return arguments[7:]

    return call


def test_absent_arguments_are_empty_tensors(launch) -> None:
    lens, lse, workspace, *scalars = launch(1)
    assert (lens.shape, lens.dtype) == ((0,), torch.int32)
    assert (lse.shape, lse.dtype) == ((0, 8), torch.float32)
    assert (workspace.shape, workspace.dtype) == ((0,), torch.float32)
    assert scalars == [1, NUM_SMS]


def test_a_fixed_number_of_splits_holds_for_any_number_of_tokens(launch, monkeypatch) -> None:
    monkeypatch.setattr(launch_plan, "unsplit_from", lambda config, num_sms: 1)
    assert launch(2, workspace=torch.zeros(WORKSPACE_SIZE))[3] == 2
    assert launch(None)[3] == 1


def test_given_arguments_are_passed_on(launch) -> None:
    lens, lse, workspace = torch.zeros(3).int(), torch.zeros(3, 8), torch.zeros(WORKSPACE_SIZE)
    assert launch(2, lens, lse, workspace) == (lens, lse, workspace, 2, NUM_SMS)


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


def test_more_splits_than_lanes_are_refused(fake_cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="num_splits: got 33, at most 32 on a GPU"):
        fake_cuda.state(SPARSE_FMHA, FmhaConfig(64, 8, 128, 1024, num_splits=33))


@pytest.mark.parametrize("other", ["dtype", "current device", "device of q"])
def test_a_launch_passes_on_what_is_not_its_own(
    other, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 and tensors of another device go where they belong, with that device current."""
    config = FmhaConfig(64, 8, 128, 1024, num_splits=1)
    state = fake_cuda.state(SPARSE_FMHA, config)
    q = torch.zeros(3, 8, 64, dtype=torch.float32 if other == "dtype" else torch.bfloat16)
    rest = tuple(range(10))
    asked, passed_on, entered = [], Recorder(), []

    def launch_for(*arguments):
        asked.append(arguments)
        return passed_on, True

    @contextmanager
    def enter(where):
        entered.append(where)
        yield
        entered.append(None)

    monkeypatch.setattr("dsv4.ops.runtime.launch.launch_for", launch_for)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    index = 3 if other == "device of q" else q.get_device()
    current = 1 if other == "current device" else index
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current)
    state.device = SimpleNamespace(index=index)
    attention_launch.make_launch(state)(q, *rest)
    assert asked == [(SPARSE_FMHA, config, q)]
    assert passed_on.calls == [(q, *rest)]
    assert entered == [q.device, None]


# ---- workspaces and captures ----

# Splits its keys: one token leaves most SMs idle.
CONFIG = FmhaConfig(512, 64, 128, 1024, sink_mode="softmax")


def call(fake: FakeCuda, tokens: int, config: FmhaConfig = CONFIG) -> torch.Tensor:
    """Launch and return the workspace that the kernel got."""
    tensors = tensors_of(tokens, heads=64, head_dim=512, rows=500)
    fake.state(SPARSE_FMHA, config).launch(*tensors, RUNNER)
    *_, workspace, num_splits, _ = fake.kernel.calls.pop()
    assert num_splits > 1, "nothing to split, no workspace"
    return workspace


def test_one_eager_call_warms_captures_of_any_stream(fake_cuda: FakeCuda) -> None:
    """What a capture needs is there after one call of its shape, as everywhere in torch."""
    fake_cuda.stream = 7
    eager = call(fake_cuda, 4)
    assert fake_cuda.synchronised == [7], "a replay on another stream could see memory unzeroed"
    for stream in (7, 8):
        with fake_cuda.capture(stream):
            captured = call(fake_cuda, 4)
        assert captured is not eager, "a replay may run beside launches of any stream"
        assert captured.numel() >= launch_plan.workspace_size(CONFIG, 4, 2)
    # Eager calls of a known size neither allocate nor wait again.
    assert call(fake_cuda, 4) is eager
    assert fake_cuda.synchronised == [7]


def test_a_cold_capture_is_refused(fake_cuda: FakeCuda) -> None:
    """Without any call before it: compiling and zeroing memory are illegal in a capture."""
    with (
        pytest.raises(RuntimeError, match=r"cold and a CUDA graph .* once with tensors"),
        fake_cuda.capture(1),
    ):
        call(fake_cuda, 4)
    fake_cuda.state(SPARSE_FMHA, CONFIG)  # loaded, but never launched
    with pytest.raises(RuntimeError, match="cold and a CUDA graph"), fake_cuda.capture(1):
        call(fake_cuda, 4)


def test_what_a_graph_holds_stays_alive(fake_cuda: FakeCuda) -> None:
    """A workspace is outgrown with a fixed number of splits: graphs keep the address they have."""
    config = FmhaConfig(512, 64, 128, 1024, num_splits=4)
    call(fake_cuda, 2, config)
    call(fake_cuda, 8, config)  # outgrows a workspace that no graph holds
    assert workspaces._RETIRED == []
    with fake_cuda.capture(3):
        first = call(fake_cuda, 8, config)
    call(fake_cuda, 64, config)
    with fake_cuda.capture(3):
        second = call(fake_cuda, 64, config)
    assert second.numel() > first.numel()
    assert [first] == workspaces._RETIRED


def test_large_workspaces_are_not_kept_twice(fake_cuda: FakeCuda) -> None:
    """A captured launch takes a large workspace from the graph's memory: zeros, every time."""
    config = FmhaConfig(512, 64, 128, 1024, num_splits=4)
    eager = call(fake_cuda, 150, config)
    size = launch_plan.workspace_size(config, 150, 4)
    assert eager.numel() == size > workspaces.MOST_SPARE
    with fake_cuda.capture(3):
        one, other = call(fake_cuda, 150, config), call(fake_cuda, 150, config)
    assert one.numel() == other.numel() == size
    assert one is not other and one is not eager
    assert workspaces._CAPTURE[SPARSE_FMHA.name, None].numel() == 0


def test_a_growing_batch_outgrows_few_workspaces(fake_cuda: FakeCuda) -> None:
    """One token more at a time, with a fixed number of splits: sizes double."""
    config = FmhaConfig(512, 64, 128, 1024, num_splits=4)
    sizes = {call(fake_cuda, tokens, config).numel() for tokens in range(1, 100)}
    assert len(sizes) == 8


def test_streams_have_workspaces_of_their_own(fake_cuda: FakeCuda) -> None:
    fake_cuda.stream = 1
    one = call(fake_cuda, 4)
    fake_cuda.stream = 2
    assert call(fake_cuda, 4) is not one


def test_operators_have_workspaces_of_their_own(fake_cuda: FakeCuda) -> None:
    """Partial results of one lay where another one expects counts of zero."""
    first = call(fake_cuda, 4)
    device = fake_cuda.state(SPARSE_FMHA, CONFIG).device
    other = workspaces.workspace("other", device, 1, 1, pytest.fail)
    assert other is not first and workspaces.workspace("other", device, 1, 1, pytest.fail) is other
    with fake_cuda.capture(3):
        captured = call(fake_cuda, 4)
        assert workspaces.workspace("other", device, 1, 1, pytest.fail) is not captured


def test_warmup_covers_every_launch_of_so_many_tokens(fake_cuda: FakeCuda) -> None:
    """Both kernels of a configuration run once, and no later size allocates."""
    state = fake_cuda.state(SPARSE_FMHA, CONFIG)
    size = SPARSE_FMHA.max_workspace_size(CONFIG, 300, state.target)
    workspaces.reserve(SPARSE_FMHA.name, state.device, fake_cuda.stream, size)
    probes = list(SPARSE_FMHA.probes(CONFIG, state.target, state.device))
    assert [probe[-2:] for probe in probes] == [(1, NUM_SMS), (2, NUM_SMS)]
    assert all((probe[5] == -1).all() for probe in probes), "a probe attends to something"
    fake_cuda.synchronised.clear()
    for tokens in (1, 2, 5, 8):
        call(fake_cuda, tokens)
        with fake_cuda.capture(9):
            call(fake_cuda, tokens)
    assert fake_cuda.synchronised == []
