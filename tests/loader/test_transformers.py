"""What `DeepseekV4ForCausalLM.save_pretrained` of transformers writes, in all its spellings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsv4
from dsv4.config.model_config import ModelConfig, RopeScaling
from dsv4.loader import load_tensors
from dsv4.loader.assemble import model_tensors

pytestmark = pytest.mark.stage("loader")

transformers = pytest.importorskip("transformers")

SWA = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"

# By default names go back to the released ones, nearly; older files keep transformers' own.
SPELLINGS = pytest.mark.parametrize("original", [True, False], ids=["mapped", "own"])


@pytest.fixture
def model(seed: int) -> transformers.DeepseekV4ForCausalLM:
    config = transformers.DeepseekV4Config(
        vocab_size=50,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=24,
        n_routed_experts=5,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,  # all entries: transformers breaks ties of the index scores at random
        sliding_window=8,
        layer_types=[SWA, CSA, HCA, CSA],
        compress_rates={CSA: 2, HCA: 8},
        num_hash_layers=1,
        routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(50, 5).argsort(-1)[:, :2])
            elif "norm" in name:
                tensor.uniform_(0.6, 1.4)
            else:
                tensor.normal_(0, 0.2)
    return model


@SPELLINGS
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"], ids=["one file", "many files"])
def test_logits_equal(model, original: bool, shard_size: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, save_original_format=original, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
    ours = dsv4.load(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 50, (2, 37))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        actual = ours(ids)
    assert (actual - expected).norm() <= 2e-5 * expected.norm()


@SPELLINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_saved_ones(
    model, original: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model.to(dtype).save_pretrained(tmp_path, save_original_format=original)
    own = model.state_dict()
    found = load_tensors(tmp_path)[1]
    layer = "model.layers.1.self_attn.compressor."
    gate_up = own["model.layers.2.mlp.experts.gate_up_proj"]
    for name, expected in {
        "embed.weight": own["model.embed_tokens.weight"],
        "head.weight": own["lm_head.weight"],
        "hc_head_base": own["model.hc_head.hc_base"],
        "layers.0.attn.kv_norm.weight": own["model.layers.0.self_attn.kv_norm.weight"],
        "layers.1.attn.compressor.norm.weight": own[f"{layer}kv_norm.weight"],
        "layers.1.attn.indexer.compressor.ape": own[f"{layer}indexer.position_bias"],
        "layers.1.attn.indexer.compressor.norm.weight": own[f"{layer}indexer.kv_norm.weight"],
        "layers.2.ffn.experts.3.w1.weight": gate_up[3, :32],
        "layers.2.ffn.experts.3.w3.weight": gate_up[3, 32:],
        "layers.2.ffn.experts.4.w2.weight": own["model.layers.2.mlp.experts.down_proj"][4],
        "layers.3.ffn.gate.bias": own["model.layers.3.mlp.gate.e_score_correction_bias"],
    }.items():
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name
    assert all(torch.isfinite(t.float()).all() for _, t in model_tensors(dsv4.load(tmp_path)))


def test_configuration(model, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    expected = ModelConfig(
        vocab_size=50,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=24,
        n_routed_experts=5,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        sliding_window=8,
        layer_types=(SWA, CSA, HCA, CSA),
        compress_ratios=(0, 2, 8, 2),
        num_hash_layers=1,
        routed_scaling_factor=1.7,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=64),
        num_nextn_predict_layers=0,
    )
    assert ModelConfig.from_json(tmp_path) == expected


@pytest.mark.parametrize("config", [ModelConfig.flash(), ModelConfig.pro()], ids=["flash", "pro"])
def test_transformers_reads_our_config_and_we_read_its_own(config: ModelConfig) -> None:
    theirs = transformers.DeepseekV4Config.from_dict(config.to_json())
    back = ModelConfig.from_json(theirs.to_dict())
    fields = {"num_nextn_predict_layers": config.num_nextn_predict_layers}
    assert back.__class__(**{**vars(back), **fields}) == config
