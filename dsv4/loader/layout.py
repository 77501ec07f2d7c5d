"""The tensors of a checkpoint in the released layout: names, dtypes, shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.config.layer_schedule import LayerKind, LayerSpec, layer_schedule
from dsv4.config.model_config import ModelConfig

EXPERT_MATRICES = ("w1", "w2", "w3")


@dataclass(frozen=True)
class TensorSpec:
    """Tensor that the released layout stores under a name.

    Attributes:
        dtype: float8_e8m0fnu is a byte b that means 2^(b - 127); int8 and uint8 are two e2m1 codes.
        shape: as stored.
        required: False for what a file may leave out.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    required: bool = True

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def inventory(
    config: ModelConfig, *, mtp_expert_scheme: str | None = "auto"
) -> dict[str, TensorSpec]:
    """Return every tensor of the released layout, in the order of the forward pass.

    Unquantised matrices count as bfloat16, the dtype of the releases; files may widen them.

    Args:
        config: the model.
        mtp_expert_scheme: format of the MTP layers' experts. "auto" = as the main layers, but "fp4"
            beside "nvfp4": NVIDIA requantised the main layers only.
    """
    return dict(tensor_specs(config, mtp_expert_scheme=mtp_expert_scheme))


def tensor_specs(
    config: ModelConfig, *, mtp_expert_scheme: str | None = "auto"
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the items of `inventory` one by one: a configuration may name any number of tensors."""
    if mtp_expert_scheme == "auto":
        mtp_expert_scheme = "fp4" if config.expert_scheme == "nvfp4" else config.expert_scheme
    names = _Names(config)
    yield names.one("embed.weight", torch.bfloat16, config.vocab_size, config.hidden_size)
    for layer in layer_schedule(config):
        yield from names.layer(layer, mtp_expert_scheme if layer.is_mtp else config.expert_scheme)
    yield names.one("norm.weight", torch.bfloat16, config.hidden_size)
    yield names.one("head.weight", torch.bfloat16, config.vocab_size, config.hidden_size)
    yield from names.head("")


def expert_name(prefix: str, expert: int, matrix: str, part: str) -> str:
    """Name of one routed expert's tensor: `layers.3.ffn.experts.17.w1.weight`."""
    return f"{prefix}.ffn.experts.{expert}.{matrix}.{part}"


_Named = tuple[str, TensorSpec]


class _Names:
    """The tensors of one model, box by box."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        e8m0 = config.scale_dtype == "e8m0"
        self.scale_dtype = torch.float8_e8m0fnu if e8m0 else torch.float32

    @staticmethod
    def one(name: str, dtype: torch.dtype, *shape: int, required: bool = True) -> _Named:
        return name, TensorSpec(dtype, shape, required)

    def matrix(self, name: str, outputs: int, inputs: int, scheme: str | None) -> Iterator[_Named]:
        """A projection [outputs, inputs] in one of the weight formats."""
        if scheme is None:
            yield self.one(f"{name}.weight", torch.bfloat16, outputs, inputs)
        elif scheme == "fp8":
            rows, columns = self.config.fp8_block
            yield self.one(f"{name}.weight", torch.float8_e4m3fn, outputs, inputs)
            yield self.one(
                f"{name}.scale", self.scale_dtype, -(-outputs // rows), -(-inputs // columns)
            )
        elif scheme == "fp4":
            yield self.one(f"{name}.weight", torch.int8, outputs, inputs // 2)
            yield self.one(f"{name}.scale", torch.float8_e8m0fnu, outputs, inputs // 32)
        else:
            yield self.one(f"{name}.weight", torch.uint8, outputs, inputs // 2)
            yield self.one(f"{name}.weight_scale", torch.float8_e4m3fn, outputs, inputs // 16)
            yield self.one(f"{name}.weight_scale_2", torch.float32)
            yield self.one(f"{name}.input_scale", torch.float32, required=False)

    def linear(self, name: str, outputs: int, inputs: int) -> Iterator[_Named]:
        yield from self.matrix(name, outputs, inputs, self.config.linear_scheme)

    def layer(self, layer: LayerSpec, expert_scheme: str | None) -> Iterator[_Named]:
        config, prefix = self.config, layer.prefix
        width = config.hidden_size
        if layer.is_mtp:
            yield from self.linear(f"{prefix}.e_proj", width, width)
            yield from self.linear(f"{prefix}.h_proj", width, width)
            yield self.one(f"{prefix}.enorm.weight", torch.bfloat16, width)
            yield self.one(f"{prefix}.hnorm.weight", torch.bfloat16, width)
        yield from self.sublayer(prefix, "attn")
        yield from self.attention(f"{prefix}.attn", layer)
        yield from self.sublayer(prefix, "ffn")
        yield from self.ffn(prefix, layer, expert_scheme)
        if layer.is_mtp:
            yield self.one(f"{prefix}.norm.weight", torch.bfloat16, width)
            yield from self.head(f"{prefix}.")

    def sublayer(self, prefix: str, kind: str) -> Iterator[_Named]:
        """Hyper-connection and norm in front of a sublayer."""
        streams, width = self.config.hc_mult, self.config.hidden_size
        mixes = streams * (streams + 2)
        yield self.one(f"{prefix}.hc_{kind}_fn", torch.float32, mixes, streams * width)
        yield self.one(f"{prefix}.hc_{kind}_base", torch.float32, mixes)
        yield self.one(f"{prefix}.hc_{kind}_scale", torch.float32, 3)
        yield self.one(f"{prefix}.{kind}_norm.weight", torch.bfloat16, width)

    def attention(self, prefix: str, layer: LayerSpec) -> Iterator[_Named]:
        config = self.config
        heads, head_dim = config.num_attention_heads, config.head_dim
        groups, rank = config.o_groups, config.o_lora_rank
        yield from self.linear(f"{prefix}.wq_a", config.q_lora_rank, config.hidden_size)
        yield self.one(f"{prefix}.q_norm.weight", torch.bfloat16, config.q_lora_rank)
        yield from self.linear(f"{prefix}.wq_b", heads * head_dim, config.q_lora_rank)
        yield from self.linear(f"{prefix}.wkv", head_dim, config.hidden_size)
        yield self.one(f"{prefix}.kv_norm.weight", torch.bfloat16, head_dim)
        yield self.one(f"{prefix}.attn_sink", torch.float32, heads)
        if layer.kind is not LayerKind.SWA:
            yield from self.compressor(f"{prefix}.compressor", layer, head_dim)
        if layer.kind is LayerKind.CSA:
            index_heads, index_dim = config.index_n_heads, config.index_head_dim
            yield from self.linear(
                f"{prefix}.indexer.wq_b", index_heads * index_dim, config.q_lora_rank
            )
            name = f"{prefix}.indexer.weights_proj.weight"
            yield self.one(name, torch.bfloat16, index_heads, config.hidden_size)
            yield from self.compressor(f"{prefix}.indexer.compressor", layer, index_dim)
        yield from self.linear(f"{prefix}.wo_a", groups * rank, heads * head_dim // groups)
        yield from self.linear(f"{prefix}.wo_b", config.hidden_size, groups * rank)

    def compressor(self, prefix: str, layer: LayerSpec, dim: int) -> Iterator[_Named]:
        columns = 2 * dim if layer.overlap else dim
        yield self.one(f"{prefix}.ape", torch.float32, layer.ratio, columns)
        yield self.one(f"{prefix}.wkv.weight", torch.bfloat16, columns, self.config.hidden_size)
        yield self.one(f"{prefix}.wgate.weight", torch.bfloat16, columns, self.config.hidden_size)
        yield self.one(f"{prefix}.norm.weight", torch.bfloat16, dim)

    def ffn(self, prefix: str, layer: LayerSpec, expert_scheme: str | None) -> Iterator[_Named]:
        config = self.config
        experts, width, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        yield self.one(f"{prefix}.ffn.gate.weight", torch.bfloat16, experts, width)
        if layer.hash_routed:
            shape = (config.vocab_size, config.num_experts_per_tok)
            yield self.one(f"{prefix}.ffn.gate.tid2eid", torch.int64, *shape)
        else:
            yield self.one(f"{prefix}.ffn.gate.bias", torch.float32, experts)
        shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
        for expert in range(experts):
            for matrix in EXPERT_MATRICES:
                name = f"{prefix}.ffn.experts.{expert}.{matrix}"
                yield from self.matrix(name, *shapes[matrix], expert_scheme)
        for matrix in EXPERT_MATRICES:
            yield from self.linear(f"{prefix}.ffn.shared_experts.{matrix}", *shapes[matrix])

    def head(self, prefix: str) -> Iterator[_Named]:
        """Hyper-connection that collapses the streams before the output norm."""
        streams, width = self.config.hc_mult, self.config.hidden_size
        yield self.one(f"{prefix}hc_head_fn", torch.float32, streams, streams * width)
        yield self.one(f"{prefix}hc_head_base", torch.float32, streams)
        yield self.one(f"{prefix}hc_head_scale", torch.float32, 1)
