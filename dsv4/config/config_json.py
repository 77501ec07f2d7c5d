"""`config.json`: the released form and the one transformers writes, to and from `ModelConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from dsv4.config.fields import (
    FIELDS,
    QUANTISATION_FIELDS,
    YARN_FIELDS,
    Form,
    OneOf,
    check_object,
    missing_keys,
)
from dsv4.config.layer_schedule import LayerKind
from dsv4.config.model_config import RATIO_KINDS, ModelConfig, RopeScaling
from dsv4.quoting import quoted

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
_FIXED = {
    name: field.kind.values[0]
    for name, field in FIELDS.items()
    if isinstance(field.kind, OneOf) and len(field.kind.values) == 1
}
_EXPERT_SCHEMES = {"fp4": "fp4", "fp8": "fp8", "bf16": None, "bfloat16": None}
_DEFAULT_RATES = {LayerKind.CSA.value: 4, LayerKind.HCA.value: 128}  # of transformers
_DEFAULT_HASH_LAYERS = 3  # of transformers, where the model has as many


def fields_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the keys of either file form to `ModelConfig` arguments.

    Raises:
        ValueError: a key is missing, of the wrong JSON type, out of range, or says that this is
            another model; the message names it.
    """
    data = dict(data)
    check_object(data, FIELDS)
    _check_complete(data)
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
    scaling = config.rope_scaling
    data: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        **_FIXED,
        **{name: getattr(config, name) for name in _COPIED},
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "compress_ratios": [*ratios, *[0] * config.num_nextn_predict_layers],
        "torch_dtype": "bfloat16",
        "rope_scaling": None if scaling is None else {"type": "yarn", **asdict(scaling)},
    }
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


def _check_complete(data: dict[str, Any]) -> None:
    """Refuse a file that lacks a key its form must have: a default would be another model's."""
    missing = missing_keys(data, FIELDS, Form)
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}: not a DeepSeek-V4 config.json")
    if "compress_ratios" in data:
        form = Form.RELEASED
    elif data.get("layer_types") is not None:
        form = Form.TRANSFORMERS
    else:
        raise ValueError("config has neither compress_ratios (as released) nor layer_types")
    missing = missing_keys(data, FIELDS, [form])
    if "rope_parameters" in data and "rope_scaling" in missing:
        missing.remove("rope_scaling")
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}, which {form} files have")
    if data.get("qk_rope_head_dim") is None and data.get("partial_rotary_factor") is None:
        raise ValueError("config lacks qk_rope_head_dim")


def _layers_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read `compress_ratios`: one rate per main layer, then one per draft layer."""
    layers, ratios = data["num_hidden_layers"], data["compress_ratios"]
    drafts = data["num_nextn_predict_layers"]
    if any(key.startswith("dspark_") for key in data):
        warnings.warn(
            "this checkpoint drafts with DSpark, which is not MTP: its draft layers are ignored",
            stacklevel=4,
        )
        drafts = 0
    elif any(ratios[layers:]):
        raise ValueError(
            f"config compress_ratios of MTP layers must be 0, got {quoted(ratios[layers:])}"
        )
    return {
        "num_nextn_predict_layers": drafts,
        "compress_ratios": tuple(ratios[:layers]),
        "layer_types": tuple((data.get("layer_types") or [])[:layers]),
    }


def _transformers_layers_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read transformers' `layer_types`, `compress_rates` and `mlp_layer_types`."""
    types = data["layer_types"]
    rates = _DEFAULT_RATES | (data.get("compress_rates") or {})
    values = {
        "num_nextn_predict_layers": 0,
        "layer_types": tuple(types),
        "compress_ratios": tuple(rates.get(kind, 0) for kind in types),
    }
    routers = data.get("mlp_layer_types")
    if routers is not None:
        hashed = routers.count("hash_moe")
        if routers != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed):
            raise ValueError(
                "config mlp_layer_types must be hash_moe layers followed by moe layers, one per "
                f"layer, got {quoted(routers)}"
            )
        values["num_hash_layers"] = hashed
    elif data.get("num_hash_layers") is None:
        values["num_hash_layers"] = min(_DEFAULT_HASH_LAYERS, len(types))
    return values


def _rope_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotation: bases, YaRN and the rotated part of a head."""
    values: dict[str, Any] = {}
    if data.get("qk_rope_head_dim") is None:
        values["qk_rope_head_dim"] = int(data["head_dim"] * data["partial_rotary_factor"])
    scaling, where = data.get("rope_scaling"), "rope_scaling"
    nested = data.get("rope_parameters")
    if nested is not None:
        parts = {"main": {}, "compress": nested} | {
            name: part for name, part in nested.items() if name in ("main", "compress")
        }
        for name, part in parts.items():
            if not isinstance(part, dict):
                raise ValueError(
                    f"config rope_parameters.{name} must be an object, got {quoted(part)}"
                )
        main, scaling, where = parts["main"], parts["compress"], "rope_parameters.compress"
        if "rope_theta" in main:
            values["rope_theta"] = main["rope_theta"]
        if "rope_theta" in scaling and scaling is not nested:
            values["compress_rope_theta"] = scaling["rope_theta"]
    return values | _yarn_of(scaling, where)


def _yarn_of(scaling: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Read YaRN from the object that the file keeps under `where`."""
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return {}
    if kind != "yarn":
        raise ValueError(f"config {where} must be yarn, got {quoted(kind)}")
    missing = missing_keys(scaling, YARN_FIELDS, Form)
    if missing:
        raise ValueError(f"config {where} lacks {', '.join(missing)}, got {quoted(scaling)}")
    check_object(scaling, YARN_FIELDS, f"{where}.")
    names = [f.name for f in fields(RopeScaling)]
    present = {name: scaling[name] for name in names if scaling.get(name) is not None}
    return {"rope_scaling": RopeScaling(**present)}


def _quantisation_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read which weights are quantised, and how."""
    quantisation = data.get("quantization_config")
    if quantisation is None:
        # A dequantised copy may keep `expert_dtype`; without a quantisation it means nothing.
        return {}
    check_object(quantisation, QUANTISATION_FIELDS, "quantization_config.")
    missing = missing_keys(quantisation, QUANTISATION_FIELDS, Form)
    if missing:
        raise ValueError(f"config quantization_config lacks {', '.join(missing)}")
    expert_dtype = data.get("expert_dtype") or quantisation.get("expert_dtype") or "fp4"
    nvfp4 = quantisation.get("moe_quant_algo") == "NVFP4"
    return {
        "linear_scheme": "fp8",
        "expert_scheme": "nvfp4" if nvfp4 else _EXPERT_SCHEMES[expert_dtype],
        "scale_dtype": "e8m0" if quantisation.get("scale_fmt", "ue8m0") else "float32",
        "fp8_block": tuple(quantisation.get("weight_block_size") or (128, 128)),
    }
