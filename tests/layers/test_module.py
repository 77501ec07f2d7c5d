"""Conversions of a model: numbers change their dtype, codes and what is always fp32 do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from dsv4.model.model import DeepseekV4
from tests.model.tiny import quantized_config, random_model, tiny_config, with_mtp

CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "to device and dtype": (lambda model: model.to("cpu", torch.bfloat16), torch.bfloat16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "half": (lambda model: model.half(), torch.float16),
    "double": (lambda model: model.double(), torch.float64),
    "type": (lambda model: model.type(torch.bfloat16), torch.bfloat16),
    "float": (lambda model: model.float(), torch.float32),
}
CONFIGS = {
    "plain": with_mtp(tiny_config("SCH")),
    "fp4": with_mtp(quantized_config("SCH")),
    "fp8": replace(quantized_config("SCH"), expert_scheme="fp8", scale_dtype="float32"),
}


@pytest.mark.parametrize("convert, dtype", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_converted_model_is_one_built_with_the_dtype(
    convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype, config, seed: int
) -> None:
    model = random_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = convert(model)
    expected = DeepseekV4(config, dtype=dtype, device="meta").state_dict()
    assert converted.dtype == dtype
    for name, tensor in converted.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(_bits(tensor), _bits(before[name].to(tensor.dtype))), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_part_of_a_model_keeps_its_codes_too(seed: int) -> None:
    layer = random_model(CONFIGS["fp4"]).layers[0]
    formats = {name: tensor.dtype for name, tensor in layer.state_dict().items()}
    assert torch.float8_e4m3fn in formats.values() and torch.int8 in formats.values()
    converted = formats | {"ffn.gate.weight": torch.float16}  # plain, as the activations
    assert {name: t.dtype for name, t in layer.half().state_dict().items()} == converted


def test_a_converted_model_computes_as_one_that_was_built_so(seed: int) -> None:
    config = CONFIGS["fp4"]
    model = random_model(config)
    built = DeepseekV4(config, dtype=torch.bfloat16)
    built.load_state_dict(model.state_dict())
    ids = torch.randint(0, config.vocab_size, (1, 12))
    assert torch.equal(model.to(torch.bfloat16)(ids), built(ids))


def test_moving_keeps_every_format() -> None:
    model = random_model(CONFIGS["fp4"])
    formats = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    moved = model.to("meta").state_dict()
    assert {name: tensor.dtype for name, tensor in moved.items()} == formats
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
