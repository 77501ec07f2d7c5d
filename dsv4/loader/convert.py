"""Conversion of other layouts to the released one: names, fused experts, weight formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config.model_config import ModelConfig
from dsv4.loader.layout import expert_name
from dsv4.ops.quantize import dequantize_e2m1, dequantize_e4m3_blocks

# transformers' module names, and what `save_pretrained` makes of them: it maps its names back to
# the released ones, except that `model.` and four names below it stay and `kv_norm` becomes `norm`.
_TOP = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_COMPRESSOR = {
    "position_bias": "ape",
    "kv_proj.weight": "wkv.weight",
    "gate_proj.weight": "wgate.weight",
    "kv_norm.weight": "norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{
        f"{kind}_hc.{part}": f"hc_{kind}_{part}"
        for kind in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "attn.norm.weight": "attn.kv_norm.weight",
    "attn.sinks": "attn.attn_sink",
    "attn.q_a_proj.weight": "attn.wq_a.weight",
    "attn.q_a_norm.weight": "attn.q_norm.weight",
    "attn.q_b_proj.weight": "attn.wq_b.weight",
    "attn.kv_proj.weight": "attn.wkv.weight",
    "attn.o_a_proj.weight": "attn.wo_a.weight",
    "attn.o_b_proj.weight": "attn.wo_b.weight",
    "attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "attn.compressor.indexer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    **{f"attn.compressor.{k}": f"attn.compressor.{v}" for k, v in _COMPRESSOR.items()},
    **{
        f"attn.compressor.indexer.{k}": f"attn.indexer.compressor.{v}"
        for k, v in _COMPRESSOR.items()
    },
    "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
    "ffn.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "ffn.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "ffn.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}
_IN_LAYER = re.compile(r"(layers\.\d+)\.(.+)")
_FUSED = re.compile(r"(layers\.\d+)\.ffn\.experts\.(gate_up_proj|down_proj)")

Index = tuple[int | slice, ...]


def released_name(name: str) -> str:
    """Return the released name of a tensor that transformers named; any other name unchanged."""
    name = name.removeprefix("model.")
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return _TOP.get(name, name)
    layer, rest = match.groups()
    rest = re.sub(r"^self_attn\.", "attn.", rest)
    rest = re.sub(r"^mlp\.", "ffn.", rest)
    return f"{layer}.{_LAYER.get(rest, rest)}"


@dataclass(frozen=True)
class FusedExperts:
    """One of transformers' tensors that hold a matrix, or two, of every expert of a layer.

    Attributes:
        layer: prefix of the layer in the released layout.
        kind: `gate_up_proj`, [experts, 2 * inner, width] with the gate (w1) rows first; or
            `down_proj`, [experts, width, inner].
    """

    layer: str
    kind: str

    @classmethod
    def of(cls, name: str) -> FusedExperts | None:
        """Recognise a name that `released_name` returned; None for any other tensor."""
        match = _FUSED.fullmatch(name)
        return None if match is None else cls(*match.groups())

    def shape(self, config: ModelConfig) -> tuple[int, int, int]:
        """Return the shape it must have."""
        inner, width = config.moe_intermediate_size, config.hidden_size
        matrices = (width, inner) if self.kind == "down_proj" else (2 * inner, width)
        return (config.n_routed_experts, *matrices)

    def parts(self, config: ModelConfig) -> Iterator[tuple[str, Index]]:
        """Yield the released name of every matrix in it, and the index of the matrix."""
        inner = config.moe_intermediate_size
        for expert in range(config.n_routed_experts):
            if self.kind == "down_proj":
                yield expert_name(self.layer, expert, "w2", "weight"), (expert,)
            else:
                gate, up = (expert, slice(0, inner)), (expert, slice(inner, 2 * inner))
                yield expert_name(self.layer, expert, "w1", "weight"), gate
                yield expert_name(self.layer, expert, "w3", "weight"), up


def dequantize(
    weight: Tensor,
    sibling: Callable[[str], Tensor],
    block: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Decode a stored weight [outputs, inputs] of whichever format to a floating-point dtype.

    Args:
        weight: as stored; its dtype tells the format: float8_e4m3fn, int8 (e2m1 pairs with one E8M0
            scale per 32 inputs), uint8 (NVFP4: e2m1 pairs with one e4m3 scale per 16 inputs and one
            float32 scale per tensor), or a plain floating-point dtype.
        sibling: returns the tensor stored beside it under another last name, such as "scale".
        block: outputs and inputs per FP8 scale.
        dtype: of the result.
    """
    if weight.dtype == torch.float8_e4m3fn:
        return dequantize_e4m3_blocks(weight, sibling("scale"), block, dtype)
    if weight.dtype == torch.int8:
        return dequantize_e2m1(weight, sibling("scale"), dtype)
    if weight.dtype == torch.uint8:
        values = dequantize_e2m1(weight, sibling("weight_scale"), torch.float32)
        return values.mul_(sibling("weight_scale_2").float()).to(dtype)
    return weight.to(dtype)
