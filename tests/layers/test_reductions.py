"""Products of the model are summed in float32; the process keeps its settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from dsv4.engine.engine import Engine
from dsv4.engine.sampling_params import SamplingParams
from dsv4.layers.linear import Linear
from dsv4.layers.reductions import _SETTINGS, full_precision_sums
from tests.engine.tiny_model import tiny_model

MATMUL = torch.backends.cuda.matmul


def _settings() -> list[tuple[bool, bool]]:
    return [(getattr(MATMUL, name), getattr(MATMUL, f"{name}_split_k", True)) for name in _SETTINGS]


@pytest.fixture(params=[(True, True), (False, False), (False, True)])
def outside(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    before = _settings()
    for name in _SETTINGS:
        setattr(MATMUL, name, request.param)
    yield request.param
    for name, setting in zip(_SETTINGS, before):
        setattr(MATMUL, name, setting)


def test_every_product_of_a_model_is_summed_in_float32(outside: tuple[bool, bool]) -> None:
    model = tiny_model(0)
    seen = []

    def note(*_: object) -> None:
        seen.extend(_settings())

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, Linear)]
    model(torch.tensor([[1, 2, 3]]))
    engine = Engine(model, 1, 16, num_draft_tokens=1)
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=4))
    while engine.num_requests:
        engine.step()
    for hook in hooks:
        hook.remove()
    assert len(seen) > 100
    assert set(seen) == {(False, outside[1])}
    assert _settings() == [outside] * 2


def test_settings_come_back_after_an_error_and_after_the_last_thread(outside) -> None:
    started, leave = threading.Event(), threading.Event()

    @full_precision_sums
    def stay() -> None:
        started.set()
        leave.wait()

    @full_precision_sums
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    thread = threading.Thread(target=stay)
    thread.start()
    started.wait()
    with pytest.raises(RuntimeError):
        fail()
    assert _settings() == [(False, outside[1])] * 2, "another thread is still inside"
    leave.set()
    thread.join()
    assert _settings() == [outside] * 2
