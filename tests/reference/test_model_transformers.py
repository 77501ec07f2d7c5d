"""The reference model against an independent implementation, transformers' DeepseekV4."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4.reference.model import ReferenceModel
from tests.reference.hf_names import official_tensors

pytestmark = pytest.mark.stage("reference")

SWA = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
SHAPES = {
    "every layer type": dict(layers=[SWA, CSA, HCA, CSA], rates=(4, 16), hash_layers=1),
    "compressed from the start": dict(layers=[HCA, CSA], rates=(4, 128), hash_layers=0, length=300),
    "HCA at the rate of CSA": dict(layers=[SWA, HCA, CSA], rates=(4, 4), hash_layers=2),
}


def _build(shape: dict, yarn: bool):
    transformers = pytest.importorskip("transformers")
    layers, (csa, hca) = shape["layers"], shape["rates"]
    scaling = SimpleNamespace(
        factor=16.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1
    )
    fields = dict(
        vocab_size=61,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        num_experts_per_tok=2,
        n_routed_experts=5,
        sliding_window=12,
        o_groups=2,
        o_lora_rank=16,
        # Few heads often all score 0, and transformers breaks such ties at random.
        index_n_heads=24,
        index_head_dim=32,
        index_topk=5,
        swiglu_limit=0.4,
        routed_scaling_factor=1.7,
        qk_rope_head_dim=16,
    )
    hf = transformers.DeepseekV4Config(
        **fields,
        layer_types=layers,
        compress_rates={CSA: csa, HCA: hca},
        mlp_layer_types=["hash_moe"] * shape["hash_layers"]
        + ["moe"] * (len(layers) - shape["hash_layers"]),
        rope_parameters={"rope_type": "yarn", **vars(scaling)} if yarn else None,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV4ForCausalLM(hf).eval()
    _randomise(model, fields["n_routed_experts"])
    config = SimpleNamespace(
        **fields,
        hc_mult=hf.hc_mult,
        hc_sinkhorn_iters=hf.hc_sinkhorn_iters,
        hc_eps=hf.hc_eps,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_theta,
        compress_rope_theta=hf.compress_rope_theta,
        rope_scaling=scaling if yarn else None,
        num_nextn_predict_layers=0,
        linear_scheme=None,
        expert_scheme=None,
        fp8_block=(128, 128),
    )
    return model, ReferenceModel(config, official_tensors(model.state_dict()))


@torch.no_grad()
def _randomise(model: torch.nn.Module, experts: int) -> None:
    """Every parameter away from zero and one: a term that is left out must show."""
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.stack([torch.randperm(experts)[:2] for _ in range(len(tensor))]))
        elif "norm" in name:
            tensor.uniform_(0.6, 1.4)
        elif name.endswith(("sinks", "base", "scale", "bias")):
            tensor.normal_(0.3, 0.7)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


@pytest.mark.parametrize("yarn", [True, False], ids=["yarn", "plain"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape: dict, yarn: bool, seed: int) -> None:
    model, reference = _build(shape, yarn)
    errors = []
    # Where two scores nearly tie the two may choose differently: rare, so two of three draws agree.
    for _ in range(3):
        ids = torch.randint(0, 61, (2, shape.get("length", 83)))
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
            actual = reference.forward(ids).logits
        errors.append(float((actual - expected).norm() / expected.norm()))
    assert sorted(errors)[1] < 2e-5, f"relative differences {errors} at seed {seed}"


def test_leaving_out_the_compressed_branch_changes_the_logits(seed: int) -> None:
    _, reference = _build(SHAPES["every layer type"], yarn=True)
    ids = torch.randint(0, 61, (1, 83))
    blind = ReferenceModel(reference.config, reference.tensors, compressed_branch=False)
    with torch.no_grad():
        full, cut = reference.forward(ids).logits, blind.forward(ids).logits
    assert torch.equal(full[:, :3], cut[:, :3]), "the first three tokens see no complete block"
    assert (full - cut)[:, 40:].norm() > 1e-2 * full.norm()
