"""What transformers does not have: MTP, encoded weights, simulated quantisation, gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4.reference.model import IndexTrace, ReferenceModel, RouteTrace
from dsv4.reference.weights import encode_fp4, encode_fp8

pytestmark = pytest.mark.stage("reference")

VOCAB, HIDDEN, HEADS, DIM, EXPERTS, INNER = 40, 128, 4, 128, 3, 128


def _config(**changes) -> SimpleNamespace:
    fields = dict(
        num_hidden_layers=3,
        head_dim=DIM,
        qk_rope_head_dim=64,
        sliding_window=9,
        o_groups=2,
        index_n_heads=8,
        index_head_dim=128,
        index_topk=4,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=2,
        hc_sinkhorn_iters=5,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=None,
        num_nextn_predict_layers=1,
        linear_scheme=None,
        expert_scheme=None,
        fp8_block=(128, 128),
    )
    return SimpleNamespace(**{**fields, **changes})


def _matrix(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def _compressor(prefix: str, dim: int, rate: int, columns: int) -> dict[str, Tensor]:
    return {
        prefix + "ape": torch.randn(rate, columns),
        prefix + "wkv.weight": _matrix(columns, HIDDEN),
        prefix + "wgate.weight": _matrix(columns, HIDDEN),
        prefix + "norm.weight": torch.rand(dim) + 0.5,
    }


def _block(prefix: str, kind: str) -> dict[str, Tensor]:
    a, f, mixes = prefix + "attn.", prefix + "ffn.", 2 * 2 + 2 * 2
    out = {
        a + "wq_a.weight": _matrix(128, HIDDEN),
        a + "q_norm.weight": torch.rand(128) + 0.5,
        a + "wq_b.weight": _matrix(HEADS * DIM, 128),
        a + "wkv.weight": _matrix(DIM, HIDDEN),
        a + "kv_norm.weight": torch.rand(DIM) + 0.5,
        a + "attn_sink": torch.randn(HEADS),
        a + "wo_a.weight": _matrix(2 * 128, HEADS * DIM // 2),
        a + "wo_b.weight": _matrix(HIDDEN, 2 * 128),
        f + "gate.weight": _matrix(EXPERTS, HIDDEN),
        f + "gate.bias": torch.randn(EXPERTS) * 0.1,
    }
    for name in ("attn_norm", "ffn_norm"):
        out[f"{prefix}{name}.weight"] = torch.rand(HIDDEN) + 0.5
    for name in ("hc_attn_", "hc_ffn_"):
        out[f"{prefix}{name}fn"] = _matrix(mixes, 2 * HIDDEN)
        out[f"{prefix}{name}base"], out[f"{prefix}{name}scale"] = torch.randn(mixes), torch.rand(3)
    for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
        out[f"{f}experts.{name}.weight"] = _matrix(EXPERTS, *shape)
        out[f"{f}shared_experts.{name}.weight"] = _matrix(*shape)
    if kind == "HCA":
        out |= _compressor(a + "compressor.", DIM, 16, DIM)
    if kind == "CSA":
        out |= _compressor(a + "compressor.", DIM, 4, 2 * DIM)
        out |= _compressor(a + "indexer.compressor.", 128, 4, 256)
        out[a + "indexer.wq_b.weight"] = _matrix(8 * 128, 128)
        out[a + "indexer.weights_proj.weight"] = _matrix(8, HIDDEN)
    return out


def _head(prefix: str) -> dict[str, Tensor]:
    return {
        prefix + "hc_head_fn": _matrix(2, 2 * HIDDEN),
        prefix + "hc_head_base": torch.randn(2),
        prefix + "hc_head_scale": torch.rand(1),
        prefix + "norm.weight": torch.rand(HIDDEN) + 0.5,
    }


def _tensors(kinds: tuple[str, ...] = ("SWA", "CSA", "HCA")) -> dict[str, Tensor]:
    out = {"embed.weight": torch.randn(VOCAB, HIDDEN), "head.weight": _matrix(VOCAB, HIDDEN)}
    for layer, kind in enumerate(kinds):
        out |= _block(f"layers.{layer}.", kind)
    out |= _head("") | _block("mtp.0.", "SWA") | _head("mtp.0.")
    for name in ("e_proj", "h_proj"):
        out[f"mtp.0.{name}.weight"] = _matrix(HIDDEN, HIDDEN)
    for name in ("enorm", "hnorm"):
        out[f"mtp.0.{name}.weight"] = torch.rand(HIDDEN) + 0.5
    return out


def _encode(tensors: dict[str, Tensor], *, one_by_one: bool) -> dict[str, Tensor]:
    """The official storage: FP8 linears, FP4 experts."""
    plain = ("gate.", "compressor.", "weights_proj", "norm", "embed", "head")
    out = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if not name.endswith(".weight") or any(part in name for part in plain):
            out[name] = tensor
        elif ".experts." in name:
            prefix, matrix = stem.rsplit(".", 1)
            experts = [encode_fp4(w) for w in tensor]
            if one_by_one:
                for e, (codes, scale) in enumerate(experts):
                    out[f"{prefix}.{e}.{matrix}.weight"] = codes
                    out[f"{prefix}.{e}.{matrix}.scale"] = scale
            else:
                out[name], out[stem + ".scale"] = encode_fp4(tensor)
        else:
            out[name], out[stem + ".scale"] = encode_fp8(tensor)
    return out


def test_encoded_weights_give_the_logits_of_their_decoded_values(seed: int) -> None:
    tensors = _tensors()
    config = _config(linear_scheme="fp8", expert_scheme="fp4")
    ids = torch.randint(0, VOCAB, (2, 50))
    singly = ReferenceModel(config, _encode(tensors, one_by_one=True))
    stacked = ReferenceModel(config, _encode(tensors, one_by_one=False))
    decoded = dict(tensors)
    for name in stacked.tensors:
        if name.endswith(".scale"):
            stem = name.removesuffix(".scale")
            decoded[stem + ".weight"] = stacked.weight(stem)
    a, b, c = (m.forward(ids) for m in (singly, stacked, ReferenceModel(config, decoded)))
    assert torch.equal(a.logits, b.logits) and torch.equal(a.logits, c.logits)
    assert torch.equal(a.mtp_logits[0], c.mtp_logits[0])
    plain = ReferenceModel(_config(), decoded).forward(ids).logits
    distance = (plain - a.logits).norm() / plain.norm()
    assert 1e-4 < distance < 0.5, f"activation quantisation moves the logits by {distance:.1e}"


@pytest.mark.parametrize("source", ["h_proj", "e_proj"])
def test_mtp_block_is_a_window_layer_over_its_projected_inputs(source: str, seed: int) -> None:
    """With one projection off, the block equals a one-layer model whose embedding is projected."""
    tensors = _tensors(())
    other = {"h_proj": "e_proj", "e_proj": "h_proj"}[source]
    tensors[f"mtp.0.{other}.weight"].zero_()
    ids = torch.randint(0, VOCAB, (2, 30))
    config = _config(num_hidden_layers=0)
    mtp_logits = ReferenceModel(config, tensors).forward(ids).mtp_logits[0]
    renamed = {"layers.0." + n.removeprefix("mtp.0."): t for n, t in tensors.items() if "mtp" in n}
    renamed |= {n.removeprefix("mtp.0."): t for n, t in tensors.items() if "mtp" in n}
    renamed["head.weight"] = tensors["head.weight"]
    embed = tensors["embed.weight"]
    embed = embed / (embed.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    norm = tensors[f"mtp.0.{source[0]}norm.weight"]
    renamed["embed.weight"] = (embed * norm) @ tensors[f"mtp.0.{source}.weight"].T
    seen = ids[:, :-1] if source == "h_proj" else ids[:, 1:]
    one_layer = _config(num_hidden_layers=1, num_nextn_predict_layers=0)
    expected = ReferenceModel(one_layer, renamed).forward(seen).logits
    assert (mtp_logits - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("schemes", [(None, None), ("fp8", "fp4")], ids=["fp32", "quantised"])
def test_no_position_sees_a_later_token(schemes: tuple, seed: int) -> None:
    config = _config(linear_scheme=schemes[0], expert_scheme=schemes[1])
    model = ReferenceModel(config, _tensors())
    ids = torch.randint(0, VOCAB, (1, 40))
    changed = ids.clone()
    cut = 23
    changed[:, cut:] = (changed[:, cut:] + 1) % VOCAB
    a, b = model.forward(ids), model.forward(changed)
    torch.testing.assert_close(a.logits[:, :cut], b.logits[:, :cut], atol=1e-4, rtol=1e-4)
    mtp_a, mtp_b = a.mtp_logits[0], b.mtp_logits[0]
    torch.testing.assert_close(mtp_a[:, : cut - 1], mtp_b[:, : cut - 1], atol=1e-4, rtol=1e-4)
    assert (mtp_a[:, cut - 1] - mtp_b[:, cut - 1]).norm() > 1e-3


@pytest.mark.parametrize("schemes", [(None, None), ("fp8", "fp4")], ids=["fp32", "quantised"])
def test_gradients_reach_every_weight_but_the_choices(schemes: tuple, seed: int) -> None:
    config = _config(linear_scheme=schemes[0], expert_scheme=schemes[1])
    tensors = {n: t.requires_grad_() for n, t in _tensors().items()}
    traces: list = []
    model = ReferenceModel(config, tensors)
    output = model.forward(torch.randint(0, VOCAB, (2, 40)), traces=traces)
    loss = output.logits.square().mean() + output.mtp_logits[0].square().mean()
    loss.backward(retain_graph=True)
    choices = {n for n in tensors if n.endswith("gate.bias") or ".indexer." in n}
    for name, tensor in tensors.items():
        reached = tensor.grad is not None and bool(tensor.grad.any())
        assert reached == (name not in choices), name
        assert tensor.grad is None or tensor.grad.isfinite().all(), name
    (trace,) = (t for t in traces if isinstance(t, IndexTrace))
    routes = [t.prefix for t in traces if isinstance(t, RouteTrace)]
    assert routes == ["layers.0.ffn.", "layers.1.ffn.", "layers.2.ffn.", "mtp.0.ffn."]
    assert trace.layer == 1 and trace.scores.shape == (2, 40, 10)
    assert (trace.selected.sum(-1) == trace.visible.sum(-1).clamp(max=4)).all()
    trace.scores.square().mean().backward()
    assert all(tensors[n].grad.any() for n in choices if ".indexer." in n)
