"""The model's configuration: what `config.json` says, validated."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from dsv4.model.layer_schedule import LayerKind

_RATIO_KINDS = {0: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}

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
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, applied to every rotation of a layer with a compressor and to no other layer.

    Attributes:
        factor: how far the context was stretched.
        original_max_position_embeddings: context length before stretching, in tokens.
        beta_fast, beta_slow: rotations over the original context between which frequencies are blended.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one DeepSeek-V4. Field names are the keys of the released `config.json`.

    Attributes:
        compress_ratios: original tokens per compressed entry of each main layer, 0 for a layer without compressor.
        layer_types: attention of each main layer, values of `LayerKind`. Derived from the ratios 0, 4 and 128 when
            left empty; other rates need it spelt out, because the kind, not the rate, decides overlap.
        rope_theta, compress_rope_theta: rotation base of SWA and MTP layers, of layers with a compressor.
        rope_scaling: YaRN of the layers with a compressor; None = none.
        linear_scheme: "fp8" = e4m3 weights with one scale per `fp8_block`; None = unquantised.
        expert_scheme: format of the routed experts: "fp4" (e2m1, one E8M0 scale per 32 inputs), "fp8" (as the linears),
            "nvfp4" (a checkpoint format; the loader dequantises it and builds the model with None), None = unquantised.
        scale_dtype: how FP8 block scales are stored, "e8m0" or "float32" (the Base checkpoints).
        fp8_block: (outputs, inputs) that share an FP8 scale.

    Raises:
        ValueError: a field is out of range; the message names it, its value and what was expected.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    compress_ratios: tuple[int, ...]
    layer_types: tuple[str, ...] = ()
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    num_nextn_predict_layers: int = 1
    linear_scheme: str | None = None
    expert_scheme: str | None = None
    scale_dtype: str = "e8m0"
    fp8_block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compress_ratios", tuple(self.compress_ratios))
        kinds = tuple(self.layer_types) or _kinds_of_ratios(self.compress_ratios)
        object.__setattr__(self, "layer_types", tuple(str(kind) for kind in kinds))
        object.__setattr__(self, "fp8_block", tuple(self.fp8_block))
        _check_ranges(self)
        _check_layers(self)
        _check_shapes(self)
        _check_quantisation(self)

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint declares a quantisation: activations and caches are then rounded as it was trained."""
        return self.linear_scheme is not None or self.expert_scheme is not None

    @classmethod
    def flash(cls) -> ModelConfig:
        """DeepSeek-V4-Flash as released: FP8 linears, FP4 experts, one MTP layer."""
        return cls(
            hidden_size=4096,
            num_hidden_layers=43,
            num_attention_heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            n_routed_experts=256,
            num_experts_per_tok=6,
            moe_intermediate_size=2048,
            vocab_size=129280,
            compress_ratios=(0, 0, *(4, 128) * 20, 4),
            routed_scaling_factor=1.5,
            rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=65536),
            linear_scheme="fp8",
            expert_scheme="fp4",
        )

    @classmethod
    def pro(cls) -> ModelConfig:
        """DeepSeek-V4-Pro as released: FP8 linears, FP4 experts, one MTP layer."""
        return cls(
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=128,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1536,
            o_groups=16,
            o_lora_rank=1024,
            sliding_window=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=1024,
            n_routed_experts=384,
            num_experts_per_tok=6,
            moe_intermediate_size=3072,
            vocab_size=129280,
            compress_ratios=(128, 128, *(4, 128) * 29, 4),
            routed_scaling_factor=2.5,
            rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=65536),
            linear_scheme="fp8",
            expert_scheme="fp4",
        )

    @classmethod
    def from_json(cls, source: str | PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Read `config.json` as released, or as transformers' `DeepseekV4Config` writes it.

        Unknown keys are ignored. A quantised file without `expert_dtype` (the first release) reads as FP4 experts; the
        loader decides from the tensors. transformers drops the MTP tensors, so its files read as having no MTP layers;
        DSpark drafts are another module than MTP: their presence is warned about and no MTP layer is declared.

        Args:
            source: path of the file, of its folder, or the parsed object.

        Raises:
            ValueError: not a JSON object, a key is missing or its value is not one this model has.
        """
        data = source if isinstance(source, Mapping) else _read_object(Path(source))
        return cls(**_fields_of(data))

    def to_json(self) -> dict[str, Any]:
        """Return the released `config.json` form, JSON types only; `from_json` reads it back to an equal config."""
        data: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            **{key: value for key, value in _FIXED.items() if key != "mlp_bias"},
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name in _PLAIN},
            "eos_token_id": _untuple(self.eos_token_id),
            "compress_ratios": [*self.compress_ratios, *[0] * self.num_nextn_predict_layers],
            "torch_dtype": "bfloat16",
        }
        if self.rope_scaling is not None:
            data["rope_scaling"] = {"type": "yarn", **asdict(self.rope_scaling)}
        if any(_RATIO_KINDS.get(r) != k for r, k in zip(self.compress_ratios, self.layer_types)):
            data["layer_types"] = list(self.layer_types)
            data["compress_rates"] = {
                kind: rate for kind, rate in zip(self.layer_types, self.compress_ratios) if rate
            }
        if self.linear_scheme is not None:
            data["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0" if self.scale_dtype == "e8m0" else None,
                "weight_block_size": list(self.fp8_block),
            }
            data["expert_dtype"] = {"fp8": "fp8", None: "bf16"}.get(self.expert_scheme, "fp4")
            if self.expert_scheme == "nvfp4":
                data["quantization_config"]["moe_quant_algo"] = "NVFP4"
        return data


# Keys copied between the file and the dataclass as they are.
_PLAIN = {
    f.name
    for f in fields(ModelConfig)
    if f.name
    not in {
        "compress_ratios",
        "layer_types",
        "rope_scaling",
        "eos_token_id",
        "linear_scheme",
        "expert_scheme",
        "scale_dtype",
        "fp8_block",
    }
}
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
)


def _read_object(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the keys of either file form to constructor arguments."""
    for key, expected in _FIXED.items():
        if data.get(key) is not None and data[key] != expected:
            raise ValueError(f"config {key} is {data[key]!r}, this model needs {expected!r}")
    missing = [key for key in _REQUIRED if data.get(key) is None]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}: not a DeepSeek-V4 config.json")
    values = {key: data[key] for key in _PLAIN if data.get(key) is not None}
    if isinstance(data.get("eos_token_id"), list):
        ids = tuple(data["eos_token_id"])
        values["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    elif "eos_token_id" in data:
        values["eos_token_id"] = data["eos_token_id"]
    values.update(_layers_of(data), **_rope_of(data), **_quantisation_of(data))
    return values


def _layers_of(data: Mapping[str, Any]) -> dict[str, Any]:
    layers, types = data["num_hidden_layers"], data.get("layer_types")
    if "compress_ratios" in data:
        ratios = list(data["compress_ratios"])
        mtp = data.get("num_nextn_predict_layers", 1)
        if any(key.startswith("dspark_") for key in data):
            warnings.warn(
                "this checkpoint drafts with DSpark, which is not MTP: its draft layers are ignored",
                stacklevel=4,
            )
            mtp = 0
        elif any(ratios[layers:]):
            raise ValueError(
                f"config compress_ratios of MTP layers must be 0, got {ratios[layers:]}"
            )
        values = {"num_nextn_predict_layers": mtp, "compress_ratios": tuple(ratios[:layers])}
        return {**values, "layer_types": tuple(types[:layers])} if types else values
    if types is None:
        raise ValueError(
            "config lacks compress_ratios (as released) and layer_types (transformers)"
        )
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates.update(data.get("compress_rates") or {})
    unknown = sorted(set(types) - set(LayerKind))
    if unknown:
        raise ValueError(f"config layer_types must be among {[*LayerKind]}, got {unknown}")
    values = {
        "num_nextn_predict_layers": 0,
        "layer_types": tuple(types),
        "compress_ratios": tuple(rates.get(kind, 0) for kind in types),
    }
    routers = data.get("mlp_layer_types")
    if routers is not None:
        hashed = routers.count("hash_moe")
        if list(routers) != ["hash_moe"] * hashed + ["moe"] * (layers - hashed):
            raise ValueError(
                "config mlp_layer_types must be hash_moe layers followed by moe layers, one per "
                f"layer, got {routers}"
            )
        values["num_hash_layers"] = hashed
    return values


def _rope_of(data: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if data.get("qk_rope_head_dim") is None:
        if data.get("partial_rotary_factor") is None:
            raise ValueError("config lacks qk_rope_head_dim")
        values["qk_rope_head_dim"] = int(data["head_dim"] * data["partial_rotary_factor"])
    scaling = data.get("rope_scaling")
    nested = data.get("rope_parameters")
    if nested is not None:
        compress = nested.get("compress", nested)
        scaling = compress
        if "main" in nested:
            values["rope_theta"] = nested["main"]["rope_theta"]
            values["compress_rope_theta"] = compress["rope_theta"]
    if scaling is None:
        return values
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return values
    if kind != "yarn" or scaling.get("attention_factor") not in (None, 1, 1.0):
        raise ValueError(
            "config rope_scaling must be yarn with attention_factor 1 (DeepSeek-V4 does not scale "
            f"the rotation), got {dict(scaling)}"
        )
    try:
        values["rope_scaling"] = RopeScaling(
            factor=float(scaling["factor"]),
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
            beta_fast=float(scaling.get("beta_fast", 32)),
            beta_slow=float(scaling.get("beta_slow", 1)),
        )
    except KeyError as error:
        raise ValueError(
            f"config rope_scaling lacks {error.args[0]}, got {dict(scaling)}"
        ) from None
    return values


def _quantisation_of(data: Mapping[str, Any]) -> dict[str, Any]:
    quantisation = data.get("quantization_config")
    if quantisation is None:
        # A dequantised copy may keep `expert_dtype`; without a quantisation it means nothing.
        return {"linear_scheme": None, "expert_scheme": None}
    method, fmt = quantisation.get("quant_method"), quantisation.get("fmt", "e4m3")
    if method != "fp8" or fmt != "e4m3":
        raise ValueError(
            "config quantization_config must have quant_method 'fp8' and fmt 'e4m3', got "
            f"{method!r} and {fmt!r}"
        )
    expert_dtype = data.get("expert_dtype", quantisation.get("expert_dtype", "fp4"))
    schemes = {"fp4": "fp4", "fp8": "fp8", "bf16": None, "bfloat16": None}
    if expert_dtype not in schemes:
        raise ValueError(f"config expert_dtype must be among {[*schemes]}, got {expert_dtype!r}")
    nvfp4 = quantisation.get("moe_quant_algo") == "NVFP4"
    return {
        "linear_scheme": "fp8",
        "expert_scheme": "nvfp4" if nvfp4 else schemes[expert_dtype],
        # None is what files with float32 scales say; a file that says nothing is detected by the loader.
        "scale_dtype": "float32" if quantisation.get("scale_fmt", "ue8m0") is None else "e8m0",
        "fp8_block": tuple(quantisation.get("weight_block_size") or (128, 128)),
    }


def _kinds_of_ratios(ratios: tuple[int, ...]) -> tuple[LayerKind, ...]:
    unknown = sorted(set(ratios) - set(_RATIO_KINDS))
    if unknown:
        raise ValueError(
            f"compress_ratios {unknown} do not tell CSA from HCA: give layer_types, or use the rates 0, 4 and 128"
        )
    return tuple(_RATIO_KINDS[ratio] for ratio in ratios)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"config {name} must be {expected}, got {value!r}")


def _check_ranges(config: ModelConfig) -> None:
    minimum = {name: 1 for name in (*_REQUIRED, "qk_rope_head_dim", "hc_mult", "hc_sinkhorn_iters")}
    minimum |= {"max_position_embeddings": 1, "num_hash_layers": 0, "num_nextn_predict_layers": 0}
    for name, least in minimum.items():
        value = getattr(config, name)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        _require(is_int and value >= least, name, value, f"an integer of at least {least}")
    for name in (
        "routed_scaling_factor",
        "swiglu_limit",
        "hc_eps",
        "rms_norm_eps",
        "rope_theta",
        "compress_rope_theta",
    ):
        value = getattr(config, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(is_number and value > 0, name, value, "a positive number")
    _require(config.n_shared_experts == 1, "n_shared_experts", config.n_shared_experts, "1")


def _check_layers(config: ModelConfig) -> None:
    layers = config.num_hidden_layers
    for name in ("compress_ratios", "layer_types"):
        found = len(getattr(config, name))
        _require(found == layers, name, f"{found} entries", f"one entry per layer ({layers})")
    unknown = sorted(set(config.layer_types) - set(LayerKind))
    _require(not unknown, "layer_types", unknown, f"among {[str(kind) for kind in LayerKind]}")
    for kind in LayerKind:
        rates = {r for r, k in zip(config.compress_ratios, config.layer_types) if k == kind}
        if kind is LayerKind.SWA:
            _require(
                rates <= {0}, "compress_ratios", sorted(rates), "0 in sliding_attention layers"
            )
        else:
            valid = len(rates) <= 1 and all(isinstance(r, int) and r > 0 for r in rates)
            _require(valid, "compress_ratios", sorted(rates), f"one positive rate in {kind} layers")
    _require(
        config.num_hash_layers <= layers,
        "num_hash_layers",
        config.num_hash_layers,
        f"at most num_hidden_layers ({layers})",
    )


def _check_shapes(config: ModelConfig) -> None:
    rope = config.qk_rope_head_dim
    _require(rope % 2 == 0, "qk_rope_head_dim", rope, "even")
    _require(
        rope <= config.head_dim, "qk_rope_head_dim", rope, f"at most head_dim ({config.head_dim})"
    )
    _require(
        config.index_head_dim >= rope,
        "index_head_dim",
        config.index_head_dim,
        f"at least qk_rope_head_dim ({rope})",
    )
    _require(
        config.num_attention_heads % config.o_groups == 0,
        "num_attention_heads",
        config.num_attention_heads,
        f"a multiple of o_groups ({config.o_groups})",
    )
    _require(
        config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        config.num_experts_per_tok,
        f"at most n_routed_experts ({config.n_routed_experts})",
    )
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        _require(scaling.factor >= 1, "rope_scaling.factor", scaling.factor, "at least 1")
        _require(
            scaling.original_max_position_embeddings > 0,
            "rope_scaling.original_max_position_embeddings",
            scaling.original_max_position_embeddings,
            "positive",
        )


def _check_quantisation(config: ModelConfig) -> None:
    schemes = (None, "fp4", "fp8", "nvfp4")
    _require(
        config.linear_scheme in (None, "fp8"),
        "linear_scheme",
        config.linear_scheme,
        "None or 'fp8'",
    )
    _require(
        config.expert_scheme in schemes, "expert_scheme", config.expert_scheme, f"among {schemes}"
    )
    _require(
        config.scale_dtype in ("e8m0", "float32"),
        "scale_dtype",
        config.scale_dtype,
        "'e8m0' or 'float32'",
    )
    block = config.fp8_block
    _require(
        len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block),
        "fp8_block",
        block,
        "two positive integers",
    )
    _require(
        config.linear_scheme is not None or config.expert_scheme is None,
        "expert_scheme",
        config.expert_scheme,
        "None when linear_scheme is None (no release quantises the experts alone)",
    )
    if config.expert_scheme in ("fp4", "nvfp4"):
        for name in ("hidden_size", "moe_intermediate_size"):
            value = getattr(config, name)
            _require(value % 32 == 0, name, value, "a multiple of 32 (FP4 scale groups)")
    if config.quantized:
        nope = config.head_dim - config.qk_rope_head_dim
        _require(
            nope % 64 == 0,
            "head_dim",
            config.head_dim,
            "64n + qk_rope_head_dim (FP8 groups of the KV cache)",
        )
        _require(
            config.index_head_dim >= 32 and config.index_head_dim.bit_count() == 1,
            "index_head_dim",
            config.index_head_dim,
            "a power of two of at least 32 (Hadamard, FP4 groups)",
        )


def _untuple(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
