"""transformers' parameter names of DeepSeek-V4 turned into the official ones."""

from __future__ import annotations

import re

from torch import Tensor

_RENAMES = (
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"(attn|ffn)_hc\.", r"hc_\1_"),
    (r"self_attn\.compressor\.indexer\.q_b_proj", "attn.indexer.wq_b"),
    (r"self_attn\.compressor\.indexer\.(scorer\.)?weights_proj", "attn.indexer.weights_proj"),
    (r"self_attn\.compressor\.indexer\.", "attn.indexer.compressor."),
    (r"self_attn\.", "attn."),
    (r"compressor\.position_bias", "compressor.ape"),
    (r"compressor\.kv_proj", "compressor.wkv"),
    (r"compressor\.gate_proj", "compressor.wgate"),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"q_a_proj", "wq_a"),
    (r"q_a_norm", "q_norm"),
    (r"q_b_proj", "wq_b"),
    (r"attn\.kv_proj", "attn.wkv"),
    (r"o_a_proj", "wo_a"),
    (r"o_b_proj", "wo_b"),
    (r"attn\.sinks", "attn.attn_sink"),
    (r"mlp\.", "ffn."),
    (r"e_score_correction_bias", "bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
    (r"shared_experts\.up_proj", "shared_experts.w3"),
    (r"experts\.down_proj$", "experts.w2.weight"),
)


def official_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under official names; experts stay stacked."""
    out = {}
    for name, tensor in state.items():
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            out[stem + "w1.weight"], out[stem + "w3.weight"] = tensor.chunk(2, dim=1)
        else:
            out[name] = tensor
    return out
