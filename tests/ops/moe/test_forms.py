"""Forms that FP4 experts are prepared in: one group decides that of a whole layer."""

from __future__ import annotations

import pytest
import torch

from dsv4 import ops
from dsv4.kernels.moe.config import ExpertsConfig
from dsv4.kernels.moe.layer_config import MoeConfig
from dsv4.ops.moe.op import FORMS
from dsv4.ops.moe.weights import GatedWeights, choose_form, decoded, prepare_, restore_
from dsv4.testing.moe import MATRICES, Case, Inputs, Weight

pytestmark = pytest.mark.stage("moe")

CASE = Case(20, 256, 384, 8, 3)


def unchanged(experts: GatedWeights) -> None:
    pass


def move_k_block(experts: GatedWeights) -> None:
    """A row of an expert, of one matrix: a k block is 12 below the other."""
    scale = experts.w2_scale.view(torch.uint8)
    scale[2, 7, 4:8] = scale[2, 7, :4].max() - 12


def move_group(experts: GatedWeights) -> None:
    scale = experts.w1_scale.view(torch.uint8)
    scale[7, 9, 6] = scale[7, 9, 4] - 12


def empty_group(experts: GatedWeights) -> None:
    """0 and -0, and the exponent 1, the floor of the official quantiser."""
    experts.w3[1, 3, 80:96] = torch.tensor([0, -128, 8, -120] * 4, dtype=torch.int8)
    experts.w3_scale.view(torch.uint8)[1, 3, 5] = 1


def tiny_value(experts: GatedWeights) -> None:
    empty_group(experts)
    experts.w3[1, 3, 90] = 1


@pytest.mark.parametrize(
    ("change", "form"),
    [
        (unchanged, "row_packed"),
        (move_k_block, "packed"),
        (move_group, "raw"),
        (empty_group, "row_packed"),
        (tiny_value, "raw"),
    ],
)
def test_one_group_decides_the_form_of_a_layer(change, form, seed) -> None:
    inputs = Inputs.make(CASE, seed)
    experts, shared = gated(inputs.routed), gated(inputs.shared)
    change(experts)
    before = [tensor.view(torch.uint8).clone() for tensor in experts if tensor is not None]
    values = [values_of(*pair, "released") for pair in zip(experts.codes, experts.scales)]
    gate = torch.randn(CASE.experts, CASE.hidden) / 10

    def layer(form: str) -> torch.Tensor:
        options = {"top_k": CASE.top_k, "scaling": 1.7, "limit": 4.0, "form": form}
        bias = torch.zeros(CASE.experts)
        return ops.moe(inputs.x, gate, experts, shared, bias=bias, **options)

    expected = layer("released")
    assert choose_form(experts, FORMS["sm_90a"]) == form
    for weights in (experts, shared):
        prepare_(weights, form)
    assert torch.equal(layer(form), expected)
    found = [values_of(*pair, form) for pair in zip(experts.codes, experts.scales)]
    assert all(map(torch.equal, found, values))
    restore_(experts, form)
    after = [tensor.view(torch.uint8) for tensor in experts if tensor is not None]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["hidden", "inner"])
def test_rows_of_one_k_block_are_refused(name) -> None:
    sizes = {"hidden": 256, "inner": 256, "top_k": 2, name: 128}
    message = f"{name} must be at least 256 for row_packed scales, got 128"
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**sizes, scale_form="row_packed")
    with pytest.raises(ValueError, match=message):
        MoeConfig(**sizes, experts=4, form="row_packed")
    assert MoeConfig(**sizes, experts=4, expert_dtype="fp8", form="row_packed").inner


def values_of(codes: torch.Tensor, scale: torch.Tensor, form: str) -> torch.Tensor:
    return decoded(codes, scale, form, (128, 128), torch.float32)


def gated(weights: dict[str, Weight]) -> GatedWeights:
    parts = [weights[name] for name in MATRICES]
    return GatedWeights(*(p.codes for p in parts), *(p.scale for p in parts))
