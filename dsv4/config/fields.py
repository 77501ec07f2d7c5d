"""Declaration of `config.json`: every key that is read, its type, its range, and where it must be.

`FIELDS` is the whole file format but for the nested objects, whose keys are `YARN_FIELDS` and
`QUANTISATION_FIELDS`. Ranges are far beyond any released model; they bound the work that a hostile
file can ask for, and keep arithmetic on the values finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from dsv4.config.layer_schedule import LayerKind
from dsv4.quoting import quoted


class Form(StrEnum):
    """Layout of a `config.json`."""

    RELEASED = "released"  # DeepSeek's files: `compress_ratios`
    TRANSFORMERS = "transformers"  # what DeepseekV4Config writes: `layer_types`


class Kind(Protocol):
    """Set of values that a key may have."""

    @property
    def expected(self) -> str:
        """What is expected, to follow "must be"."""

    def accepts(self, value: object) -> bool:
        """Whether a parsed JSON value belongs to the set."""


@dataclass(frozen=True)
class Integer:
    """Integers `low .. high`; a bool is none."""

    low: int
    high: int

    @property
    def expected(self) -> str:
        return f"an integer in {self.low:,} .. {self.high:,}"

    def accepts(self, value: object) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.low <= value <= self.high


@dataclass(frozen=True)
class Real:
    """Numbers, integers included, in `low .. high`; never NaN."""

    low: float
    high: float

    @property
    def expected(self) -> str:
        return f"a number in {self.low:g} .. {self.high:g}"

    def accepts(self, value: object) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and self.low <= value <= self.high


@dataclass(frozen=True)
class OneOf:
    """A few strings, bools or numbers, compared with their types."""

    values: tuple[object, ...]

    @property
    def expected(self) -> str:
        if len(self.values) == 1:
            return repr(self.values[0])
        return f"one of {', '.join(map(repr, self.values))}"

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(known) and value == known for known in self.values)


@dataclass(frozen=True)
class ListOf:
    """Lists of at most `most` values of one kind."""

    item: Kind
    most: int

    @property
    def expected(self) -> str:
        return f"a list of at most {self.most:,}, each {self.item.expected}"

    def accepts(self, value: object) -> bool:
        is_list = isinstance(value, (list, tuple)) and len(value) <= self.most
        return is_list and all(map(self.item.accepts, value))


@dataclass(frozen=True)
class EitherOf:
    """One kind or another."""

    kinds: tuple[Kind, ...]

    @property
    def expected(self) -> str:
        return ", or ".join(kind.expected for kind in self.kinds)

    def accepts(self, value: object) -> bool:
        return any(kind.accepts(value) for kind in self.kinds)


@dataclass(frozen=True)
class Object:
    """JSON objects; `values`, if given, is the kind of every member."""

    values: Kind | None = None

    @property
    def expected(self) -> str:
        return "an object" + (f" of {self.values.expected}" if self.values else "")

    def accepts(self, value: object) -> bool:
        if not isinstance(value, dict):
            return False
        return self.values is None or all(map(self.values.accepts, value.values()))


@dataclass(frozen=True)
class Field:
    """One key.

    Attributes:
        kind: the values it may have.
        required: forms that must have it; where it is absent, the default of `ModelConfig` holds,
            which is transformers' own.
        nullable: null is a value; for other keys it is the same as absent.
    """

    kind: Kind
    required: frozenset[Form] = frozenset()
    nullable: bool = False


_EITHER = frozenset(Form)
_RELEASED = frozenset({Form.RELEASED})

_LAYERS = 4096
_WIDTH = Integer(1, 1 << 20)
_HEADS = Integer(1, 1 << 16)
_FACTOR = Real(1e-6, 1e6)
_EPSILON = Real(1e-30, 1.0)
_THETA = Real(2.0, 1e12)  # YaRN divides by the logarithm of the base, which is 0 for 1
_TOKEN = Integer(0, (1 << 31) - 1)
_RATE = Integer(1, 1 << 16)

FIELDS: dict[str, Field] = {
    "hidden_size": Field(_WIDTH, _EITHER),
    "num_hidden_layers": Field(Integer(1, _LAYERS), _EITHER),
    "num_attention_heads": Field(_HEADS, _EITHER),
    "head_dim": Field(_HEADS, _EITHER),
    "qk_rope_head_dim": Field(_HEADS),  # or `partial_rotary_factor`
    "q_lora_rank": Field(_WIDTH, _EITHER),
    "o_groups": Field(_HEADS, _EITHER),
    "o_lora_rank": Field(_WIDTH, _EITHER),
    "sliding_window": Field(Integer(1, 1 << 16), _EITHER),
    "index_n_heads": Field(_HEADS, _EITHER),
    "index_head_dim": Field(_HEADS, _EITHER),
    "index_topk": Field(_WIDTH, _EITHER),
    "n_routed_experts": Field(Integer(1, 1 << 16), _EITHER),
    "num_experts_per_tok": Field(Integer(1, 1 << 10), _EITHER),
    "moe_intermediate_size": Field(_WIDTH, _EITHER),
    "vocab_size": Field(Integer(1, 1 << 24), _EITHER),
    "routed_scaling_factor": Field(_FACTOR, _RELEASED),
    "swiglu_limit": Field(_FACTOR, _RELEASED),
    "hc_mult": Field(Integer(1, 64), _RELEASED),
    "hc_sinkhorn_iters": Field(Integer(1, 1000), _RELEASED),
    "hc_eps": Field(_EPSILON, _RELEASED),
    "rms_norm_eps": Field(_EPSILON, _RELEASED),
    "rope_theta": Field(_THETA, _RELEASED),
    "compress_rope_theta": Field(_THETA, _RELEASED),
    "max_position_embeddings": Field(Integer(1, 1 << 30), _RELEASED),
    "num_hash_layers": Field(Integer(0, _LAYERS), _RELEASED),
    "num_nextn_predict_layers": Field(Integer(0, 64), _RELEASED),
    "bos_token_id": Field(_TOKEN, _RELEASED, nullable=True),
    "eos_token_id": Field(EitherOf((_TOKEN, ListOf(_TOKEN, 1024))), _RELEASED, nullable=True),
    "compress_ratios": Field(ListOf(Integer(0, 1 << 16), 2 * _LAYERS), _RELEASED),
    "layer_types": Field(
        ListOf(OneOf(tuple(kind.value for kind in LayerKind)), _LAYERS),
        frozenset({Form.TRANSFORMERS}),
    ),
    "compress_rates": Field(Object(_RATE)),
    "mlp_layer_types": Field(ListOf(OneOf(("hash_moe", "moe")), _LAYERS)),
    "partial_rotary_factor": Field(Real(1e-6, 1.0)),
    "rope_scaling": Field(Object(), _RELEASED, nullable=True),  # or `rope_parameters`
    "rope_parameters": Field(Object()),
    "quantization_config": Field(Object()),
    "expert_dtype": Field(OneOf(("fp4", "fp8", "bf16", "bfloat16"))),
    # Settings that the architecture fixes: a file that says otherwise describes another model.
    "model_type": Field(OneOf(("deepseek_v4",))),
    "num_key_value_heads": Field(OneOf((1,))),
    "n_shared_experts": Field(OneOf((1,))),
    "scoring_func": Field(OneOf(("sqrtsoftplus",))),
    "topk_method": Field(OneOf(("noaux_tc",))),
    "norm_topk_prob": Field(OneOf((True,))),
    "hidden_act": Field(OneOf(("silu",))),
    "attention_bias": Field(OneOf((False,))),
    "tie_word_embeddings": Field(OneOf((False,))),
}

YARN_FIELDS: dict[str, Field] = {
    "factor": Field(Real(1.0, 1e6), _EITHER),
    "original_max_position_embeddings": Field(Real(1.0, float(1 << 30)), _EITHER),
    "beta_fast": Field(Real(1e-3, 1e6)),
    "beta_slow": Field(Real(1e-3, 1e6)),
    "attention_factor": Field(Real(1.0, 1.0)),  # DeepSeek-V4 does not scale the rotation
}

QUANTISATION_FIELDS: dict[str, Field] = {
    "quant_method": Field(OneOf(("fp8",)), _EITHER),
    "fmt": Field(OneOf(("e4m3",))),
    "expert_dtype": FIELDS["expert_dtype"],
    "scale_fmt": Field(OneOf(("ue8m0",)), nullable=True),
    "weight_block_size": Field(ListOf(Integer(1, 1 << 16), 2)),
}


def check_value(name: str, value: object, kind: Kind) -> None:
    """Refuse a value outside its kind.

    Raises:
        ValueError: names the key, what is expected and what was found.
    """
    if not kind.accepts(value):
        raise ValueError(f"config {name} must be {kind.expected}, got {quoted(value)}")


def check_object(data: dict[str, Any], fields: dict[str, Field], prefix: str = "") -> None:
    """Check the type and range of every declared key that a JSON object has.

    Args:
        prefix: where the object is in the file, as "rope_scaling.".

    Raises:
        ValueError: names the first key that does not fit.
    """
    for name, field in fields.items():
        value = data.get(name)
        if value is not None:
            check_value(f"{prefix}{name}", value, field.kind)


def missing_keys(
    data: dict[str, Any], fields: dict[str, Field], forms: Iterable[Form]
) -> list[str]:
    """Return the keys that an object of one of the forms must have, and lacks."""
    wanted = frozenset(forms)
    return [
        name
        for name, field in fields.items()
        if wanted <= field.required
        and (name not in data if field.nullable else data.get(name) is None)
    ]
