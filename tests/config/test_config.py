"""config.json as released, its variants, and what is refused."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from dsv4.config import json_file
from dsv4.config.fields import FIELDS, Form
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
        rope_scaling=RopeScaling(512.0, 4096, 16.0, 2.0),
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
        ({"hidden_size": "4096"}, "hidden_size must be an integer in 1 .. 1,048,576, got '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer"),
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer in 0 .. 4,096, got -1"),
        ({"num_hash_layers": 44}, r"num_hash_layers must be at most num_hidden_layers \(43\)"),
        ({"num_hidden_layers": 45}, r"compress_ratios must be one entry per layer \(45\)"),
        ({"num_hidden_layers": [43]}, "num_hidden_layers must be an integer in 1 .. 4,096, got"),
        (
            {"compress_ratios": [0] * 43 + [4]},
            r"compress_ratios of MTP layers must be 0, got \[4\]",
        ),
        ({"compress_ratios": [3] * 43}, "do not tell CSA from HCA: give layer_types"),
        (
            {"compress_ratios": 4},
            "compress_ratios must be a list of at most 8,192, each an integer",
        ),
        ({"layer_types": ["linear"] * 43}, "layer_types must be a list .* each one of 'sliding"),
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
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number in 1e-30 .. 1, got 0"),
        ({"rope_theta": "big"}, r"rope_theta must be a number in 2 .. 1e\+12, got 'big'"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be a number in .*, got inf"),
        ({"eos_token_id": 129280}, r"eos_token_id must be below vocab_size \(129280\)"),
        ({"model_type": "deepseek_v41"}, "model_type must be 'deepseek_v4', got 'deepseek_v41'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 1, got 8"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be 1, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sqrtsoftplus', got 'softmax'"),
        ({"expert_dtype": "int4"}, "expert_dtype must be one of 'fp4', 'fp8', .* got 'int4'"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config.quant_method must be 'fp8', got 'awq'",
        ),
        ({"quantization_config": {}}, "quantization_config lacks quant_method"),
        ({"quantization_config": []}, "quantization_config must be an object"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "fp8_block must be two positive integers",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling must be yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling lacks original_max"),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.3}},
            "rope_scaling.attention_factor must be a number in 1 .. 1, got 1.3",
        ),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"factor": "x"}},
            "rope_scaling.factor must be a number in 1 .. 1e\\+06, got 'x'",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_json(FLASH | changes)
    assert str(caught.value).startswith("config ")


@pytest.mark.parametrize(
    "key",
    [
        "routed_scaling_factor",
        "rope_scaling",
        "num_hash_layers",
        "swiglu_limit",
        "compress_rope_theta",
        "rope_theta",
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
        "rms_norm_eps",
        "max_position_embeddings",
        "eos_token_id",
        "num_nextn_predict_layers",
        "bos_token_id",
    ],
)
def test_what_every_release_says_is_never_filled_in(key: str) -> None:
    without = {name: value for name, value in FLASH.items() if name != key}
    with pytest.raises(ValueError, match=f"config lacks {key}, which released files have"):
        ModelConfig.from_json(without)
    if key not in ("rope_scaling", "eos_token_id", "bos_token_id"):
        with pytest.raises(ValueError, match=f"config lacks {key}, which"):
            ModelConfig.from_json(FLASH | {key: None})


def test_null_where_null_is_a_value() -> None:
    config = ModelConfig.from_json(
        FLASH | {"rope_scaling": None, "eos_token_id": None, "bos_token_id": None}
    )
    assert (config.rope_scaling, config.eos_token_id, config.bos_token_id) == (None, None, None)


def test_the_defaults_are_those_of_transformers() -> None:
    """Its form leaves out what equals its defaults, so ours for absent keys must be the same."""
    transformers = pytest.importorskip("transformers")
    sizes = {name: FLASH[name] for name, field in FIELDS.items() if field.required == set(Form)}
    layers = {"layer_types": [CSA.value] * FLASH["num_hidden_layers"], "qk_rope_head_dim": 64}
    written = transformers.DeepseekV4Config(**sizes, **layers).to_dict()
    assert ModelConfig.from_json(sizes | layers) == ModelConfig.from_json(written)
    short = {"num_hidden_layers": 2, "layer_types": [CSA.value] * 2}
    assert ModelConfig.from_json(sizes | layers | short).num_hash_layers == 2


# Finite arithmetic and bounded work: each of these loaded once, and failed or hung in a forward.
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": 10**7}, "sliding_window must be an integer in 1 .. 65,536"),
        (
            {"sliding_window": 4096, "max_position_embeddings": 4095},
            r"sliding_window must be at most max_position_embeddings \(4095\), got 4096",
        ),
        ({"sliding_window": 2**64}, "sliding_window must be an integer in"),
        ({"hc_sinkhorn_iters": 2**31 - 1}, "hc_sinkhorn_iters must be an integer in 1 .. 1,000"),
        ({"n_routed_experts": 10**9}, "n_routed_experts must be an integer in 1 .. 65,536"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be an integer in"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer in 1 .. 4,096"),
        ({"compress_ratios": [4] * 10**6}, "compress_ratios must be a list of at most 8,192"),
        ({"compress_ratios": [[0], 4, 128, 4, 0]}, "compress_ratios must be a list .* integer"),
        ({"compress_ratios": [{}] * 44}, "compress_ratios must be a list"),
        ({"compress_ratios": [True] * 44}, "compress_ratios must be a list"),
        ({"layer_types": [[]] * 43}, "layer_types must be a list"),
        ({"expert_dtype": []}, "expert_dtype must be one of .* got \\[\\]"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be an integer in .*, or a list"),
        ({"eos_token_id": "1"}, "eos_token_id must be an integer"),
        ({"compress_rope_theta": 1}, "compress_rope_theta must be a number in 2 .. "),
        ({"rope_theta": 10**400}, "rope_theta must be a number in 2 .. .*, got 1000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number in .*, got nan"),
        ({"rope_scaling": []}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling must be yarn, got"),
        ({"rope_parameters": {"main": 3}}, "rope_parameters.main must be an object, got 3"),
        ({"rope_parameters": {"compress": []}}, "rope_parameters.compress must be an object"),
        *(
            (
                {"rope_scaling": FLASH["rope_scaling"] | {key: value}},
                f"rope_scaling.{key} must be a number in",
            )
            for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
            for value in (float("inf"), 10**400, 0, True)
        ),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"beta_slow": 64}},
            r"rope_scaling.beta_fast must be at least beta_slow \(64\), got 32",
        ),
        (
            {"quantization_config": FLASH["quantization_config"] | {"weight_block_size": [0, 1]}},
            "quantization_config.weight_block_size must be a list of at most 2",
        ),
        (
            {"quantization_config": FLASH["quantization_config"] | {"scale_fmt": {}}},
            "quantization_config.scale_fmt must be 'ue8m0'",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_sizes_and_types_are_bounded_when_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config {message}") as caught:
        ModelConfig.from_json(FLASH | changes)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("fraction", [float("-inf"), float("nan"), 0, 1.5, "x", 10**400])
def test_partial_rotary_factor_has_a_range(fraction: object) -> None:
    data = {key: value for key, value in FLASH.items() if key != "qk_rope_head_dim"}
    with pytest.raises(ValueError, match="config partial_rotary_factor must be a number in"):
        ModelConfig.from_json(data | {"partial_rotary_factor": fraction})


@pytest.mark.parametrize("rates", [{HCA.value: [[]]}, {HCA.value: 0}, {HCA.value: 4.5}, []])
def test_compress_rates_are_integers(rates: object) -> None:
    data = {key: value for key, value in FLASH.items() if key != "compress_ratios"}
    layers = {"layer_types": [HCA.value] * 43, "compress_rates": rates}
    with pytest.raises(ValueError, match="config compress_rates must be an object of an integer"):
        ModelConfig.from_json(data | layers)


def test_a_rope_table_shorter_than_the_positions_is_warned_about(tmp_path: Path) -> None:
    short = FLASH | {"rope_scaling": FLASH["rope_scaling"] | {"factor": 8}}
    with pytest.warns(UserWarning, match="rope_scaling covers 524,288 positions .* 1,048,576"):
        assert ModelConfig.from_json(short).rope_scaling.factor == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig.from_json(FLASH)
        ModelConfig.from_json(FLASH | {"rope_scaling": None})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "[" * 100_000, '{"a": 1' * 9])
def test_json_that_is_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not valid JSON") as caught:
        ModelConfig.from_json(file)
    assert str(caught.value).startswith(str(file))


def test_files_that_would_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json is not a regular file"):
        ModelConfig.from_json(tmp_path)
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    (tmp_path / "long.json").write_text("{}" + " " * 9)
    with pytest.raises(ValueError, match=r"long\.json has 11 bytes, expected at most 10"):
        ModelConfig.from_json(tmp_path / "long.json")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"compress_ratios": 4}, "compress_ratios must be a tuple, got 4"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling must be a RopeScaling or None"),
        ({"hidden_size": 10**5000}, r"hidden_size must .*, got a value that cannot be printed"),
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
