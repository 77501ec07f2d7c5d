"""The whole model against transformers' DeepseekV4ForCausalLM, fp32, without quantisation."""

from __future__ import annotations

import pytest
import torch

from dsv4.config.model_config import ModelConfig
from dsv4.model.model import DeepseekV4
from tests.model.tiny import ids_away_from_ties, random_model, relative_error, tiny_config
from tests.reference.hf_names import official_tensors

SHAPES = {
    "every layer type": dict(kinds="SCHC", num_hash_layers=2),
    "published window and rates": dict(
        kinds="HCS", rates=(4, 128), sliding_window=128, num_hash_layers=0, length=300
    ),
    "more heads, one group": dict(
        kinds="CSH", num_attention_heads=16, o_groups=1, hc_mult=2, index_topk=3
    ),
    "CSA and HCA of one rate": dict(kinds="CHC", rates=(4, 4), sliding_window=5, index_topk=2),
    "odd rates": dict(kinds="SHCC", rates=(3, 7), sliding_window=6, index_topk=4),
    "more entries than are chosen from": dict(kinds="CCH", index_topk=64),
    "window of one": dict(kinds="SC", sliding_window=1),
    "no rotation scaling": dict(kinds="SCH", rope_scaling=None, swiglu_limit=10.0),
}


def transformers_model(config: ModelConfig, model: DeepseekV4):
    """transformers' model with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    data = config.to_json()
    for key in ("architectures", "compress_ratios", "torch_dtype", "num_hash_layers"):
        data.pop(key, None)
    kinds = [str(kind) for kind in config.layer_types]
    scaling = data.pop("rope_scaling", None)
    if scaling is not None:
        scaling = {"rope_type": scaling.pop("type"), **scaling}
    rates = {kind: rate for kind, rate in zip(kinds, config.compress_ratios) if rate}
    hashed = config.num_hash_layers
    hf = transformers.DeepseekV4ForCausalLM(
        transformers.DeepseekV4Config(
            **{
                **data,
                "layer_types": kinds,
                "compress_rates": {
                    "compressed_sparse_attention": 4,
                    "heavily_compressed_attention": 128,
                    **rates,
                },
                "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (len(kinds) - hashed),
                "rope_parameters": scaling,
                "attn_implementation": "eager",
            }
        )
    ).eval()
    ours = model.state_dict()
    with torch.no_grad():
        for name, tensor in official_tensors(hf.state_dict()).items():
            assert ours[name].shape == tensor.shape, name
            tensor.copy_(ours.pop(name))
    assert not ours, f"transformers has no {sorted(ours)}"
    return hf


@pytest.mark.stage("embedding")
@pytest.mark.stage("projections")
@pytest.mark.stage("moe")
@pytest.mark.stage("head")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape: dict, seed: int) -> None:
    shape = dict(shape)
    length = shape.pop("length", 90)
    config = tiny_config(**shape)
    model = random_model(config)
    hf = transformers_model(config, model)
    ids = ids_away_from_ties(model, 2, length)
    with torch.no_grad():
        expected = hf(input_ids=ids, use_cache=False).logits
    logits = model(ids)
    assert logits.dtype == torch.float32 and logits.shape == (2, length, config.vocab_size)
    error = relative_error(logits, expected)
    assert error < 2e-5, f"relative difference {error:.1e} at seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("repeat", range(5))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers_for_more_seeds(shape: dict, repeat: int, seed: int) -> None:
    torch.manual_seed(seed + repeat)
    test_logits_equal_transformers(shape, seed)


def test_every_parameter_matters(seed: int) -> None:
    """Zeroing any one parameter changes the logits: none can be forgotten without being noticed."""
    config = tiny_config("SCH", index_topk=3)
    model = random_model(config)
    ids = ids_away_from_ties(model, 1, 60)
    before = model(ids)
    for name, parameter in model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.zero_()
        changed = relative_error(model(ids), before)
        parameter.data.copy_(kept)
        assert changed > 1e-5, f"{name} has no influence"
