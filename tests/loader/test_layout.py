"""The inventory against the published numbers and against the model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dsv4.config.model_config import ModelConfig
from dsv4.loader import inventory
from dsv4.loader.assemble import model_tensors
from dsv4.model.model import DeepseekV4
from tests.loader.tiny import FORMATS

pytestmark = pytest.mark.stage("loader")

PUBLISHED = {
    "flash": (ModelConfig.flash(), 69_187, 159_609_485_896),
    "pro": (ModelConfig.pro(), 145_116, 864_704_792_696),
}


@pytest.mark.parametrize("config, tensors, nbytes", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_counts_and_bytes_equal_the_published_index(
    config: ModelConfig, tensors: int, nbytes: int
) -> None:
    specs = inventory(config)
    assert len(specs) == tensors
    assert sum(spec.nbytes for spec in specs.values()) == nbytes


def test_dtypes_of_flash_equal_the_published_census() -> None:
    """Backbone counts of the DSpark census, less its three draft layers, plus one MTP layer."""
    specs = inventory(ModelConfig.flash())
    experts = {name for name in specs if ".ffn.experts." in name}
    counts = Counter(spec.dtype for name, spec in specs.items() if name not in experts)
    assert len(experts) == 44 * 256 * 3 * 2
    assert counts[torch.int64] == 3
    assert counts[torch.float8_e4m3fn] == counts[torch.float8_e8m0fnu] == 43 * 8 + 21 + 10


@pytest.mark.parametrize("config", [c for c, *_ in PUBLISHED.values()], ids=PUBLISHED.keys())
def test_meta_model_has_the_published_inventory(config: ModelConfig) -> None:
    _assert_model_matches(config)


@pytest.mark.parametrize("name", ["plain", "released", "base", "base-e8m0", "plain-experts"])
def test_tiny_model_has_the_inventory_of_its_format(name: str) -> None:
    _assert_model_matches(FORMATS[name])


def _assert_model_matches(config: ModelConfig) -> None:
    """Same names and shapes, quantised dtypes kept; plain floats may be widened to float32."""
    model = DeepseekV4(config, dtype=torch.bfloat16, device="meta")
    held = dict(model_tensors(model))
    specs = inventory(config)
    assert held.keys() == specs.keys()
    for name, spec in specs.items():
        assert tuple(held[name].shape) == spec.shape, name
        widened = spec.dtype == torch.bfloat16 and held[name].dtype == torch.float32
        assert held[name].dtype == spec.dtype or widened, name
