"""The mixture-of-experts layer: weights that are prepared in place, and leave it as released."""

from __future__ import annotations

import pytest
import torch

from dsv4.config.layer_schedule import LayerKind, LayerSpec
from dsv4.layers import moe as module
from dsv4.layers.moe import MoE
from dsv4.loader.assemble import load
from dsv4.loader.writer import save
from dsv4.ops.moe.op import FORMS
from dsv4.reference.model import ReferenceModel
from tests.model.tiny import quantized_config, random_model

pytestmark = pytest.mark.stage("moe")


@pytest.fixture(params=["sm_90a", "sm_100a"])
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def layer(arch, seed, monkeypatch) -> MoE:
    """One whose device is taken for a GPU with kernels."""
    monkeypatch.setattr(module, "prepared_forms", lambda *arguments: FORMS[arch])
    spec = LayerSpec(LayerKind.SWA, 0, False, 0, "layers.0")
    layer = MoE(quantized_config("S"), spec, torch.bfloat16)
    for name, parameter in layer.named_parameters():
        if parameter.element_size() == 1 and name.endswith("scale"):
            parameter.data.copy_(torch.exp2(torch.randint(-8, -3, parameter.shape).float()))
        elif parameter.dtype == torch.int8:
            parameter.data.copy_(torch.randint(-128, 128, parameter.shape))
        else:
            parameter.data.copy_(torch.randn(parameter.shape).clamp(-4, 4))
    return layer


def state_of(layer: MoE) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def test_prepared_weights_take_the_place_of_the_released(layer, arch) -> None:
    x, ids = torch.randn(2, 3, 128).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
    released, expected = state_of(layer), layer(x, ids)
    places = [parameter.data_ptr() for parameter in layer.parameters()]
    scales = layer.experts.w1.scale.clone()
    layer.prepare()
    # A row of the layer has one k block: no room for an exponent of its own.
    assert layer.form == ("packed" if arch == "sm_90a" else "tiled")
    assert places == [parameter.data_ptr() for parameter in layer.parameters()]
    # One block of codes may lie as it did; scales of either form do not.
    assert not torch.equal(layer.experts.w1.scale.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(layer(x, ids), expected)
    assert_same(layer.state_dict(), released)
    layer.prepare()
    layer.release()
    assert layer.form == "released"
    assert torch.equal(layer.experts.w1.scale.view(torch.uint8), scales.view(torch.uint8))


def layer_of(scheme: str | None, dtype: torch.dtype = torch.bfloat16) -> MoE:
    """With random experts."""
    spec = LayerSpec(LayerKind.SWA, 0, False, 0, "layers.0")
    layer = MoE(quantized_config("S", expert_scheme=scheme), spec, dtype)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.uint8:
            parameter.data.copy_(torch.randint(0, 256, parameter.shape))
        elif name.endswith("scale"):
            parameter.data.copy_(torch.exp2(torch.randint(-8, -3, parameter.shape).float()))
        else:
            parameter.data.copy_(torch.randn(parameter.shape).clamp(-4, 4))
    return layer


@pytest.mark.parametrize("scheme", ["nvfp4", None])
def test_experts_multiplied_in_bf16_are_prepared(scheme, monkeypatch, seed) -> None:
    monkeypatch.setattr(module, "prepared_forms", lambda *arguments: FORMS["sm_90a"])
    layer = layer_of(scheme)
    x, ids = torch.randn(2, 3, 128).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
    released, rounded = state_of(layer), layer(x, ids)
    # Hopper's kernels take activations as they are, and so does torch with weights for them.
    monkeypatch.setattr(module, "rounds_to_nvfp4", lambda form, x: False)
    expected = layer(x, ids)
    assert torch.equal(expected, rounded) == (scheme is None)
    monkeypatch.undo()
    monkeypatch.setattr(module, "prepared_forms", lambda *arguments: FORMS["sm_90a"])
    codes = layer.experts.w2.weight.clone()
    layer.prepare()
    assert layer.form == "packed"
    assert not torch.equal(layer.experts.w2.weight, codes)
    assert torch.equal(layer(x, ids), expected)
    assert_same(layer.state_dict(), released)
    whole = layer.experts.weights.global_scales
    if scheme == "nvfp4":
        assert whole.data_ptr() == layer.experts.w1.weight_scale_2.data_ptr()
        assert torch.equal(whole[2], layer.experts.w2.weight_scale_2)
        assert torch.equal(whole[5], layer.experts.w2.input_scale)
    else:
        # What follows a conversion is not left in an order that nothing reads.
        assert layer.float().form == "released"
        assert torch.equal(layer.experts.w2.weight, codes.float())
    layer.release()
    assert torch.equal(layer.experts.w2.weight, codes.to(layer.experts.w2.weight.dtype))


def test_nvfp4_experts_are_prepared_for_blackwell(monkeypatch, seed) -> None:
    monkeypatch.setattr(module, "prepared_forms", lambda *arguments: FORMS["sm_100a"])
    layer = layer_of("nvfp4")
    x, ids = torch.randn(2, 3, 128).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
    released, expected = state_of(layer), layer(x, ids)
    scales = layer.experts.w2.weight_scale.clone()
    layer.prepare()
    assert layer.form == "tiled"
    assert not torch.equal(layer.experts.w2.weight_scale.float(), scales.float())
    assert torch.equal(layer(x, ids), expected)
    assert_same(layer.state_dict(), released)
    layer.release()
    # Without scales of inputs these are not rounded.
    layer.experts.drop_input_scales_()
    assert not torch.equal(layer(x, ids), expected)
    assert not any(name.endswith("input_scale") for name in layer.state_dict())


@pytest.mark.parametrize("rounds", [True, False])
def test_nvfp4_layer_is_that_of_the_reference(rounds, monkeypatch, seed) -> None:
    """With the scales of inputs that checkpoints have, and as on Hopper."""
    layer = layer_of("nvfp4", torch.float32)
    for name, parameter in layer.named_parameters():
        if name.endswith("input_scale"):
            # Some blocks of x and most of h are above what the scales reach to.
            parameter.data.uniform_(2.0**-11, 2.0**-10)
    if not rounds:
        monkeypatch.setattr(module, "rounds_to_nvfp4", lambda form, x: False)
    config = quantized_config("S", expert_scheme="nvfp4")
    tensors = {f"ffn.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors["embed.weight"] = torch.zeros(1)
    reference = ReferenceModel(config, tensors, rounds_nvfp4_inputs=rounds)
    x, ids = torch.randn(2, 3, 128), torch.zeros(2, 3, dtype=torch.int64)
    found, expected = layer(x, ids), reference.moe("ffn.", x, ids)
    assert (found - expected).norm() / expected.norm() < (2e-2 if rounds else 1e-3)
    other = ReferenceModel(config, tensors, rounds_nvfp4_inputs=not rounds).moe("ffn.", x, ids)
    assert (found - other).norm() / other.norm() > 3e-2


def test_a_state_dict_is_loaded_into_released_weights(layer) -> None:
    released = state_of(layer)
    layer.prepare()
    changed = {name: tensor.flip(0) for name, tensor in released.items()}
    layer.load_state_dict(changed)
    assert layer.form == "released"
    assert_same(layer.state_dict(), changed)


def test_a_spread_of_scales_that_cannot_be_packed_is_kept_raw(layer, arch) -> None:
    layer.experts.w2.scale.data.view(torch.uint8)[3, 70, 1] = 90
    released = state_of(layer)
    x, ids = torch.randn(1, 2, 128).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    expected = layer(x, ids)
    layer.prepare()
    assert layer.form == ("raw" if arch == "sm_90a" else "tiled")
    assert torch.equal(layer(x, ids), expected)
    assert_same(layer.state_dict(), released)


def test_preparation_during_a_capture_is_refused(layer, monkeypatch) -> None:
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="run the layer once before the capture"):
        layer.prepare()


def test_a_saved_model_is_as_released(arch, monkeypatch, seed, tmp_path) -> None:
    monkeypatch.setattr(module, "prepared_forms", lambda *arguments: FORMS[arch])
    model = random_model(quantized_config("S"), torch.bfloat16)
    released = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layer = model.layers[0].ffn
    layer.prepare()
    form, codes = layer.form, layer.experts.w2.weight.clone()
    save(tmp_path / "saved", model.config, model)
    assert layer.form == form != "released"
    assert torch.equal(layer.experts.w2.weight, codes)
    other = load(tmp_path / "saved")
    # Loaded models are prepared at once.
    assert other.layers[0].ffn.form == form
    assert torch.equal(other.layers[0].ffn.experts.w2.weight, codes)
    assert_same(dict(other.state_dict()), released)
