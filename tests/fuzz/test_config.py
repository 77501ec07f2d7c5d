"""Mutated `config.json` objects: each is read, or refused in one line that names a key."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from dsv4.config.model_config import ModelConfig
from dsv4.layers.rope import Rope
from tests.fuzz.values import assert_one_line, mutated
from tests.loader.tiny import CONFIG, FORMATS

LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def _transformers_form() -> dict[str, Any]:
    data = CONFIG.to_json()
    scaling = data.pop("rope_scaling")
    for key in ("compress_ratios", "num_hash_layers", "num_nextn_predict_layers"):
        data.pop(key)
    return data | {
        "layer_types": LAYERS,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": scaling | {"rope_type": "yarn", "rope_theta": 160000.0},
        },
    }


FORMS = {
    "released": FORMATS["released"].to_json(),
    "base": FORMATS["base"].to_json(),
    "transformers": _transformers_form(),
}


@pytest.mark.parametrize("rounds", [400, pytest.param(40_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_every_mutation_is_read_or_refused_by_name(form: str, rounds: int, seed: int) -> None:
    dice, outcomes = random.Random(seed), Counter()
    for _ in range(rounds):
        data = mutated(dice, FORMS[form])
        outcomes[_outcome(data)] += 1
    assert outcomes["read"] > rounds // 20
    assert outcomes["refused"] > rounds // 4
    assert outcomes.total() == rounds


def _outcome(data: dict[str, Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = ModelConfig.from_json(data)
            again = ModelConfig.from_json(json.loads(json.dumps(config.to_json())))
    except ValueError as error:
        message = str(error)
        assert message.startswith("config "), message
        assert_one_line(message)
        return "refused"
    assert again == config
    for spec in config.schedule[:2]:
        rotation = Rope.of_layer(config, spec).at(torch.tensor([0, 1, 10**6]))
        assert torch.view_as_real(rotation).isfinite().all()
    return "read"
