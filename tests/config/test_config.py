"""config.json as released, its variants, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from dsv4.config.layer_schedule import LayerKind, layer_schedule
from dsv4.config.model_config import ModelConfig, RopeScaling
from tests.loader.tiny import CONFIG, FORMATS

pytestmark = pytest.mark.stage("loader")

SWA, CSA, HCA = LayerKind

# The keys of the released Flash config.json.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}


def test_released_flash() -> None:
    assert ModelConfig.from_json(FLASH) == ModelConfig.flash()
    assert ModelConfig.from_json(FLASH | {"expert_dtype": "fp4"}) == ModelConfig.flash()


@pytest.mark.parametrize(
    "config, kinds, first, last",
    [
        (ModelConfig.flash(), {SWA: 2, CSA: 21, HCA: 20}, SWA, CSA),
        (ModelConfig.pro(), {CSA: 30, HCA: 31}, HCA, CSA),
    ],
    ids=["flash", "pro"],
)
def test_schedule(
    config: ModelConfig, kinds: dict[LayerKind, int], first: LayerKind, last: LayerKind
) -> None:
    *main, mtp = layer_schedule(config)
    assert Counter(layer.kind for layer in main) == kinds
    assert (main[0].kind, main[-1].kind) == (first, last)
    assert {layer.kind: layer.ratio for layer in main}.items() <= {SWA: 0, CSA: 4, HCA: 128}.items()
    assert [layer.index for layer in main if layer.hash_routed] == [0, 1, 2]
    assert (mtp.kind, mtp.ratio, mtp.hash_routed, mtp.is_mtp) == (SWA, 0, False, True)
    assert (mtp.prefix, mtp.index) == ("mtp.0", len(main))
    assert (main[5].prefix, main[5].index, main[5].is_mtp) == ("layers.5", 5, False)


def test_the_kind_not_the_rate_decides_overlap() -> None:
    config = replace(CONFIG, compress_ratios=(0, 8, 2), layer_types=(SWA, CSA, HCA))
    assert [layer.overlap for layer in layer_schedule(config)] == [False, True, False, False]
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    "config",
    [ModelConfig.flash(), ModelConfig.pro(), *FORMATS.values()],
    ids=["flash", "pro", *FORMATS],
)
def test_json_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_unusual_values_round_trip() -> None:
    config = replace(
        ModelConfig.flash(),
        rope_scaling=RopeScaling(8.0, 4096, 16.0, 2.0),
        eos_token_id=(1, 7),
        bos_token_id=None,
        num_nextn_predict_layers=2,
        fp8_block=(32, 32),
    )
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_config_is_frozen_and_hashable() -> None:
    config = ModelConfig.flash()
    assert hash(config) == hash(ModelConfig.flash())
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1


def test_variants_of_the_quantisation() -> None:
    def read(**changes: Any) -> ModelConfig:
        quantisation = FLASH["quantization_config"] | changes.pop("quantization", {})
        return ModelConfig.from_json(FLASH | {"quantization_config": quantisation} | changes)

    base = read(expert_dtype="fp8")
    assert (base.linear_scheme, base.expert_scheme) == ("fp8", "fp8")
    nvfp4 = read(expert_dtype="fp4", quantization={"moe_quant_algo": "NVFP4", "group_size": 16})
    assert nvfp4.expert_scheme == "nvfp4"
    moved = read(quantization={"expert_dtype": "fp8"})  # where transformers moves the key
    assert moved.expert_scheme == "fp8"
    assert read(quantization={"scale_fmt": None}).scale_dtype == "float32"
    assert read(quantization={"weight_block_size": [32, 32]}).fp8_block == (32, 32)
    plain = ModelConfig.from_json(FLASH | {"quantization_config": None, "expert_dtype": "fp4"})
    assert not plain.quantized
    assert plain.expert_scheme is None
    assert base.quantized


def test_dspark_drafts_are_ignored_with_one_warning() -> None:
    ratios = [*FLASH["compress_ratios"], 0, 0]
    dspark = {"dspark_block_size": 5, "dspark_target_layer_ids": [40, 41, 42]}
    with pytest.warns(UserWarning, match="DSpark") as caught:
        config = ModelConfig.from_json(FLASH | dspark | {"compress_ratios": ratios})
    assert len(caught) == 1
    assert config == replace(ModelConfig.flash(), num_nextn_predict_layers=0)


def test_partial_rotary_factor_stands_in_for_the_rope_dimension() -> None:
    data = {key: value for key, value in FLASH.items() if key != "qk_rope_head_dim"}
    assert ModelConfig.from_json(data | {"partial_rotary_factor": 0.125}) == ModelConfig.flash()
    with pytest.raises(ValueError, match="config lacks qk_rope_head_dim"):
        ModelConfig.from_json(data)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": None}, "lacks hidden_size: not a DeepSeek-V4 config.json"),
        ({"hidden_size": "4096"}, "hidden_size must be an integer of at least 1, got '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer"),
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer of at least 0, got -1"),
        ({"num_hash_layers": 44}, r"num_hash_layers must be at most num_hidden_layers \(43\)"),
        ({"num_hidden_layers": 45}, r"compress_ratios must be one entry per layer \(45\)"),
        ({"num_hidden_layers": [43]}, "num_hidden_layers must be an integer, got"),
        (
            {"compress_ratios": [0] * 43 + [4]},
            r"compress_ratios of MTP layers must be 0, got \[4\]",
        ),
        ({"compress_ratios": [3] * 43}, "do not tell CSA from HCA: give layer_types"),
        ({"compress_ratios": 4}, "compress_ratios must be a list, got 4"),
        ({"layer_types": ["linear"] * 43}, "layer_types must be among"),
        ({"layer_types": [HCA.value] * 43}, "compress_ratios must be one positive rate in all"),
        ({"layer_types": [SWA.value] * 43}, "compress_ratios must be 0 in sliding_attention"),
        ({"o_groups": 7}, r"num_attention_heads must be a multiple of o_groups \(7\), got 64"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even and at most head_dim"),
        ({"qk_rope_head_dim": 1024}, "qk_rope_head_dim must be even and at most head_dim"),
        ({"index_head_dim": 32}, r"index_head_dim must be at least qk_rope_head_dim \(64\)"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two"),
        ({"head_dim": 500}, "head_dim must be 64 n"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok must be at most n_routed_experts"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size must be a multiple of 32"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be a positive number"),
        ({"eos_token_id": 129280}, r"eos_token_id must be below vocab_size \(129280\)"),
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41', DeepSeek-V4 has"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"expert_dtype": "int4"}, "expert_dtype must be one of fp4, fp8, .* got 'int4'"),
        ({"quantization_config": {"quant_method": "awq"}}, "must have quant_method 'fp8' and fmt"),
        ({"quantization_config": []}, "quantization_config must be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "fp8_block must be two positive integers",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling must be yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling lacks original_max"),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.3}},
            "rope_scaling must be yarn with attention_factor 1",
        ),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"factor": "x"}},
            "rope_scaling.factor must be a positive number",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_json(FLASH | changes)
    assert str(caught.value).startswith("config ")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"linear_scheme": "int8"}, "linear_scheme must be one of"),
        ({"scale_dtype": "bf16"}, "scale_dtype must be one of"),
        ({"linear_scheme": None}, "expert_scheme must be None where linear_scheme is None"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config {message}"):
        replace(ModelConfig.flash(), **changes)


def test_transformers_router_layout() -> None:
    layers = {"layer_types": [CSA.value] * 43, "mlp_layer_types": ["moe"] * 42 + ["hash_moe"]}
    data = {key: value for key, value in FLASH.items() if key != "compress_ratios"}
    with pytest.raises(ValueError, match="config mlp_layer_types must be hash_moe layers followed"):
        ModelConfig.from_json(data | layers)
    with pytest.raises(ValueError, match="neither compress_ratios"):
        ModelConfig.from_json(data)
