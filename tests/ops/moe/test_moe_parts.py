"""`moe` of more tokens than a launch takes: the parts give what the whole gives, and arguments are
looked at as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.ops.moe import op
from tests.ops.moe.test_moe import HIDDEN, Layer, case_of

pytestmark = pytest.mark.stage("moe")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


class OnGpu(Tensor):
    """Tensor that says that it is on one."""

    is_cuda = True


PARTS_TOKENS = 8  # two parts of as many as a launch takes


def in_parts(layer: Layer, **changes) -> Tensor:
    return layer(layer.x.as_subclass(OnGpu), **changes).as_subclass(Tensor)


@pytest.mark.parametrize("tokens", [7, PARTS_TOKENS])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["scores", "table"])
def test_more_tokens_than_a_launch_takes(is_hashed, tokens, seed, monkeypatch) -> None:
    monkeypatch.setattr(op, "MAX_TOKENS", PARTS_TOKENS // 2)
    layer = Layer(case_of(tokens), seed, is_hashed)
    live = torch.tensor([tokens - 2], dtype=torch.int32)
    out = torch.full_like(layer.x, torch.nan)
    wanted = layer(live_tokens=live)
    assert in_parts(layer, live_tokens=live, out=out) is not None
    assert torch.equal(out, wanted)
    assert torch.equal(in_parts(layer), layer())
    wide = in_parts(layer, out_dtype=torch.float32)
    assert torch.equal(wide, layer(out_dtype=torch.float32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        # Each part by itself would fit.
        (lambda x: {"input_ids": torch.zeros(12, dtype=torch.int64)}, ValueError, "input_ids: got"),
        (lambda x: {"out": x.new_empty(12, HIDDEN)}, ValueError, "out: got shape"),
        (lambda x: {"x_codes": x}, ValueError, "x_scale: got nothing beside x_codes"),
        (lambda x: {"input_ids": 5}, TypeError, "input_ids: got a int"),
        (lambda x: {"out_dtype": "bf16"}, TypeError, "out_dtype: got 'bf16'"),
    ],
)
def test_arguments_of_parts_are_looked_at_as_a_whole(
    change, error, message, seed, monkeypatch
) -> None:
    monkeypatch.setattr(op, "MAX_TOKENS", PARTS_TOKENS // 2)
    layer = Layer(case_of(PARTS_TOKENS), seed, is_hashed=True)
    with pytest.raises(error, match=f"^{message}"):
        in_parts(layer, **change(layer.x))


def test_an_output_over_rows_of_another_part_is_refused(seed, monkeypatch) -> None:
    monkeypatch.setattr(op, "MAX_TOKENS", PARTS_TOKENS // 2)
    layer = Layer(case_of(PARTS_TOKENS), seed)
    memory = layer.x.new_zeros(PARTS_TOKENS + 4, HIDDEN)
    memory[:PARTS_TOKENS] = layer.x
    layer.x = memory[:PARTS_TOKENS]
    with pytest.raises(ValueError, match=r"^out: shares memory with x"):
        in_parts(layer, out=memory[4:])
