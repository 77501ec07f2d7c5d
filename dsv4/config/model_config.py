"""The model's configuration: what `config.json` says, validated."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from dsv4.config.fields import FIELDS, QUANTISATION_FIELDS, YARN_FIELDS, Object, check_value
from dsv4.config.layer_schedule import LayerKind, LayerSpec, layer_schedule
from dsv4.quoting import quoted

# The released files name a layer's attention by its rate alone.
RATIO_KINDS = {0: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, applied to every rotation of a layer with a compressor and to no other layer.

    Attributes:
        factor: how far the context was stretched.
        original_max_position_embeddings: context length before stretching, in tokens.
        beta_fast, beta_slow: rotations over the original context; frequencies between are blended.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one DeepSeek-V4; fields are named as in the released `config.json`.

    Attributes:
        compress_ratios: original tokens per compressed entry of each main layer, 0 for a layer
            without a compressor.
        layer_types: attention of each main layer, values of `LayerKind`. Left empty, it follows
            from the ratios 0, 4 and 128; other rates need it spelt out, because the kind, not the
            rate, decides overlap.
        rope_theta: rotation base of SWA and MTP layers.
        compress_rope_theta: rotation base of layers with a compressor.
        rope_scaling: YaRN of the layers with a compressor; None = none.
        linear_scheme: "fp8" = e4m3 weights with one scale per `fp8_block`; None = unquantised.
        expert_scheme: format of the routed experts. "fp4" = e2m1 with one E8M0 scale per 32 inputs,
            "nvfp4" = e2m1 with one e4m3 scale per 16 inputs and one fp32 scale, "fp8" = as the
            linears, None = unquantised. Beside "nvfp4" the MTP layers' experts are "fp4".
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
        for name in ("compress_ratios", "layer_types", "fp8_block"):
            value = getattr(self, name)
            _require(isinstance(value, (tuple, list)), name, value, "a tuple")
            object.__setattr__(self, name, tuple(value))
        check_value("compress_ratios", self.compress_ratios, FIELDS["compress_ratios"].kind)
        kinds = self.layer_types or _kinds_of_ratios(self.compress_ratios)
        object.__setattr__(self, "layer_types", tuple(str(kind) for kind in kinds))
        _check_ranges(self)
        _check_rope(self)
        _check_tokens(self)
        _check_layers(self)
        _check_shapes(self)
        _check_quantisation(self)

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint declares a quantisation, so that activations are rounded too."""
        return self.linear_scheme is not None or self.expert_scheme is not None

    @cached_property
    def schedule(self) -> tuple[LayerSpec, ...]:
        """Every layer in order, MTP layers last: `layer_schedule(self)`."""
        return layer_schedule(self)

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

        Unknown keys are ignored; a key that the form must have is never filled in. A quantised file
        without `expert_dtype` (the first release) reads as FP4 experts; the loader decides from the
        tensors. transformers drops the MTP tensors, so its files read as having no MTP layers.
        DSpark drafts are another module than MTP: their presence is warned about and no MTP layer
        is declared. Other engines tabulate the rotation over the stretched context: a table shorter
        than the positions is warned about.

        Args:
            source: path of the file, of its folder, or the parsed object.

        Raises:
            ValueError: not a JSON object, a key is missing or its value is not one this model has.
            OSError: the file cannot be read.
        """
        from dsv4.config.config_json import fields_from_json
        from dsv4.config.json_file import read_object

        if isinstance(source, Mapping):
            data = source
        else:
            folder = Path(source)
            data = read_object(folder / "config.json" if folder.is_dir() else folder)
        config = cls(**fields_from_json(data))
        _warn_of_short_rope(config)
        return config

    def to_json(self) -> dict[str, Any]:
        """Return the released `config.json` form; `from_json` reads it back to an equal config."""
        from dsv4.config.config_json import fields_to_json

        return fields_to_json(self)


def _warn_of_short_rope(config: ModelConfig) -> None:
    scaling = config.rope_scaling
    if scaling is None:
        return
    length = scaling.factor * scaling.original_max_position_embeddings
    if length < config.max_position_embeddings:
        warnings.warn(
            f"config rope_scaling covers {length:,.0f} positions (factor x "
            "original_max_position_embeddings), max_position_embeddings is "
            f"{config.max_position_embeddings:,}: engines that tabulate the rotation read past it",
            stacklevel=3,
        )


def _kinds_of_ratios(ratios: tuple[int, ...]) -> tuple[LayerKind, ...]:
    unknown = [ratio for ratio in ratios if ratio not in RATIO_KINDS]
    if unknown:
        raise ValueError(
            f"config compress_ratios {quoted(unknown)} do not tell CSA from HCA: give layer_types, "
            "or use the rates 0, 4 and 128"
        )
    return tuple(RATIO_KINDS[ratio] for ratio in ratios)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"config {name} must be {expected}, got {quoted(value)}")


def _check_ranges(config: ModelConfig) -> None:
    """Check every field by itself against the declaration of the file format."""
    for field in fields(config):
        declared, value = FIELDS.get(field.name), getattr(config, field.name)
        if declared is None or isinstance(declared.kind, Object):
            continue
        if value is not None or not declared.nullable:
            check_value(field.name, value, declared.kind)


def _check_rope(config: ModelConfig) -> None:
    scaling = config.rope_scaling
    if scaling is None:
        return
    _require(isinstance(scaling, RopeScaling), "rope_scaling", scaling, "a RopeScaling or None")
    for name, value in vars(scaling).items():
        check_value(f"rope_scaling.{name}", value, YARN_FIELDS[name].kind)
    expected = f"at least beta_slow ({scaling.beta_slow})"
    valid = scaling.beta_fast >= scaling.beta_slow
    _require(valid, "rope_scaling.beta_fast", scaling.beta_fast, expected)


def _check_tokens(config: ModelConfig) -> None:
    eos = config.eos_token_id
    ends = eos if isinstance(eos, (tuple, list)) else (eos,)
    for name, ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", ends)):
        valid = all(i is None or i < config.vocab_size for i in ids)
        _require(valid, name, getattr(config, name), f"below vocab_size ({config.vocab_size})")


def _check_layers(config: ModelConfig) -> None:
    layers, ratios, types = config.num_hidden_layers, config.compress_ratios, config.layer_types
    for name, entries in (("compress_ratios", ratios), ("layer_types", types)):
        expected = f"one entry per layer ({layers})"
        _require(len(entries) == layers, name, len(entries), expected)
    for kind in LayerKind:
        rates = sorted({ratio for ratio, name in zip(ratios, types) if name == kind})
        if kind is LayerKind.SWA:
            _require(rates in ([], [0]), "compress_ratios", rates, f"0 in {kind} layers")
        else:
            valid = len(rates) <= 1 and 0 not in rates
            _require(valid, "compress_ratios", rates, f"one positive rate in all {kind} layers")
    hashed = config.num_hash_layers
    _require(hashed <= layers, "num_hash_layers", hashed, f"at most num_hidden_layers ({layers})")
    window, most = config.sliding_window, config.max_position_embeddings
    expected = f"at most max_position_embeddings ({most})"
    _require(window <= most, "sliding_window", window, expected)


def _check_shapes(config: ModelConfig) -> None:
    rope, head, index = config.qk_rope_head_dim, config.head_dim, config.index_head_dim
    expected = f"even and at most head_dim ({head})"
    _require(rope % 2 == 0 and rope <= head, "qk_rope_head_dim", rope, expected)
    expected = f"at least qk_rope_head_dim ({rope})"
    _require(index >= rope, "index_head_dim", index, expected)
    heads, groups = config.num_attention_heads, config.o_groups
    expected = f"a multiple of o_groups ({groups})"
    _require(heads % groups == 0, "num_attention_heads", heads, expected)
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    expected = f"at most n_routed_experts ({experts})"
    _require(chosen <= experts, "num_experts_per_tok", chosen, expected)


def _check_quantisation(config: ModelConfig) -> None:
    for name, allowed in (
        ("linear_scheme", (None, "fp8")),
        ("expert_scheme", (None, "fp4", "fp8", "nvfp4")),
        ("scale_dtype", ("e8m0", "float32")),
    ):
        value = getattr(config, name)
        _require(value in allowed, name, value, f"one of {allowed}")
    block, linear, expert = config.fp8_block, config.linear_scheme, config.expert_scheme
    valid = len(block) == 2 and QUANTISATION_FIELDS["weight_block_size"].kind.accepts(block)
    _require(valid, "fp8_block", block, "two positive integers")
    valid = linear is not None or expert is None
    _require(valid, "expert_scheme", expert, "None where linear_scheme is None")
    if expert in ("fp4", "nvfp4"):
        for name in ("hidden_size", "moe_intermediate_size"):
            value = getattr(config, name)
            _require(value % 32 == 0, name, value, "a multiple of 32 (FP4 scale groups)")
    if config.quantized:
        head, rope, index = config.head_dim, config.qk_rope_head_dim, config.index_head_dim
        expected = f"64 n + qk_rope_head_dim ({rope}): KV is rounded in groups of 64"
        _require((head - rope) % 64 == 0, "head_dim", head, expected)
        expected = "a power of two of at least 32 (Hadamard, FP4 groups)"
        _require(index >= 32 and index.bit_count() == 1, "index_head_dim", index, expected)
