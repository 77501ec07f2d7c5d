"""`config.json`: the released form and the one transformers writes, to and from `ModelConfig`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from os import PathLike
from pathlib import Path
from typing import Any

from dsv4.config.layer_schedule import LayerKind
from dsv4.config.model_config import RATIO_KINDS, ModelConfig, RopeScaling

# Settings the architecture fixes. A file that says otherwise describes another model.
_FIXED = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}

# Fields whose value in the file has another form than in the dataclass; the rest are copied.
_TRANSLATED = {
    "compress_ratios",
    "layer_types",
    "rope_scaling",
    "eos_token_id",
    "linear_scheme",
    "expert_scheme",
    "scale_dtype",
    "fp8_block",
}
_COPIED = [f.name for f in fields(ModelConfig) if f.name not in _TRANSLATED]
_DERIVABLE = {"qk_rope_head_dim"}
_REQUIRED = [
    f.name
    for f in fields(ModelConfig)
    if f.default is MISSING and f.name not in _TRANSLATED | _DERIVABLE
]

_EXPERT_SCHEMES = {"fp4": "fp4", "fp8": "fp8", "bf16": None, "bfloat16": None}


def read_object(path: str | PathLike[str]) -> dict[str, Any]:
    """Parse the JSON object in a file, or in the `config.json` of a folder."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON, or bytes that are not UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def fields_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the keys of either file form to `ModelConfig` arguments.

    Raises:
        ValueError: a key is missing, of the wrong JSON type, or says that this is another model.
    """
    for key, expected in _FIXED.items():
        if data.get(key) is not None and data[key] != expected:
            raise ValueError(f"config {key} is {data[key]!r}, DeepSeek-V4 has {expected!r}")
    missing = [key for key in _REQUIRED if data.get(key) is None]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}: not a DeepSeek-V4 config.json")
    values = {key: data[key] for key in _COPIED if data.get(key) is not None}
    for key in ("bos_token_id", "eos_token_id"):
        if key in data:
            values[key] = data[key]
    if isinstance(data.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(data["eos_token_id"])
    values |= _layers_of(data) if "compress_ratios" in data else _transformers_layers_of(data)
    return values | _rope_of(data) | _quantisation_of(data)


def fields_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the released form of a config; rates it cannot tell apart get `layer_types` beside."""
    eos = config.eos_token_id
    ratios, types = config.compress_ratios, config.layer_types
    data: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        **_FIXED,
        **{name: getattr(config, name) for name in _COPIED},
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "compress_ratios": [*ratios, *[0] * config.num_nextn_predict_layers],
        "torch_dtype": "bfloat16",
    }
    if config.rope_scaling is not None:
        data["rope_scaling"] = {"type": "yarn", **asdict(config.rope_scaling)}
    if any(RATIO_KINDS.get(ratio) != kind for ratio, kind in zip(ratios, types)):
        data["layer_types"] = list(types)
        data["compress_rates"] = {kind: ratio for ratio, kind in zip(ratios, types) if ratio}
    if config.linear_scheme is not None:
        data["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0" if config.scale_dtype == "e8m0" else None,
            "weight_block_size": list(config.fp8_block),
        }
        data["expert_dtype"] = {"fp8": "fp8", None: "bf16"}.get(config.expert_scheme, "fp4")
        if config.expert_scheme == "nvfp4":
            data["quantization_config"]["moe_quant_algo"] = "NVFP4"
    return data


def _typed(data: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return `data[key]`, the default where it is absent or null; refuse another JSON type."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        expected = {list: "a list", dict: "an object", int: "an integer"}[kind]
        raise ValueError(f"config {key} must be {expected}, got {value!r}")
    return value


def _layers_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read `compress_ratios`: one rate per main layer, then one per draft layer."""
    layers = _typed(data, "num_hidden_layers", int)
    ratios, types = _typed(data, "compress_ratios", list, []), _typed(data, "layer_types", list, [])
    drafts = _typed(data, "num_nextn_predict_layers", int, 1)
    if any(key.startswith("dspark_") for key in data):
        warnings.warn(
            "this checkpoint drafts with DSpark, which is not MTP: its draft layers are ignored",
            stacklevel=4,
        )
        drafts = 0
    elif any(ratios[layers:]):
        raise ValueError(f"config compress_ratios of MTP layers must be 0, got {ratios[layers:]}")
    return {
        "num_nextn_predict_layers": drafts,
        "compress_ratios": tuple(ratios[:layers]),
        "layer_types": tuple(types[:layers]),
    }


def _transformers_layers_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read transformers' `layer_types`, `compress_rates` and `mlp_layer_types`."""
    types = _typed(data, "layer_types", list)
    if types is None:
        raise ValueError("config has neither compress_ratios (as released) nor layer_types")
    rates = {LayerKind.CSA.value: 4, LayerKind.HCA.value: 128}
    rates |= _typed(data, "compress_rates", dict, {})
    values = {
        "num_nextn_predict_layers": 0,
        "layer_types": tuple(str(kind) for kind in types),
        "compress_ratios": tuple(rates.get(str(kind), 0) for kind in types),
    }
    routers = _typed(data, "mlp_layer_types", list)
    if routers is not None:
        hashed = routers.count("hash_moe")
        if routers != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
            raise ValueError(
                "config mlp_layer_types must be hash_moe layers followed by moe layers, one per "
                f"layer, got {routers}"
            )
        values["num_hash_layers"] = hashed
    return values


def _rope_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotation: bases, YaRN and the rotated part of a head."""
    values: dict[str, Any] = {}
    if data.get("qk_rope_head_dim") is None:
        fraction = data.get("partial_rotary_factor")
        if not isinstance(fraction, (int, float)):
            raise ValueError("config lacks qk_rope_head_dim")
        values["qk_rope_head_dim"] = int(_typed(data, "head_dim", int) * fraction)
    scaling = _typed(data, "rope_scaling", dict)
    nested = _typed(data, "rope_parameters", dict)
    if nested is not None:
        main, scaling = _typed(nested, "main", dict, {}), _typed(nested, "compress", dict, nested)
        if "rope_theta" in main:
            values["rope_theta"] = main["rope_theta"]
        if "rope_theta" in scaling and scaling is not nested:
            values["compress_rope_theta"] = scaling["rope_theta"]
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return values
    if kind != "yarn" or scaling.get("attention_factor") not in (None, 1):
        raise ValueError(
            "config rope_scaling must be yarn with attention_factor 1 (DeepSeek-V4 does not scale "
            f"the rotation), got {scaling}"
        )
    names = [f.name for f in fields(RopeScaling)]
    absent = [name for name in names[:2] if name not in scaling]
    if absent:
        raise ValueError(f"config rope_scaling lacks {', '.join(absent)}, got {scaling}")
    present = {name: scaling[name] for name in names if scaling.get(name) is not None}
    return {**values, "rope_scaling": RopeScaling(**present)}


def _quantisation_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read which weights are quantised, and how."""
    quantisation = _typed(data, "quantization_config", dict)
    if quantisation is None:
        # A dequantised copy may keep `expert_dtype`; without a quantisation it means nothing.
        return {}
    method, fmt = quantisation.get("quant_method"), quantisation.get("fmt", "e4m3")
    if (method, fmt) != ("fp8", "e4m3"):
        raise ValueError(
            "config quantization_config must have quant_method 'fp8' and fmt 'e4m3', got "
            f"{method!r} and {fmt!r}"
        )
    expert_dtype = data.get("expert_dtype", quantisation.get("expert_dtype", "fp4"))
    if expert_dtype not in _EXPERT_SCHEMES:
        expected = ", ".join(_EXPERT_SCHEMES)
        raise ValueError(f"config expert_dtype must be one of {expected}, got {expert_dtype!r}")
    nvfp4 = quantisation.get("moe_quant_algo") == "NVFP4"
    return {
        "linear_scheme": "fp8",
        "expert_scheme": "nvfp4" if nvfp4 else _EXPERT_SCHEMES[expert_dtype],
        "scale_dtype": "e8m0" if quantisation.get("scale_fmt", "ue8m0") else "float32",
        "fp8_block": tuple(_typed(quantisation, "weight_block_size", list, [128, 128])),
    }
